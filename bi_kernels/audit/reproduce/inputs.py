"""Writes the lines that draw a script's inputs."""

from dataclasses import dataclass

import torch

from bi_kernels.audit.problem.problem import Problem


@dataclass(frozen=True)
class Drawn:
    """A tensor that a script draws."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: int = 0  # of integers, up to `high`; floats are from N(0, 1)
    high: int = 2
    share: float = 0.3  # of a mask that is set

    def line(self, rows: str = "", kind: str = "random") -> str:
        """Returns its Python; rows: a name of the script, the size of a dimension before the others; kind: random,
        spread (exponents that differ), zeros or NaN (zeros, where the dtype has none)."""
        sizes = [*filter(None, (rows,)), *map(str, self.shape)]
        size = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
        if kind == "NaN" and self.dtype.is_floating_point:
            return f"torch.full({size}, torch.nan, dtype={self.dtype})"
        if kind in ("zeros", "NaN"):
            return f"torch.zeros({size}, dtype={self.dtype})"
        if self.dtype == torch.bool:
            return f"(torch.rand({size}) < {self.share:.2f})"
        cast = "" if self.dtype in (torch.float32, torch.int64) else f".to({self.dtype})"
        if not self.dtype.is_floating_point:
            return f"torch.randint({self.low}, {self.high}, {size}){cast}"
        if kind == "spread":
            return f"(torch.randn({size}) * 2.0 ** torch.randint(-4, 5, {size})){cast}"
        return f"torch.randn({size}){cast}"


def inputs(p: Problem, ids: int = 0) -> dict:
    """Returns an op, its device, a token's tensors and the shared ones by name; ids: token ids are below it, or below
    the vocabulary."""

    def drawn(dims: str, dtype: torch.dtype) -> Drawn:
        if dims.endswith(":id"):
            return Drawn((), torch.int64, high=ids or p._shape(dims)[0])
        return Drawn(p._shape(dims), torch.bool if dims.endswith(":bool") else dtype)

    return {
        "op": p.op,
        "device": repr(p.device.type),
        "tokens": {name: drawn(dims, p.input_dtype) for name, dims in p.op.tokens.items()},
        "shared": {name: drawn(dims, p.dtype) for name, dims in p.op.shared.items()},
    }


def call(p: Problem, tensors: dict[str, str], *more: str, positions: tuple[int, str] = (0, "")) -> str:
    """Returns the arguments of `fn`: the tensors' Python in the op's order, its constants, and `more`; positions: how
    many its table holds, and their Python, of an op that takes them."""
    constants = [f"{name}={value!r}" for name, value in p.op.constants.items()] + [f"dtype={p.dtype}"] * p.op.casts
    if p.op.positions:
        table = f"rope_table({positions[0]}, {p.dims['head_dim']}, device={p.device.type!r})"
        constants += [f"table={table}", f"positions={positions[1]}"]
    return ", ".join([*(tensors[name] for name in p.op.order or tensors), *constants, *more])
