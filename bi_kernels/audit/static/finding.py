"""Findings of the static audit: their kinds, and the patterns that reveal them."""

import re
from dataclasses import dataclass

from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

ATOMIC, SCATTER, RUN_TIME, UNREADABLE = "atomic", "unordered scatter", "run-time choice", "source not readable"
TOO_LARGE, SHARED = "more shared memory than there is", 227 * 1024  # bytes that a program on sm_90 may have
GRID_STRIDE, BY_DEVICE, BY_ROWS = REDUCTIONS = (
    "grid-stride reduction",
    "reduction cut by multiprocessors",
    "reduction cut by rows",
)

# An instruction follows a line's start, a brace, a semicolon or a guard: bar.red and redux.sync are none of these.
PTX = re.compile(
    r"(?:^|[;{}])\s*(?:@!?%?\w+\s+)?((?:atom|red|multimem\.red|multimem\.ld_reduce|cp\.reduce)\."
    r"[a-z][^;\n]*)",
    re.MULTILINE,
)
SCATTERS = re.compile(r"(index_add|index_reduce|scatter_add|scatter_reduce)_?")
ACCUMULATING, ACCUMULATES = ("index_put", "put", "bincount", "scatter"), ("accumulate", "weights", "reduce")
DEVICE = re.compile(r"multi_?processor_?count|num_sms?|sm_count", re.IGNORECASE)
KERNELS, CHOOSERS = (JITFunction, InterpretedFunction), (Autotuner, Heuristics)


@dataclass(frozen=True)
class Finding:
    kind: str
    function: str
    line: int  # in the function's source file; 0 where the level does not know
    code: str
    level: str  # AST, PTX or SASS; torch: seen when dispatched; launch: when launched; size: what it asks for
    op: str = ""  # that source names, of a scatter

    def __str__(self) -> str:
        return f"{self.kind} in {self.function}{f', line {self.line}' if self.line else ''} ({self.level}): {self.code}"
