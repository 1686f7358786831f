"""Frequencies of RoPE for more positions than a model was first trained on: in fp64, as Transformers' `rope_parameters`
spell and compute them."""

import math
from collections.abc import Mapping

import torch

from bi_kernels.scalars import check_flag, check_number, truncated_repr

TRAINED = "original_max_position_embeddings"
KEYS = {  # of a rope_type: what it needs, and what it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "yarn": (
        ("factor", TRAINED),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", TRAINED), ()),
}


def frequencies(op: str, dim: int, theta: float, scaling: Mapping | None) -> tuple[torch.Tensor, float]:
    """Returns the angle by which each of dim/2 pairs turns a position, and what multiplies cos and sin."""
    i = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    plain = theta ** (-i / dim)
    given = {"rope_type": "default"} if scaling is None else _checked(op, theta, scaling)
    kind, factor = given["rope_type"], given.get("factor", 1.0)
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "ntk":  # theta times factor ** (dim / (dim - 2)): the last pair turns as linear's, the first as before
        return plain * factor ** (-i / max(dim - 2, 1)), 1.0
    if kind == "llama3":  # by how often a pair turns in the context trained on
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        kept = ((given[TRAINED] * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / factor), 1.0
    if kind == "yarn":
        kept = 1 - _ramp(dim, theta, given)
        return plain * (kept + (1 - kept) / factor), _attention_factor(given)
    return plain, 1.0


def _ramp(dim: int, theta: float, given: Mapping) -> torch.Tensor:
    """Returns for each pair how much of YaRN's interpolation it gets, from 0 (beta_fast turns and more) to 1."""
    turning = lambda turns: dim * math.log(given[TRAINED] / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = turning(given.get("beta_fast", 32)), turning(given.get("beta_slow", 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0  # as Transformers has it
    return ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)


def _attention_factor(given: Mapping) -> float:
    if "attention_factor" in given:
        return given["attention_factor"]
    scale = lambda weight: 0.1 * weight * math.log(given["factor"]) + 1 if given["factor"] > 1 else 1.0
    both = "mscale" in given and "mscale_all_dim" in given
    return scale(given["mscale"]) / scale(given["mscale_all_dim"]) if both else scale(1)


def _checked(op: str, theta: float, scaling: Mapping) -> dict:
    """Returns what is given and not None. Raises TypeError and ValueError."""
    if not isinstance(scaling, Mapping):
        raise TypeError(f"{op}: scaling is {truncated_repr(scaling)}, expected None or a dict with a rope_type")
    given = {k: v for k, v in scaling.items() if v is not None}
    kind = given.get("rope_type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(f"{op}: scaling's rope_type is {truncated_repr(kind)}, expected one of {', '.join(KEYS)}")
    needed, optional = KEYS[kind]
    for k in [k for k in given if k not in ("rope_type", "rope_theta", *needed, *optional)]:
        known = ", ".join((*needed, *optional)) or "nothing else"
        raise ValueError(f"{op}: scaling of rope_type {kind!r} has {truncated_repr(k)}, expected {known}")
    for k in needed:
        if k not in given:
            raise ValueError(f"{op}: scaling of rope_type {kind!r} has no {k}, expected {', '.join(needed)}")
    for k, value in given.items():
        if k == "truncate":
            check_flag(op, "scaling's truncate", value)
        elif k != "rope_type" and not 0 < check_number(op, f"scaling's {k}", value) < math.inf:
            raise ValueError(f"{op}: scaling's {k} is {truncated_repr(value)}, expected a positive number")
    if given.get("rope_theta", theta) != theta:
        raise ValueError(f"{op}: scaling's rope_theta is {given['rope_theta']}, expected theta, which is {theta}")
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"{op}: theta is {theta}, expected more than 1 with scaling of rope_type 'yarn'")
    of = {"beta_slow": 1, "beta_fast": 32, **given}
    for less, more in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if less in of and not of[less] < of[more]:
            raise ValueError(f"{op}: scaling's {less} is {of[less]}, expected less than {more}, which is {of[more]}")
    return given
