"""The experiments of the dtype-contract audit."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import torch

import bi_kernels
from bi_kernels import contract, reference
from bi_kernels.audit import parallel
from bi_kernels.audit.checks import forward, gradient
from bi_kernels.audit.checks.gradient import BUFFERED, IN_GRAD
from bi_kernels.audit.compare import Drift
from bi_kernels.audit.controls.forward import bf16_accumulation, half_of_k_in_bf16, tf32_inputs
from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED, Row
from bi_kernels.audit.inputs import draw_integers, generator
from bi_kernels.contract import CONTRACT, DTYPES, SHAPES, dtype_name
from helpers.common import Counts, Found

REFUSED = (torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.int8, torch.complex64, torch.bool)

TOLD = {PASS: "✅", UNSUPPORTED: "⬜ refused"}

HALF = "one of two halves rounded to bf16"


def bounds() -> list[dict]:
    """Returns the contract's row of every op, its factor c evaluated at a reduction of 4096."""
    return [
        {"op": name, "rounding": op["rounding"], "contraction": op["fma"], "S": op["S"]}
        | {f"c, {d}": f"{contract.factor(name, dtype, 4096):.2g}" for d, dtype in DTYPES.items()}
        for name, op in CONTRACT["ops"].items()
    ]


def acceptance(session) -> Found:
    """Returns every op at every dtype: computed and returned as the contract says, or refused with a sentence that
    names the op, the dtype and the supported set. Returns the rows and one line an op."""
    rows, lines = [], []
    at = torch.arange(3, device=session.device)
    for name, subjects in groupby(session.make(), lambda s: s.problem.op.name):
        s, line = next(subjects), {"op": name}
        op, given = s.problem.op, s.inputs("normal", 3)
        kept_as_is = [k for k, v in op.tokens.items() if v.endswith((":id", ":bool"))]
        for dtype in (*DTYPES.values(), *REFUSED):
            convert = lambda some: {k: t if k in kept_as_is else t.float().to(dtype) for k, t in some.items()}
            arguments = given if op.casts else map(convert, given)
            subject = replace(s, problem=replace(s.problem, dtype=dtype), memo={}) if op.casts else s
            try:
                got = subject.call(*arguments, (3,), at)
                dtypes = [t.dtype for t in (got if isinstance(got, tuple) else [got])]
                said = short = f"returns {', '.join(map(dtype_name, dtypes))}"
                kept = dtype in DTYPES.values() and dtypes == list(op.returned(dtype).values())
            except Exception as error:
                said, short = str(error), "raised"
                named = dtype_name(dtype) in said and (op.function or name) in said and all(d in said for d in DTYPES)
                kept = dtype not in DTYPES.values() and isinstance(error, TypeError) and named
            right = PASS if dtype in DTYPES.values() else UNSUPPORTED
            line[dtype_name(dtype)] = TOLD[right] if kept else f"❌ {short}"
            verdict = right if kept else NEEDS_FIX
            row = s.row("contract", "dtype", Drift(int(not kept), 1), verdict=verdict, detail=said[:200])
            rows.append(replace(row, dtype=dtype_name(dtype)))
        lines.append(line)
    return rows, lines


def gradients(session) -> Found:
    """Returns in which dtype a real backward leaves every gradient. Returns the rows and one line an op, over its
    dtypes."""
    rows, lines = [], []
    for name, subjects in groupby(session.make(), lambda s: f"{s.problem.op.name} {s.problem.case}".strip()):
        made = [row for s in subjects for row in gradient.judge_dtypes(s)]
        lines.append({"op": name} | {way: _left([r for r in made if r.layout == way]) for way in (IN_GRAD, BUFFERED)})
        rows += made
    return rows, lines


def _left(rows: list[Row]) -> str:
    """Says of which gradients the dtype is right in every dtype of the op, and which is not."""
    wrong = [f"❌ {r.dtype}: {r.tensor} {r.detail}" for r in rows if r.verdict != PASS]
    return "; ".join(wrong) or ", ".join(dict.fromkeys(r.tensor for r in rows))


def accuracy(session) -> list[Row]:
    """Judges every op's accuracy, on every family of inputs. Records and returns the rows."""
    for rows in parallel.each(session, _accuracy, range(len(session.make()))):
        session.add(rows)
    return [r for r in session.rows if r.relation == "accuracy"]


def _accuracy(session, number: int) -> list[Row]:
    subject = session.make()[number]
    return [forward.accuracy(subject, kind) for kind in subject.problem.accurate_on]


def begin(session) -> None:
    """Begins `accuracy`, on a GPU, while what comes before is looked at."""
    parallel.ahead(session, _accuracy, range(len(session.make())))


def accumulation(session) -> dict[str, dict[int, float]]:
    """{who, dtype: {K: largest error as a share of the bound}} of a GEMM at every K of the shape sets, on inputs whose
    sums are exact: the candidate, and GEMMs that round on the way."""
    candidate = session.candidate.functions.get("linear", bi_kernels.linear)
    variants = {
        ("candidate", "bf16"): candidate,
        ("candidate", "fp32"): candidate,
        (HALF, "bf16"): half_of_k_in_bf16,
        ("every slab of 16 rounded to bf16", "bf16"): bf16_accumulation,
        ("inputs rounded to TF32", "fp32"): tf32_inputs,
    }
    every = sorted({k for shapes in SHAPES for _, k in contract.linears(shapes).values()})
    return {
        ", ".join(who): {k: _share_on_integers(session, fn, who[1], k) for k in every} for who, fn in variants.items()
    }


def _share_on_integers(session, function: Callable, dtype: str, k: int) -> float:
    g = generator(session.device, session.parameters["seed"], "integers", dtype, k)
    x, w = (draw_integers((16, k), DTYPES[dtype], g, shared) for shared in (False, True))
    exact, magnitude = reference.linear(x, w)
    limit = contract.bound("linear", DTYPES[dtype], exact, torch.zeros_like(magnitude), k)
    return float(((function(x, w).double() - exact).abs() / limit).max())


def rounding_said(errors: dict[str, dict[int, float]]) -> str:
    """Says how far the candidate, and those that round on the way, are from the bound."""
    of = lambda ours: [v for who, line in errors.items() if who.startswith("candidate") == ours for v in line.values()]
    worst, least = max(of(True)), min(of(False))
    beyond = ", beyond it" if worst > 1 else ""
    dtypes = " and ".join(who.partition(", ")[2] for who in errors if who.startswith("candidate"))
    seen = "seen at every K" if least > 1 else "not seen at every K"
    others = f"Rounding on the way: {seen}, {least:.3g} times the bound or more"
    return f"Candidate, {dtypes}: {worst:.3g} of the bound{beyond}\n{others}"


def shares(rows: list[Row], dtype: str) -> Counts:
    """{op: {inputs: largest error as a share of the bound}}."""
    seen: Counts = {}
    for r in rows:
        if r.relation == "accuracy" and r.dtype == dtype and not r.control:
            line = seen.setdefault(f"{r.op} {r.case}".strip(), {})
            line[r.inputs] = max(line.get(r.inputs, 0.0), float(r.threshold_share or 0.0))
    return seen
