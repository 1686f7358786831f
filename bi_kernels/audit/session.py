"""What a notebook holds: `start` checks its parameters, and the session it returns judges, shows and records."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import bi_kernels
from bi_kernels.audit.checks.ops import judge, quick
from bi_kernels.audit.controls.run import judge_controls
from bi_kernels.audit.findings import FINDING, PASS, Row, grouped, late, needs_fix, verdict_of, write_rows
from bi_kernels.audit.parallel import Processes
from bi_kernels.audit.parameters import choose, command, device_name, read
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.report import escape, tables
from bi_kernels.audit.report.provenance import provenance
from bi_kernels.audit.static import verdict as static
from bi_kernels.audit.static.launches import Variant
from bi_kernels.audit.targets.candidates import Candidate, resolve
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig, problems
from bi_kernels.contract import DTYPES


def start(audit: str, given: dict) -> "Session":
    """Begins an audit of the registry's ops with the parameters given.

    Importing this module imports triton, so `bi_kernels.audit.start` chooses the device before. Raises ValueError: one
    sentence with the parameter, its value and what is allowed.
    """
    p = read(audit, given)
    return Session(audit, asdict(p), choose(p.device, p.shapes), resolve(p.candidate, audit, p.op))


@dataclass
class Session:
    audit: str
    parameters: dict  # all of them, checked
    device: torch.device
    candidate: Candidate
    rows: list[Row] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)  # that were launched
    launched: dict[str, Variant] = field(default_factory=dict)  # on a GPU, by other processes: see static/verdict.py
    pool: Processes | None = None  # of the processes that judge parts of this audit
    begun: dict = field(default_factory=dict)  # the parts that they were given: see parallel.py

    @property
    def out(self) -> Path | None:
        """Says where bi-audit collects the evidence; None when the notebook runs by itself."""
        out = os.environ.get("BI_AUDIT_OUT")
        return Path(out) if out else None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def quick(self) -> bool:
        """Tells whether a few checks stand for all."""
        return self.parameters.get("checks") == "quick"

    @property
    def dtypes(self) -> list[str]:
        return list(DTYPES) if self.parameters["dtype"] == "all" else [self.parameters["dtype"]]

    @property
    def device_name(self) -> str:
        """Names the GPU, or says 'interpreter'."""
        return device_name(self.device)

    @property
    def device_label(self) -> str:
        """Names a row's device: the GPU, 'interpreter' for kernels on a CPU, 'cpu' for stock operators there."""
        return "cpu" if not self.on_gpu and self.candidate.spec == "torch" else self.device_name

    @property
    def command(self) -> str:
        return command(self.audit, self.parameters)

    def provenance(self):
        """Returns a table of commit, device, versions and parameters."""
        fields = provenance(self.device, self.parameters) | {"command": escape.code(self.command)}
        if self.out:
            (self.out / "provenance.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        return tables.facts({k: v if k == "command" else escape.text(v) for k, v in fields.items()})

    def make(self) -> list[OpUnderTest]:
        """Returns the subjects of this audit: the candidate's functions at every case and dtype."""
        p, functions = self.parameters, self.candidate.functions
        every = problems(self.audit, self.dtypes, p["shapes"], self.device, p["seed"], tuple(functions))
        if self.quick:  # each op at its first case
            every = [x for x in every if x.case == next(iter(x.op.cases(p["shapes"])))]
        return [
            OpUnderTest(x, functions[x.op.name], self.candidate.spec, self.device_label, self.command) for x in every
        ]

    def problem(self, op: str, case: str, dtype: str) -> OpConfig:
        p = self.parameters
        return OpConfig(OPS[op], case, DTYPES[dtype], p["shapes"], self.device, p["seed"])

    def subject(
        self, op: str, dtype: str = "bf16", function: Callable | None = None, candidate: str = "bi_kernels"
    ) -> OpUnderTest:
        """Returns one op at its first case: this package's, or another's function."""
        problem = self.problem(op, next(iter(OPS[op].cases(self.parameters["shapes"]))), dtype)
        return OpUnderTest(
            problem,
            function or getattr(bi_kernels, problem.op.function or op),
            candidate,
            self.device_label,
            self.command,
        )

    def judge(
        self,
        forward: bool = True,
        backward: bool = False,
        meanwhile: Callable[["Session"], object] = lambda session: None,
    ) -> list[Row]:
        """Judges every relation of every op of this audit; drifts leave a reproducer. Returns the rows it added.

        They are recorded op by op. backward: gradients too, and the static audit of all that was launched; meanwhile:
        begins, on a GPU, what will be asked for next.
        """
        if self.quick:
            rows = [row for s in self.make() for row in quick(s, forward, backward)]
            self.add(rows)
            return rows
        return judge(self, forward, backward, meanwhile)

    def add(self, rows: list[Row]) -> None:
        """Records rows as this audit's, and saves what there is so far."""
        for row in rows:
            row.audit = self.audit
        self.rows += rows
        if self.out:
            write_rows(self.out / "verdicts.json", [vars(r) for r in self.rows])

    def conclude(self, *sentences: str) -> None:
        """Leaves in a file what the audit found out, in plain sentences with which its report begins."""
        if self.out:
            (self.out / FINDING).write_text(" ".join(filter(None, sentences)) + "\n", encoding="utf-8")

    def whole_run(self) -> None:
        """Judges, on a GPU, every variant of this package's kernels that this run has launched so far; records it."""
        self.add(static.judge_whole_run(self))

    def controls(self) -> list[Row]:
        """Judges every control of this audit by the relation that must flag it; returns their rows."""
        return judge_controls(self)

    @property
    def failures(self) -> list[Row]:
        """Lists the rows that need a fix, and the controls that were missed."""
        return needs_fix(self.rows)

    @property
    def passed(self) -> bool:
        """Tells whether something was judged, nothing needs a fix, and there were controls, all caught."""
        return verdict_of(self.rows) == PASS

    def verdict(self):
        """Returns the verdict bundle: a table for people, JSON for programs, the same on every run."""
        return tables.verdict(self)

    def failure(self) -> str:
        """Says in one line a failing op what fails, for the notebook's last assert."""
        said = [
            f"{op} {case} {dtype}: {relation} needs a fix in {len(rows)} of its checks, first {rows[0].layout} "
            f"(M = {rows[0].rows}, {rows[0].inputs}): {rows[0].detail or rows[0].mismatches}"
            for (op, case, dtype, relation), rows in grouped(
                self.failures, lambda r: (r.candidate if r.control else r.op, r.case, r.dtype, r.relation)
            ).items()
        ]
        said += [f"{r.op}: {r.detail}" for r in late(self.rows)]
        return "\n".join(said) or "nothing was judged, or no control was run"
