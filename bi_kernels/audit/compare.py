"""Raw-bit comparison and the drift report."""

from dataclasses import asdict, dataclass

import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(t: torch.Tensor) -> torch.Tensor:
    """Returns the bits of `t` as integers of the same width: −0 differs from +0, and NaN payloads count."""
    return t.resolve_neg().contiguous().view(_INTEGER[t.element_size()])


def ordered(t: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats of `t`: neighbours differ by 1, −0 and +0 are both 0."""
    bits = raw(t).long()
    magnitude = bits & (2 ** (8 * t.element_size() - 1) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


@dataclass(frozen=True)
class Drift:
    """How far `actual` is from `expected`; all zero where the bits are equal.

    max_ulp is infinite where an element is not finite, and where two lie more than a binade of ULP apart, as numbers of
    either sign do: the steps between those count exponents, which says nothing.
    """

    mismatches: int
    elements: int
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | float = 0
    first_index: tuple[int, ...] | None = None
    part: int = 0  # of several tensors, the first that differs

    def __str__(self) -> str:
        if not self.mismatches:
            return f"equal bits in {self.elements} elements"
        return (
            f"{self.mismatches} of {self.elements} elements differ, first at {self.first_index}: max abs "
            f"{self.max_abs:.3g}, max relative {self.max_rel:.3g}"
            + f", max {self.max_ulp} ULP"
            * (self.max_ulp < float("inf"))
        )

    def json(self) -> dict:
        """Returns the report as JSON values; a difference that is not finite becomes the string 'inf'."""
        return {
            k: "inf" if v == float("inf") else list(v) if isinstance(v, tuple) else v
            for k, v in asdict(self).items()
            if k != "part"
        }


Tensors = torch.Tensor | tuple[torch.Tensor, ...]
AT_ONCE = 2**24  # elements in fp64, of a vocabulary's table six times as many bytes as it has


def compare(actual: Tensors, expected: Tensors) -> Drift:
    """Returns both of one shape and dtype; a difference in dtype or shape is an error of the caller's. Of several
    outputs the sum and the worst, and the first index of the first that differs."""
    if isinstance(actual, tuple):
        return joined([compare(a, e) for a, e in zip(actual, expected, strict=True)])
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"cannot compare {actual.dtype} {tuple(actual.shape)} with {expected.dtype} {tuple(expected.shape)}"
        )
    if actual.is_complex():
        actual, expected = (torch.view_as_real(t.resolve_conj()) for t in (actual, expected))
    differ = raw(actual) != raw(expected)
    count = int(differ.sum())
    if not count:
        return Drift(0, actual.numel())
    flat = differ.flatten()
    a, e = actual.flatten()[flat], expected.flatten()[flat]
    first = tuple(map(int, torch.unravel_index(flat.to(torch.uint8).argmax(), actual.shape)))
    if not bool((a.isfinite() & e.isfinite()).all()):
        return Drift(count, actual.numel(), *[float("inf")] * 3, first)
    worst = [_worst(*pair) for pair in zip(a.split(AT_ONCE), e.split(AT_ONCE))]
    return Drift(count, actual.numel(), *map(max, zip(*worst)), first_index=first)


def _worst(a: torch.Tensor, e: torch.Tensor) -> tuple[float, float, int | float]:
    """Returns the largest differences of finite elements, absolute, relative and in ULP; of integers only the first."""
    a64, e64 = a.double(), e.double()
    gap = (a64 - e64).abs()
    if not a.dtype.is_floating_point:
        return float(gap.max()), 0, 0
    relative = gap / torch.maximum(a64.abs(), e64.abs()).clamp(min=torch.finfo(torch.float64).tiny)
    steps = int((ordered(a) - ordered(e)).abs().max())
    return float(gap.max()), float(relative.max()), steps if steps <= 1 / torch.finfo(a.dtype).eps else float("inf")


def joined(parts: list[Drift]) -> Drift:
    """Returns the sum and the worst of several tensors' drifts, and the first index of the first that differs."""
    total = lambda name, over: over(getattr(p, name) for p in parts)
    part = next((i for i, p in enumerate(parts) if p.mismatches), 0)
    return Drift(
        *(total(name, sum) for name in ("mismatches", "elements")),
        *(total(name, max) for name in ("max_abs", "max_rel", "max_ulp")),
        parts[part].first_index,
        part,
    )
