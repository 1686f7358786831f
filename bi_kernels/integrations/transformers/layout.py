"""Reads where the sequences of a model's call lie, once a call, from its mask, its positions or its cu_seqlens."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from transformers.cache_utils import StaticSlidingWindowLayer

from bi_kernels.checks import can_wait, integers
from bi_kernels.integrations.transformers.gradients import Folds
from bi_kernels.ops.attention.schedule import SCHEDULE, Sequences
from bi_kernels.ops.rope import packed_positions
from bi_kernels.tokens import TokenLayout, current_layout, dense

FEW = 65536  # numbers of a mask that are copied to the host
_current: ContextVar["Call | None"] = ContextVar("call of a model", default=None)


def current() -> "Call | None":
    """Returns the model call that is running."""
    return _current.get()


@dataclass(eq=False)
class Call(ContextDecorator):
    """The sequences of one call, in rows of `length` tokens behind `past` ones of a cache, or packed in one row.

    The model enters it, and so does checkpointing wherever it computes a layer again.
    """

    batch: int
    length: int
    past: int | Tensor = 0
    spans: tuple[Tensor, Tensor] | None = None  # each row's first token and the end of its last; None without padding
    cu_seqlens: Tensor | None = None
    paged: Mapping | None = None
    layout: TokenLayout | None = None
    folds: Folds = field(default_factory=Folds)
    attended: int = 0  # calls of attention that are ours
    is_patched: bool = False  # whether code that no trial has seen runs in it
    is_promised: bool = True  # whether the answer was yes, so that what breaks it is refused
    taken: dict[int, TokenLayout | None] = field(default_factory=dict)  # by an index, of so many; None: in two ways
    _known: dict[tuple, Sequences] = field(default_factory=dict)
    _outer: list = field(default_factory=list)

    def __enter__(self) -> "Call":
        layout = self.layout or nullcontext()
        layout.__enter__()
        self._outer.append((_current.set(self), layout))
        return self

    def __exit__(self, *error) -> None:
        token, layout = self._outer.pop()
        _current.reset(token)
        layout.__exit__(*error)

    def within(self, function: Callable) -> Callable:
        """Wraps a function to run in this call."""
        return self(function)

    @property
    def fresh(self) -> bool:
        """Whether a sequence's keys are those of this call alone."""
        return self.paged is None and (self.cu_seqlens is not None or isinstance(self.past, int) and not self.past)

    @contextmanager
    def known(self) -> Iterator[None]:
        """Runs the model's own forward within one that was set on it."""
        self.is_patched = False
        try:
            yield
        finally:
            self.is_patched = True

    def take(self, x: Tensor, at: object) -> None:
        """Notes the tokens that an index takes of x (batch, length, ...) or (tokens, ...)."""
        picks = at if isinstance(at, tuple) else (at,)
        masks = len(picks) == 1 and isinstance(at, Tensor) and at.dtype == torch.bool and at.dim() <= 2
        dims = at.dim() if masks else 2
        lead = x.shape[:dims]
        layout = self.layout if lead.numel() == self.layout.rows else self.taken.get(lead.numel())
        if layout is None or not (masks and at.shape == lead or all(isinstance(p, slice) for p in picks[:dims])):
            return
        rows = torch.arange(lead.numel(), device="cpu").view(lead)[at.cpu() if masks else picks[:dims]].flatten()
        if len(rows) != self.layout.rows:
            taken = layout.selected(rows)
            known = self.taken.setdefault(len(rows), taken)
            if known is not None and not torch.equal(known.slots, taken.slots):
                self.taken[len(rows)] = None

    def rows(self, lead: torch.Size) -> TokenLayout | nullcontext:
        """Returns the layout of an input (*lead, features) of an op of this call. Raises ValueError where nobody can
        tell."""
        count, entered = lead.numel(), current_layout("apply")
        if not isinstance(entered, TokenLayout) or entered.rows == count:
            return nullcontext()
        if self.taken.get(count) is None and self.is_promised and (self.is_patched or count in self.taken):
            raise ValueError(
                f"apply: a layer that trains is given {count} tokens, shape {tuple(lead)}, in a model's call of "
                f"{self.layout.rows}, and nobody told their sequences; expected all of the call's, those that slices "
                "or one mask take of them, or `with bi.TokenLayout`"
            )
        return self.taken.get(count) or dense(lead[:-1].numel(), lead[-1] if lead else 1)  # as embedded positions

    def positions(self) -> Tensor | None:
        """Returns the positions (batch, length) of padded or packed tokens in their sequences; None for full rows."""
        if self.cu_seqlens is not None:
            return packed_positions(self.cu_seqlens, self.batch * self.length).view(self.batch, self.length)
        if self.spans is None:
            return None
        begin = self.spans[0][:, None]
        return (torch.arange(self.length, device=begin.device) + self.past - begin).clamp(min=0)

    def next_tokens(self, ids: Tensor, ignored: int) -> Tensor:
        """Returns the token after each of ids (batch, length), `ignored` after a sequence's last one and padding."""
        following = torch.full_like(ids, ignored)
        following[:, :-1] = ids[:, 1:]
        if self.cu_seqlens is not None:
            last = self.cu_seqlens[1:][self.cu_seqlens.diff() > 0].long() - 1
            following.view(-1)[last] = ignored
        elif self.spans is not None:
            at, (begin, end) = torch.arange(self.length, device=ids.device), (s[:, None] for s in self.spans)
            following[(at < begin) | (at + 1 >= end)] = ignored
        return following

    def sequences(self, stored: int, stride: int, device: torch.device, chunk: int = 1) -> Sequences:
        """Returns attention's sequences, for `stored` keys a row, rows `stride` apart, which see chunks of so many."""
        key = stored, stride, chunk
        if key not in self._known:
            make = self._packed if self.cu_seqlens is not None else self._rows
            self._known[key] = make(stored, stride, device, chunk)
        return self._known[key]

    def _packed(self, stored: int, stride: int, device: torch.device, chunk: int) -> Sequences:
        ends = self.cu_seqlens.to(device, torch.int32)
        first, lengths = ends[:-1].contiguous(), ends.diff()
        return Sequences(first, lengths, first, lengths, None, 0, self.batch * self.length, True, True)

    def _rows(self, stored: int, stride: int, device: torch.device, chunk: int) -> Sequences:
        """A cache holds the last `stored` tokens of a row, or has room for so many if it is static."""
        row = torch.arange(self.batch, dtype=torch.int32, device=device)
        total = self.past + self.length
        begin, end = self.spans or (torch.zeros_like(row), torch.zeros_like(row) + total)
        gone = max(total - stored, 0) if isinstance(total, int) else 0  # tokens that a window's cache has dropped
        first_q = (begin - self.past).clamp(min=0)
        length_q = ((end - self.past).clamp(0, self.length) - first_q).clamp(min=0)
        kept = (begin - gone).clamp(min=0)
        length_k = end - gone - kept
        full = self.spans is None
        where = [t.to(torch.int32) for t in (row * self.length + first_q, length_q, row * stride + kept, length_k)]
        if gone:
            return trimmed(*where, (gone - begin).clamp(min=0), stored, full, chunk)
        return Sequences(*where, None, 0, stored, full, full and total == stored)


def trimmed(
    first_q: Tensor,
    length_q: Tensor,
    first_k: Tensor,
    length_k: Tensor,
    dropped: Tensor,
    most: int,
    full_q: bool,
    chunk: int = 1,
) -> Sequences:
    """Returns sequences, as pages of one key, for a window's cache that keeps only the last keys.

    The fold over keys is anchored at absolute positions, so `dropped` keys count, except whole splits and chunks; the
    window, or the chunk, hides them.
    """
    whole = math.lcm(SCHEDULE.split, chunk)
    shift = dropped % whole
    at = torch.arange(whole - 1 + most, dtype=torch.int32, device=first_k.device)
    last = (length_k - 1).clamp(min=0)[:, None]
    pages = first_k[:, None] + torch.minimum((at - shift[:, None]).clamp(min=0), last)
    length_k = (length_k + shift).to(torch.int32)
    return Sequences(first_q, length_q, first_k, length_k, pages.to(torch.int32), 1, len(at), full_q, False)


def _wrong(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"apply: {name} {value}, expected {expected}")


def _padding_mask(mask: object) -> Tensor | None:
    """Returns a padding mask (batch, tokens), or None; `generate` prepares a dict of one for each kind of layer."""
    if isinstance(mask, Mapping):
        mask = next((m for m in mask.values() if m is not None), None)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        what = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise _wrong("attention_mask is", what, "a padding mask (batch, tokens) of ones and zeros")
    return mask


def _checked_ends(name: str, ends: object, mask: Tensor | None, batch: int, length: int) -> list[int] | None:
    """Returns cu_seqlens as a list, None where only the device knows them. Raises TypeError and ValueError."""
    if not isinstance(ends, Tensor):
        raise TypeError(f"apply: {name} is a {type(ends).__name__}, expected a torch.Tensor (sequences + 1,)")
    if ends.dim() != 1 or not len(ends) or not integers(ends):
        given = f"of shape {tuple(ends.shape)} and dtype {ends.dtype}"
        raise _wrong(f"{name} is", given, "integers (sequences + 1,)")
    known = ends.tolist() if can_wait(ends) else None
    if batch != 1 or mask is not None or known and (known[0] or known[-1] != length or known != sorted(known)):
        where = f"{known} for tokens {(batch, length)}" + (" and an attention_mask" if mask is not None else "")
        raise _wrong(f"{name} is", where, "sequences that fill one row, unmasked")
    return known


def _seen(cache: object) -> int | Tensor:
    """Returns the number of tokens of a row in a cache; a tensor where only the device knows."""
    if cache is None:
        return 0
    layers = [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "get_seq_length")]
    lengths = [layer.get_seq_length() for layer in layers]
    windows = [layer for layer in layers if isinstance(layer, StaticSlidingWindowLayer)]
    if windows and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "apply: a CUDA graph is captured behind a static cache with a window, which counts its tokens in Python "
            "and stands still in a replay, expected a cache without a window"
        )
    known = [n for n in lengths if isinstance(n, int)]
    if known or not lengths:
        return known[0] if known else cache.get_seq_length()
    return lengths[0].clone()  # its update is in place


def _spans(mask: Tensor, batch: int, length: int, past: int | Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns each row's first token and the end of its last; None for rows without padding."""
    known, width = isinstance(past, int), mask.shape[1]
    total = int(past) + length if known or can_wait(past) else None
    fits = width == total if known else width >= (total or length)  # a static cache's may be as wide as its room
    if mask.shape[0] != batch or not fits:
        raise _wrong("attention_mask has shape", tuple(mask.shape), f"({batch}, {total or f'at least {length}'})")
    device = mask.device
    mask = mask.cpu() if mask.numel() <= FEW and can_wait(mask) else mask  # a copy takes less time than what follows
    given, mask = mask, mask != 0
    begin = mask.to(torch.uint8).argmax(1)
    count = mask.sum(1)
    end = width - mask.flip(1).to(torch.uint8).argmax(1)
    if can_wait(mask):
        said = torch.stack([begin, end, count, (given != mask).sum(1)]).tolist()
        if any(said[3]):
            i = next(i for i, n in enumerate(said[3]) if n)
            raise _wrong(f"attention_mask's row {i} has", f"{said[3][i]} values that are neither", "ones and zeros")
        if all(n == total for n in said[2]) and not any(said[0]):
            return None
        holes = [i for i, (b, e, n) in enumerate(zip(*said[:3])) if n and e - b != n]
        if holes:
            raise _wrong(f"attention_mask's row {holes[0]} has", "zeros between ones", "padding at its ends alone")
    end = torch.where(count > 0, end, begin)
    return begin.to(device, torch.int32), end.to(device, torch.int32)


def _restarts(positions: Tensor, batch: int, length: int) -> list[int] | None:
    """Returns cu_seqlens where the positions of a row restart, None where none does. Raises ValueError."""
    if positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != length:
        raise _wrong("position_ids has shape", tuple(positions.shape), f"({batch}, {length})")
    starts = torch.ones(batch, length, dtype=torch.bool, device=positions.device)
    starts[:, 1:] = positions.expand(batch, -1).diff(dim=1) != 1
    if not can_wait(starts):
        return None
    at = starts.flatten().nonzero().flatten().tolist()
    return None if len(at) == batch else [*at, batch * length]


def _padded_layout(spans: tuple[Tensor, Tensor] | None, batch: int, length: int, past: int | Tensor) -> TokenLayout:
    """Returns the layout of padded rows behind `past` tokens of a cache."""
    if spans is None:
        return dense(batch, length)
    begin, end = ((t - int(past)).clamp(min=0).tolist() for t in spans)
    starts = [i * length + min(b, e) for i, (b, e) in enumerate(zip(begin, end))]
    return TokenLayout(starts, [max(e - b, 0) for b, e in zip(begin, end)], batch * length)


def _cleared(cache: object) -> None:
    """Fills a new paged cache with zeros, as later releases of Transformers do. 5.17 warms up on uninitialised memory,
    and sampling from NaN ends the process on a GPU."""
    shared = getattr(getattr(cache, "_block_manager", None), "_hash_to_id", None)  # prefixes that it holds already
    if not shared and not getattr(cache, "bi_kernels_cleared", False):
        cache.bi_kernels_cleared = True
        for t in (*getattr(cache, "key_cache", ()), *getattr(cache, "value_cache", ())):
            t.zero_()


def read(
    input_ids: Tensor | None = None,
    attention_mask: object = None,
    position_ids: Tensor | None = None,
    past_key_values: object = None,
    inputs_embeds: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cache: object = None,
    cu_seqlens: Tensor | None = None,
    **rest,
) -> Call:
    """Returns the call that a model's arguments describe; `cu_seqlens` is `logprobs`' name for cu_seq_lens_q. Raises
    TypeError and ValueError with one sentence where they contradict each other."""
    x = input_ids if inputs_embeds is None else inputs_embeds
    if x is None:
        return Call(0, 0)  # the model says so itself
    (batch, length), trains = x.shape[:2], torch.is_grad_enabled()
    if cache is not None:
        _cleared(cache)
        room = getattr(cache, "max_tokens_read", None) or cache.num_blocks * cache.block_size  # of older releases
        return Call(batch, length, paged={"cu_seq_lens_q": cu_seq_lens_q, "position_ids": position_ids, "room": room})
    past, mask, ends = _seen(past_key_values), _padding_mask(attention_mask), None
    name = "cu_seq_lens_q" if cu_seqlens is None else "cu_seqlens"
    cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    if cu_seqlens is not None:
        ends = _checked_ends(name, cu_seqlens, mask, batch, length)
    elif mask is None and position_ids is not None and isinstance(past, int) and not past and length > 1:
        ends = _restarts(position_ids, batch, length)
        cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=x.device)
    if cu_seqlens is not None:
        return Call(batch, length, cu_seqlens=cu_seqlens, layout=TokenLayout.packed(ends) if trains and ends else None)
    spans = None if mask is None else _spans(mask.to(x.device), batch, length, past)
    return Call(batch, length, past, spans, layout=_padded_layout(spans, batch, length, past) if trains else None)


def put(bound: inspect.BoundArguments, name: str, value: object) -> None:
    """Sets an argument, among the others' keywords if the signature does not name it."""
    more = next((n for n, p in bound.signature.parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    if name in bound.signature.parameters or more is None:
        bound.arguments[name] = value
    else:
        bound.arguments[more] = bound.arguments.get(more, {}) | {name: value}


def names_arguments(kind: type) -> Callable:
    """Returns the forward of a class that names its arguments: where its own hands on *args and **kwargs, a base's."""
    forwards = [vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)]
    kinds = {p.kind for p in _signature(forwards[0]).parameters.values()}
    if not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return forwards[0]
    return next((f for f in forwards if "input_ids" in _signature(f).parameters), forwards[0])


@lru_cache(maxsize=64)
def _signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward)


def arguments(forward: Callable, *args, **kwargs) -> tuple[inspect.BoundArguments, dict]:
    """Returns the bound arguments of a model's forward, and a dict of all by name."""
    bound, given = _signature(forward).bind_partial(*args, **kwargs), {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        given |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return bound, given
