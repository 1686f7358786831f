"""Whose token is whose: what a reduction over tokens must know of a batch.

The gradient of a parameter is a left fold over slabs of 16 tokens, counted from each sequence's start, sequences in
logical order. Where the sequences lie in memory is no part of that order, so the ops are told:

    with TokenLayout.packed(cu_seqlens):
        loss = model(ids)          # the ops keep the layout for their backward

Without one, x of shape (..., length, features) is read as sequences of `length` tokens, in order, without padding.

A parameter's fold goes on in the order of the backward passes. So each micro-batch is one forward and one backward, in
the step's order, and a parameter is used once in it (an embedding tied to an LM head has a fold for each, see
grads.py).
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar
from functools import lru_cache
from itertools import accumulate, count
from typing import Any
from weakref import WeakValueDictionary

import torch
import triton
import triton.language as tl

from bi_kernels import compat
from bi_kernels.checks import check_numbers, integers_of
from bi_kernels.launch import jit
from bi_kernels.scalars import check_flag, integer_of, truncated_repr

SLAB = 16  # tokens that the tensor core adds in one step; a fold may be cut between slabs and nowhere else
ELEMENTS, WARPS = 1024, 4  # that one program copies
OP, X = "TokenLayout", {"embedding": "ids", "lm_head_logprob": "hidden", "matmul": "a"}  # whose tokens are not x
# the layouts that are entered in a thread or task, each with the number of the backward around it, or -1
_entered: ContextVar[tuple[tuple["TokenLayout", int], ...]] = ContextVar("token layouts", default=())
# whether a parameter's gradient was folded by shapes alone
inferred_any: ContextVar[bool] = ContextVar("a layout was inferred", default=False)
ENTERED = "bi_kernels: a token layout was entered"
_ids = count()
_live: WeakValueDictionary[int, "TokenLayout"] = WeakValueDictionary()
LIVE_MAIN_GRADS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # every MainGrads in use, by its number
# whether an embedding folded first, by where a gradient lies, of the backward that is under way
_folded: dict[int, dict[tuple[torch.device, int], bool]] = {}


@jit
def _gather_kernel(x, slots, y, count, columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(slots + slot, mask=slot < count, other=-1).to(tl.int64)
    inside = (slot < count)[:, None] & (col < columns)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], mask=inside & (row >= 0)[:, None], other=0.0)
    tl.store(y + slot.to(tl.int64)[:, None] * columns + col[None, :], value, mask=inside)


class TokenLayout(ContextDecorator):
    """The sequences of one call: sequence i holds the rows starts[i] … starts[i] + lengths[i] of `rows` token rows.

    order: the logical number of each sequence, where memory holds them in another order than the step does; with
    several micro-batches, each holds the sequences that follow those of the one before. Rows of no sequence are
    padding: no gradient of a parameter sees them. Raises ValueError for sequences that overlap or leave the rows.
    """

    is_inferred = False  # whether it was read from (tokens, features), one sequence as far as that says

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], rows: int, order: Sequence[int] | None = None):
        starts, lengths = integers_of(OP, "starts", starts), integers_of(OP, "lengths", lengths)
        rows = integer_of(OP, "rows", rows)
        count = len(starts)
        if len(lengths) != count:
            said = f"starts is {truncated_repr(starts)} and lengths is {truncated_repr(lengths)}"
            raise ValueError(f"TokenLayout: {said}, expected one of each a sequence")
        if not count:
            raise ValueError("TokenLayout: lengths is empty, expected at least one sequence")
        order = list(range(count)) if order is None else integers_of(OP, "order", order)
        if len(set(order)) != count or len(order) != count:
            raise ValueError(
                f"TokenLayout: order is {truncated_repr(order)}, expected {count} different numbers, one a sequence"
            )
        spans = sorted(zip(starts, lengths))
        ends, following = [0, *(s + n for s, n in spans)], [*(s for s, _ in spans), rows]
        if min(lengths) < 0 or any(end > start for end, start in zip(ends, following)) or rows >= 2**31:
            raise ValueError(
                f"TokenLayout: sequences start at {truncated_repr(starts)} with lengths {truncated_repr(lengths)}, "
                f"expected them to lie in {truncated_repr(rows)} rows, fewer than 2**31, and not to overlap"
            )
        self.spans = [span for span in spans if span[1]]  # where each sequence starts, and its length
        slots: list[int] = []
        ordered = [(start, length) for _, start, length in sorted(zip(order, starts, lengths)) if length]
        for start, length in ordered:
            slots += range(start, start + length)
            slots += [-1] * (-length % SLAB)
        self.rows, self.tokens = rows, sum(lengths)
        self.lengths = [length for _, length in ordered]  # of the sequences that have tokens, in logical order
        self.in_order = self.tokens == rows and ordered == sorted(ordered)  # no padding, and as memory holds them
        self.slots = torch.tensor(slots, dtype=torch.int32, device="cpu")
        self.identity = self.tokens == rows and slots == [*range(rows), *[-1] * (-rows % SLAB)]
        self._on: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._register()

    def _register(self) -> None:
        """Makes the tensor that stands for this layout in compiled code; see `layout_of`."""
        number = next(_ids)
        self.stand_in = torch.tensor([number], device="cpu")
        _live[number] = self

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._register()  # a copy's number, or another process's, is not its own

    @classmethod
    def packed(cls, cu_seqlens: torch.Tensor | Sequence[int], order: Sequence[int] | None = None) -> "TokenLayout":
        """Sequences one after another: cu_seqlens starts at 0, never decreases, and ends at the row count."""
        ends = integers_of(OP, "cu_seqlens", cu_seqlens)
        if len(ends) < 2 or ends[0] != 0 or ends != sorted(ends):
            raise ValueError(
                f"{OP}: cu_seqlens is {truncated_repr(ends)}, expected it to start at 0, never decrease, and end"
            )
        if ends[-1] >= 2**31:
            raise ValueError(f"{OP}: cu_seqlens ends at {truncated_repr(ends[-1])}, expected fewer than 2**31 rows")
        return cls(ends[:-1], [b - a for a, b in zip(ends, ends[1:])], ends[-1], order)

    @classmethod
    def padded(
        cls,
        lengths: torch.Tensor | Sequence[int],
        width: int,
        left: bool = False,
        order: Sequence[int] | None = None,
        *,
        left_padded: bool = False,
    ) -> "TokenLayout":
        """Returns a (sequences, width) batch, each sequence at the start of its row, or with `left`, which attention
        calls `left_padded`, at the end of it."""
        lengths, width = integers_of(OP, "lengths", lengths), integer_of(OP, "width", width)
        left = check_flag(OP, "left", left) | check_flag(OP, "left_padded", left_padded)
        if lengths and max(lengths) > width:
            raise ValueError(
                f"TokenLayout: lengths holds {truncated_repr(max(lengths))}, expected at most the width "
                f"{truncated_repr(width)}"
            )
        starts = [i * width + (width - n if left else 0) for i, n in enumerate(lengths)]
        return cls(starts, lengths, width * len(lengths), order)

    def __enter__(self) -> "TokenLayout":
        compat.mark_thread(ENTERED)
        _entered.set((*_entered.get(), (self, compat.current_backward())))
        return self

    def __exit__(self, *error) -> None:
        _entered.set(_entered.get()[:-1])

    def within(self, function: Callable) -> Callable:
        """`function` under this layout wherever it is called, as activation checkpointing does inside backward."""
        return self(function)

    @property
    def padding(self) -> bool:
        return self.tokens < self.rows

    def slots_on(self, device: torch.device) -> torch.Tensor:
        """(slots,) int32: the row of each slot of the fold, −1 where a slab is not full; a multiple of 16 of them."""
        return self._there("slots", device, lambda: self.slots)

    def rows_on(self, device: torch.device) -> torch.Tensor:
        """(tokens,) int64: the rows in the order of the fold."""
        return self._there("rows", device, lambda: self.slots[self.slots >= 0].long())

    def sequences_on(self, device: torch.device) -> torch.Tensor:
        """(tokens,) int32: the number of each token's sequence, tokens in the order of the fold."""
        numbers = lambda: torch.arange(len(self.lengths), dtype=torch.int32, device="cpu")
        made = lambda: numbers().repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64, device="cpu"))
        return self._there("sequences", device, made)

    def _there(self, name: str, device: torch.device, made: Callable[[], torch.Tensor]) -> torch.Tensor:
        if (name, device) not in self._on:
            there = made()  # from pinned memory, the copy waits for nothing that the device has yet to do
            there = there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there
            self._on[name, device] = there
        return self._on[name, device]

    def selected(self, rows: torch.Tensor) -> "TokenLayout":
        """Returns the layout of some of the rows, (tokens,) their numbers on the CPU, in which each sequence stays in
        one piece. Raises ValueError where one does not."""
        owner, cpu = torch.full((self.rows,), -1, dtype=torch.int32, device="cpu"), torch.device("cpu")
        owner[self.rows_on(cpu)] = self.sequences_on(cpu)
        numbers, lengths = (t.tolist() for t in torch.unique_consecutive(owner[rows], return_counts=True))
        starts = [0, *accumulate(lengths)]
        runs = [run for run in zip(numbers, starts, lengths) if run[0] >= 0] or [(0, 0, 0)]
        numbers, starts, lengths = zip(*runs)
        ranks = {number: rank for rank, number in enumerate(sorted(numbers))}
        return TokenLayout(starts, lengths, len(rows), [ranks[number] for number in numbers])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows of x (rows, columns) in the order of the fold, zeros in free slots; x itself if that is its
        order."""
        if self.identity:
            return x
        if x.stride(-1) != 1:
            x = x.contiguous()
        y = x.new_empty(len(self.slots), x.shape[1])
        if y.numel():
            count, columns = y.shape
            block = min(ELEMENTS, triton.next_power_of_2(columns))
            rows, given = ELEMENTS // block, (x, self.slots_on(x.device), y)
            grid, sizes = (triton.cdiv(count, rows), triton.cdiv(columns, block)), (count, columns, x.stride(0))
            _gather_kernel[grid](*given, *sizes, ROWS=rows, BLOCK=block, num_warps=WARPS)
        return y


class _Unset:
    """The layout of what is computed again in a backward, where the `with` of its forward is over. Where that only
    brings saved tensors back, nobody asks it anything."""

    def __init__(self, op: str):
        self._op = op

    def __getattr__(self, name: str):
        raise ValueError(
            f"{self._op}: called inside a backward, as activation checkpointing does, without its token layout; "
            "checkpoint layout.within(function) instead of function"
        )


@lru_cache(maxsize=64)
def dense(sequences: int, length: int, inferred: bool = False) -> TokenLayout:
    """Returns the layout of rows without padding; inferred: of (tokens, features), one sequence."""
    layout = TokenLayout([i * length for i in range(sequences)], [length] * sequences, sequences * length)
    layout.is_inferred = inferred
    return layout


def current_layout(op: str) -> TokenLayout | _Unset | None:
    """Returns the layout that `with` set, or None. Inside a backward, where a call is made again, that is one entered
    there, as by `within`; one around the backward may be another call's."""
    (*_, (layout, within)), backward = _entered.get() or ((None, -1),), compat.current_backward()
    if backward == -1 or layout is not None and within == backward:
        return layout
    return _Unset(op) if compat.is_marked(ENTERED) else None


def layout_for(op: str, lead: Sequence[int], trains: bool = True) -> TokenLayout:
    """Returns the layout that `with` set, or the one that the leading dimensions (..., length) say; ValueError if they
    differ.

    trains: whether a parameter's gradient is wanted; else no layout is asked for.
    """
    *outer, length = lead or (1,)
    sequences = torch.Size(outer).numel()
    tokens = sequences * length
    if tokens >= 2**31:
        raise ValueError(f"{op}: {X.get(op, 'x')} has {tokens} tokens, expected fewer than 2**31")
    layout = current_layout(op) if trains else None
    if isinstance(layout, _Unset) or layout is not None and layout.rows == tokens:
        return layout
    if layout is not None:
        raise ValueError(
            f"{op}: {X.get(op, 'x')} has {tokens} tokens, shape {tuple(lead)}, but the token layout has "
            f"{layout.rows} rows; enter the layout of this very call"
            + "; for (…, heads, D) use qk_norm"
            * (op.endswith("rms_norm") and tokens == layout.rows * length)
        )
    if trains:
        inferred_any.set(True)
        if len(lead) > 2:
            warnings.warn(
                f"{op}: x has leading dimensions {tuple(lead)}, which are taken for {sequences} sequences of {length} "
                "tokens where its parameters' gradients are added; for heads use qk_norm, else enter a TokenLayout",
                stacklevel=3,
            )
    return dense(max(sequences, 1), length if sequences else 0, not outer)


def continues_step(*parameters: torch.Tensor | None) -> bool:
    """Tells whether an earlier micro-batch of a step has left a gradient in the main_grad that MainGrads gave one of
    these."""
    buffers = [getattr(p, "main_grad", None) for p in parameters]
    return any(hasattr(b, "of_step") and getattr(b, "zeros_at", None) != (id(b), b._version) for b in buffers)


def warn_unlaid_micro_batch(op: str, layout: "TokenLayout", *parameters: torch.Tensor | None) -> None:
    """Warns of a micro-batch that goes on with a step's fold, and whose sequences nobody told."""
    if not isinstance(layout, TokenLayout) or not layout.is_inferred:
        return  # what is computed again may have none
    if continues_step(*parameters):
        warnings.warn(
            f"{op}: another micro-batch of (tokens, features) without a token layout, which is taken for one sequence, "
            "so that gradients depend on the split; expected the forward inside `with TokenLayout.packed(cu_seqlens)`",
            stacklevel=3,
        )


def _check_own(op: str, name: str, weight: torch.Tensor) -> None:
    """Raises ValueError for the copy of a parameter that a reentrant checkpoint passes on: what an op leaves there goes
    to the parameter's `.grad`, beside its main_grad."""
    if not weight.is_leaf or compat.current_node() != "CheckpointFunctionBackward":
        return
    there = [p for owner in LIVE_MAIN_GRADS.values() for p in owner.parameters if p.data_ptr() == weight.data_ptr()]
    if weight.numel() and there and all(p is not weight for p in there):
        raise ValueError(
            f"{op}: {name} is a copy of a parameter, made by a reentrant checkpoint, and has no main_grad; let the "
            "checkpointed function hold the parameter, or set use_reentrant=False"
        )


def main_grad(op: str, weight: torch.Tensor, name: str = "weight", attribute: str = "main_grad") -> torch.Tensor | None:
    """Returns the fp32 buffer on a parameter into which backward accumulates, checked; None if it has none. Raises
    ValueError for a reentrant checkpoint's copy of a parameter that has one."""
    buffer = getattr(weight, attribute, None)
    if buffer is None:
        _check_own(op, name, weight)
        return None
    if not isinstance(buffer, torch.Tensor) or buffer.dtype != torch.float32:
        what = f"dtype {buffer.dtype}" if isinstance(buffer, torch.Tensor) else f"type {type(buffer).__name__}"
        raise TypeError(f"{op}: {name}.{attribute} has {what}, expected torch.float32")
    if buffer.device == weight.device:
        check_numbers(op, f"{name}.{attribute}", buffer)
    if (
        buffer.shape != weight.shape
        or buffer.device != weight.device
        or not buffer.is_contiguous()
        or buffer.is_inference()
    ):
        raise ValueError(
            f"{op}: {name}.{attribute} has shape {tuple(buffer.shape)} on {buffer.device}, expected it "
            f"contiguous, {tuple(weight.shape)} on {weight.device} as {name}"
        )
    return buffer


def embedding_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns the buffer of an embedding, which a weight that is tied to an LM head has besides `main_grad`."""
    own = main_grad("embedding", weight, attribute="embedding_main_grad")
    return main_grad("embedding", weight) if own is None else own


def training_arguments(op: str, x: torch.Tensor, features: int, **parameters: torch.Tensor | None) -> tuple:
    """Returns the layout of x's tokens, whose last dimensions are features, and of each parameter the buffer that
    torch.compile must know of; else None, for a backward looks it up."""
    trains = False
    if torch.compiler.is_compiling():
        attributes = ("embedding_main_grad", "main_grad") if op == "embedding" else ("main_grad",)
        buffers = []
        for p in parameters.values():
            trained = p is not None and p.requires_grad
            found = [getattr(p, a) for a in attributes if hasattr(p, a)] if trained else []
            buffers.append(found[0] if found else None)
            trains = trains or trained
        return _token_layout(x, op, features, trains), *buffers
    for name, p in parameters.items():
        if p is not None and p.requires_grad:
            trains = True
            embedding_grad(p) if op == "embedding" else main_grad(op, p, name)
    return layout_for(op, x.shape[: x.dim() - features], trains), *[None] * len(parameters)


@torch.library.custom_op("bi_kernels::token_layout", mutates_args=())
def _token_layout(x: torch.Tensor, op: str, features: int, trains: bool) -> torch.Tensor:
    """Returns a tensor that stands for the layout that is entered when the compiled code runs."""
    layout = layout_for(op, x.shape[: x.dim() - features], trains)
    number = layout.__dict__.setdefault("_id", next(_ids))
    _live[number] = layout
    stand_in = torch.tensor([number], device="cpu")
    stand_in.token_layout = layout  # and keeps it alive
    return stand_in


@_token_layout.register_fake
def _(x, op, features, trains):
    return torch.empty(1, dtype=torch.int64, device="cpu")


def layout_of(layout: "TokenLayout | torch.Tensor") -> TokenLayout:
    """Returns the layout that `training_arguments` returned, or a layout's stand-in means."""
    return _live[int(layout)] if isinstance(layout, torch.Tensor) else layout


def gradient_of(
    op: str, parameter: torch.Tensor, name: str = "weight", buffer: torch.Tensor | None = None
) -> tuple[torch.Tensor, bool]:
    """Returns where a parameter's gradient goes, and whether it goes on from what is there: a buffer, or a new tensor.
    buffer: as `training_arguments` returned it."""
    if buffer is None and not torch.compiler.is_compiling():
        buffer = embedding_grad(parameter) if op == "embedding" else main_grad(op, parameter, name)
    if buffer is None:
        return torch.empty_like(parameter, memory_format=torch.contiguous_format), False
    if not torch.compiler.is_compiling():
        _tell_second_use(op, name, buffer)
    return buffer, True


def _tell_second_use(op: str, name: str, buffer: torch.Tensor) -> None:
    """Warns where one backward comes to a buffer twice: the second fold goes on with the first, so that the result
    depends on how a batch is split. Raises ValueError where an embedding is one of the two, which has a remedy."""
    if (backward := compat.current_backward()) < 0 or not buffer.numel():
        return
    if backward not in _folded:
        _folded.clear()
        _folded[backward] = {}
    folded, place, embeds = _folded[backward], (buffer.device, buffer.data_ptr()), op == "embedding"
    if place not in folded:  # by address: a transposed weight has a view of its buffer
        folded[place] = embeds
        return
    if folded[place] != embeds:
        raise ValueError(
            f"{op}: {name} is both an embedding's and a product's, and has one main_grad; expected it among the `tied` "
            "of MainGrads, which keeps a buffer for each"
        )
    warnings.warn(
        f"{op}: a backward comes to {name} twice, so that its gradient depends on how a batch is split; expected each "
        "parameter to be used once in a loss",
        stacklevel=3,
    )


def consume_zero_flag(buffer: torch.Tensor) -> bool:
    """Tells whether `buffer` holds the zeros that MainGrads left there, so that a fold may begin without reading them;
    asked again, it says no. Not in the capture of a CUDA graph, whose replays go on from each other."""
    if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    left, buffer.zeros_at = getattr(buffer, "zeros_at", None), None
    return left == (id(buffer), buffer._version)
