"""What a notebook imports: `start` checks its parameters, and the session it returns judges, shows and records."""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

PARAMETERS = {"dtype": "all", "candidate": "bi_kernels", "shapes": "tiny", "device": "auto", "seed": 0, "op": ""}
_NOTEBOOK_NAMES = {"In", "Out"}


def start(audit: str, namespace: dict) -> "Session":
    """Reads the notebook's parameters from its globals and checks their names and values.

    Must come before the kernels are imported: without a CUDA device it turns Triton's interpreter on. Raises ValueError
    with one sentence naming the parameter, its value and what is allowed.
    """
    plain = (str, int, float, bool, list, dict, type(None))
    given = {
        k: v
        for k, v in namespace.items()
        if isinstance(v, plain) and not k.startswith("_") and k not in _NOTEBOOK_NAMES
    }
    unknown = sorted(set(given) - set(PARAMETERS))
    if unknown:
        raise ValueError(f"unknown parameter {unknown[0]!r}, expected one of {', '.join(PARAMETERS)}")
    p = PARAMETERS | given

    device = choose(p["device"])
    from bi_kernels.audit.problem.candidates import resolve
    from bi_kernels.contract import DTYPES, SHAPES

    if p["dtype"] not in ("all", *DTYPES):
        raise ValueError(f"dtype is {p['dtype']!r}, expected all, {', '.join(DTYPES)}")
    if p["shapes"] not in list(SHAPES):
        raise ValueError(f"shapes is {p['shapes']!r}, expected one of {', '.join(SHAPES)}")
    if isinstance(p["seed"], bool) or not isinstance(p["seed"], int) or p["seed"] < 0:
        raise ValueError(f"seed is {p['seed']!r}, expected an integer of at least 0")
    if device.type == "cpu" and p["shapes"] != "tiny":
        raise ValueError(f"shapes is {p['shapes']!r}, which needs a CUDA device; the interpreter runs tiny")
    return Session(audit, p, device, resolve(p["candidate"], audit, p["op"]))


def choose(device: str) -> "torch.device":
    """Checks the parameter; on a CPU turns Triton's interpreter on."""
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {device!r}, expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but no CUDA device is available; use cpu or auto")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cuda" and interpreted:
        raise ValueError("device is 'cuda', but TRITON_INTERPRET=1 is set; unset it or use cpu")
    on_gpu = device != "cpu" and torch.cuda.is_available() and not interpreted
    if not on_gpu:
        if "triton" in sys.modules and not interpreted:
            raise ValueError("device is a CPU, but triton was imported before TRITON_INTERPRET=1 was set")
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)  # the interpreter uses one, and torch's small operations are faster so
    return torch.device("cuda" if on_gpu else "cpu")


@dataclass
class Session:
    audit: str
    parameters: dict
    device: "torch.device"
    candidate: "Candidate"
    rows: list = field(default_factory=list)
    subjects: list = field(default_factory=list)
    variants: list = field(default_factory=list)
    pool: object = None

    @property
    def out(self) -> Path | None:
        """Where bi-audit collects the evidence; None when the notebook runs by itself."""
        return Path(os.environ["BI_AUDIT_OUT"]) if os.environ.get("BI_AUDIT_OUT") else None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtypes(self) -> list[str]:
        from bi_kernels.contract import DTYPES

        return list(DTYPES) if self.parameters["dtype"] == "all" else [self.parameters["dtype"]]

    @property
    def device_label(self) -> str:
        """The device of a row: a GPU's name, 'interpreter' for kernels on a CPU, 'cpu' for stock operators there."""
        from bi_kernels.audit.evidence.provenance import device_name

        return "cpu" if not self.on_gpu and self.candidate.spec == "torch" else device_name(self.device)

    @property
    def command(self) -> str:
        changed = {k: v for k, v in self.parameters.items() if v != PARAMETERS[k]}
        flags = [f"--{k} {v}" if k not in ("op",) else f"-p {k} {v}" for k, v in changed.items()]
        return " ".join(["bi-audit run", self.audit, *flags])

    def provenance(self):
        """A table of commit, device, versions and parameters."""
        from bi_kernels.audit.evidence import tables as show
        from bi_kernels.audit.evidence.provenance import provenance

        fields = provenance(self.device, self.parameters) | {"command": f"`{self.command}`"}
        if self.out:
            (self.out / "provenance.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        return show.facts(fields)

    def make(self, audit: str = "", dtypes: Iterable[str] = (), candidate: "Candidate | None" = None) -> list:
        """The subjects of an audit: the candidate's functions at every case and dtype."""
        from bi_kernels.audit.problem.problem import problems
        from bi_kernels.audit.problem.subject import Subject

        chosen = candidate or self.candidate
        return [
            Subject(p, chosen.functions[p.op.name], chosen.spec, self.device_label, self.command)
            for p in problems(
                audit or self.audit,
                list(dtypes) or self.dtypes,
                self.parameters["shapes"],
                self.device,
                self.parameters["seed"],
                tuple(chosen.functions),
            )
        ]

    def subject(
        self, op: str, dtype: str = "bf16", function: "Callable | None" = None, candidate: str = "bi_kernels"
    ) -> "Subject":
        """One op at its first case: this package's, or another's function."""
        import bi_kernels
        from bi_kernels.audit.problem.problem import Problem
        from bi_kernels.audit.problem.registry import OPS
        from bi_kernels.audit.problem.subject import Subject
        from bi_kernels.contract import DTYPES

        case = next(iter(OPS[op].cases(self.parameters["shapes"])))
        problem = Problem(OPS[op], case, DTYPES[dtype], self.parameters["shapes"], self.device, self.parameters["seed"])
        return Subject(problem, function or getattr(bi_kernels, op), candidate, self.device_label, self.command)

    def judge(self, examples: int = 5, forward: bool = True, backward: bool = False) -> list:
        """Judges every relation of every op of this audit; drifts leave a reproducer. Returns the rows it added.

        backward: gradients too, and the static audit of all that was launched.
        """
        from bi_kernels.audit.relations.judge import judge

        return judge(self, examples, forward, backward)

    def add(self, rows: list) -> None:
        """Records rows as this audit's, and saves what there is so far."""
        for row in rows:
            row.audit = self.audit
        self.rows += rows
        if self.out:
            from bi_kernels.audit.evidence.verdicts import write_rows

            write_rows(self.out / "verdicts.json", [r.json() for r in self.rows])

    def controls(self) -> list:
        """Judges every control of this audit by the relation that must flag it; returns their rows."""
        from bi_kernels.audit.broken.judge import judge_controls

        return judge_controls(self)

    @property
    def failures(self) -> list:
        """Rows that need a fix, and controls that were missed."""
        return [r for r in self.rows if (not r.caught if r.control else r.verdict == "needs-fix")]

    @property
    def passed(self) -> bool:
        """Something was judged, nothing needs a fix, and there were controls, all caught."""
        return (
            any(r.verdict == "pass" for r in self.rows if not r.control)
            and any(r.control for r in self.rows)
            and not self.failures
        )

    def verdict(self):
        """The verdict bundle: a table for people, JSON for programs, the same on every run."""
        from bi_kernels.audit.evidence import tables as show

        return show.verdict(self)

    def failure(self) -> str:
        """One line a failing op, for the notebook's last assert."""
        seen = {}
        for r in self.failures:
            seen.setdefault((r.candidate if r.control else r.op, r.case, r.dtype, r.relation), []).append(r)
        return (
            "\n".join(
                f"{op} {case} {dtype}: {relation} needs a fix in {len(rows)} of its checks, first {rows[0].layout} "
                f"(M = {rows[0].rows}, {rows[0].inputs}): {rows[0].detail or rows[0].mismatches}"
                for (op, case, dtype, relation), rows in seen.items()
            )
            or "nothing was judged, or no control was run"
        )
