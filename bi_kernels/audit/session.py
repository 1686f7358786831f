"""What a notebook holds: `start` checks its parameters, and the session it returns judges, shows and records."""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

import bi_kernels
from bi_kernels.audit.broken import attention as broken_attention
from bi_kernels.audit.broken import forward as broken_forward
from bi_kernels.audit.broken import gradient as broken_gradient
from bi_kernels.audit.evidence import tables
from bi_kernels.audit.evidence.provenance import device_name, provenance
from bi_kernels.audit.evidence.verdicts import write_rows
from bi_kernels.audit.parameters import choose, command, read
from bi_kernels.audit.problem.candidates import Candidate, resolve
from bi_kernels.audit.problem.registry import OPS, Problem, problems
from bi_kernels.audit.problem.subject import NEEDS_FIX, PASS, UNSUPPORTED, Row, Subject
from bi_kernels.audit.relations import forward as forward_relations
from bi_kernels.audit.relations import gradient as gradient_relations
from bi_kernels.audit.reproduce.forward import export
from bi_kernels.audit.reproduce.gradient import export_gradient
from bi_kernels.audit.static import binary as static
from bi_kernels.contract import DTYPES


def start(audit: str, given: dict) -> "Session":
    """Begins an audit of the registry's ops with the parameters given.

    Importing this module imports triton, so `bi_kernels.audit.start` chooses the device before. Raises ValueError: one
    sentence with the parameter, its value and what is allowed.
    """
    p = read(audit, given)
    device = choose(p.device)
    if device.type == "cpu" and p.shapes != "tiny":
        raise ValueError(f"shapes is {p.shapes!r}, which needs a CUDA device; the interpreter runs tiny")
    return Session(audit, asdict(p), device, resolve(p.candidate, audit, p.op))


def up_to_a_drift(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows up to the first that drifts, and draws no more."""
    found = []
    for r in rows:
        found.append(r)
        if r.mismatches:
            break
    return found


@dataclass
class Session:
    audit: str
    parameters: dict  # all of them, checked
    device: torch.device
    candidate: Candidate
    rows: list[Row] = field(default_factory=list)
    subjects: list[Subject] = field(default_factory=list)
    variants: list[static.Variant] = field(default_factory=list)

    @property
    def out(self) -> Path | None:
        """Says where bi-audit collects the evidence; None when the notebook runs by itself."""
        return Path(os.environ["BI_AUDIT_OUT"]) if os.environ.get("BI_AUDIT_OUT") else None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

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
        fields = provenance(self.device, self.parameters) | {"command": f"`{self.command}`"}
        if self.out:
            (self.out / "provenance.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        return tables.facts(fields)

    def make(self, audit: str = "", dtypes: Iterable[str] = (), candidate: Candidate | None = None) -> list[Subject]:
        """Returns the subjects of an audit: the candidate's functions at every case and dtype."""
        chosen, shapes, seed = candidate or self.candidate, self.parameters["shapes"], self.parameters["seed"]
        every = problems(
            audit or self.audit, list(dtypes) or self.dtypes, shapes, self.device, seed, tuple(chosen.functions)
        )
        return [Subject(p, chosen.functions[p.op.name], chosen.spec, self.device_label, self.command) for p in every]

    def problem(self, op: str, case: str, dtype: str) -> Problem:
        p = self.parameters
        return Problem(OPS[op], case, DTYPES[dtype], p["shapes"], self.device, p["seed"])

    def subject(
        self, op: str, dtype: str = "bf16", function: Callable | None = None, candidate: str = "bi_kernels"
    ) -> Subject:
        """Returns one op at its first case: this package's, or another's function."""
        problem = self.problem(op, next(iter(OPS[op].cases(self.parameters["shapes"]))), dtype)
        return Subject(problem, function or getattr(bi_kernels, op), candidate, self.device_label, self.command)

    def judge(self, examples: int = 5, forward: bool = True, backward: bool = False) -> list[Row]:
        """Judges every relation of every op of this audit; drifts leave a reproducer. Returns the rows it added.

        They are recorded op by op. backward: gradients too, and the static audit of all that was launched.
        """
        before, launched = len(self.rows), []
        for subject in self.make():
            self.subjects.append(subject)
            rows: list[Row] = []
            refused = lambda rows=rows: any(r.verdict == UNSUPPORTED for r in rows)
            with static.recorded() if backward else nullcontext() as launches:
                rows += forward_relations.judge(subject, examples) if forward else []
                subject.forget()
                if backward and not refused():
                    rows += gradient_relations.judge_gradients(subject)
            if backward and not refused():
                rows += gradient_relations.judge_gradient_accuracy(subject)
                launched.append((subject, launches))
            if self.out:
                export(subject, self.candidate, rows, self.out / "repro")
                export_gradient(subject, self.candidate, rows, self.out / "repro")
            subject.forget()
            self.add(rows)
        if backward:
            static_rows, self.variants = gradient_relations.atomics_free(launched)
            self.add(static_rows)
        if forward:
            self.add(forward_relations.coverage(self.rows[before:], self.subjects))
        if backward:
            self.add(gradient_relations.gradient_coverage(self.rows[before:], self.subjects))
        return self.rows[before:]

    def add(self, rows: list[Row]) -> None:
        """Records rows as this audit's, and saves what there is so far."""
        for row in rows:
            row.audit = self.audit
        self.rows += rows
        if self.out:
            write_rows(self.out / "verdicts.json", [vars(r) for r in self.rows])

    def controls(self) -> list[Row]:
        """Judges every control of this audit by the relation that must flag it; returns their rows."""
        every = (*broken_forward.CONTROLS, *broken_gradient.GRADIENT_CONTROLS, *broken_attention.ATTENTION_CONTROLS)
        rows, static_rows = [], {}
        for control in every:
            if control.audit != self.audit or control.gpu and not (self.on_gpu and self.parameters["shapes"] != "tiny"):
                continue
            problem = self.problem(control.op, control.case, control.dtype)
            s = Subject(problem, control.function, control.name, self.device_name)
            try:
                if control.relation == gradient_relations.STATIC:
                    levels = [c.level for c in every if c.function == control.function]
                    if control.function not in static_rows:
                        static_rows[control.function] = _static_rows(s, levels)
                    found = [replace(static_rows[control.function][control.level], candidate=control.name)]
                else:
                    found = _flagging(control.relation, s)
            except Exception as error:
                found = [s.row(control.relation, "", detail=f"{type(error).__name__}: {error}")]
            s.forget()
            rows.append(next((r for r in found if r.verdict == NEEDS_FIX), found[0]).as_control())
        self.add(rows)
        return rows

    @property
    def failures(self) -> list[Row]:
        """Lists the rows that need a fix, and the controls that were missed."""
        return [r for r in self.rows if (not r.caught if r.control else r.verdict == NEEDS_FIX)]

    @property
    def passed(self) -> bool:
        """Tells whether something was judged, nothing needs a fix, and there were controls, all caught."""
        return (
            any(r.verdict == PASS for r in self.rows if not r.control)
            and any(r.control for r in self.rows)
            and not self.failures
        )

    def verdict(self):
        """Returns the verdict bundle: a table for people, JSON for programs, the same on every run."""
        return tables.verdict(self)

    def failure(self) -> str:
        """Says in one line a failing op what fails, for the notebook's last assert."""
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


def _flagging(relation: str, s: Subject) -> list[Row]:
    """Judges a control by the experiments that must flag it."""
    if relation == "invariance":
        few = forward_relations.by_layout(s, only=("singles", "batch", "neighbours", "permuted", "decode"))
        return up_to_a_drift(chain(forward_relations.by_row_count(s), few))
    if relation == "parity":
        return [r for r in forward_relations.parity(s) if r.layout == "decode=packed"]
    if relation == "determinism":
        return [forward_relations.determinism(s)]
    if relation == gradient_relations.INVARIANCE:
        return up_to_a_drift(r for r in gradient_relations.by_split(s) if r.relation == relation)
    if relation == gradient_relations.ACCURACY:
        return [r for kind in ("normal", "wide") for r in gradient_relations.gradient_accuracy(s, kind)]
    return [forward_relations.accuracy(s, "normal"), forward_relations.accuracy(s, "wide")]


def _static_rows(s: Subject, levels: list[str]) -> dict[str, Row]:
    """Returns {level: the static audit's row} of what one step of a control launches."""
    with static.recorded() as launches:
        step = gradient_relations.Step(s, "normal", [5, 17])
        step.gradients(step.layouts["packed"])
    return dict(zip(levels, gradient_relations.atomics_free([(s, launches)], levels)[0]))
