"""The experiments of the dtype-contract audit."""

import torch

import bi_kernels
from bi_kernels import contract, reference
from bi_kernels.audit.broken.forward import bf16_accumulation
from bi_kernels.audit.evidence.drift import Drift
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, Row
from bi_kernels.audit.problem.problem import Problem
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.contract import CONTRACT, DTYPES, dtype_name

REFUSED = (torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.int8, torch.complex64, torch.bool)


def bounds() -> list[dict]:
    """Returns the contract's row of every op, its factor c evaluated at a reduction of 4096."""
    lines = []
    for name, op in CONTRACT["ops"].items():
        factor = lambda d: contract.evaluate(op["c"].get(d, op["c"].get("any")), n=4096)
        lines.append(
            {"op": name, "rounding": op["rounding"], "contraction": op["fma"], "S": op["S"].replace("|", "\\|")}
            | {f"c, {d}": f"{factor(d):.2g}" for d in DTYPES}
        )
    return lines


def acceptance(session) -> tuple[list[Row], list[dict]]:
    """Returns every op at every dtype: computed and returned as the contract says, or refused with a sentence that
    names the op, the dtype and the supported set. Returns the rows and one line an op."""
    rows, lines = [], []
    first: dict[str, Subject] = {}
    for s in session.make():
        first.setdefault(s.problem.op.name, s)
    for name, s in first.items():
        op, line = s.problem.op, {"op": name}
        tokens, shared = s.inputs("normal", 3)
        at = torch.arange(3, device=session.device)
        for dtype in (*DTYPES.values(), *REFUSED):
            kept_as_is = [k for k, v in op.tokens.items() if v.endswith((":id", ":bool"))]
            convert = lambda given: {k: t if k in kept_as_is else t.float().to(dtype) for k, t in given.items()}
            target = Problem(
                op, s.problem.case, dtype if op.casts else s.problem.dtype, s.problem.shapes, s.problem.device
            )
            subject = Subject(target, s.function, s.candidate, s.device, s.command)
            if op.casts:
                arguments = tokens, shared
            else:
                arguments = convert(tokens), convert(shared)
            try:
                got = subject.call(*arguments, (3,), at)
                dtypes = [t.dtype for t in (got if isinstance(got, tuple) else [got])]
                said = f"returns {', '.join(map(dtype_name, dtypes))}"
                kept = dtype in DTYPES.values() and dtypes == list(op.returned(dtype).values())
            except Exception as error:
                said = str(error)
                named = dtype_name(dtype) in said and (op.function or name) in said and all(d in said for d in DTYPES)
                kept = dtype not in DTYPES.values() and isinstance(error, TypeError) and named
            line[dtype_name(dtype)] = "✅" if kept else f"❌ {said[:60]}"
            row = s.row(
                "contract", "dtype", Drift(int(not kept), 1), detail=said[:200], verdict=PASS if kept else NEEDS_FIX
            )
            row.dtype = dtype_name(dtype)
            rows.append(row)
        lines.append(line)
    return rows, lines


def accumulation(session) -> dict[str, dict[int, float]]:
    """{variant: {K: largest error as a share of the bound}} of a bf16 GEMM, ours and two that accumulate otherwise."""
    g = torch.Generator().manual_seed(session.parameters["seed"])
    out: dict[str, dict[int, float]] = {}
    for k in (64, 256, 1024, 4096) if session.on_gpu else (64, 128, 256, 512):
        x, w = (torch.randn(32, k, generator=g).bfloat16().to(session.device) for _ in range(2))
        exact, magnitude = reference.linear(x, w)
        limit = contract.bound("linear", torch.bfloat16, exact, magnitude, k)
        half = lambda x, w: (
            bi_kernels.linear(x[:, : k // 2], w[:, : k // 2]) + bi_kernels.linear(x[:, k // 2 :], w[:, k // 2 :])
        )
        for name, fn in (
            ("candidate", session.candidate.functions.get("linear", bi_kernels.linear)),
            ("partial sums rounded to bf16", half),
            ("every step rounded to bf16", bf16_accumulation),
        ):
            out.setdefault(name, {})[k] = float(((fn(x, w).double() - exact).abs() / limit).max())
    return out


def shares(rows: list[Row], dtype: str) -> dict[str, dict[str, float]]:
    """{op: {inputs: largest error as a share of the bound}}."""
    seen: dict[str, dict[str, float]] = {}
    for r in rows:
        if r.relation == "accuracy" and r.dtype == dtype and not r.control:
            line = seen.setdefault(f"{r.op} {r.case}".strip(), {})
            line[r.inputs] = max(line.get(r.inputs, 0.0), float(r.threshold_share or 0.0))
    return seen
