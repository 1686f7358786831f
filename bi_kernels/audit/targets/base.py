"""What every target has: rows that say whose they are, attempts that become rows, and errors as a share of a bound."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from bi_kernels.audit import faults
from bi_kernels.audit.axes import axes_of, side_of
from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import NEEDS_FIX, NOT_RUN, PASS, Row, sentence
from bi_kernels.audit.memory import give_back, patiently

T = TypeVar("T")
PIECE = 2**25  # elements whose errors are computed at a time: a quarter of a gigabyte in fp64


class Target:
    """What is audited. A subclass says whose its rows are, and calls it."""

    required = False  # whether a check that has no row needs a fix
    whose: tuple[str, ...]  # audit, op, case, candidate, dtype and device
    command = ""  # that judged it
    parts: Sequence[str] = ("out",)  # the names of its outputs
    sides: Mapping[str, Collection[str]] = {}  # names of inputs, by what a row calls their gradients

    def side(self, tensor: str) -> str:
        """Returns whose gradient a tensor is; '' where it is none."""
        of = tensor.partition(",")[0].removesuffix(".grad")
        return next((side for side, names in self.sides.items() if of[:1] == "d" and of[1:] in names), "")

    def row(
        self,
        relation: str,
        layout: str,
        drift: Drift | None = None,
        against: str = "",
        inputs: str = "normal",
        rows: int = 0,
        verdict: str = "",
        **more,
    ) -> Row:
        """Returns the row of a relation and a layout; it needs a fix where elements differ, or where there is no
        drift."""
        part, parts = drift.part if drift else 0, self.parts
        tensor = parts[part] if part < len(parts) else f"{parts[0]}[{part}]"
        said = {"tensor": tensor, "axes": axes_of(relation, layout, inputs)} | (drift.json() if drift else {}) | more
        said.setdefault("side", self.side(said["tensor"]) or side_of(relation))
        verdict = verdict or (NEEDS_FIX if drift is None or drift.mismatches else PASS)
        if verdict == NEEDS_FIX:
            said |= {"first_failing_op": self.whose[1], "repro": self.command}
        return Row(*self.whose, relation, layout, against, inputs, rows, verdict, **said)

    def attempt(
        self,
        relation: str,
        layout: str,
        thunk: Callable[[], Drift | Row | list[Row]],
        refusal: Callable[[Exception], str] | None = None,
        **said,
    ) -> list[Row]:
        """Returns the rows that `thunk` gives, of a drift the one with what is `said`; where it raises, the row that
        says so, with the verdict that `refusal` gives the error."""
        unjudged = self.row(relation, layout, None, **said)
        name = faults.key(unjudged)
        if row := faults.instead(name, unjudged):
            return [row]
        try:
            found = patiently(thunk)
            faults.settled()
        except Exception as error:
            more = {"detail": "; ".join(filter(None, (said.get("detail"), sentence(error))))}
            more |= {"verdict": refusal(error)} if refusal else {}
            return [faults.raised(name, self.row(relation, layout, None, **said | more))]
        finally:
            give_back()
        if isinstance(found, Row):
            return [found]
        rows = list(found) if isinstance(found, Iterable) else [self.row(relation, layout, found, **said)]
        return rows or [self.row(relation, layout, None, **said | {"detail": NOT_RUN})] * self.required

    def computed(
        self,
        relation: str,
        layout: str,
        make: Callable[[], T],
        refusal: Callable[[Exception], str] | None = None,
        **said,
    ) -> tuple[T | None, list[Row]]:
        """Returns what `make` returns, of which no row is made, and, where it raises, the row that says so."""
        made: list = []

        def making() -> Row:
            made.append(make())
            return self.row(relation, layout)

        raised = self.attempt(relation, layout, making, refusal, **said)
        return (made[-1], []) if made else (None, raised)

    def against_bound(
        self, relation: str, y: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor, dtype: torch.dtype, **said
    ) -> Row:
        """Returns the row that says how much of the bound `limit` the error of y takes against fp64; elements above it
        are its mismatches."""
        said = {"against": "fp64", "detail": ""} | said
        if y.dtype != dtype or y.shape != exact.shape:
            said["detail"] = f"returned {y.dtype} {tuple(y.shape)}, expected {dtype} {tuple(exact.shape)}"
            return self.row(relation, "rows", Drift(exact.numel(), exact.numel(), float("inf")), **said)
        parts = (t.reshape(-1).split(PIECE) for t in (y, exact, limit))
        wrongs, firsts, shares, gaps, relatives = zip(*map(_error, *parts))
        at = next((i * PIECE + first for i, first in enumerate(firsts) if first is not None), None)
        if at is not None:
            at = tuple(map(int, torch.unravel_index(torch.tensor(at), y.shape)))
            values = float(y[at]), float(exact[at]), float(limit[at])
            said["detail"] += "; first {:.9g}, exactly {:.9g}, allowed ± {:.3g}".format(*values)
        drift = Drift(sum(wrongs), y.numel(), max(gaps), max(relatives), first_index=at)
        worst = "inf" if max(shares) == float("inf") else max(shares)
        return self.row(relation, "rows", drift, max_ulp=None, threshold_share=worst, **said)


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
