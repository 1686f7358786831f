"""Audits a function of a notebook's cells, and shows which rows depend on how the batch was cut."""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import torch

from bi_kernels.audit.callables.audit import audit as audit_callable
from bi_kernels.audit.callables.report import Report
from bi_kernels.audit.callables.target import Target
from bi_kernels.audit.evidence.drift import ordered, raw
from bi_kernels.audit.evidence.markdown import table
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.kernel_error import KernelError, kernel_error
from bi_kernels.audit.problem.candidates import load, resolve
from bi_kernels.audit.problem.problem import OpConfig
from bi_kernels.audit.problem.registry import OPS
from bi_kernels.audit.problem.subject import OpUnderTest
from bi_kernels.audit.relations import gradient as gradients
from bi_kernels.audit.relations.forward import judge
from bi_kernels.audit.static.launches import Launches, recorded
from bi_kernels.audit.static.source import source as findings
from bi_kernels.audit.static.verdict import atomics_free
from bi_kernels.checks import integers_of
from bi_kernels.contract import DTYPES
from bi_kernels.scalars import truncated_repr
from bi_kernels.workbench.source import line_in_cell, write_op


def audit(function: Callable, *inputs, op: str = "", **options) -> Report:
    """Judges a function of the cells: does a row's result, or a gradient, depend on what else is in the batch?

    function(*inputs) may be anything that `bi_kernels.audit.audit` takes, with its options: batch, shared, outputs,
    reference, backward, seconds, seed. With the name of a registered op the function is judged as that op instead, on
    the interpreter, at the op's own smallest shapes; options are then dtype="bf16", seed=0 and forward=True, where
    False judges its backward alone. Raises KernelError, one sentence with the kernel's line, where a kernel cannot run
    at all.
    """
    with _one_sentence():
        if op:
            for name, value in options.items():
                if name not in ("dtype", "seed", "forward"):
                    raise TypeError(
                        f"audit: {name} is {truncated_repr(value)}, expected dtype, seed or forward beside op"
                    )
            for name, value, known in (("op", op, OPS), ("dtype", options.get("dtype", "bf16"), DTYPES)):
                if value not in known:
                    raise ValueError(f"audit: {name} is {truncated_repr(value)}, expected one of {', '.join(known)}")
            return _as_op(function, op, **options)
        with _importable(function) as (found, text), _one_sentence(function, text):
            report = audit_callable(found, *inputs, **{"name": getattr(function, "__name__", "")} | options)
        if text:
            _name_the_cells_lines(report.rows, function, text)
        return report


@contextmanager
def _one_sentence(function: Callable | None = None, text: str = "") -> Iterator[None]:
    """Raises a kernel's error as one sentence, in place of Triton's and the auditor's tracebacks; text: the file that
    stands for the function's cell."""
    try:
        yield
    except Exception as error:
        if not (found := kernel_error(error)):
            raise
        if line := text and line_in_cell(function, text, found.kernel, found.line):
            found = KernelError(found.kernel, line, found.code, found.message)
        raise found from None


@contextmanager
def _importable(function: Callable) -> Iterator[tuple[Callable, str]]:
    """Yields a function of the cells as one of a file, so that its kernels are compiled too, and the file's text; what
    no file can hold, and what has one, as it is, and ''."""
    if not isinstance(function, FunctionType) or function.__module__ != "__main__":
        yield function, ""
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = write_op(Path(folder, f"{function.__name__}.py"), function)
            found = load(f"{path}:{function.__name__}"), path.read_text(encoding="utf-8")
        except (ValueError, OSError):  # it holds a tensor, say
            found = function, ""
        yield found


def _as_op(function: Callable, op: str, dtype: str = "bf16", seed: int = 0, forward: bool = True) -> Report:
    """Judges by every relation of the registered op, or those of its backward alone; the static audit sees what one
    step launches."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_op(Path(folder, f"{function.__name__}.py"), function)
        loaded = resolve(f"{path}:{function.__name__}", OPS[op].audit, op).functions[op]
        problem = OpConfig(OPS[op], "", DTYPES[dtype], "tiny", torch.device("cpu"), seed)
        command = f"bi-audit run {OPS[op].audit} --candidate {path.name}:{function.__name__} -p op {op}"
        subject = OpUnderTest(problem, loaded, function.__name__, "interpreter", command)
        rows = (judge(subject) if forward else []) + gradients.judge_gradients(subject)
        with recorded() as launches:
            rows += gradients.judge_gradient_accuracy(subject)
        if findings(loaded):  # what the source shows needs no binary
            launches = Launches()
        rows += atomics_free([(subject, launches)])[0]
        _name_the_cells_lines(rows, function, path.read_text(encoding="utf-8"))
        return Report(function.__name__, rows, f"judged as {op}, {dtype}, at the op's smallest shapes")


def _name_the_cells_lines(rows: list[Row], function: Callable, text: str) -> None:
    """Has rows name a line by its number in the function's cell instead of that in the file `text`."""
    in_cell = lambda m: f"in {m[1]}, line {line_in_cell(function, text, m[1], int(m[2])) or m[2]}"
    for row in rows:
        row.detail = re.sub(r"\bin (\w+), line (\d+)", in_cell, row.detail)


@dataclass(repr=False)
class RowDrift:
    """How far each row is from the same row of the whole batch, by the number of rows in a call."""

    ulp: dict[int, torch.Tensor]  # by rows in a call: steps of the last place by which each row is off at most

    @property
    def drifts(self) -> bool:
        return any(bool(far.any()) for far in self.ulp.values())

    def _repr_markdown_(self) -> str:
        calls = {f"calls of {m}": far.tolist() for m, far in self.ulp.items()}
        lines = [
            {"row": i} | {call: f"{n:,}" if n else "=" for call, n in zip(calls, far)}
            for i, far in enumerate(zip(*calls.values()))
        ]
        return (
            f"ULP between a row of a small call and the same row of the whole batch (= the same bits)\n\n{table(lines)}"
        )

    __repr__ = _repr_markdown_


def drift(
    function: Callable,
    *inputs,
    rows: Sequence[int] | None = None,
    batch: int = 0,
    shared: Sequence[str] = (),
    outputs: Sequence[str] = (),
) -> RowDrift:
    """Returns which rows differ when the batch is cut into calls of fewer rows: the shortest question of an audit.

    rows: how many rows each call has; 1, 2 and 4 unless given, as far as the batch has more. batch, shared and outputs
    are those of `audit`. Raises ValueError for a number of rows that the batch does not have.
    """
    given = rows if rows is None else integers_of("drift", "rows", rows)
    with _one_sentence():
        t = Target(function, inputs, {}, batch, shared, outputs, getattr(function, "__name__", "function"), 0)
        whole = t.whole()
        found = {}
        for m in [m for m in (1, 2, 4) if m < t.count] if given is None else given:
            if not 1 <= m <= t.count:
                raise ValueError(f"drift: rows holds {m}, expected from 1 to {t.count}, the rows of the batch")
            parts = t.compute([t.every[i : i + m] for i in range(0, t.count, m)])
            far = [_ulp(a, b).flatten(1).amax(1) for a, b in zip(parts, whole)]
            found[m] = torch.stack(far).amax(0)
        return RowDrift(found)


def _ulp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns by how many steps of the last place elements differ; at least 1 where their bits do."""
    return torch.maximum((ordered(a) - ordered(b)).abs(), (raw(a) != raw(b)).long())
