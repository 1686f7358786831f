"""A standalone script that shows the drift of a callable, as small as the drift allows; the search runs its own lines."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import cloudpickle
import torch

from bi_kernels.audit.callables.relations import INVARIANCE, plan
from bi_kernels.audit.callables.step import gradients_kept
from bi_kernels.audit.callables.target import Target
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, Row
from bi_kernels.audit.problem.candidates import file_or_module_import, reached
from bi_kernels.audit.reproduce.forward import PRINTED
from bi_kernels.contract import rows as row_counts

DRAWN, SPREAD = "drawn", "drawn, with spread exponents"  # by the script; else it loads the user's own


@dataclass(frozen=True)
class Pair:
    """One sample in two calls, or, for the gradient `tensor`, all samples in one call and in several."""

    a: tuple[tuple[int, ...], ...]
    b: tuple[tuple[int, ...], ...]
    sample: int
    filler: str
    inputs: str
    output: int = 0  # the number of the output, forward
    tensor: str = ""

    @property
    def fills(self) -> bool:
        """Whether a call has a place without a sample."""
        return any(i < 0 for calls in (self.a, self.b) for c in calls for i in c)

    def drifts(self, t: Target, given: dict) -> bool:
        scope = {"fn": t.function, "torch": torch, "given": given}
        if _eager(t) is not t.function:
            torch.compiler.reset()  # as in a new process: what is compiled depends on the calls before
        try:
            with gradients_kept(t.module):
                exec("\n".join(body(t, self)), scope)
            return bool(compare(scope["a"].detach(), scope["b"].detach()).mismatches)
        except Exception:
            return False


def _drawn(t: Target, kind: str) -> dict[str, str]:
    """The line that draws each tensor of the arguments."""
    lines: dict[str, str] = {}
    for k, v in t.values.items():
        if not isinstance(v, torch.Tensor):
            continue
        shape = tuple(v.shape)
        if v.is_floating_point():
            powers = f" * 2.0 ** torch.randint(-4, 5, {shape})" if kind == SPREAD and k in t.batched else ""
            lines[k] = (
                f"(torch.randn({shape}){powers}).to({v.dtype})" if powers else f"torch.randn({shape}).to({v.dtype})"
            )
        elif v.dtype == torch.bool:
            lines[k] = f"(torch.rand({shape}) < {float(v.double().mean()):.2f})"
        else:
            lines[k] = f"torch.randint({int(v.min())}, {int(v.max()) + 1}, {shape}).to({v.dtype})"
    return lines


def body(t: Target, pair: Pair) -> list[str]:
    """The lines that leave both results in `a` and `b`; they need `torch`, `fn` and, where inputs are loaded, `given`."""
    device, drawn = str(t.device), _drawn(t, pair.inputs)
    lines = ["from torch.utils._pytree import tree_leaves", ""]
    lines += ["torch.manual_seed(0)"] if pair.inputs in (DRAWN, SPREAD) else []
    lines.append("arguments = {")
    for k, v in t.values.items():
        text = (
            repr(v)
            if k not in drawn
            else f'{drawn[k]}.to("{device}")'
            if pair.inputs in (DRAWN, SPREAD)
            else f"given[{k!r}]"
        )
        lines.append(f"    {k!r}: {text},")
    lines += [
        "}",
        f"batched, calls = {sorted(t.batched)}, {{'a': {_calls(pair.a)}, 'b': {_calls(pair.b)}}}",
        "",
        "",
        "def call(samples, leaves=arguments):",
        f'    at = torch.tensor(samples, device="{device}")',
        "    taken = dict(leaves)",
        "    for k in batched:",
        f"        taken[k] = leaves[k].index_select({t.batch}, at.clamp(min=0))",
    ]
    if pair.fills:
        fill = "torch.nan" if pair.filler == "nonfinite" else "7.0"
        lines += [
            f"        fill = {fill} if taken[k].is_floating_point() else 0",
            f"        taken[k] = taken[k].index_fill({t.batch}, (at < 0).nonzero().flatten(), fill)",
        ]
    if t.outputs:
        lines += [f"    for k in {t.outputs}:", "        taken[k] = taken[k].clone()"]
    names = list(t.values)
    positional = ", ".join(f"taken[{k!r}]" for k in names[: t.positional])
    keywords = ", ".join(f"{k}=taken[{k!r}]" for k in names[t.positional :])
    lines.append(f"    y = fn({', '.join(filter(None, (positional, keywords)))})")
    lines.append(
        f"    return [taken[k] for k in {t.outputs}]"
        if t.outputs
        else "    return [y for y in tree_leaves(y) if isinstance(y, torch.Tensor)]"
    )
    return lines + (_backward(t, pair) if pair.tensor else _forward(t, pair))


def _calls(calls: tuple[tuple[int, ...], ...]) -> str:
    """Python for calls, runs of samples as ranges."""

    def one(c):
        return (
            f"list(range({c[0]}, {c[-1] + 1}))" if len(c) > 2 and c == tuple(range(c[0], c[-1] + 1)) else str(list(c))
        )

    alone = len(calls) > 2 and all(len(c) == 1 for c in calls) and [c[0] for c in calls] == list(range(len(calls)))
    return f"[[i] for i in range({len(calls)})]" if alone else f"[{', '.join(map(one, calls))}]"


def _forward(t: Target, pair: Pair) -> list[str]:
    d = t.dims[pair.output]
    return [
        "",
        "",
        "def result(calls):",
        f"    samples = next(c for c in calls if {pair.sample} in c)",
        f"    y = call(samples)[{pair.output}]",
        f"    return y.unflatten({d}, (len(samples), -1)).movedim({d}, 0)[samples.index({pair.sample})]",
        "",
        "",
        "a, b = result(calls['a']), result(calls['b'])",
    ]


def _backward(t: Target, pair: Pair) -> list[str]:
    name = pair.tensor.removeprefix("d")
    own = name in t.values
    lines = ["", "", "def gradient(calls):"]
    if own:
        lines += [f"    leaf = arguments[{name!r}].detach().clone().requires_grad_()"]
    else:
        lines += [f"    leaf = dict(fn.named_parameters())[{name!r}]", "    leaf.grad = None"]
    if own and name not in t.batched:
        lines.append("    leaf.main_grad = torch.zeros_like(leaf, dtype=torch.float32)  # for ops that use it")
    given = f"arguments | {{{name!r}: leaf}}" if own else "arguments"
    lines += [
        "    for samples in calls:",
        "        outputs, upstream = [], []",
        f"        for y, d in zip(call(samples, {given}), {t.dims}):",
        "            if d is None or not y.requires_grad:",
        "                continue",
        "            outputs.append(y.unflatten(d, (len(samples), -1)).movedim(d, 0))",
        f"            dy = torch.randn({t.count}, *outputs[-1].shape[1:], generator=torch.Generator().manual_seed(1))",
        "            dy = dy[samples].to(y)",
        *["            dy[[i < 0 for i in samples]] = 0"] * pair.fills,
        "            upstream.append(dy)",
        "        torch.autograd.backward(outputs, upstream)",
        "    found = leaf.grad if leaf.grad is not None else leaf.main_grad",
        "    return found.clone()",
        "",
        "",
        "a, b = gradient(calls['a']), gradient(calls['b'])",
    ]
    return lines


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _eager(t: Target) -> Callable:
    """What torch.compile was given, or the callable itself."""
    return getattr(t.function, "_torchdynamo_orig_callable", getattr(t.function, "_orig_mod", t.function))


def _imports(t: Target, candidate: str, imports: str, folder: Path) -> list[str]:
    """The lines that bring the callable into the script as `fn`: by its name where it has one, else as `imports` says, else
    from a file."""
    if candidate:
        return [file_or_module_import(candidate, folder)]
    function = _eager(t)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    again = [""] if function is t.function else ["fn = torch.compile(fn)"]
    try:
        if getattr(importlib.import_module(module), name) is function and module != "__main__":
            return [*reached(module, folder), f"from {module} import {name} as fn", *filter(None, again)]
    except Exception:
        pass
    for where in ("torch.nn.functional", "torch"):
        name = getattr(function, "__name__", "")
        if getattr(importlib.import_module(where), name, None) is function:
            return [f"from {where} import {name} as fn", *filter(None, again)]
    if imports:
        return [imports]
    (folder / f"{_safe(t.name)}.pkl").write_bytes(cloudpickle.dumps(function))
    home = module or type(function).__module__  # what is pickled names what it is made of
    return [
        "from pathlib import Path",
        "",
        "import cloudpickle",
        "",
        *reached(home, folder),
        f'fn = cloudpickle.loads(Path(__file__).with_name("{_safe(t.name)}.pkl").read_bytes())',
        *filter(None, again),
    ]


def _shrunk(t: Target, rows: list[Row]) -> tuple[Pair, dict] | None:
    """The smallest pair found that drifts, and the inputs it needs where it does not draw its own."""
    layouts, every = plan(t.count, t.seed), tuple(range(t.count))
    drifting = [r for r in rows if r.verdict == NEEDS_FIX and r.mismatches and r.relation in ("invariance", INVARIANCE)]
    drifting.sort(key=lambda r: (r.relation != "invariance", r.rows))
    judged = [i for i, d in enumerate(t.dims) if d is not None]
    seen = set()
    for r in drifting[:12]:
        calls, filler = layouts.get(r.layout, ([[i] for i in every], "stale"))
        if r.relation == INVARIANCE:
            found = Pair((every,), tuple(map(tuple, calls)), 0, filler, DRAWN, tensor=r.tensor)
            options = [found]
        else:
            output = next((i for i in judged if f"[{i}]" in r.tensor), judged[0])
            samples = sorted(i for c in calls for i in c if i >= 0)
            options = [
                Pair(tuple(map(tuple, calls)), (every,), s, filler, DRAWN, output)
                for s in dict.fromkeys((samples[r.first_index[0]] if r.inputs == "given" else samples[0], *samples[:8]))
            ]
        given = t.spread() if r.inputs == "spread" else t.values
        for pair in options:
            for inputs in (DRAWN, SPREAD, r.inputs):
                pair = replace(pair, inputs=inputs)
                if pair in seen or seen.add(pair) or not pair.drifts(t, given):
                    continue
                return (pair if pair.tensor else _smaller(t, pair, given)), given
    return None


def _smaller(t: Target, pair: Pair, given: dict) -> Pair:
    """The sample alone, and the fewest others beside it, as far as it still drifts."""
    alone = replace(pair, a=((pair.sample,),))
    pair = alone if alone.drifts(t, given) else pair
    for m in row_counts(t.count):
        others = [i for i in range(t.count) if i != pair.sample][: m - 1]
        fewer = replace(pair, b=((pair.sample, *others),))
        if fewer.b != pair.a and fewer.drifts(t, given):
            return fewer
    return pair


def _cut(t: Target, pair: Pair, given: dict) -> tuple[Pair, dict]:
    """The pair on inputs that hold its own samples alone, if it still drifts there."""
    used = sorted({i for calls in (pair.a, pair.b) for c in calls for i in c if i >= 0})
    number = {-1: -1} | {i: n for n, i in enumerate(used)}
    renumbered = lambda calls: tuple(tuple(number[i] for i in c) for c in calls)
    fewer = replace(pair, a=renumbered(pair.a), b=renumbered(pair.b), sample=number[pair.sample])
    at = torch.tensor(used, device=t.device)
    held = {k: v.index_select(t.batch, at) if k in t.batched else v for k, v in given.items()}
    return (fewer, held) if fewer.drifts(t, held) else (pair, given)


def export(t: Target, rows: list[Row], candidate: str, imports: str, folder: Path) -> Path | None:
    """Writes the script, and what it loads, and names it in the rows that drift; None where nothing was found to show."""
    found = _shrunk(t, rows)
    if found is None:
        return None
    pair, given = found
    if pair.inputs not in (DRAWN, SPREAD) and not pair.tensor:
        pair, given = _cut(t, pair, given)
    folder.mkdir(parents=True, exist_ok=True)
    safe = _safe(t.name)
    path = folder / f"{safe}.py"
    what = (
        f"the gradient {pair.tensor} of {t.count} samples in one call and in {len(pair.b)}"
        if pair.tensor
        else f"sample {pair.sample} in calls of {' and '.join(str(len(next(c for c in s if pair.sample in c))) for s in (pair.a, pair.b))}"
    )
    interpret = ["import os", "", 'os.environ["TRITON_INTERPRET"] = "1"', ""] if t.device.type == "cpu" else []
    load = []
    if pair.inputs not in (DRAWN, SPREAD):
        torch.save({k: v for k, v in given.items() if isinstance(v, torch.Tensor)}, folder / f"{safe}.pt")
        load = ["from pathlib import Path", f'given = torch.load(Path(__file__).with_name("{safe}.pt"))']
    printed = [line.format(a="a", b="b") for line in PRINTED]
    path.write_text(
        "\n".join(
            [
                f"# {t.name}: {what}, along dimension {t.batch}.",
                *interpret,
                "import torch",
                *_imports(t, candidate, imports, folder),
                *load,
                *body(t, pair),
                *printed,
            ]
        ),
        encoding="utf-8",
    )
    for r in rows:
        if r.verdict == NEEDS_FIX and r.mismatches:
            r.repro = f"python {folder.name}/{path.name}"
    return path
