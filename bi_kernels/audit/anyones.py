"""The audit `any`: a callable that is in no registry, on inputs that its user names. What the notebook imports."""

import ast
import copy
import os
import re
import sys
from collections.abc import Callable

from bi_kernels.audit.session import Session

PARAMETERS = {"candidate": "", "inputs": "", "batch": 0, "shared": "", "outputs": "", "reference": "", "seconds": 120,
              "device": "auto", "seed": 0}
TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:<(?P<below>\d+))?")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def start(namespace: dict) -> "AnySession":
    """Reads the notebook's parameters and checks them; ValueError with one sentence."""
    plain = (str, int, float, bool)
    given = {k: v for k, v in namespace.items() if isinstance(v, plain) and not k.startswith("_")}
    unknown = sorted(set(given) - set(PARAMETERS))
    if unknown:
        raise ValueError(f"unknown parameter {unknown[0]!r}, expected one of {', '.join(PARAMETERS)}")
    p = PARAMETERS | given
    for name in ("candidate", "inputs"):
        if not p[name]:
            raise ValueError(f"{name} is empty, expected " + (
                "package.module:function or path/to/file.py:function" if name == "candidate" else
                "the inputs, as in 'x=bf16[300,64] ids=int64[300]<1000 eps=1e-6', or path/to/file.py:function that returns them"))
    if p["device"] not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {p['device']!r}, expected auto, cpu or cuda")

    import torch

    gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if p["device"] == "cuda" and not gpu:
        raise ValueError("device is 'cuda', but no CUDA device is available, or TRITON_INTERPRET=1 is set; use cpu or auto")
    if p["device"] == "cpu" or not gpu:
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)
    from bi_kernels.audit.candidates import Candidate, load
    device = torch.device("cuda" if gpu and p["device"] != "cpu" else "cpu")
    session = AnySession("any", p, device, Candidate(p["candidate"], {"fn": load(p["candidate"])}))
    session.inputs = read_inputs(p["inputs"], device, p["seed"])
    return session


def read_inputs(spec: str, device, seed: int) -> dict:
    """{name: value}: 'name=dtype[shape]' draws normal numbers, 'name=int64[shape]<n' integers below n, 'name=bool[shape]'
    flips coins, and 'name=literal' is a Python value; or what `file.py:function` returns, a tuple or a dict."""
    import torch

    if ".py:" in spec or "=" not in spec:
        from bi_kernels.audit.candidates import load
        found = load(spec)()
        found = found if isinstance(found, dict) else dict(zip((f"input{i}" for i in range(len(found))), found))
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in found.items()}
    g, out = torch.Generator(device).manual_seed(seed), {}
    for part in re.findall(r"\w+=(?:\w+\[[^\]]*\](?:<\d+)?|\S+)", spec):
        name, _, text = part.partition("=")
        tensor = TENSOR.fullmatch(text)
        if not tensor:
            try:
                out[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                raise ValueError(f"inputs: {part!r} is neither name=dtype[shape] nor name=literal") from None
            continue
        dtype = getattr(torch, DTYPES.get(tensor["dtype"], tensor["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"inputs: {part!r} has dtype {tensor['dtype']!r}, expected one of torch's, or {', '.join(DTYPES)}")
        shape = tuple(int(n) for n in tensor["shape"].split(",") if n.strip())
        if dtype == torch.bool:
            out[name] = torch.rand(shape, generator=g, device=device) < 0.5
        elif dtype.is_floating_point:
            out[name] = torch.randn(shape, generator=g, device=device).to(dtype)
        else:
            out[name] = torch.randint(0, int(tensor["below"] or 2), shape, generator=g, device=device).to(dtype)
    if not out:
        raise ValueError(f"inputs is {spec!r}, expected 'name=dtype[shape] …' or path/to/file.py:function")
    return out


class AnySession(Session):
    """A session whose subject is one callable."""

    def judge(self) -> "Report":
        """Runs the audit; the rows are this session's, and a drift leaves a reproducer."""
        from bi_kernels.audit.callables import audit
        from bi_kernels.audit.candidates import load
        p = self.parameters
        named = lambda text: tuple(x for x in re.split(r"[,\s]+", text) if x)
        self.report = audit(self.candidate.functions["fn"], *self.inputs.values(), names=tuple(self.inputs), batch=p["batch"], shared=named(p["shared"]),
                            outputs=named(p["outputs"]), reference=load(p["reference"]) if p["reference"] else None,
                            seconds=p["seconds"], seed=p["seed"], candidate=p["candidate"],
                            folder=self.out / "repro" if self.out else None)
        self.add(self.report.rows)
        return self.report

    def controls(self) -> list:
        """The same callable, broken on purpose: each must be flagged by its relation where the callable itself is not, or
        in other elements."""
        from bi_kernels.audit import callables as c
        t, rows = self.report.target, []
        own = {(r.relation, r.layout, r.tensor): r.mismatches for r in self.report.rows if r.inputs == "given"}
        for name, relation, change in CONTROLS:
            broken = copy.copy(t)
            broken.results = lambda arguments, change=change: change(t.results(arguments), arguments[t.first], t)
            if relation == c.DETERMINISM:
                found = c.determinism(broken, 3)
            else:
                whole = {"given": broken.compute([list(range(t.count))])[1]}
                found = [r for layout, (calls, filler) in c.plan(t.count, t.seed).items()
                         if not layout.startswith("rows:") for r in c.invariance(broken, layout, calls, filler, whole)]
            row = next((r for r in found if r.mismatches and own.get((r.relation, r.layout, r.tensor)) != r.mismatches), found[0])
            row.candidate, row.control = name, True
            row.caught = bool(row.mismatches) and own.get((row.relation, row.layout, row.tensor)) != row.mismatches
            rows.append(row)
        self.add(rows)
        return rows

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(r.dtype for r in self.rows))

    @property
    def command(self) -> str:
        p = self.parameters
        changed = {k: v for k, v in p.items() if v != PARAMETERS[k] and k not in ("candidate", "inputs")}
        flags = "".join(f" --{k} {v}" if k in ("device", "seed") else f" -p {k} '{v}'" for k, v in changed.items())
        return f"bi-audit run any --candidate {p['candidate']} --inputs '{p['inputs']}'{flags}"


def _first_float(found: list) -> int | None:
    return next((i for i, y in enumerate(found) if y.is_floating_point() and y.numel()), None)


def _changed(found: list, change: Callable) -> list:
    i = _first_float(found)
    return found if i is None else [change(y.clone()) if k == i else y for k, y in enumerate(found)]


def _one_ulp(found: list, x, t) -> list:
    """The last bit of the last element, if the batch holds more than one sample."""
    def change(y):
        from bi_kernels.audit.drift import raw
        if x.shape[t.batch] > 1:
            raw(y).view(-1)[-1] ^= 1
        return y.contiguous()
    return _changed([y.contiguous() for y in found], change)


def _leaks(found: list, x, t) -> list:
    """0 times the sum of the inputs, which is not 0 beside a NaN."""
    return _changed(found, lambda y: y + 0 * x.sum() if x.is_floating_point() else y + (x.shape[t.batch] % 7) * y.abs().amax())


def _noise(found: list, x, t) -> list:
    import torch
    return _changed(found, lambda y: y + torch.rand_like(y))


CONTROLS = (("one ULP in one element of a batch of more than one", "invariance", _one_ulp),
            ("a neighbour's NaN that leaks", "invariance", _leaks),
            ("random noise", "determinism", _noise))
