"""Where the logical tokens of one call lie, and which dimensions of a tensor hold them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from bi_kernels.audit.layouts import of_each_token

MOST = 3  # ways to read a tensor; one that other calls contradict is dropped later


class Tokens(NamedTuple):
    """The logical tokens of a batch, numbered sample by sample."""

    lengths: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.lengths)

    def samples(self) -> np.ndarray:
        """Returns the sample of each token."""
        return of_each_token(self.lengths)[0]

    def positions(self) -> np.ndarray:
        """Returns the position of each token in its sample."""
        return of_each_token(self.lengths)[1]


class Reading(NamedTuple):
    """One way to read a tensor: form is bl (a row a token), l (a row a place, shared by samples), b (a row a sample), k
    (a row a key of a cache) or n (one row); dims: those rows' dimensions; split: features of the last of them."""

    form: str
    dims: tuple[int, ...]
    split: int = 1
    keys: int | None = None  # the dimension of the keys that a query sees


@dataclass(frozen=True)
class Geometry:
    """The grid (rows, width) of a call's places: the number of the logical token in each, −1 for padding."""

    grid: np.ndarray
    tokens: Tokens
    cached: np.ndarray | None = None  # (rows, keys): the tokens in a cache, this call's included

    @property
    def rows(self) -> int:
        return self.grid.shape[0]

    @property
    def width(self) -> int:
        return self.grid.shape[1]

    @property
    def keys(self) -> np.ndarray:
        """Returns (rows, keys): the token of each key that a query may see."""
        return self.grid if self.cached is None else self.cached

    @cached_property
    def held(self) -> list[int]:
        """Lists the samples of the call."""
        return sorted(set(self.tokens.samples()[self.grid[self.grid >= 0]].tolist()))

    @cached_property
    def one_sample_a_row(self) -> bool:
        samples = self.tokens.samples()
        return all(len(set(samples[r[r >= 0]])) <= 1 for r in self.grid)

    def kinds(self, form: str) -> str:
        """Returns what rows of a form may stand for: t(oken), p(osition), s(ample), n(othing)."""
        b, l = self.rows > 1, self.width > 1
        if form in ("bl", "k"):
            return "t"
        if not self.one_sample_a_row:
            return {"l": "tp", "b": "s", "n": "n"}[form]
        alone = "n" + "p" * (not l) + "s" * (not b) + "t" * (not b and not l)
        return {"l": "p" if b else "tp", "b": "s" if l else "ts", "n": alone}[form]

    def places(self, form: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens, the row of each) for rows of a form; padding has none."""
        if form == "k":
            there = np.flatnonzero(self.cached.reshape(-1) >= 0)
            return self.cached.reshape(-1)[there], there
        there = np.flatnonzero(self.grid.reshape(-1) >= 0)
        row = {"bl": there, "l": there % self.width, "b": there // self.width, "n": there * 0}[form]
        return self.grid.reshape(-1)[there], row

    def places_on(self, form: str, device: torch.device) -> list[torch.Tensor]:
        """Returns the same as tensors."""
        return [torch.from_numpy(at).to(device) for at in self.places(form)]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], list[Reading]]:
        return {}

    def readings(self, shape: Sequence[int]) -> list[Reading]:
        """Lists the ways to read a tensor of a shape, the likeliest first."""
        shape = tuple(shape)
        if shape not in self._known:
            found = list(dict.fromkeys(self._exact(shape)))
            if all(r.form != "bl" for r in found):
                found = [*self._merged(shape), *found]
            self._known[shape] = found[:MOST] or [Reading("n", ())]
        return self._known[shape]

    def _exact(self, shape: tuple[int, ...]) -> Iterator[Reading]:
        b, l, k, dims = self.rows, self.width, self.keys.shape[1], range(len(shape))
        if b > 1 and l > 1:
            pairs = [(i, j) for j in dims for i in dims if i != j and shape[i] == b and shape[j] == l]
            first = [p for p in pairs if p[0] < p[1]][:1] or pairs
            yield from (self._with_keys(Reading("bl", p), shape, k) for p in first)
            yield from (Reading("bl", (i,)) for i in dims if shape[i] == b * l)
            if not first or first[0][0] > first[0][1]:
                yield from (Reading("l", (j,)) for j in dims if shape[j] == l)
                yield from (Reading("b", (i,)) for i in dims if shape[i] == b)
        elif b > 1 or l > 1:
            form, size = ("l", l) if l > 1 else ("b", b)
            for i in dims:
                if shape[i] == size:
                    yield self._with_keys(Reading(form, (i,)), shape, k)
        elif k > 1:
            yield self._with_keys(Reading("n", ()), shape, k)
        if self.cached is not None and k != l and b == 1:
            yield from (Reading("k", (i,)) for i in dims if shape[i] == k)

    def _with_keys(self, reading: Reading, shape: tuple[int, ...], keys: int) -> Reading:
        if keys == 1:
            return reading
        last = len(shape) - 1  # of scores; other calls tell a tensor that has as many features by chance
        return reading._replace(keys=last) if last not in reading.dims and last > 1 and shape[last] == keys else reading

    def _merged(self, shape: tuple[int, ...]) -> Iterator[Reading]:
        """Yields readings of a dimension that holds tokens and features, tokens first."""
        b, l = self.rows, self.width
        t = b * l
        if shape and t > 1 and shape[0] > t and shape[0] % t == 0:
            yield Reading("bl", (0,), shape[0] // t)
        if len(shape) > 1 and b > 1 and l > 1 and shape[1] == l and shape[0] > b and shape[0] % b == 0:
            found = Reading("bl", (0, 1), shape[0] // b)
            yield found._replace(keys=2) if len(shape) == 3 and shape[2] == l else found


def by_rows(t: torch.Tensor, reading: Reading) -> torch.Tensor:
    """Returns a view of `t` with the rows' dimensions first, features after them; of keys, those last."""
    dims = reading.dims
    if reading.split > 1:
        t = t.unflatten(dims[0], (-1, reading.split))
        dims = tuple(d + (d > dims[0]) for d in dims)
    return t.movedim(dims, tuple(range(len(dims))))


def flat_rows(t: torch.Tensor, reading: Reading) -> torch.Tensor:
    """Returns (rows, features) of a tensor."""
    view = by_rows(t, reading)
    return view.reshape(view.shape[: len(reading.dims)].numel(), -1)


def write_rows(t: torch.Tensor, reading: Reading, row: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrites some rows of a tensor."""
    view, flat = by_rows(t, reading), flat_rows(t, reading).clone()
    flat[row] = values.to(t.dtype)
    flat = flat.view(view.shape)
    for d, stride in enumerate(view.stride()):  # what is expanded has one place in memory
        if not stride:
            view, flat = view.narrow(d, 0, 1), flat.narrow(d, 0, 1)
    view.copy_(flat)
