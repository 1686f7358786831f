"""What the fuzz calls: a valid call of each public name, drawn by a seed."""

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import bi_kernels as bi
from bi_kernels.contract import DTYPES


class Draw(random.Random):
    """A case's random numbers: of Python, and tensors of one dtype."""

    def __init__(self, number: int):
        super().__init__(number)
        self.generator = torch.Generator().manual_seed(number)
        self.dtype = self.choice([*DTYPES.values()])

    def size(self) -> int:
        return self.choice((1, 2, 3, 5, 16, 17, 20))

    def lead(self) -> tuple[int, ...]:
        return self.choice(((), (3,), (5,), (17,), (2, 3), (1, 4), (2, 1, 2)))

    def t(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def ids(self, shape: tuple[int, ...], below: int) -> Tensor:
        dtype = self.choice((torch.int64, torch.int64, torch.int32))
        return torch.randint(0, below, shape, generator=self.generator).to(dtype)

    def ends(self, total: int) -> Tensor:
        cuts = sorted(self.randrange(total + 1) for _ in range(self.randrange(4)))
        return torch.tensor([0, *cuts, total], dtype=self.choice((torch.int32, torch.int64)))

    def some(self, **optional) -> dict:
        return {name: value for name, value in optional.items() if self.random() < 0.4}


# A valid call of each public name: its arguments in the order of its signature


def _linear(d: Draw) -> dict:
    n, k = d.size(), d.size()
    return {"x": d.t(*d.lead(), k), "weight": d.t(n, k)} | d.some(bias=d.t(n))


def _matmul(d: Draw) -> dict:
    k = d.size()
    return {"a": d.t(*d.lead(), d.size(), k), "b": d.t(k, d.size())}


def _two(x: str, other: str) -> Callable[[Draw], dict]:
    def of(d: Draw) -> dict:
        shape = *d.lead(), d.size()
        return {x: d.t(*shape), other: d.t(*shape)}

    return of


def _norm(*names: str) -> Callable[[Draw], dict]:
    def of(d: Draw) -> dict:
        shape = *d.lead(), d.size(), d.size()
        return {name: d.t(*shape) for name in names} | {"weight": d.t(shape[-1])} | d.some(eps=2.0**-17)

    return of


def _layer_norm(d: Draw) -> dict:
    shape = *d.lead(), d.size(), d.size()
    return {"x": d.t(*shape)} | d.some(weight=d.t(shape[-1]), bias=d.t(shape[-1]), eps=0.5, heads=True)


def _with_parameter(d: Draw) -> dict:
    shape = *d.lead(), d.size(), d.size()
    return {"x": d.t(*shape), "weight": d.t(*d.choice(((), shape[-1:], (shape[-2], 1))))} | d.some(features=2)


def _bias_add(d: Draw) -> dict:
    n = d.size()
    return {"x": d.t(*d.lead(), n), "bias": d.t(n)}


def _mask_fill(d: Draw) -> dict:
    shape = *d.lead(), d.size()
    return {
        "x": d.t(*shape),
        "mask": d.t(*shape[d.randrange(len(shape)) :]) > 0,
        "value": d.choice((0.0, -1e4, -math.inf)),
    }


def _rope(d: Draw) -> dict:
    dim, heads, packed = d.choice((2, 8, 16)), d.choice((1, 2, 3)), d.random() < 0.5
    lead = (d.size(),) if packed else d.lead()
    where = {"cu_seqlens": d.ends(lead[0])} if packed else {"positions": d.ids(lead, 32)}
    table = bi.rope_table(32, d.choice((dim, dim, 2)))
    return {"x": d.t(*lead, heads, dim), "table": table, **where} | d.some(interleaved=True)


def _embedding(d: Draw) -> dict:
    vocab = d.size()
    return {"ids": d.ids(d.lead(), vocab), "weight": d.t(vocab, d.size())} | d.some(padding_id=0)


def _targets(d: Draw, lead: tuple[int, ...], vocab: int) -> dict:
    return {"targets": d.ids(lead, vocab)} | d.some(temperature=0.7, ignore_index=d.choice((-100, 0)))


def _token_logprob(d: Draw) -> dict:
    lead, vocab = d.lead(), d.size()
    return {"logits": d.t(*lead, vocab)} | _targets(d, lead, vocab)


def _lm_head(d: Draw) -> dict:
    lead, vocab, hidden = d.lead(), d.size(), d.size()
    return {"hidden": d.t(*lead, hidden), "weight": d.t(vocab, hidden), **_targets(d, lead, vocab)} | d.some(
        keep_bytes=d.choice((0, 10**6))
    )


def _attention(d: Draw) -> dict:
    kind, width, keys = d.choice(("packed", "other keys", "batch", "lengths", "paged")), d.choice((8, 16)), 2
    heads = keys * d.choice((1, 2))
    count, most, new = d.choice((1, 2, 3)), d.choice((4, 6)), d.choice((1, 3))
    if kind in ("packed", "other keys"):
        rows = d.size()
        ends = d.ends(rows)
        given = {"q": d.t(rows, heads, width), "k": d.t(rows, keys, width), "v": d.t(rows, keys, width)}
        given[d.choice(("cu_seqlens", "cu_seqlens_q"))] = ends
        if kind == "other keys":
            given |= {"cu_seqlens_k": ends, "cu_seqlens_q": given.pop("cu_seqlens", ends)}
    elif kind == "paged":
        given = {"q": d.t(count, new, heads, width), "k": d.t(4, 2, keys, width), "v": d.t(4, 2, keys, width)}
        given |= {"lengths_k": d.ids((count,), most - 3) + 3, "block_table": d.ids((count, most // 2), 4)}
    else:
        given = {"q": d.t(count, new, heads, width)} | {name: d.t(count, most, keys, width) for name in ("k", "v")}
        if kind == "lengths":
            given |= {"lengths_k": d.ids((count,), most + 1)} | d.some(lengths_q=d.ids((count,), new + 1))
            given |= d.some(left_padded=True)
    spans = d.choice(({}, {}, {"causal": False}, {"window": 2}, {"chunk": 2}))
    return given | spans | d.some(scale=0.5, soft_cap=2.0, sinks=d.t(heads))


def _integers(d: Draw, values: list[int]):
    return d.choice((list, tuple, torch.tensor, np.array))(values)


def _layout(d: Draw) -> dict:
    lengths = [d.randrange(5) for _ in range(d.choice((1, 2, 3)))]
    starts = [i * 5 for i in range(len(lengths))]
    order = d.sample(range(len(lengths)), len(lengths))
    given = {"starts": _integers(d, starts), "lengths": _integers(d, lengths), "rows": 5 * len(lengths)}
    return given | d.some(order=_integers(d, order))


def _packed(d: Draw) -> dict:
    ends = d.ends(d.size()).tolist()
    return {"cu_seqlens": _integers(d, ends)} | d.some(order=d.sample(range(len(ends) - 1), len(ends) - 1))


def _padded(d: Draw) -> dict:
    lengths = [d.randrange(5) for _ in range(d.choice((1, 2, 3)))]
    return {"lengths": _integers(d, lengths), "width": 5} | d.some(left=True, order=[*range(len(lengths))])


def _main_grads(d: Draw) -> dict:
    p = [torch.nn.Parameter(d.t(*s)) for s in d.choice((((3, 4),), ((3, 4), (5,)), ((2, 4), (3, 4), ())))]
    return {"parameters": p} | d.some(tied=p[:1], groups=2)


def _shared(of: Callable[[Draw], dict]) -> Callable[[Draw], dict]:
    """A call of a weight that is shared over the ranks."""

    def shared(d: Draw) -> dict:
        given = of(d)
        parallel = bi.TensorParallel(torch.distributed.group.WORLD)
        return given | {"weight": parallel.share(given["weight"], together=None)}

    return shared


def _groups(d: Draw, tokens: int) -> bi.Groups:
    return bi.group_by_expert(d.ids((tokens, 2), 4), 4)


def _grouped_linear(d: Draw) -> dict:
    ends = d.ids((3,), d.size()).int().sort().values
    k, n = d.size(), d.size()
    return {"x": d.t(int(ends[-1]), k), "weight": d.t(3, n, k), "offsets": ends} | d.some(bias=d.t(3, n))


def _routed_linear(d: Draw) -> dict:
    lead, k, n = (d.size(),), d.size(), d.size()
    return {"x": d.t(*lead, k), "experts": d.ids(lead, 3), "weight": d.t(3, n, k)} | d.some(bias=d.t(3, n))


def _routed_sum(d: Draw) -> dict:
    shape = d.size(), 2
    return {"y": d.t(*shape, 8), "weights": d.t(*shape), "experts": d.ids(shape, 4)}


CALLS: dict[str, Callable[[Draw], dict]] = {
    "silu": lambda d: {"x": d.t(*d.lead(), d.size())},
    "gelu": lambda d: {"x": d.t(*d.lead(), d.size())} | d.some(approximate="tanh"),
    "swiglu": _two("gate", "up"),
    "geglu": lambda d: _two("gate", "up")(d) | d.some(approximate="tanh"),
    "clamped_swiglu": lambda d: _two("gate", "up")(d) | d.some(limit=d.choice((0.5, 2)), alpha=-1.5, offset=0.3),
    "soft_cap": lambda d: {"x": d.t(*d.lead(), d.size()), "cap": d.choice((0.25, 30))},
    "add": _two("x", "residual"),
    "scale": lambda d: {"x": d.t(*d.lead()), "factor": d.choice((1.5, -3, 0.0))},
    "bias_add": _bias_add,
    "mask_fill": _mask_fill,
    "cast": lambda d: {"x": d.t(*d.lead(), 3), "dtype": d.choice([*DTYPES.values()])},
    "rope": _rope,
    "rope_table": lambda d: (
        {"positions": d.size(), "head_dim": d.choice((2, 16))}
        | d.some(theta=1e6, device="cpu", scaling={"rope_type": d.choice(("linear", "ntk")), "factor": 4})
    ),
    "packed_positions": lambda d: {"cu_seqlens": d.ends(n := d.size()), "tokens": n},
    "linear": _linear,
    "matmul": _matmul,
    "rms_norm": _norm("x"),
    "qk_norm": _norm("x"),
    "add_rms_norm": _norm("x", "residual"),
    "embedding": _embedding,
    "lm_head_logprob": _lm_head,
    "token_logprob": _token_logprob,
    "layer_norm": _layer_norm,
    "row_sum": lambda d: {"x": d.t(*d.lead(), d.size())} | d.some(scale=0.5, out_dtype=torch.float32),
    "softmax": lambda d: {"x": d.t(*d.lead(), d.size())} | d.some(out_dtype=torch.float32),
    "scaled": _with_parameter,
    "shifted": _with_parameter,
    "log_softmax": lambda d: {"logits": d.t(*d.lead(), d.size())},
    "attention": _attention,
    "gated": lambda d: {"gate_up": d.t(*d.lead(), 2 * d.size())} | d.some(gate="geglu", interleaved=True),
    "top_k": lambda d: {"scores": d.t(*d.lead(), 6), "k": d.choice((1, 2, 6))},
    "grouped_linear": _grouped_linear,
    "routed_linear": _routed_linear,
    "routed_sum": _routed_sum,
    "group_by_expert": lambda d: {"expert_ids": d.ids((d.size(), 2), 4), "experts": 4},
    "dispatch": lambda d: {"x": d.t(n := d.size(), 8), "groups": _groups(d, n)},
    "combine": lambda d: {"y": d.t(2 * (n := d.size()), 8), "weights": d.t(n, 2), "groups": _groups(d, n)},
    "batch_invariant_mode": lambda d: d.some(strict=True),
    "TokenLayout": _layout,
    "TokenLayout.packed": _packed,
    "TokenLayout.padded": _padded,
    "MainGrads": _main_grads,
    "MainGrads.close": lambda d: {"group": 0},
    "MainGrads.clip_grad_norm_": lambda d: {"max_norm": 1.0} | d.some(error_if_nonfinite=False),
    "MainGrads.load_state_dict": lambda d: {"state": d.state},
    "TensorParallel": lambda d: {"group": torch.distributed.group.WORLD} | d.some(sequence=True),
    "ExpertParallel": lambda d: {"group": torch.distributed.group.WORLD},
    **{f"TensorParallel.{name}": call for name, call in (("linear", _linear), ("rms_norm", _norm("x")))},
    **{f"TensorParallel.{n}": _shared(of) for n, of in (("embedding", _embedding), ("lm_head_logprob", _lm_head))},
    **{f"TensorParallel.{name}": call for name, call in (("qk_norm", _norm("x")), ("attention", _attention))},
    "TensorParallel.share": lambda d: {"weight": d.t(4, 6)} | d.some(together=2, keys=True),
    "audit": lambda d: {"fn": torch.relu, "inputs": d.t(2, 3), "backward": False, "seconds": 0.1},
    "locate": lambda d: {"model": torch.nn.Linear(2, 2), "batch": d.t(2, 2, dtype=torch.float32)},
}
