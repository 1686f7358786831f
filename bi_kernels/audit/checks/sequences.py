"""Whole models: of a module that takes input_ids, a sample is a sequence with its mask, padded, packed or cached."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from bi_kernels.audit.axes import Kind
from bi_kernels.audit.compare import compare
from bi_kernels.audit.findings import INVARIANCE, UNSUPPORTED, Row, sentence
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.step import left, prepare
from bi_kernels.audit.targets.any_callable import CallableTarget, alike, tensors
from bi_kernels.audit.targets.callable_step import gradients_kept
from bi_kernels.tokens import TokenLayout

FURTHER = " far"
PADDING, FAR = 7, 121  # places without a token beside the longest sequence
DECODED, PREFILL, CHUNK = 3, 2, 3  # sequences that go on from a cache, the tokens that it then holds, those of a call
IDS, MASK, POSITIONS, CACHE = "input_ids", "attention_mask", "position_ids", "past_key_values"
KNOWN = IDS, MASK, POSITIONS, CACHE
GIVEN, LEFT, PACKED = "padded as given", "left_padded sequences", "packed"
TOGETHER = "decode of left-padded prompts"

Made = dict[int, list[torch.Tensor]]  # what each output, by its number, holds of each sequence


class Sequences:
    """The sequences of a module's input_ids without their padding, and what it makes of them in one call or several."""

    def __init__(self, t: CallableTarget):
        self.t, ids, mask = t, t.values[IDS], t.values.get(MASK)
        parameters = inspect.signature(getattr(t.eager, "forward", t.eager)).parameters
        self.takes, self.needs = set(parameters), {k for k, p in parameters.items() if p.default is p.empty}
        self.real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        self.tokens = [row[at] for row, at in zip(ids, self.real)]
        self.lengths = list(map(len, self.tokens))
        config = getattr(t.module, "config", None)
        known = getattr(config, "pad_token_id", None) or 0
        self.widest = getattr(config, "max_position_embeddings", None) or math.inf
        others = [k for k, v in tensors(t.values).items() if k not in KNOWN and v.shape[:2] == ids.shape]
        if others:
            what = (
                f"its mask is {others[0]}, and"
                if "mask" in others[0]
                else f"{others[0]} holds a number for each token;"
            )
            raise ValueError(f"{what} {IDS}, {MASK} and {POSITIONS} alone are laid out again")
        if not all(self.lengths):
            raise ValueError("a sequence has no token")
        self.padding = int(ids[~self.real][0]) if not self.real.all() else known
        self.kinds: dict[int, bool] = {}  # of each output that is judged, whether it holds a row a token
        leaves, _ = self.called(ids, t.values.get(MASK), t.values.get(POSITIONS))
        for number, y in enumerate(leaves):
            if y.shape[:2] == ids.shape or y.shape[:1] == ids.shape[:1] and y.dim() < 3:  # no heads' weights, no cache
                self.kinds[number] = y.shape[:2] == ids.shape
        if not self.kinds:
            raise ValueError("none of its outputs holds a row for each sequence")
        self.whole = self.held(leaves, self.real)

    def called(
        self, ids: torch.Tensor, mask=None, positions=None, seen: int = 0, **more
    ) -> tuple[list[torch.Tensor], object]:
        """Returns the floating tensors of a call, the cache's aside, and all that it returned; seen: tokens that the
        cache holds."""
        t = self.t
        if mask is None and MASK in self.needs:
            mask = ids.new_ones(len(ids), seen + ids.shape[1])
        if positions is None and POSITIONS in self.needs:
            positions = torch.arange(seen, seen + ids.shape[1], device=ids.device).expand(ids.shape)
        own = {k: v for k, v in t.values.items() if k not in KNOWN}
        told = {k: v for k, v in ((MASK, mask), (POSITIONS, positions)) if v is not None}
        found = t.function(**own | {IDS: ids} | told | more)
        kept = [v for k, v in found.items() if k != CACHE] if isinstance(found, Mapping) else found
        leaves = [kept] if isinstance(kept, torch.Tensor) else tree_leaves(list(kept))
        return [y for y in leaves if isinstance(y, torch.Tensor) and y.is_floating_point()], found

    def held(self, leaves: list[torch.Tensor], real: torch.Tensor) -> Made:
        """Returns what outputs hold of the sequences of a call, whose tokens lie where `real` is true."""
        return {
            n: [y[at] for y, at in zip(leaves[n], real)] if token else list(leaves[n])
            for n, token in self.kinds.items()
        }

    def padded(self, rows: Sequence[torch.Tensor], left: bool, width: int) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """Returns ids of a width, where the rows' tokens lie in them, and what a call is told of that."""
        ids = rows[0].new_full((len(rows), width), self.padding)
        real = torch.zeros_like(ids, dtype=torch.bool)
        for i, row in enumerate(rows):
            at = slice(width - len(row), width) if left else slice(len(row))
            ids[i, at], real[i, at] = row, True
        mask = real.to(self.t.values[MASK].dtype if MASK in self.t.values else torch.long)
        return ids, real, {"mask": mask} | ({"positions": places(real)} if POSITIONS in self.takes else {})

    def alone(self) -> Made:
        every = [self.called(row[None])[0] for row in self.tokens]
        return {n: [leaves[n][0] for leaves in every] for n in self.kinds}

    def beside(self, left: bool, width: int) -> Made:
        ids, real, told = self.padded(self.tokens, left, width)
        return self.held(self.called(ids, **told)[0], real)

    def packed(self) -> Made:
        positions = torch.cat([torch.arange(n, device=self.real.device) for n in self.lengths])[None]
        # beside a cache Transformers sees no packed row
        uncached = {"use_cache": False} if "use_cache" in self.takes else {}
        leaves, _ = self.called(torch.cat(self.tokens)[None], positions=positions, **uncached)
        return {n: list(leaves[n][0].split(self.lengths)) for n, token in self.kinds.items() if token}

    def decoded(self, step: int) -> Made:
        """Goes on from a cache, `step` tokens a call, each sequence by itself."""
        made: Made = {n: [] for n, token in self.kinds.items() if token}
        for row in self.tokens[:DECODED]:
            cuts, found, cached = [0, *range(PREFILL, len(row), step), len(row)], {n: [] for n in made}, {}
            for at, end in zip(cuts, cuts[1:]):
                leaves, out = self.called(row[None, at:end], use_cache=True, seen=at, **cached)
                cached = {CACHE: _cache(out)}
                for n, parts in found.items():
                    parts.append(leaves[n][0])
            for n, parts in found.items():
                made[n].append(torch.cat(parts))
        return made

    def together(self) -> Made:
        """Goes on from a cache of all, whose prompts are padded left, token by token."""
        steps = min(CHUNK, min(self.lengths) - 1)
        if not steps:
            raise NotImplementedError("a sequence of one token has no prompt")
        prompts = [row[:-steps] for row in self.tokens]
        ids, real, told = self.padded(prompts, True, max(map(len, prompts)) + 1)
        leaves, out = self.called(ids, **told, use_cache=True)
        made = {n: [[y[at]] for y, at in zip(leaves[n], real)] for n, token in self.kinds.items() if token}
        for step in range(-steps, 0):
            ids = torch.stack([row[step] for row in self.tokens])[:, None]
            real = torch.cat((real, torch.ones_like(ids, dtype=torch.bool)), 1)
            now = {"mask": real.to(told["mask"].dtype), "positions": places(real)[:, -1:]}
            leaves, out = self.called(ids, **{k: now[k] for k in told}, use_cache=True, **{CACHE: _cache(out)})
            for n, parts in made.items():
                for part, y in zip(parts, leaves[n]):
                    part.append(y)
        return {n: [torch.cat(part) for part in parts] for n, parts in made.items()}

    def gradients(self, ids: torch.Tensor, real: torch.Tensor, told: dict) -> dict[str, torch.Tensor]:
        """Returns the gradients of the parameters, where each token, or sequence, has its own gradient upstream."""
        parameters = dict(self.t.module.named_parameters())
        starts = (real.long().argmax(1) + torch.arange(0, real.numel(), real.shape[1], device=real.device)).tolist()
        with gradients_kept(self.t.module):
            prepare(parameters.values(), main_grad=True)
            with torch.enable_grad(), TokenLayout(starts, self.lengths, ids.numel()):
                leaves, _ = self.called(ids, **told)
                trained = {n: token for n, token in self.kinds.items() if leaves[n].requires_grad}
                upstream = [self._upstream(n, leaves[n], real if token else None) for n, token in trained.items()]
                torch.autograd.backward([leaves[n] for n in trained], upstream)
            found = {k: left(p).clone() for k, p in parameters.items()}
        return {f"d{k}": g for k, g in found.items() if g.any()}

    def _upstream(self, number: int, y: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Returns an upstream gradient that is the same for a token wherever it lies, and 0 beside them."""
        g = generator(y.device, self.t.seed, "sequences", number)
        shape = y.shape if real is None else (sum(self.lengths), *y.shape[2:])
        dy = torch.randn(shape, generator=g, device=y.device).to(y.dtype)
        return dy if real is None else torch.zeros_like(y).index_put((real,), dy)


def places(real: torch.Tensor) -> torch.Tensor:
    """Returns each token's place in its sequence; 0 before the first."""
    return (real.long().cumsum(1) - 1).clamp(min=0)


def _cache(found):
    return found[CACHE] if isinstance(found, Mapping) else getattr(found, CACHE)


def _judged(s: Sequences, layout: str, made: Callable[[], Made], excuse: str, pooled: str) -> list[Row]:
    """Returns the rows of a layout: of what is there for each token, and for each sequence; excuse, pooled: what is
    said of either where it is another computation, which is no drift then."""
    axes = [Kind.CACHE if layout.startswith("decode") else Kind.PADDING]
    row = partial(s.t.row, "invariance", layout, against=GIVEN, axes=axes)
    try:
        with torch.no_grad():
            made_there = made()
    except Exception as error:
        clear = isinstance(error, (TypeError, ValueError, NotImplementedError, AssertionError))
        if not clear and not layout.endswith(FURTHER):  # where a table of places may end
            raise
        return [row(verdict=UNSUPPORTED, detail=sentence(error))]
    rows = []
    for token, said in ((True, excuse), (False, pooled)):
        mine = {n: found for n, found in made_there.items() if s.kinds[n] is token}
        if not mine:
            continue
        count, join = len(next(iter(mine.values()))), torch.cat if token else torch.stack
        pairs = [(join(found), join(s.whole[n][:count])) for n, found in mine.items()]
        if said and not all(alike(a, b) for a, b in pairs):
            rows.append(row(verdict=UNSUPPORTED, detail=said))
        else:
            rows.append(row(compare(*map(tuple, zip(*pairs))), rows=count, tensor=f"out[{next(iter(mine))}]"))
    return rows or [row(verdict=UNSUPPORTED, detail="none of its outputs holds a row for each token")]


def _of(t: CallableTarget) -> Sequences | None:
    """Returns the sequences of a module that takes input_ids; None of any other callable."""
    ids = t.values.get(IDS)
    if t.module is None or ids is None or ids.dim() != 2 or ids.is_floating_point() or t.batch:
        return None
    with torch.no_grad():
        return Sequences(t)


def sequences(t: CallableTarget) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges a module that takes input_ids on whole sequences; nothing of any other callable. What of it
    is asked follows what its forward takes: attention_mask, position_ids, past_key_values and use_cache."""
    if (s := _of(t)) is None:
        return {}
    longest = max(s.lengths)
    blind = "" if POSITIONS in s.takes else "takes no padding on the left: no position_ids"
    # what is pooled of a sequence may be read in its first place, or its last
    sides = {
        left: "" if (~s.real[:, 0 if left else -1]).any() else "pools another place there" for left in (True, False)
    }
    asked: dict[str, tuple[Callable[[], Made], str, str]] = {"unpadded": (s.alone, "", "")}
    if MASK in s.takes:
        for name, beside in (("", PADDING), (FURTHER, FAR)):
            width = int(min(longest + beside, s.widest))
            asked[f"right_padded{name}"] = partial(s.beside, False, width), "", sides[False]
            asked[f"{LEFT}{name}"] = partial(s.beside, True, width), blind, blind or sides[True]
    if {MASK, POSITIONS} <= s.takes:
        asked[PACKED] = s.packed, "takes no packed row", ""  # its sequences see each other
    if {CACHE, "use_cache"} <= s.takes:
        asked["decode"] = partial(s.decoded, 1), "", ""
        asked[f"decode, {CHUNK} tokens a call"] = partial(s.decoded, CHUNK), "", ""
        if MASK in s.takes:
            asked[TOGETHER] = s.together, blind, ""
    return {layout: partial(_judged, s, layout, *how) for layout, how in asked.items()}


def sequence_gradients(t: CallableTarget) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges the parameters' gradients of such a module under other padding."""
    s = _of(t)
    if s is None or MASK not in s.takes or not any(p.requires_grad for p in t.module.parameters()):
        return {}
    given = {"mask": t.values.get(MASK), "positions": t.values.get(POSITIONS)}
    expected = s.gradients(t.values[IDS], s.real, given)

    def judged(layout: str, left: bool) -> list[Row]:
        ids, real, told = s.padded(s.tokens, left, max(s.lengths) + PADDING)
        found = s.gradients(ids, real, told)
        if missing := expected.keys() ^ found.keys():
            return [t.row(INVARIANCE, layout, detail=f"{min(missing)} is there in one of two calls", against=GIVEN)]
        drift = compare(tuple(found[k] for k in expected), tuple(expected.values()))
        tensor = list(expected)[drift.part]
        told = {"tensor": tensor, "rows": len(s.lengths), "axes": [Kind.PADDING]}
        return [t.row(INVARIANCE, layout, drift, against=GIVEN, **told)]

    ways = {"right_padded": False} | ({LEFT: True} if POSITIONS in s.takes else {})
    return {layout: partial(judged, layout, left) for layout, left in ways.items()}
