"""Which op first: what each op of a decoder's forward gives on every rank, beside what it gives on one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from bi_kernels.audit.chain.layouts import THREADS, hash_of
from bi_kernels.model import Decoder

OPS = "embedding", "rms_norm", "add_rms_norm", "linear", "qk_norm", "rope", "attention", "swiglu", "lm_head_logprob"
LEAVES = 4  # parts of an output's columns that are hashed apart, so that a rank can hash what it has of them


class _Watched:
    """Ops that note what they give."""

    def __init__(self, ops, found: list[dict], names: dict[Tensor, str], ranks: int):
        self._ops, self._given = ops, (found, names, ranks)

    def __getattr__(self, name: str):
        op = getattr(self._ops, name)
        if name == "keys":
            return lambda heads: _Watched(op(heads), *self._given)
        return self._noting(name, op) if name in OPS else op

    def _noting(self, name: str, op: Callable) -> Callable:
        found, names, ranks = self._given

        def call(*args, **given):
            out = op(*args, **given)
            of = next((names[t] for t in args if isinstance(t, Tensor) and t in names), "")
            for t in out if isinstance(out, tuple) else (out,):
                flat = t.flatten(2).flatten(0, 1) if t.dim() > 3 else t.flatten(1) if t.dim() > 1 else t[:, None]
                whole, part = (_hashes(flat, count) for count in (LEAVES, LEAVES // ranks))
                found.append({"op": f"{name} {of}".strip(), "columns": flat.shape[1], "whole": whole, "part": part})
            return out

        return call


def _hashes(t: Tensor, count: int) -> list[str]:
    with ThreadPoolExecutor(THREADS) as threads:
        return [b.hex() for b in threads.map(hash_of, t.detach().tensor_split(count, 1))]


def watched(model: Decoder, ranks: int, call: Callable) -> list[dict]:
    """Calls what calls a model; returns a record of each output of each op, in the order of the calls."""
    found, names = [], {p: name for name, p in model.named_parameters()}
    holders = [model, *model.layers]
    before = [holder.ops for holder in holders]
    try:
        for holder in holders:
            holder.ops = _Watched(holder.ops, found, names, ranks)
        call()
    finally:
        for holder, ops in zip(holders, before):
            holder.ops = ops
    return found


def differing(one: list[dict], ranks: list[list[dict]]) -> tuple[str, int] | None:
    """Returns the first op of which a rank has other bits than one rank, and how many it was the one after; None if
    there is none. What goes into it agreed: it is what the ops before gave."""
    counts = {len(said) for said in ranks}
    if counts != {len(one)} and min(counts, default=0) >= len(one):
        return "the number of outputs", len(one)
    for number, theirs in enumerate(one):
        for rank, said in enumerate(ranks):
            mine = said[number] if number < len(said) else {"op": ""}
            if mine["op"] != theirs["op"]:
                return theirs["op"], number
            if mine["columns"] == theirs["columns"]:
                same = mine["whole"] == theirs["whole"]
            else:
                first = rank * len(mine["part"])
                same = mine["part"] == theirs["whole"][first : first + len(mine["part"])]
            if not same:
                return theirs["op"], number
    return None
