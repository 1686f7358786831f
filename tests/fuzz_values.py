"""What the fuzz calls: a valid call of each public name, drawn by a seed, and odd values that take an argument's
place."""

import math
import random
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import bi_kernels as bi
from bi_kernels.contract import DTYPES

HUGE = 2**45  # rows of an expanded tensor, which no memory holds
NAN, INF = math.nan, math.inf


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


class Plain(Tensor):
    """A subclass whose numbers stand in its memory."""


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
        return {name: d.t(*shape) for name in names} | {"weight": d.t(shape[-1])} | d.some(eps=1e-5)

    return of


def _bias_add(d: Draw) -> dict:
    n = d.size()
    return {"x": d.t(*d.lead(), n), "bias": d.t(n)}


def _mask_fill(d: Draw) -> dict:
    shape = *d.lead(), d.size()
    return {"x": d.t(*shape), "mask": d.t(*shape[d.randrange(len(shape)) :]) > 0, "value": d.choice((0.0, -1e4, -INF))}


def _rope(d: Draw) -> dict:
    dim, heads, packed = d.choice((2, 8, 16)), d.choice((1, 2, 3)), d.random() < 0.5
    lead = (d.size(),) if packed else d.lead()
    where = {"cu_seqlens": d.ends(lead[0])} if packed else {"positions": d.ids(lead, 32)}
    return {"x": d.t(*lead, heads, dim), "table": bi.rope_table(32, dim), **where} | d.some(interleaved=True)


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
    return given | d.choice(({}, {}, {"causal": False}, {"window": 2})) | d.some(scale=0.5)


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


CALLS: dict[str, Callable[[Draw], dict]] = {
    "silu": lambda d: {"x": d.t(*d.lead(), d.size())},
    "gelu": lambda d: {"x": d.t(*d.lead(), d.size())} | d.some(approximate="tanh"),
    "swiglu": _two("gate", "up"),
    "add": _two("x", "residual"),
    "scale": lambda d: {"x": d.t(*d.lead()), "factor": d.choice((1.5, -3, 0.0))},
    "bias_add": _bias_add,
    "mask_fill": _mask_fill,
    "cast": lambda d: {"x": d.t(*d.lead(), 3), "dtype": d.choice([*DTYPES.values()])},
    "rope": _rope,
    "rope_table": lambda d: {"positions": d.size(), "head_dim": d.choice((2, 16))} | d.some(theta=1e6, device="cpu"),
    "packed_positions": lambda d: {"cu_seqlens": d.ends(n := d.size()), "tokens": n},
    "linear": _linear,
    "matmul": _matmul,
    "rms_norm": _norm("x"),
    "qk_norm": _norm("x"),
    "add_rms_norm": _norm("x", "residual"),
    "embedding": _embedding,
    "lm_head_logprob": _lm_head,
    "token_logprob": _token_logprob,
    "log_softmax": lambda d: {"logits": d.t(*d.lead(), d.size())},
    "attention": _attention,
    "TokenLayout": _layout,
    "TokenLayout.packed": _packed,
    "TokenLayout.padded": _padded,
    "MainGrads": _main_grads,
    "MainGrads.close": lambda d: {"group": 0},
    "MainGrads.clip_grad_norm_": lambda d: {"max_norm": 1.0} | d.some(error_if_nonfinite=False),
    "MainGrads.load_state_dict": lambda d: {"state": d.state},
    "TensorParallel": lambda d: {"group": torch.distributed.group.WORLD} | d.some(sequence=True),
    **{f"TensorParallel.{name}": call for name, call in (("linear", _linear), ("rms_norm", _norm("x")))},
    **{f"TensorParallel.{n}": _shared(of) for n, of in (("embedding", _embedding), ("lm_head_logprob", _lm_head))},
    **{f"TensorParallel.{name}": call for name, call in (("qk_norm", _norm("x")), ("attention", _attention))},
    "TensorParallel.share": lambda d: {"weight": d.t(4, 6)} | d.some(together=2, keys=True),
    "audit": lambda d: {"fn": torch.relu, "inputs": d.t(2, 3), "backward": False, "seconds": 0.1},
    "locate": lambda d: {"model": torch.nn.Linear(2, 2), "batch": d.t(2, 2, dtype=torch.float32)},
}

# Odd values, by what stood there

ANYTHING: list = [None, "x", "two\nlines", b"y", [], [1], (1,), {}, {1: 2}, 1, 0, -1, 2.5, True, NAN, 2**63, 1j]
ANYTHING += [10**5000, -(10**400), object(), len, Ellipsis, int, torch.float32, torch.float64, torch.device("cpu")]
ANYTHING += [np.zeros(3), np.zeros((3, 3)), np.float32(2), np.int64(1), torch.zeros(()), torch.ones(3, 3), range(3)]
NUMBERS: list = [0, -1, -0.0, 1, 2, NAN, INF, -INF, 1e300, 1e-300, 5e-324, 1e-39, 2**63, 2**31, -(2**63) - 1, 10**400]
NUMBERS += [True, False, "1", 1.5, 1j, Fraction(1, 2), np.float64(0.5), np.float32(0.5), np.int64(1), np.bool_(True)]
NUMBERS += [torch.tensor(1.0), torch.tensor([1.0, 2.0]), torch.tensor(1), [1], 1e39, -100, 7]
DTYPE_NAMES = ("float64", "complex64", "int32", "int64", "bool", "uint8", "int8", "int16", "uint16", "uint64")
DTYPE_NAMES += ("float16", "bfloat16", "float32", "float8_e4m3fn", "quint8")


def _dtype(d: Draw, t: Tensor) -> Tensor:
    name = d.choice(DTYPE_NAMES)
    if name == "quint8":
        return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8)
    return t.to(getattr(torch, name))


def _apart(d: Draw, t: Tensor) -> Tensor:
    """A slice with other numbers around it, at an address of no alignment."""
    padded = torch.full((t.numel() + 4,), 77, dtype=t.dtype)
    return padded[3 : 3 + t.numel()].view(t.shape).copy_(t)


def _spread(d: Draw, t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, 99)], -1)[..., 0]


def _overlapping(d: Draw, t: Tensor) -> Tensor:
    flat = d.t(t.numel() + 1).to(t.dtype)
    return flat.as_strided(t.shape, [1] * t.dim())


def _holding(d: Draw, t: Tensor) -> Tensor:
    t, value = t.clone(), d.choice((NAN, INF, -INF, 1e30, -1e30, 0.0, 1e-40) if t.is_floating_point() else WRONG)
    if t.numel():
        t.view(-1)[d.randrange(t.numel())] = value
    return t


WRONG = (-1, -100, 0, 1, 2**31 - 1, -(2**31), 4, 6, 33, 1000)  # ids, lengths and ends of sequences


def _fake(d: Draw, t: Tensor) -> Tensor:
    return FakeTensorMode(allow_non_fake_inputs=d.random() < 0.5).from_tensor(t)


def _rows(d: Draw, t: Tensor) -> Tensor:
    dim = d.randrange(t.dim())
    return d.choice((lambda: torch.cat([t, t.narrow(dim, 0, 1)], dim), lambda: t.narrow(dim, 0, t.shape[dim] - 1)))()


@torch.inference_mode()
def _inference(d: Draw, t: Tensor) -> Tensor:
    return t.clone()


TENSORS: dict[str, Callable[[Draw, Tensor], object]] = {
    "another dtype": _dtype,
    "more rows or fewer": _rows,
    "no rows": lambda d, t: t.narrow(d.randrange(t.dim()), 0, 0),
    "a dimension more": lambda d, t: t.unsqueeze(d.randrange(t.dim() + 1)),
    "a dimension less": lambda d, t: t[0],
    "flat": lambda d, t: t.flatten(),
    "0-d": lambda d, t: t.flatten()[0],
    "huge": lambda d, t: t[:1].expand(HUGE, *t.shape[1:]),
    "huge and more": lambda d, t: t[..., :1].expand(*t.shape[:-1], HUGE),
    "transposed": lambda d, t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "apart": _apart,
    "spread": _spread,
    "expanded": lambda d, t: t[:1].expand(t.shape),
    "overlapping": _overlapping,
    "negated": lambda d, t: torch._neg_view(t),
    "conjugated": lambda d, t: t.to(torch.complex64).conj(),
    "imaginary": lambda d, t: torch.complex(t.float(), t.float()).conj().imag,
    "holding": _holding,
    "all of one": lambda d, t: torch.full_like(t, d.choice((0, 1, -100))),
    "sparse": lambda d, t: t.to_sparse(),
    "csr": lambda d, t: t.to_sparse_csr(),
    "mkldnn": lambda d, t: t.float().to_mkldnn(),
    "nested": lambda d, t: torch.nested.nested_tensor([*t]),
    "jagged": lambda d, t: torch.nested.nested_tensor([*t], layout=torch.jagged),
    "meta": lambda d, t: t.to("meta"),
    "fake": _fake,
    "a subclass": lambda d, t: t.as_subclass(Plain),
    "a parameter": lambda d, t: torch.nn.Parameter(t, requires_grad=t.is_floating_point() and d.random() < 0.5),
    "of inference": _inference,
    "of a graph": lambda d, t: t.clone().requires_grad_() * 1,
    "numpy": lambda d, t: t.float().numpy(),
    "a list": lambda d, t: t.tolist(),
    "in a list": lambda d, t: [t],
    "an iterator": lambda d, t: iter(t),
}
OTHERWISE = ("transposed", "apart", "spread", "expanded", "overlapping", "holding", "all of one", "a subclass")
OTHERWISE += ("a parameter", "of inference", "of a graph", "no rows", "another dtype", "imaginary")
LISTS: dict[str, Callable[[Draw, list], object]] = {
    "reversed": lambda d, v: v[::-1],
    "cut": lambda d, v: v[:-1],
    "longer": lambda d, v: [*v, d.choice((0, v[-1], 10**6))],
    "empty": lambda d, v: [],
    "holding": lambda d, v: [*v[:-1], d.choice(ANYTHING + [-1, 2**40, 2**70, "1"])],
    "floats": lambda d, v: [float(n) for n in v],
    "nested": lambda d, v: [v],
    "numpy": lambda d, v: np.array(v),
    "numpy floats": lambda d, v: np.array(v, dtype=np.float32),
    "a generator": lambda d, v: (n for n in v),
    "one": lambda d, v: v[0],
    "bools": lambda d, v: [bool(n) for n in v],
    "a text": lambda d, v: "".join(map(str, v)),
    "tensors": lambda d, v: [torch.tensor(n) for n in v],
}


def _odd_parameters(d: Draw, given: list[Tensor]) -> tuple[str, object]:
    kind = d.choice(("names", "generator", "tensor", "element", "element", "element", "none", "twice", "module"))
    if kind == "element":
        kind, p = odd_tensor(d, given[0].detach())
        return kind, [p, *given[1:]]
    made = {"names": lambda: [(f"w{i}", p) for i, p in enumerate(given)], "generator": lambda: iter(given)}
    made |= {"tensor": lambda: given[0], "none": list, "twice": lambda: given * 2, "module": lambda: ["w"]}
    return kind, made[kind]()


def odd_tensor(d: Draw, t: Tensor) -> tuple[str, object]:
    """Returns an odd value in a tensor's place, and what is odd about it; some can be made of no such tensor."""
    if t.is_nested or t.numel() > 10**6:
        return "likewise", t
    while True:
        kind = d.choice(OTHERWISE if d.random() < 0.5 else [*TENSORS])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = TENSORS[kind](d, t)
        except Exception:
            continue
        if isinstance(value, Tensor) and type(value) is Tensor and value.is_leaf and value.is_floating_point():
            value.requires_grad_(d.random() < 0.3 and not value.is_inference())
        return kind, value


def odd(d: Draw, name: str, value: object) -> tuple[str, object]:
    """Returns an odd value in the place of `value`, and what is odd about it."""
    if d.random() < 0.1 or value is None:
        value = d.choice([v for v in ANYTHING if name not in ("calls", "loss", "reference") or not callable(v)])
        return f"{type(value).__name__}", value.clone() if isinstance(value, Tensor) else value
    if isinstance(value, Tensor):
        return odd_tensor(d, value)
    if isinstance(value, bi.RopeTable):
        part = d.choice(("cos", "sin"))
        kind, other = odd_tensor(d, getattr(value, part))
        return f"{part} {kind}", value._replace(**{part: other})
    if name in ("parameters", "tied") and value:
        return _odd_parameters(d, value)
    if isinstance(value, (list, tuple, np.ndarray)) and len(value):
        kind = d.choice([*LISTS])
        return kind, LISTS[kind](d, [int(n) for n in value])
    if isinstance(value, dict):
        one = d.choice([*value])
        kind, other = odd(d, one, value[one] if isinstance(value[one], str) else None)
        return f"{one} {kind}", value | {one: other}
    value = d.choice(NUMBERS if isinstance(value, (int, float)) and type(value) is not bool else ANYTHING)
    return f"{type(value).__name__}", value.clone() if isinstance(value, Tensor) else value
