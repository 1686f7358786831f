"""Audits a function of a notebook's cells, and shows which rows depend on how the batch was cut."""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import torch

from bi_kernels.audit.callable_audit import audit as audit_callable
from bi_kernels.audit.checks import gradient as gradients
from bi_kernels.audit.checks.forward import judge
from bi_kernels.audit.compare import ordered, raw
from bi_kernels.audit.findings import Row
from bi_kernels.audit.kernel_error import KernelError, kernel_error
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.report.any_callable import Report
from bi_kernels.audit.report.markdown import table
from bi_kernels.audit.static.launches import Launches, recorded
from bi_kernels.audit.static.source import source as findings
from bi_kernels.audit.static.verdict import atomics_free
from bi_kernels.audit.targets.any_callable import CallableTarget
from bi_kernels.audit.targets.candidates import load, resolve
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.checks import integers_of
from bi_kernels.contract import DTYPES
from bi_kernels.scalars import truncated_repr
from bi_kernels.workbench.run import kernel_errors
from bi_kernels.workbench.source import line_in_cell, write_op


def audit(function: Callable, *inputs, op: str = "", **options) -> Report:
    """Checks whether a row's result, or a gradient, of a function of the cells depends on the rest of the batch.

    function(*inputs) may be anything that `bi_kernels.audit.audit` takes, with its options: batch, shared, outputs,
    reference, backward, seconds, seed. With the name of a registered op it is checked as that op instead, on the
    interpreter, at the op's smallest shapes; options are then dtype="bf16", seed=0 and forward=True, where False checks
    its backward alone. Raises KernelError, one sentence with the kernel's line, where a kernel cannot run at all.
    """
    if op:
        for name, value in options.items():
            if name not in ("dtype", "seed", "forward"):
                raise TypeError(f"audit: {name} is {truncated_repr(value)}, expected dtype, seed or forward beside op")
        for name, value, known in (("op", op, OPS), ("dtype", options.get("dtype", "bf16"), DTYPES)):
            if value not in known:
                raise ValueError(f"audit: {name} is {truncated_repr(value)}, expected one of {', '.join(known)}")
        with kernel_errors():
            return _as_op(function, op, **options)
    with kernel_errors(), _importable(function) as (found, text):
        try:
            report = audit_callable(found, *inputs, **{"name": getattr(function, "__name__", "")} | options)
        except Exception as error:
            raised = kernel_error(error)
            if not (line := raised and text and line_in_cell(function, text, raised.kernel, raised.line)):
                raise
            raise KernelError(raised.kernel, line, raised.code, raised.message) from None
    if text:
        _name_the_cells_lines(report.rows, function, text)
    return report


@contextmanager
def _importable(function: Callable) -> Iterator[tuple[Callable, str]]:
    """Yields a function of the cells as one of a file, so that its kernels are compiled too, and the file's text.

    A function that has a file, or that no file can hold, is yielded as it is, with ''.
    """
    found = function, ""
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(function, FunctionType) and function.__module__ == "__main__":
            with suppress(ValueError, OSError):  # it holds a tensor, say
                path = write_op(Path(folder, f"{function.__name__}.py"), function)
                found = load(f"{path}:{function.__name__}"), path.read_text(encoding="utf-8")
        yield found


def _as_op(function: Callable, op: str, dtype: str = "bf16", seed: int = 0, forward: bool = True) -> Report:
    """Runs every check of the registered op, or those of its backward alone; the static audit sees one step."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_op(Path(folder, f"{function.__name__}.py"), function)
        loaded = resolve(f"{path}:{function.__name__}", OPS[op].audit, op).functions[op]
        problem = OpConfig(OPS[op], "", DTYPES[dtype], "tiny", torch.device("cpu"), seed)
        command = f"bi-audit run {OPS[op].audit} --candidate {path.name}:{function.__name__} -p op {op}"
        subject = OpUnderTest(problem, loaded, function.__name__, "interpreter", command)
        rows = (judge(subject) if forward else []) + gradients.judge_gradients(subject)
        with recorded() as launches:
            rows += gradients.judge_gradient_accuracy(subject)
        if findings(loaded):  # findings in the source need no binary
            launches = Launches()
        rows += atomics_free([(subject, launches)])[0]
        _name_the_cells_lines(rows, function, path.read_text(encoding="utf-8"))
        return Report(function.__name__, rows, f"judged as {op}, {dtype}, at the op's smallest shapes")


def _name_the_cells_lines(rows: list[Row], function: Callable, text: str) -> None:
    """Replaces line numbers of the file `text` in the rows' details by those in the function's cell."""
    in_cell = lambda m: f"in {m[1]}, line {line_in_cell(function, text, m[1], int(m[2])) or m[2]}"
    for row in rows:
        row.detail = re.sub(r"\bin (\w+), line (\d+)", in_cell, row.detail)


@dataclass(repr=False)
class RowDrift:
    """How far each row is from the same row of the whole batch; shows itself as a table in Jupyter."""

    ulp: dict[int, torch.Tensor]  # {rows in a call: each row's largest difference, in steps of the last place}

    @property
    def drifts(self) -> bool:
        return any(bool(far.any()) for far in self.ulp.values())

    def _repr_markdown_(self) -> str:
        calls = {f"calls of {m}": far.tolist() for m, far in self.ulp.items()}
        rows = enumerate(zip(*calls.values()))
        lines = [{"row": i} | {call: f"{n:,}" if n else "=" for call, n in zip(calls, far)} for i, far in rows]
        title = "ULP between a row of a small call and the same row of the whole batch (= the same bits)"
        return f"{title}\n\n{table(lines)}"

    __repr__ = _repr_markdown_


def drift(
    function: Callable,
    *inputs,
    rows: Sequence[int] | None = None,
    batch: int = 0,
    shared: Sequence[str] = (),
    outputs: Sequence[str] = (),
) -> RowDrift:
    """Returns which rows differ when the batch is cut into calls of fewer rows.

    rows: the rows of each call; by default those of 1, 2 and 4 that are fewer than the batch. batch, shared and
    outputs are those of `audit`. Raises ValueError for a number of rows that the batch does not have.
    """
    given = rows if rows is None else integers_of("drift", "rows", rows)
    with kernel_errors():
        t = CallableTarget(function, inputs, {}, batch, shared, outputs, getattr(function, "__name__", "function"), 0)
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
    """Returns how many steps of the last place elements differ by; at least 1 where their bits differ."""
    return torch.maximum((ordered(a) - ordered(b)).abs(), (raw(a) != raw(b)).long())
