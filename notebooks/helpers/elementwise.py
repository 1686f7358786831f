"""The experiments of the elementwise and RoPE audit."""

from functools import partial

import torch

import bi_kernels
from bi_kernels import reference
from bi_kernels.audit.checks.ops import QUICK
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.controls.forward import leaks_nan_neighbour, rope_bf16_positions, rope_by_row
from bi_kernels.audit.findings import Row
from bi_kernels.audit.layouts import layouts
from bi_kernels.audit.targets.fresh_memory import poisoned_memory
from bi_kernels.audit.targets.op import CANCELLING
from helpers.common import Counts, Found, differing, size


def layout_map(session, rows: list[Row], dtype: str) -> Counts:
    """{op: {layout: elements that differ}} of the candidate, and of two broken ops for contrast."""
    names = [n for n in layouts(size(session)["lengths"]) if not session.quick or n in QUICK]
    seen: Counts = {}
    for r in rows:
        if r.relation == "invariance" and r.layout in names and r.dtype == dtype:
            line = seen.setdefault(r.op, {})
            line[r.layout] = line.get(r.layout, 0) + differing(r)
    for op, function, kind in (("rope", rope_by_row, CANCELLING), ("silu", leaks_nan_neighbour, "nonfinite")):
        s = session.subject(op, dtype, function)
        seen[f"broken: {function.__name__}"] = {
            n: compare(s.layout(n, kind), s.layout("singles" if n == "packed" else "packed", kind)).mismatches
            for n in names
        }
    return seen


def _rope_inputs(session, tokens: int, longest: int = 4096) -> tuple[torch.Tensor, bi_kernels.RopeTable]:
    heads, dim = size(session)["heads"], size(session)["head_dim"]
    g = torch.Generator().manual_seed(session.parameters["seed"])
    x = torch.randn(tokens, heads, dim, generator=g).bfloat16().to(session.device)
    return x, bi_kernels.rope_table(longest, dim, device=session.device)


def rope_positions(session) -> tuple[list[int], dict[str, list[float]]]:
    """(positions, {variant: largest error of a token at that position against fp64, relative to the token's norm})."""
    positions = [1, *(2**e + 1 for e in range(12)), 4095]  # one more than a power of two is where bf16 rounds first
    x, table = _rope_inputs(session, len(positions), longest=4097)  # 4095 rounds to 4096
    at = torch.tensor(positions, device=session.device)
    exact, _ = reference.rope(x, table, at)
    rounded = bi_kernels.RopeTable(*(part.bfloat16().float() for part in table))
    variants = {
        "bi_kernels: fp32 table from fp64": bi_kernels.rope(x, table, at),
        "cos and sin rounded to bf16": bi_kernels.rope(x, rounded, at),
        "positions rounded to bf16": rope_bf16_positions(x, table, at),
    }
    norm = lambda t: t.flatten(1).norm(dim=1)
    return positions, {name: (norm(y.double() - exact) / norm(exact)).tolist() for name, y in variants.items()}


def packed_reset(session, lengths: tuple[int, ...] = (5, 1, 17, 9)) -> Found:
    """Returns the same sequences packed: positions from cu_seqlens, positions given, and positions that never reset.
    The first two must give the bits of each sequence alone; they are the rows."""
    x, table = _rope_inputs(session, sum(lengths))
    count = lambda n: torch.arange(n, device=session.device)
    ends = torch.tensor([0, *lengths], device=session.device).cumsum(0)
    alone = torch.cat([bi_kernels.rope(part, table, count(len(part))) for part in x.split(lengths)])
    ways = {
        "cu_seqlens": bi_kernels.rope(x, table, cu_seqlens=ends),
        "positions": bi_kernels.rope(x, table, torch.cat([*map(count, lengths)])),
        "one running count, for contrast": bi_kernels.rope(x, table, count(len(x))),
    }
    drifts = {name: compare(y, alone) for name, y in ways.items()}
    s = session.subject("rope")
    rows = [
        s.row("parity", "packed=alone", drifts[name], "each sequence alone", "normal", sum(lengths), detail=name)
        for name in ("cu_seqlens", "positions")
    ]
    return rows, [{"positions from": name, "against each sequence alone": str(d)} for name, d in drifts.items()]


def outside_table(session) -> list[Row]:
    """Judges that a position outside the table gives NaN, in the output and in dx, and not the angle of a neighbour;
    a token between such has its own bits."""
    s = session.subject("rope", session.dtypes[0])
    x, table = _rope_inputs(session, 5)
    x, end = x.to(s.problem.input_dtype), len(table.cos)
    at = torch.tensor([-1, 7, end, -(2**33), 2**40], device=session.device)

    def made(rows: list[int], interleaved: bool) -> list[torch.Tensor]:
        leaf = x[rows].requires_grad_()
        with poisoned_memory(2):  # zeros: what is left unwritten is no NaN
            y = bi_kernels.rope(leaf, table, at[rows], interleaved=interleaved)
            (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        return [torch.where(t.isnan(), torch.nan, t) for t in (y.detach(), dx)]

    def compared(interleaved: bool) -> Drift:
        found, alone = made([*range(len(x))], interleaved), made([1], interleaved)
        expected = [torch.full_like(t, torch.nan).index_copy_(0, at.new_ones(1), own) for t, own in zip(found, alone)]
        return compare(tuple(found), tuple(expected))

    said = {"against": "NaN", "rows": len(x), "detail": f"positions {at.tolist()} of {end}; out and dx"}
    each = {"outside the table": False, "outside the table, interleaved": True}
    return [row for name, way in each.items() for row in s.attempt("contract", name, partial(compared, way), **said)]
