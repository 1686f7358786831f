"""Scans the source of kernels, and of the Python around them, for atomics, scatters, autotuners and unsafe reductions.

Names are resolved to objects, so an alias of `tl.atomic_add` hides nothing; a launch's arguments are followed into the
kernel through assignments, calls and fields. A reduction is a loop that carries a value made of loaded data. It is
reported where its range depends on `num_programs`, on the number of multiprocessors, or on a number that the row count
chose: by a comparison, a lookup or a division, or as a share of the rows times a program id. The row count itself may
end a range. The tile of a pure `acc = tl.dot(a, b, acc)` chain may depend on rows: on sm_90 it changes no bit. Every
tensor size that is not known to be a later dimension counts as rows.

Left to the invariance audit: a sum that Python cuts by slicing or by choosing between two launches; bounds and
accumulators in memory; num_warps or the block of a `tl.sum` chosen by rows; torch's own matmul and sum; functions
passed as arguments.
"""

import ast
import re
from collections.abc import Iterator
from types import FunctionType

import triton

from bi_kernels.audit.static.finding import (
    ACCUMULATES,
    ACCUMULATING,
    ATOMIC,
    CHOOSERS,
    PTX,
    REDUCTIONS,
    RUN_TIME,
    SCATTER,
    SCATTERS,
    Finding,
)
from bi_kernels.audit.static.flow import Flow
from bi_kernels.audit.static.function import Function, package_of, reachable, unwrap


def source(*subjects, parameters: tuple[str, ...] = ()) -> list[Finding]:
    """Returns the findings in functions, kernels, classes or modules, in all that they name in their package, and in
    every kernel that they name. The sizes of tensors named in `parameters` are no row counts."""
    functions, findings = reachable(subjects)
    findings += (x for f in functions for x in _forbidden(f))
    flow = Flow(functions, parameters)
    reductions = [x for f in flow.calls.values() if f.kernel for x in f.reductions()]
    reductions.sort(key=lambda x: REDUCTIONS.index(x.kind), reverse=True)
    findings += {(x.function, x.line): x for x in reductions}.values()  # the first kind that fits, a loop
    return sorted(set(findings), key=lambda x: (x.function, x.line, x.kind, x.code, x.level))


def _forbidden(f: Function) -> Iterator[Finding]:
    """Yields atomics, unordered scatters and autotuners, by object, or by name where the owner is not known."""
    for n in ast.walk(f.node):
        if isinstance(n, (ast.Name, ast.Attribute, ast.Constant)):
            known = [n.value] if isinstance(n, ast.Constant) else f.objects(n)
            for o in known or [getattr(n, "attr", None)]:
                inner = o.value if isinstance(o, triton.language.constexpr) else unwrap(o)
                own = isinstance(inner, FunctionType) and package_of(inner) not in ("triton", "torch")
                name = inner if isinstance(inner, str) else "" if own else getattr(inner, "__name__", "")
                if re.fullmatch(r"atomic_\w+", name) or f.kernel and PTX.search(name):
                    yield f.finding(ATOMIC, n)
                elif SCATTERS.fullmatch(name):
                    yield f.finding(SCATTER, n)
                elif any(o is chooser for chooser in (triton.autotune, triton.heuristics, *CHOOSERS)):
                    yield f.finding(RUN_TIME, n)
        elif isinstance(n, ast.Call) and f.called(n.func).strip("_") in ACCUMULATING:
            constant = lambda e, other: e.value if isinstance(e, ast.Constant) else other
            named = any(constant(k.value, True) for k in n.keywords if k.arg in ACCUMULATES)
            if named or any(constant(a, None) is True for a in n.args):
                yield f.finding(SCATTER, n)
