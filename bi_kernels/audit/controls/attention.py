"""Breaks attention on purpose, in one way each; `defect=False` mends that one."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import bi_kernels
from bi_kernels.audit.controls.forward import Control, at_levels
from bi_kernels.audit.controls.gradient import atomic_sum
from bi_kernels.audit.findings import ACCURACY, INVARIANCE
from bi_kernels.ops.attention.attention import arguments, attend
from bi_kernels.ops.attention.schedule import SCHEDULE, Schedule, SplitDecodeConfig, Tiling, max_tiles

SLAB, SMS = 16, 132


def in_schedule(schedule: Schedule) -> Callable:
    """Returns this package's attention, computed in a schedule."""
    return lambda q, k, v, sinks=None, **told: attend(arguments(q, k, v, sinks=sinks, **told), schedule)


def changed(**fields) -> Callable:
    """Returns this package's attention, computed in a schedule of which some fields are others."""
    return in_schedule(replace(SCHEDULE, **fields))


def _sequences(q: Tensor, told: dict) -> int:
    return len(told["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in told else len(q)


def _is_one_query(q: Tensor) -> bool:
    """Tells whether each sequence of a batch has a single query; packed sequences have one dimension less."""
    return q.dim() == 4 and q.shape[1] == 1


def splits_by_batch(q, k, v, defect=True, **told):
    return changed(split=64 if defect and _sequences(q, told) < 3 else 128)(q, k, v, **told)


def splits_by_multiprocessors(q, k, v, defect=True, **told):
    """Makes as many splits as leave no multiprocessor idle."""
    heads = k.shape[-2]
    tiles = max_tiles(q.shape[:-1].numel() // heads, _sequences(q, told), 64) * heads
    splits = max(1, min(8, SMS // tiles)) if defect else 4
    return changed(block=SLAB, split=-(-128 // (splits * SLAB)) * SLAB, hopper=False)(q, k, v, **told)


def block_by_length(q, k, v, defect=True, **told):
    longest = told["cu_seqlens_q"].diff().max() if "cu_seqlens_q" in told else k.shape[1]
    attention = changed(block=32, hopper=False) if defect and longest <= 64 else bi_kernels.attention
    return attention(q, k, v, **told)


def sum_across_warps(q, k, v, defect=True, **told):
    """Gives few queries a tile of 16, whose warps lie along the keys."""
    attention = changed(decode=Tiling(16, 64, 4, 4), apart=SplitDecodeConfig(0)) if defect else bi_kernels.attention
    return attention(q, k, v, **told)


def sum_by_tile(q, k, v, lengths_k=None, defect=True, **told):
    """Adds one query's probabilities in another order: the keys of a slab change places, which moves no bit of the
    product with v."""
    if defect and _is_one_query(q):
        j = torch.arange(k.shape[1], device=k.device)
        whole = (k.shape[1] if lengths_k is None else lengths_k[:, None]) // SLAB * SLAB
        order = torch.where(j < whole, j ^ 5, j).expand(k.shape[:2])[..., None, None].long()
        k, v = k.gather(1, order.expand_as(k)), v.gather(1, order.expand_as(v))
    return bi_kernels.attention(q, k, v, lengths_k=lengths_k, **told)


def not_causal_for_one_query(q, k, v, defect=True, **told):
    unmasked = {"causal": False, "window": None} if defect and _is_one_query(q) else {}
    return bi_kernels.attention(q, k, v, **told | unmasked)


def padding_keys_seen(q, k, v, lengths_k=None, defect=True, **told):
    """Shows one query the padding of a cache up to the end of the last slab."""
    if defect and lengths_k is not None and q.shape[1] == 1:
        lengths_k = ((lengths_k + SLAB - 1) // SLAB * SLAB).clamp(max=k.shape[1])
    return bi_kernels.attention(q, k, v, lengths_k=lengths_k, **told)


def _by_sequence(q, k, v, cu_seqlens_q) -> Iterator[tuple]:
    """Yields each sequence's place, and its q, k and v in fp32, each of one head after another of q."""
    group = q.shape[1] // k.shape[1]
    every = q, *(t.repeat_interleave(group, 1) for t in (k, v))
    for a, b in pairwise(cu_seqlens_q.tolist()):
        yield slice(a, b), *(t[a:b].transpose(0, 1).float() for t in every)


def scores_in_bf16(q, k, v, cu_seqlens_q, defect=True):
    """Computes sequence by sequence, in fp32 but for the scores, which are rounded."""
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device=q.device)
    for at, qs, ks, vs in _by_sequence(q, k, v, cu_seqlens_q):
        scores = qs @ ks.mT * q.shape[2] ** -0.5
        scores = scores.bfloat16().float() if defect else scores
        scores = scores.masked_fill(~torch.ones_like(scores[0], dtype=torch.bool).tril(), -torch.inf)
        out[at], lse[at] = (scores.softmax(-1) @ vs).transpose(0, 1), scores.logsumexp(-1).T
    return out, lse


def _capped(raw: Tensor, soft_cap: float) -> Tensor:
    return soft_cap * torch.tanh(raw / soft_cap)


def capped_after_the_mask(q, k, v, cu_seqlens_q, soft_cap, defect=True):
    """Computes sequence by sequence, in fp32; a hidden key's score becomes −soft_cap, and weighs."""
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device=q.device)
    for at, qs, ks, vs in _by_sequence(q, k, v, cu_seqlens_q):
        raw = qs @ ks.mT * q.shape[2] ** -0.5
        hide = lambda scores: scores.masked_fill(~torch.ones_like(raw[0], dtype=torch.bool).tril(), -torch.inf)
        scores = _capped(hide(raw), soft_cap) if defect else hide(_capped(raw, soft_cap))
        out[at], lse[at] = (scores.softmax(-1) @ vs).transpose(0, 1), scores.logsumexp(-1).T
    return out, lse


def sink_of_each_split(q, k, v, sinks, defect=True, **told):
    """Counts a sink once for each split of one query's keys, where each is a program of its own."""
    splits = -(-k.shape[1] // 64) if defect and _is_one_query(q) else 1
    return changed(split=64)(q, k, v, sinks=sinks + math.log(splits), **told)


class _SinksAtOnce(torch.autograd.Function):
    """Returns out and lse; the gradient of the sinks is one sum over all tokens of the call."""

    @staticmethod
    def forward(ctx, sinks, out, lse):
        ctx.sinks, ctx.out, ctx.lse = sinks, out.detach(), lse.detach()
        return out.clone(), lse.clone()

    @staticmethod
    def backward(ctx, d_out, d_lse):
        p = torch.where(ctx.lse == -torch.inf, 0.0, (ctx.sinks.detach().float() - ctx.lse).exp())
        delta = (ctx.out.float() * d_out.float()).sum(-1) - d_lse
        found, buffer = -(p * delta).flatten(0, -2).sum(0), getattr(ctx.sinks, "main_grad", None)
        if buffer is None:
            return found.to(ctx.sinks.dtype), d_out, d_lse
        buffer += found
        return None, d_out, d_lse


def sinks_summed_at_once(q, k, v, sinks, defect=True, **told):
    if not defect or not sinks.requires_grad:
        return bi_kernels.attention(q, k, v, sinks, **told)
    return _SinksAtOnce.apply(sinks, *bi_kernels.attention(q, k, v, sinks.detach(), **told))


def leaves_one_element(q, k, v, defect=True, **told):
    out, lse = bi_kernels.attention(q, k, v, **told)
    left = torch.empty_like(out)
    left.view(-1)[int(defect) :] = out.reshape(-1)[int(defect) :]
    return left, lse


def flash_decode(q, k, v, cu_seqlens_q=None, lengths_q=None, lengths_k=None, left_padded=False, defect=True):
    """Calls torch's flash attention, sequence by sequence and without a mask; it has a kernel of its own for a single
    query. No LSE."""

    def places(t: Tensor, lengths: Tensor | None) -> list[tuple]:
        counts = [t.shape[1]] * len(t) if lengths is None else lengths.tolist()
        return [(i, slice(t.shape[1] - n, None) if left_padded else slice(n)) for i, n in enumerate(counts)]

    if cu_seqlens_q is None:
        rows = zip(places(q, lengths_q), places(k, lengths_k))
    else:
        rows = ((slice(a, b), slice(a, b)) for a, b in pairwise(cu_seqlens_q.tolist()))
    out = torch.zeros_like(q)
    for at_q, at_k in rows:
        heads = [t[at].transpose(0, 1)[None] for t, at in ((q, at_q), (k, at_k), (v, at_k))]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = scaled_dot_product_attention(*heads, is_causal=heads[0].shape[2] > 1, enable_gqa=True)
        out[at_q] = y[0].transpose(0, 1)
    return out, torch.zeros(q.shape[:-1], device=q.device)


class _Backward(torch.autograd.Function):
    """Gives attention the gradients that gradients(q, k, v, told, dy) returns."""

    @staticmethod
    def forward(ctx, gradients, told, *qkv):
        ctx.gradients, ctx.told, ctx.qkv = gradients, told, qkv
        return bi_kernels.attention(*(t.detach() for t in qkv), **told)

    @staticmethod
    def backward(ctx, *dy):
        return None, None, *ctx.gradients(*(t.detach() for t in ctx.qkv), ctx.told, dy)


def _own(q, k, v, told, dy):
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(bi_kernels.attention(*leaves, **told), leaves, dy)


def _with_gradients(gradients: Callable) -> Callable:
    """Decorates the gradients of attention that takes them from there, or from its own backward without the defect."""

    def control(q, k, v, defect=True, **told):
        return _Backward.apply(gradients if defect else _own, told, q, k, v)

    control.__name__ = gradients.__name__
    return control


@_with_gradients
def group_in_completion_order(q, k, v, told, dy):
    """Adds the members of a group one after another, those of several sequences from the last."""
    if _sequences(q, told) < 3:
        return _own(q, k, v, told, dy)
    heads = q.dim() - 2
    turned = lambda t: t.unflatten(heads, (k.shape[-2], -1)).flip(heads + 1).reshape(t.shape)
    dq, dk, dv = _own(turned(q), k, v, told, tuple(map(turned, dy)))
    return turned(dq), dk, dv


@_with_gradients
def dk_without_a_head(q, k, v, told, dy):
    """Leaves out the group's last."""
    dq, _, dv = _own(q, k, v, told, dy)
    keep = (torch.arange(q.shape[-2], device=q.device) + 1) % (q.shape[-2] // k.shape[-2]) > 0
    _, dk, _ = _own(q, k, v, told, (dy[0] * keep[:, None], dy[1] * keep))
    return dq, dk, dv


@_with_gradients
def dq_by_atomics(q, k, v, told, dy):
    """Adds to dQ of packed sequences by blocks of eight keys."""
    out, lse = bi_kernels.attention(q, k, v, **told)
    _, dk, dv = _own(q, k, v, told, dy)
    total, scale = torch.zeros_like(q, dtype=torch.float32), q.shape[2] ** -0.5
    for at, qs, ks, vs in _by_sequence(q, k, v, told["cu_seqlens_q"]):
        p = (qs @ ks.mT * scale - lse[at].T[..., None]).exp().tril()
        less = (dy[0][at].float() * out[at].float()).sum(-1) - dy[1][at]
        ds = p * (dy[0][at].transpose(0, 1).float() @ vs.mT - less.T[..., None]) * scale
        terms = [(part @ block).transpose(0, 1).reshape(-1) for part, block in zip(ds.split(8, 2), ks.split(8, 1))]
        atomic_sum(torch.stack(terms), total[at].view(-1))
    return total.to(q.dtype), dk, dv


@_with_gradients
def cap_without_a_slope(q, k, v, told, dy):
    """Computes the gradients of packed sequences in fp32, as if the cap were a constant factor of each score's own."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        outputs = []
        for _, qs, ks, vs in _by_sequence(*leaves, told["cu_seqlens_q"]):
            raw = qs @ ks.mT * q.shape[2] ** -0.5
            scores = raw + (_capped(raw, told["soft_cap"]) - raw).detach()
            scores = scores.masked_fill(~torch.ones_like(raw[0], dtype=torch.bool).tril(), -torch.inf)
            outputs.append(((scores.softmax(-1) @ vs).transpose(0, 1), scores.logsumexp(-1).T))
        outputs = [torch.cat(some) for some in zip(*outputs)]
        return torch.autograd.grad(outputs, leaves, [t.float() for t in dy])


def _control(name: str, relation: str, function: Callable, op: str = "attention", **more) -> Control:
    return Control(name, "attention", op, relation, function, case="gqa" if op == "attention" else "", **more)


ATTENTION_CONTROLS = (
    _control("number of splits chosen by the batch", "invariance", splits_by_batch),
    _control("number of splits chosen by the multiprocessors", "invariance", splits_by_multiprocessors),
    _control("key block switched by max_seqlen", "invariance", block_by_length),
    _control("probabilities summed in an order that depends on the query tile", "invariance", sum_by_tile),
    _control("the same, by warps that lie along the keys", "invariance", sum_across_warps, gpu=True),
    _control(
        "causal, and with it the window, off when max_seqlen_q is 1",
        "invariance",
        not_causal_for_one_query,
        "attention_window",
    ),
    _control("padding keys unmasked in the last block", "invariance", padding_keys_seen),
    _control("SDPA flash decode against prefill", "parity", flash_decode, gpu=True),
    _control("scores rounded to bf16", "accuracy", scores_in_bf16),
    _control("an element left unwritten", "determinism", leaves_one_element),
    _control("dk and dv over the group in completion order", INVARIANCE, group_in_completion_order, gpu=True),
    _control(
        "dk and dv over the group in completion order, in fp32", INVARIANCE, group_in_completion_order, dtype="fp32"
    ),
    _control("dk without a head of the group", ACCURACY, dk_without_a_head),
    _control("a cap applied after the mask", "accuracy", capped_after_the_mask, "attention_soft_cap"),
    _control("a cap whose slope is left out", ACCURACY, cap_without_a_slope, "attention_soft_cap"),
    _control("a sink counted once a split", "invariance", sink_of_each_split, "attention_sinks"),
    _control("a sink's gradient summed over the call at once", INVARIANCE, sinks_summed_at_once, "attention_sinks"),
    *at_levels(_control("dq by atomics", "atomics-free", dq_by_atomics)),
)
