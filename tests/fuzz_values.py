"""Odd values that take an argument's place in a call of the fuzz."""

import math
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from fuzz_calls import Draw
from torch import Tensor
from torch._subclasses import FakeTensorMode

import bi_kernels as bi

HUGE = 2**45  # rows of an expanded tensor, which no memory holds
NAN, INF = math.nan, math.inf


class Plain(Tensor):
    """A subclass whose numbers stand in its memory."""


ANYTHING: list = [None, "x", "two\nlines", b"y", [], [1], (1,), {}, {1: 2}, 1, 0, -1, 2.5, True, NAN, 2**63, 1j]
ANYTHING += [10**5000, -(10**400), object(), len, Ellipsis, int, torch.float32, torch.float64, torch.device("cpu")]
ANYTHING += [np.zeros(3), np.zeros((3, 3)), np.float32(2), np.int64(1), torch.zeros(()), torch.ones(3, 3), range(3)]
NUMBERS: list = [0, -1, -0.0, 1, 2, NAN, INF, -INF, 1e300, 2.0**-1000, 2.0**-1074, 2.0**-130, 2**63]
NUMBERS += [2**31, -(2**63) - 1, 10**400, True, False, "1", 1.5, 1j, Fraction(1, 2), np.float64(0.5)]
NUMBERS += [np.float32(0.5), np.int64(1), np.bool_(True)]
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
    t, value = t.clone(), d.choice((NAN, INF, -INF, 1e30, -1e30, 0.0, 2.0**-133) if t.is_floating_point() else WRONG)
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
    if isinstance(value, bi.Groups):  # which nobody makes but group_by_expert
        value = d.choice(ANYTHING)
        return f"{type(value).__name__}", value
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
