"""Traces the outputs of each op of a decoder's forward on a rank, so that the first that differs can be named."""

from collections.abc import Callable

from torch import Tensor

from bi_kernels.audit.targets.model import hashes
from bi_kernels.model import Decoder

OPS = "embedding", "rms_norm", "add_rms_norm", "linear", "qk_norm", "rope", "attention", "swiglu", "lm_head_logprob"
LEAVES = 4  # parts of an output's columns that are hashed apart, so that a rank can hash its own


class _TracedOps:
    """Ops that record their outputs: the op and its weight, the number of columns, and the SHA-256 of parts of them, as
    many as one rank hashes (whole) and as each of several does (part)."""

    def __init__(self, ops, found: list[dict], names: dict[Tensor, str], ranks: int):
        self._ops, self._given = ops, (found, names, ranks)

    def __getattr__(self, name: str):
        op = getattr(self._ops, name)
        if name == "keys":
            return lambda heads: _TracedOps(op(heads), *self._given)
        return self._recording(name, op) if name in OPS else op

    def _recording(self, name: str, op: Callable) -> Callable:
        found, names, ranks = self._given

        def call(*args, **given):
            out = op(*args, **given)
            weight = next((names[t] for t in args if isinstance(t, Tensor) and t in names), "")
            for t in out if isinstance(out, tuple) else (out,):
                flat = t.flatten(2).flatten(0, 1) if t.dim() > 3 else t.flatten(1) if t.dim() > 1 else t[:, None]
                whole, part = (
                    [digest.hex() for digest in hashes(flat.tensor_split(n, 1))] for n in (LEAVES, LEAVES // ranks)
                )
                found.append({"op": f"{name} {weight}".strip(), "columns": flat.shape[1], "whole": whole, "part": part})
            return out

        return call


def trace(model: Decoder, ranks: int, call: Callable) -> list[dict]:
    """Calls a function that calls a model; returns a record of each output of each op, in the order of the calls."""
    found, names = [], {p: name for name, p in model.named_parameters()}
    holders = [model, *model.layers]
    before = [holder.ops for holder in holders]
    try:
        for holder in holders:
            holder.ops = _TracedOps(holder.ops, found, names, ranks)
        call()
    finally:
        for holder, ops in zip(holders, before):
            holder.ops = ops
    return found
