"""Reads `contract.toml`, the one source of dtypes, error bounds, shapes and row counts."""

import math
import tomllib
from collections.abc import Mapping
from importlib.resources import files

import torch

CONTRACT = tomllib.loads(files(__package__).joinpath("contract.toml").read_text(encoding="utf-8"))
VERSION: str = CONTRACT["version"]
_DTYPES: dict = CONTRACT["dtypes"]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, _DTYPES[name]["torch"]) for name in _DTYPES["supported"]}
EPS: float = CONTRACT["arithmetic"]["eps"]
SHAPES: dict[str, dict] = CONTRACT["shapes"]
SWEEP: dict = CONTRACT["sweep"]
VARIANT: dict = SWEEP["variant"]


def evaluate(expression: str, **names: float) -> float:
    """Returns an arithmetic expression of the contract; `ceil` and `sqrt` are known beside `names`."""
    return eval(expression, {"__builtins__": {}, "ceil": math.ceil, "sqrt": math.sqrt}, names)


def dtype_name(dtype: torch.dtype) -> str:
    """'bf16' for torch.bfloat16, and so on; the torch name of any other dtype."""
    return next((name for name, d in DTYPES.items() if d == dtype), str(dtype).removeprefix("torch."))


def check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError naming the op, the argument, its dtype and the supported set."""
    if tensor.dtype not in DTYPES.values():
        raise TypeError(f"{op}: {name} has dtype {dtype_name(tensor.dtype)}; supported are {', '.join(DTYPES)}")


def row(op: str, gradient: str | None = None) -> dict:
    """Returns an op's row, or that of its gradient of the input named `gradient`: S, derivation, c."""
    found = CONTRACT["ops"][op]
    found = found if gradient is None else found["gradient"][gradient]
    return row(op, found["like"]) if "like" in found else found


def rounding(dtype: torch.dtype) -> tuple[float, float]:
    """(u, tiny): one rounding of x to `dtype` errs by at most u |x| + tiny."""
    found = _DTYPES[dtype_name(dtype)]
    return 2.0 ** -found["p"], evaluate(found["tiny"])


def factor(op: str, inputs: torch.dtype, n: int | Mapping[str, int] = 1, gradient: str | None = None) -> float:
    """c of an op, or of a gradient of it, on inputs of a dtype; n: the length of the reduction, or several by name."""
    c = row(op, gradient)["c"]
    return evaluate(c.get(dtype_name(inputs), c.get("any")), **n if isinstance(n, Mapping) else {"n": n})


def bound(
    op: str,
    dtype: torch.dtype,
    reference: torch.Tensor,
    magnitude: torch.Tensor,
    n: int | Mapping[str, int] = 1,
    gradient: str | None = None,
    inputs: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the elementwise bound u |y64| + c (S + 2^-126) + tiny of `op` for an output of `dtype` (fp64, like
    `reference`).

    magnitude: the op's S of the contract; n: the length of the reduction, or several by name; gradient: the input
    whose gradient is judged, where it is one; inputs: the dtype of the op's inputs where the output has another, as a
    gradient in a parameter's fp32 `main_grad` has.
    """
    u, tiny = rounding(dtype)
    limit = reference.abs().mul_(u)  # in place: of an LM head's gradient each is gigabytes
    limit += (magnitude + 2.0**-126).mul_(factor(op, inputs or dtype, n, gradient))
    return limit.add_(tiny)


def linears(shapes: str) -> dict[str, tuple[int, int]]:
    """Returns the (N, K) of the model's linear layers at a shape set."""
    return {name: tuple(int(evaluate(d, **SHAPES[shapes])) for d in dims) for name, dims in CONTRACT["linears"].items()}


def rows(largest: int) -> list[int]:
    """Returns the row counts of the sweep up to `largest`."""
    return [m for m in SWEEP["rows"] if m <= largest]
