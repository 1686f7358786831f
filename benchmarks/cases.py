"""The measured shapes: linear layers of model families, random products, and the grid of decode."""

import math
import random
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from bi_kernels.audit.parameters import GROUPS
from bi_kernels.contract import CONTRACT, evaluate


def settings(shapes: str) -> dict:
    """Returns the contract's [benchmark]; for `tiny` shapes, with a few small cells of each group."""
    found = CONTRACT["benchmark"]
    return found | {g: found[g] | found["tiny"].get(g, {}) for g in GROUPS} if shapes == "tiny" else found


class Layer(NamedTuple):
    """A linear layer: y (M, N) of x (M, K). names: every (family, layer, shard) that has this shape."""

    n: int
    k: int
    names: tuple[tuple[str, str, int], ...]

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(family for family, _, _ in self.names))

    @property
    def name(self) -> str:
        family, layer, shard = self.names[0]
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{family} {layer}{f' / {shard}' if shard > 1 else ''}{more}"


def layers(gemm: dict, shards: bool = True) -> list[Layer]:
    """Returns every layer of the families, and of their shards, once for each shape."""
    found: dict[tuple[int, int], list] = {}
    for family, sizes in gemm["families"].items():
        dense = "heads" in sizes
        for (name, (n, k, *cut)), shard in product(
            gemm["layers" if dense else "experts"].items(), gemm["shards"] if dense and shards else (1,)
        ):
            shape = [int(evaluate(d, **sizes)) for d in (n, k)]
            if cut:
                shape[cut[0]] //= shard
            found.setdefault(tuple(shape), []).append((family, name, shard))
    return [Layer(*shape, tuple(names)) for shape, names in found.items()]


def drawn(table: dict, seed: int) -> list[tuple[int, int, int]]:
    """Returns (M, N, K) of random products, each dimension log-uniform; a seed always gives the same."""
    rng, found, unit = random.Random(f"bench {seed}"), [], table["multiple"]

    def one(name: str, unit: int) -> int:
        low, high = table[name]
        value = math.exp(rng.uniform(math.log(low), math.log(high)))
        return min(high, max(low, round(value / unit) * unit))

    while len(found) < table["count"]:
        shape = one("M", 1), one("N", unit), one("K", unit)
        if 2 * math.prod(shape) <= table["flops"] and shape not in found:
            found.append(shape)
    return found


class Cell(NamedTuple):
    """A decode step: one query of each sequence against its keys. bytes: the size of all keys and values."""

    batch: int
    keys: int
    grouping: str
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"B {self.batch}, {self.keys} keys, {self.grouping}, D {self.head_dim}"

    @property
    def bytes(self) -> int:
        return 2 * 2 * self.batch * self.keys * self.kv_heads * self.head_dim


def decode(table: dict) -> Iterator[Cell]:
    """Yields every cell of the grid, including those left out because they are larger than `largest`."""
    grid = product(table["head_dims"], table["heads"].items(), table["keys"], table["batches"])
    for head_dim, (name, heads), keys, batch in grid:
        yield Cell(batch, keys, name, *heads, head_dim)


def expected(group: str, shapes: str, seed: int) -> int:
    """Returns the number of measurements that a complete group has."""
    table = settings(shapes)
    own, gemm = table[group], table["gemm"]
    return {
        "gemm": lambda: len(layers(gemm)) * len(own["rows"]),
        "drawn": lambda: len(drawn(own, seed)),
        "gradients": lambda: 4 * len(layers(gemm, shards=False)) * len(own["tokens"]),
        "attention": lambda: 2 * len(own["sizes"]),
        "decode": lambda: 2 * sum(cell.bytes <= own["largest"] for cell in decode(own)),
        "rows": lambda: 2 * (len(own["rms_norm"]) + 4) + 3 * 2,
        "lm_head": lambda: 4,
        "calls": lambda: 9,
    }[group]()
