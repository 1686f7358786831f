"""Decoders with one op broken or one thing forgotten, each with the relation that must flag it."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

import bi_kernels
from bi_kernels.audit.controls.attention import changed, padding_keys_seen
from bi_kernels.audit.controls.forward import rope_by_row, row_count
from bi_kernels.audit.controls.gradient import dw_separate
from bi_kernels.audit.controls.usage import in_inference_mode
from bi_kernels.audit.targets.decoder import DecoderTarget, generation_rows
from bi_kernels.audit.targets.model import Control, Relation, layout_rows, mode_rows


def with_ops(**changed) -> SimpleNamespace:
    """Returns this package's ops, some of which are others."""
    return SimpleNamespace(**{name: getattr(bi_kernels, name) for name in bi_kernels.__all__} | changed)


def _recomputed_differently(gate, *given):
    """Gives activation checkpointing, which calls it inside the backward, another result than the forward had."""
    y = gate(*given)
    return y if torch._C._current_graph_task_id() == -1 else bi_kernels.scale(y, 1.5)


def _halves_for_few_rows(x, weight, bias=None, few=64):
    if row_count(x) > few:
        return bi_kernels.linear(x, weight, bias)
    first, second = map(bi_kernels.linear, x.chunk(2, -1), weight.chunk(2, -1))
    return bi_kernels.add(first, second)


def _block_by_batch(q, k, v, **told):
    count = len(told["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in told else len(q)
    return (changed(block=32, hopper=False) if count < 3 else bi_kernels.attention)(q, k, v, **told)


def _of_one_sequence(ids, experts, layout=None):
    whole = layout and bi_kernels.TokenLayout.packed([0, layout.rows])
    return bi_kernels.group_by_expert(ids, experts, whole)


def _in(layout: str, **change) -> Callable:
    """Returns what yields the rows of a layout of a changed decoder of few layers."""
    return lambda session: layout_rows(DecoderTarget(session, "bf16", "control_layers", **change), [layout])


def _in_modes(**change) -> Callable:
    """Returns what yields the rows of the other modes of a changed decoder of few layers."""
    return lambda session: mode_rows(DecoderTarget(session, "bf16", "control_layers", **change))


def _generating(ops) -> Callable:
    return lambda session: generation_rows(session, "bf16", ops, "control_layers")[0]


SEPARATE = with_ops(linear=lambda x, weight, bias=None: dw_separate(x, weight))
PADDING_SEEN = with_ops(attention=padding_keys_seen)
_HALVES, _OF_2 = (with_ops(linear=partial(_halves_for_few_rows, **few)) for few in ({}, {"few": 2}))
_GATES = {name: partial(_recomputed_differently, getattr(bi_kernels, name)) for name in ("swiglu", "gated")}
_BLOCKS, _RECOMPUTED = with_ops(attention=_block_by_batch), with_ops(**_GATES)
_INFERENCE = with_ops(linear=in_inference_mode(bi_kernels.linear))
_RUNNING = with_ops(group_by_expert=_of_one_sequence)
_FORWARD, _BACKWARD, _PARITY = Relation.INVARIANCE, Relation.GRADIENT, Relation.PARITY
CONTROLS = (
    Control("linear that adds two halves of K for 64 rows or fewer", _FORWARD, _in("singles", ops=_HALVES)),
    Control("RoPE by row", _FORWARD, _in("singles", ops=with_ops(rope=rope_by_row))),
    Control("attention whose blocks follow the batch", _FORWARD, _in("singles", ops=_BLOCKS)),
    Control("decode that sees a cache's padding", _PARITY, _in("decode", ops=PADDING_SEEN)),
    Control("dW as the sum of separately accumulated partials", _BACKWARD, _in("micro_batches:each", ops=SEPARATE)),
    Control("a step on old logprobs that saw a cache's padding", _BACKWARD, _in("decode", ops=PADDING_SEEN)),
    Control("gradients that were not told the layout", _BACKWARD, _in("left_padded", forgets=True)),
    Control("each micro-batch divided by its own tokens", _BACKWARD, _in("micro_batches:2", own=True)),
    Control("a layer recomputed otherwise than it was computed", _BACKWARD, _in("checkpointing off", ops=_RECOMPUTED)),
    Control("experts' slabs across sequences", _BACKWARD, _in("micro_batches:ragged", ops=_RUNNING, mixture=True)),
    Control("linear that is another in inference mode", _FORWARD, _in_modes(ops=_INFERENCE)),
    Control("decode that sees a cache's padding, rescored", _PARITY, _generating(PADDING_SEEN)),
    Control("linear that adds two halves of K for 2 rows or fewer, generated again", _FORWARD, _generating(_OF_2)),
)
