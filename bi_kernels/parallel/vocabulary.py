"""Embedding and LM head of a vocabulary that is cut, between its blocks, over the ranks of a group.

A rank looks up its own rows, and reduces the logits of its own blocks. A sum of integers joins these statistics, since
each number is 0 on all ranks but one; then each rank merges the blocks in ascending order. dW is the rank's own, and
dhidden one fold over the vocabulary that passes from rank to rank, in chunks of tokens so that all ranks work at once.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bi_kernels.checks import check_plain, refuse_inference, widened
from bi_kernels.ops import embedding as embeddings
from bi_kernels.ops.gemm.gemm import check_linear, product
from bi_kernels.ops.lm_head import SCRATCH, _scratch, checked
from bi_kernels.ops.vocabulary import BLOCK, Statistics, dlogits
from bi_kernels.parallel.exchange import merge
from bi_kernels.tokens import SLAB, TokenLayout, consume_zero_flag, embedding_grad, gradient_of, layout_for, main_grad

CHUNKS = 4  # of tokens, per rank: more of them shorten the wait for the ranks before


def share(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns a rank's (first row, row after its last): whole blocks, evenly; ranks after the first may have none."""
    blocks = -(-rows // BLOCK)
    first, end = (min(rows, -(-r * blocks // ranks) * BLOCK) for r in (rank, rank + 1))
    return first, end


def cut_of(op: str, weight: Tensor) -> tuple[int, int, int]:
    """Returns a shared weight's (first row, row after its last, rows of the vocabulary). Raises ValueError for a weight
    that was not shared."""
    cut = getattr(weight, "cut", None)
    if cut is None:
        check_plain(op, "weight", weight)
        raise ValueError(
            f"{op}: weight of shape {tuple(weight.shape)} is not shared over ranks, expected what TensorParallel.share "
            "returned"
        )
    return cut


def _rows(group: dist.ProcessGroup, ids: Tensor, weight: Tensor) -> Tensor:
    """Returns the rows of all ids; NaN for an id outside of the vocabulary."""
    first, end, _ = weight.cut
    mine = (ids >= first) & (ids < end)
    y = embeddings.look_up((ids - first).where(mine, 0), weight) if end > first else None
    y = weight.new_zeros(*ids.shape, weight.shape[1]) if y is None else y.masked_fill_(~mine[..., None], 0)
    if first == 0:
        y.masked_fill_(((ids < 0) | (ids >= weight.cut.rows))[..., None], float("nan"))
    return merge(y, group)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, layout, padding_id, ids, weight):
        ctx.layout, ctx.padding_id, ctx.parameter = layout, padding_id, weight
        embedding_grad(weight)
        ctx.save_for_backward(ids)
        return _rows(group, ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (ids,), weight = ctx.saved_tensors, ctx.parameter
        (dw, continues), (first, end, _) = gradient_of("embedding", weight), weight.cut
        mine = (ids >= first) & (ids < end)
        if ctx.padding_id is not None:
            mine &= ids != ctx.padding_id
        ids = (ids - first).where(mine, -1)
        embeddings.fold_rows(dy, ids, ctx.layout, None, dw, continues)
        return None, None, None, None, None if continues else dw


def embedding(group: dist.ProcessGroup, ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
    """Returns weight[ids] for a shared weight, as `bi_kernels.embedding` does."""
    *_, vocab = cut_of("embedding", weight)
    embeddings._checked(ids, weight, padding_id, vocab)
    embeddings.check_ids("embedding", "ids", ids, vocab)
    ids = widened(ids)
    if torch.is_grad_enabled() and weight.requires_grad:
        refuse_inference(ids, weight)
        return _Embedding.apply(group, layout_for("embedding", ids.shape), padding_id, ids, weight)
    return _rows(group, ids, weight)


class Head:
    """The constants of an LM head's forward and backward."""

    def __init__(self, group: dist.ProcessGroup, weight: Tensor, inv_temperature: float, ignore_index: int):
        self.group, self.weight = group, weight
        self.inv_temperature, self.ignore_index = inv_temperature, ignore_index
        self.first, self.end, self.vocab = weight.cut
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def chunks(self, rows: int) -> Iterator[slice]:
        """Yields the chunks of tokens, whole slabs, that are computed at a time."""
        most = min(-(-rows // (CHUNKS * self.ranks)), max(1, SCRATCH // max(1, self.vocab // self.ranks)))
        step = max(SLAB, most // SLAB * SLAB)
        yield from (slice(at, min(at + step, rows)) for at in range(0, rows, step))

    def statistics(self, hidden: Tensor, targets: Tensor) -> Statistics:
        """Returns the statistics of all ranks' blocks for each row, not merged yet."""
        rows = len(hidden)
        stats = Statistics(rows, self.vocab, hidden.device, targets, self.inv_temperature)
        every = hidden.new_zeros(3 * stats.blocks + 1, rows, dtype=torch.float32)
        *stats.parts, selected = every.split([stats.blocks] * 3 + [1])
        stats.selected = selected.view(rows)
        step = max(BLOCK, SCRATCH // rows // BLOCK * BLOCK)
        for first in range(self.first, self.end, step):
            own = self.weight[first - self.first : min(first + step, self.end) - self.first]
            stats.add(product(hidden, own), first)
        merge(every, self.group)
        return stats


class _LMHeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, layout, hidden, weight, targets):
        if weight.requires_grad:
            main_grad("lm_head_logprob", weight)
        ctx.set_materialize_grads(False)
        stats = head.statistics(hidden, targets).merge()
        logprob, entropy = stats.results(head.ignore_index)
        ctx.head, ctx.layout = head, layout
        ctx.save_for_backward(hidden, weight, targets, stats.lse, entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprob, d_entropy):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        head, layout = ctx.head, ctx.layout
        d_logprob = torch.zeros_like(lse) if d_logprob is None else d_logprob
        given = [targets, lse, entropy, d_logprob] + ([] if d_entropy is None else [d_entropy])
        if not layout.identity:  # free slots get an ignored target
            slots = layout.slots_on(hidden.device).long()
            given = [t[slots.clamp(min=0)] for t in given]
            given[0].masked_fill_(slots < 0, head.ignore_index)

        def dz(chunk: slice, own: Tensor) -> Tensor:
            targets, lse, entropy, d_logprob, *d_entropy = (t[chunk].contiguous() for t in given)
            dz = product(own, weight, out=_scratch(own, len(weight))[:, : len(weight)])
            rest = lse, entropy, d_logprob, d_entropy[0] if d_entropy else None
            return dlogits(dz, head.first, head.vocab, targets, *rest, head.inv_temperature, head.ignore_index, dz)

        return None, None, *_gradients(head, layout, hidden, dz, *ctx.needs_input_grad[2:4]), None


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, layout, hidden, weight):
        if weight.requires_grad:
            main_grad("linear", weight)
        ctx.head, ctx.layout = head, layout
        ctx.save_for_backward(hidden, weight)
        return _logits(head, hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (hidden, _), head, layout = ctx.saved_tensors, ctx.head, ctx.layout
        mine = layout.gather(dy[:, head.first : head.end])
        dz = lambda chunk, own: mine[chunk]
        return None, None, *_gradients(head, layout, hidden, dz, *ctx.needs_input_grad[2:4])


def _logits(head: "Head", hidden: Tensor) -> Tensor:
    found = hidden.new_zeros(len(hidden), head.vocab)
    found[:, head.first : head.end] = product(hidden, head.weight.detach())
    return merge(found, head.group)


def logits(group: dist.ProcessGroup, hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns all logits (…, vocabulary) of hidden (…, hidden) for a shared weight, as `bi_kernels.linear` does."""
    cut_of("linear", weight)
    check_linear(hidden, weight, None)
    head, lead, flat = Head(group, weight, 1.0, -100), hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1])
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        found = _Logits.apply(head, layout_for("linear", lead, weight.requires_grad), flat, weight)
    else:
        found = _logits(head, flat)
    return found.view(*lead, head.vocab)


class _HiddenGradient:
    """dhidden (tokens, hidden): one fold over the vocabulary, which passes from rank to rank in chunks of tokens."""

    def __init__(self, head: Head, hidden: Tensor):
        self.head, self.last = head, head.rank == head.ranks - 1
        self.before, self.after = (
            dist.get_global_rank(head.group, r % head.ranks) for r in (head.rank - 1, head.rank + 1)
        )
        self.fold = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self.sent: list[tuple[dist.Work, Tensor]] = []

    def add(self, chunk: slice, dz: Tensor | None) -> None:
        """Adds a chunk's dz W to the fold of the ranks before; dz is None on a rank without rows."""
        partial, weight = None, self.head.weight
        if self.head.rank:
            partial = torch.empty_like(self.fold[chunk], dtype=torch.float32)
            dist.recv(partial, self.before, group=self.head.group)
        if dz is not None:
            partial = product(dz, weight.t(), partial, out_dtype=self.fold.dtype if self.last else torch.float32)
        if self.last:
            self.fold[chunk] = partial
        else:
            self.sent.append((dist.isend(partial, self.after, group=self.head.group), partial))

    def result(self, layout: TokenLayout, like: Tensor) -> Tensor:
        """Returns dhidden of the last rank on every rank, in the order of `like`."""
        for work, _ in self.sent:
            work.wait()
        last = dist.get_global_rank(self.head.group, self.head.ranks - 1)
        dist.broadcast(self.fold.view(-1).view(torch.uint8), last, group=self.head.group)
        if layout.identity:
            return self.fold
        dhidden = torch.zeros_like(like)
        dhidden[layout.rows_on(like.device)] = self.fold[layout.slots_on(like.device) >= 0]
        return dhidden


def _gradients(
    head: Head,
    layout: TokenLayout,
    hidden: Tensor,
    dz_of: Callable[[slice, Tensor], Tensor],
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns dhidden, whole on every rank, and dW of this rank's rows; None for dW that went into main_grad.

    dz_of(chunk, hidden[chunk]) is the gradient of this rank's logits of a chunk of tokens, in the order of the fold.
    """
    weight, gathered = head.weight, layout.gather(hidden)
    buffer = main_grad("lm_head_logprob", weight) if needs_weight else None
    dw = torch.zeros_like(weight, dtype=torch.float32) if needs_weight and buffer is None else buffer
    begun = buffer is not None and not consume_zero_flag(buffer)
    dhidden = _HiddenGradient(head, gathered) if needs_hidden else None
    for chunk in head.chunks(len(gathered)):
        dz = dz_of(chunk, gathered[chunk]) if len(weight) else None
        if dz is not None and needs_weight:
            product(dz.t(), gathered[chunk].t(), dw if begun else None, dw, torch.float32)
            begun = True
        if dhidden:
            dhidden.add(chunk, dz)
    dx = dhidden.result(layout, hidden) if dhidden else None
    return dx, dw.to(weight.dtype) if needs_weight and buffer is None else None


def lm_head_logprob(
    group: dist.ProcessGroup,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    keep_bytes: float = 0,
) -> tuple[Tensor, Tensor]:
    """Returns what `bi_kernels.lm_head_logprob` does for a shared weight; the backward recomputes the logits."""
    op = "lm_head_logprob"
    *_, vocab = cut_of(op, weight)
    inv_temperature = checked(hidden, weight, targets, vocab, temperature, ignore_index, keep_bytes)
    lead = hidden.shape[:-1]
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    head = Head(group, weight, inv_temperature, ignore_index)
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), widened(targets).reshape(-1).contiguous()
    if trains:
        refuse_inference(flat, weight, wanted)
        layout = layout_for(op, lead, weight.requires_grad)
        logprob, entropy = _LMHeadLogprob.apply(head, layout, flat, weight, wanted)
    else:
        logprob, entropy = head.statistics(flat, wanted).merge().results(ignore_index)
    return logprob.view(lead), entropy.view(lead)
