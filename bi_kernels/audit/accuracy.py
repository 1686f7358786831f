"""How far results are from fp64, as a share of a bound."""

import torch

from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import Row
from bi_kernels.audit.targets.base import Target

PIECE = 2**25  # elements whose errors are computed at a time: a quarter of a gigabyte in fp64


def against_bound(
    subject: Target,
    relation: str,
    y: torch.Tensor,
    exact: torch.Tensor,
    limit: torch.Tensor,
    dtype: torch.dtype,
    kind: str,
    n: int,
    detail: str,
    tensor: str = "out",
) -> Row:
    """Returns the row that says how much of the bound `limit` the error of y takes; elements above it are its
    mismatches."""
    said = {"against": "fp64", "inputs": kind, "rows": n, "tensor": tensor}
    if y.dtype != dtype or y.shape != exact.shape:
        detail = f"returned {y.dtype} {tuple(y.shape)}, expected {dtype} {tuple(exact.shape)}"
        drift = Drift(exact.numel(), exact.numel(), float("inf"))
        return subject.row(relation, "rows", drift, detail=detail, **said)
    parts = (t.reshape(-1).split(PIECE) for t in (y, exact, limit))
    wrongs, firsts, shares, gaps, relatives = zip(*map(_error, *parts))
    at = next((i * PIECE + first for i, first in enumerate(firsts) if first is not None), None)
    if at is not None:
        at = tuple(map(int, torch.unravel_index(torch.tensor(at), y.shape)))
        detail += f"; first {float(y[at]):.9g}, exactly {float(exact[at]):.9g}, allowed ± {float(limit[at]):.3g}"
    drift = Drift(sum(wrongs), y.numel(), max(gaps), max(relatives), first_index=at)
    worst = "inf" if max(shares) == float("inf") else max(shares)
    return subject.row(relation, "rows", drift, detail=detail, max_ulp=None, threshold_share=worst, **said)


def _error(y: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor) -> tuple:
    """(elements above the limit, the first of them, the largest share of it, largest error, largest relative one)."""
    gap = (y.double() - exact).abs()
    # NaN answers NaN, Inf answers Inf, and so it may where the bound reaches beyond the dtype's range
    infinite = (exact.abs() + limit >= torch.finfo(y.dtype).max) & (y.double() == exact.sign() * torch.inf)
    right = torch.where(exact.isnan(), y.isnan(), infinite)
    finite = exact.isfinite() & y.isfinite()
    share = torch.where(right, 0.0, torch.where(finite, gap / limit, torch.inf))
    relative = gap / exact.abs().clamp(min=torch.finfo(torch.float64).tiny)
    wrong, most = ~(share <= 1), lambda t: float(t.max()) if t.numel() else 0.0
    first = int(wrong.nonzero()[0]) if wrong.any() else None
    return int(wrong.sum()), first, most(share), most(gap[finite]), most(relative[finite])
