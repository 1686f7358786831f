"""Breaks attention on purpose, in one way each; `defect=False` mends that one."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import bi_kernels
from bi_kernels.audit.broken.forward import Control
from bi_kernels.audit.broken.gradient import atomic_sum
from bi_kernels.ops.attention.attention import arguments, attend
from bi_kernels.ops.attention.schedule import SCHEDULE, Schedule, Tiling, most_tiles

SLAB, SMS = 16, 132


def in_schedule(schedule: Schedule) -> Callable:
    """Returns this package's attention, computed in a schedule."""
    return lambda q, k, v, **told: attend(arguments(q, k, v, **told), schedule)


def changed(**fields) -> Callable:
    """Returns this package's attention, computed in a schedule of which some fields are others."""
    return in_schedule(replace(SCHEDULE, **fields))


def _sequences(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    return len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1


def _longest(k: Tensor, cu_seqlens_q: Tensor | None) -> int:
    return k.shape[1] if cu_seqlens_q is None else int(cu_seqlens_q.diff().max())


def splits_by_batch(q, k, v, cu_seqlens_q=None, defect=True, **told):
    split = 64 if defect and _sequences(q, cu_seqlens_q) < 3 else 128
    return changed(split=split)(q, k, v, cu_seqlens_q=cu_seqlens_q, **told)


def splits_by_multiprocessors(q, k, v, cu_seqlens_q=None, defect=True, **told):
    """Makes as many splits as leave no multiprocessor idle."""
    heads = k.shape[-2]
    tiles = most_tiles(q.shape[:-1].numel() // heads, _sequences(q, cu_seqlens_q), 64) * heads
    splits = max(1, min(8, SMS // tiles)) if defect else 4
    attention = changed(block=SLAB, split=-(-128 // (splits * SLAB)) * SLAB, hopper_prefill=None)
    return attention(q, k, v, cu_seqlens_q=cu_seqlens_q, **told)


def block_by_length(q, k, v, cu_seqlens_q=None, defect=True, **told):
    short = defect and _longest(k, cu_seqlens_q) <= 64
    attention = changed(block=32, hopper_prefill=None) if short else bi_kernels.attention
    return attention(q, k, v, cu_seqlens_q=cu_seqlens_q, **told)


def sum_by_tile(q, k, v, cu_seqlens_q=None, lengths_k=None, defect=True, **told):
    """Adds one query's probabilities in another order: the keys of a slab change places, which moves no bit of the
    product with v."""
    if defect and cu_seqlens_q is None and q.shape[1] == 1:
        j = torch.arange(k.shape[1], device=k.device)
        whole = (k.shape[1] if lengths_k is None else lengths_k[:, None]) // SLAB * SLAB
        order = torch.where(j < whole, j ^ 5, j).expand(k.shape[:2])[..., None, None].long()
        k, v = k.gather(1, order.expand_as(k)), v.gather(1, order.expand_as(v))
    return bi_kernels.attention(q, k, v, cu_seqlens_q=cu_seqlens_q, lengths_k=lengths_k, **told)


def sum_across_warps(q, k, v, defect=True, **told):
    """Gives few queries a tile of 16, whose warps lie along the keys."""
    return (changed(decode=Tiling(16, 64, 4, 4)) if defect else bi_kernels.attention)(q, k, v, **told)


def not_causal_for_one_query(q, k, v, cu_seqlens_q=None, window=None, defect=True, **told):
    if defect and cu_seqlens_q is None and q.shape[1] == 1:
        return bi_kernels.attention(q, k, v, causal=False, **told)
    return bi_kernels.attention(q, k, v, cu_seqlens_q=cu_seqlens_q, window=window, **told)


def padding_keys_seen(q, k, v, cu_seqlens_q=None, lengths_k=None, defect=True, **told):
    """Shows one query the padding of a cache up to the end of the last slab."""
    if defect and lengths_k is not None and q.shape[1] == 1:
        lengths_k = ((lengths_k + SLAB - 1) // SLAB * SLAB).clamp(max=k.shape[1])
    return bi_kernels.attention(q, k, v, cu_seqlens_q=cu_seqlens_q, lengths_k=lengths_k, **told)


def later_splits_weigh_more(q, k, v, defect=True, schedule=SCHEDULE, **told):
    """Gives them a quarter more, as if their maximum were too small."""
    attention, split = in_schedule(schedule), schedule.split
    near = attention(q, k, v, **told)
    if not defect:
        return near
    far = attention(q, k, v, lengths_k=torch.full((len(k),), split, device=k.device), causal=False)
    share = (far[1] - near[1]).exp()[..., None] if k.shape[1] > split else torch.ones_like(near[1])[..., None]
    rest = (near[0].float() - share * far[0].float()) * 1.25
    return (share * far[0].float() + rest).div(share + 1.25 * (1 - share)).to(q.dtype), near[1]


def scores_in_bf16(q, k, v, cu_seqlens_q, defect=True):
    """Computes sequence by sequence, in fp32 but for the scores, which are rounded."""
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device=q.device)
    ends, group = cu_seqlens_q.tolist(), q.shape[1] // k.shape[1]
    for a, b in zip(ends, ends[1:]):
        qs, ks, vs = (t[a:b].transpose(0, 1).float() for t in (q, *(t.repeat_interleave(group, 1) for t in (k, v))))
        scores = qs @ ks.mT * q.shape[2] ** -0.5
        scores = (scores.bfloat16().float() if defect else scores).masked_fill(
            ~torch.ones_like(scores[0], dtype=torch.bool).tril(), -torch.inf
        )
        out[a:b], lse[a:b] = (scores.softmax(-1) @ vs).transpose(0, 1), scores.logsumexp(-1).T
    return out, lse


def leaves_one_element(q, k, v, defect=True, **told):
    out, lse = bi_kernels.attention(q, k, v, **told)
    left = torch.empty_like(out)
    left.view(-1)[int(defect) :] = out.reshape(-1)[int(defect) :]
    return left, lse


def nan_without_keys(q, k, v, defect=True, **told):
    out, lse = bi_kernels.attention(q, k, v, **told)
    none = (lse == -torch.inf) & defect
    return out.masked_fill(none[..., None], torch.nan), lse.masked_fill(none, torch.nan)


def flash_decode(q, k, v, cu_seqlens_q=None, lengths_q=None, lengths_k=None, left_padded=False, defect=True):
    """Calls torch's flash attention, sequence by sequence and without a mask; it has a kernel of its own for a single
    query. No LSE."""
    if cu_seqlens_q is not None:
        ends = cu_seqlens_q.tolist()
        rows = [(slice(a, b), slice(a, b)) for a, b in zip(ends, ends[1:])]
    else:
        width = lambda lengths, t: [t.shape[1]] * len(t) if lengths is None else lengths.tolist()
        part = lambda n, t, i: (i, slice(t.shape[1] - n, None) if left_padded else slice(n))
        rows = [
            (part(n, q, i), part(m, k, i)) for i, (n, m) in enumerate(zip(width(lengths_q, q), width(lengths_k, k)))
        ]
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


def _group_in_completion_order(q, k, v, told, dy):
    """Adds the members of a group one after another, those of several sequences from the last."""
    if _sequences(q, told.get("cu_seqlens_q")) < 3:
        return _own(q, k, v, told, dy)
    turned = lambda t: (
        t.unflatten(2 if q.dim() == 4 else 1, (k.shape[-2], -1)).flip(3 if q.dim() == 4 else 2).reshape(t.shape)
    )
    dq, dk, dv = _own(turned(q), k, v, told, tuple(map(turned, dy)))
    return turned(dq), dk, dv


def _dk_without_a_head(q, k, v, told, dy):
    """Leaves out the group's last."""
    dq, _, dv = _own(q, k, v, told, dy)
    keep = (torch.arange(q.shape[-2], device=q.device) + 1) % (q.shape[-2] // k.shape[-2]) > 0
    _, dk, _ = _own(q, k, v, told, (dy[0] * keep[:, None], dy[1] * keep))
    return dq, dk, dv


def _dq_by_atomics(q, k, v, told, dy):
    """Adds to dQ of packed sequences by blocks of eight keys."""
    out, lse = bi_kernels.attention(q, k, v, **told)
    _, dk, dv = _own(q, k, v, told, dy)
    total = torch.zeros_like(q, dtype=torch.float32)
    ends, group = told["cu_seqlens_q"].tolist(), q.shape[1] // k.shape[1]
    for a, b in zip(ends, ends[1:]):
        heads = lambda t: t[a:b].transpose(0, 1).float()
        qs, ks, vs = heads(q), *(heads(t).repeat_interleave(group, 0) for t in (k, v))
        p = (qs @ ks.mT * q.shape[2] ** -0.5 - lse[a:b].T[..., None]).exp().tril()
        less = (dy[0][a:b].float() * out[a:b].float()).sum(-1) - dy[1][a:b]
        ds = p * (heads(dy[0]) @ vs.mT - less.T[..., None]) * q.shape[2] ** -0.5
        terms = [(part @ block).transpose(0, 1).reshape(-1) for part, block in zip(ds.split(8, 2), ks.split(8, 1))]
        atomic_sum(torch.stack(terms), total[a:b].view(-1))
    return total.to(q.dtype), dk, dv


def _with(gradients: Callable) -> Callable:
    def control(q, k, v, defect=True, **told):
        return _Backward.apply(gradients if defect else _own, told, q, k, v)

    control.__name__ = gradients.__name__.strip("_")
    return control


group_in_completion_order, dk_without_a_head, dq_by_atomics = map(
    _with, (_group_in_completion_order, _dk_without_a_head, _dq_by_atomics)
)


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
    _control(
        "dk and dv over the group in completion order", "gradient invariance", group_in_completion_order, gpu=True
    ),
    _control(
        "dk and dv over the group in completion order, in fp32",
        "gradient invariance",
        group_in_completion_order,
        dtype="fp32",
    ),
    _control("dk without a head of the group", "gradient accuracy", dk_without_a_head),
    *(
        _control(f"dq by atomics, in the {where}", "atomics-free", dq_by_atomics, level=level)
        for where, level in (("source", "AST"), ("PTX", "PTX"), ("binary", "SASS"))
    ),
)
