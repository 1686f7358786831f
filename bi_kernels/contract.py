"""Reads `contract.toml`, the one source of dtypes, error bounds, shapes and row counts."""

import math
import tomllib
from importlib.resources import files

import torch

CONTRACT = tomllib.loads(files(__package__).joinpath("contract.toml").read_text(encoding="utf-8"))
VERSION: str = CONTRACT["version"]
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, CONTRACT["dtypes"][name]["torch"]) for name in CONTRACT["dtypes"]["supported"]
}
SHAPES: dict[str, dict] = CONTRACT["shapes"]
SWEEP: dict = CONTRACT["sweep"]


def evaluate(expression: str, **names: float) -> float:
    """An arithmetic expression of the contract; `ceil` and `sqrt` are known beside `names`."""
    return eval(expression, {"__builtins__": {}, "ceil": math.ceil, "sqrt": math.sqrt}, names)


def dtype_name(dtype: torch.dtype) -> str:
    """'bf16' for torch.bfloat16, and so on; the torch name of any other dtype."""
    return next((name for name, d in DTYPES.items() if d == dtype), str(dtype).removeprefix("torch."))


def check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError naming the op, the argument, its dtype and the supported set."""
    if tensor.dtype not in DTYPES.values():
        raise TypeError(f"{op}: {name} has dtype {dtype_name(tensor.dtype)}; supported are {', '.join(DTYPES)}")


def bound(op: str, dtype: torch.dtype, reference: torch.Tensor, magnitude: torch.Tensor, n: int = 1) -> torch.Tensor:
    """The elementwise error bound u |y64| + c (S + 2^-126) + tiny of `op` for an output of `dtype` (fp64, like `reference`).

    magnitude: the op's S of the contract; n: the length of the reduction.
    """
    row, c = CONTRACT["dtypes"][dtype_name(dtype)], CONTRACT["ops"][op]["c"]
    factor = evaluate(c.get(dtype_name(dtype), c.get("any")), n=n)
    return 2.0**-row["p"] * reference.abs() + factor * (magnitude + 2.0**-126) + evaluate(row["tiny"])


def linears(shapes: str) -> dict[str, tuple[int, int]]:
    """The (N, K) of the model's linear layers at a shape set."""
    return {name: tuple(int(evaluate(d, **{k: v for k, v in SHAPES[shapes].items() if k != "lengths"})) for d in dims)
            for name, dims in CONTRACT["linears"].items()}


def rows(largest: int) -> list[int]:
    """The row counts of the sweep up to `largest`."""
    return [m for m in SWEEP["rows"] if m <= largest]
