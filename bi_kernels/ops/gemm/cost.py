"""Which launch configuration a GEMM gets: the cheapest by a model of its time, fitted on a GPU.

A tile costs `step` for 16 of k and `leave` for its result; tiles run in waves over the multiprocessors; what all of
them read shares the L2 cache, and what must be read and written the memory. The configurations and their numbers stand
in cost.toml, written by tools/fit_gemm.py. None of them changes a bit, so a wrong guess costs time alone.
"""

import tomllib
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from math import ceil
from typing import NamedTuple

FITTED: dict = tomllib.loads(files(__package__).joinpath("cost.toml").read_text(encoding="utf-8"))
DEVICE: dict = FITTED["device"]
WRITES = {"rows": 2, "columns": 4, "fold": 8}  # bytes of y an element, by how a product is used
MIN_SPEEDUP = 1.05  # by how much a program must be the faster, to be preferred to the usual one
MIN_SPLIT_US = 50  # µs of a product that may be cut in two: a second launch costs the CPU, too
CACHE_LINE_ELEMENTS = 64  # 16-bit numbers: of the L2 cache
SOFTMAX_EXPONENT = 6  # how abruptly the slower of two limits takes over


class Tile(NamedTuple):
    """A configuration of Triton's kernel in kernel.py."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    extra_n: int = 0  # a second accumulator of n/2 columns: widths 96 and 192 fill 132 SMs where 128 and 256 do not
    swap: bool = False  # the weight on the tensor core's M side
    group: int = 8  # row tiles that share one column of W before the next column
    persistent: int = 0  # programs that stay on a multiprocessor; 0: one program a tile
    halves: bool = False  # store the tile in two halves: less shared memory, one more stage

    @property
    def size(self) -> tuple[int, int]:
        return self.m, self.n + self.extra_n

    @property
    def resident(self) -> int:
        """Tells how many programs fit a multiprocessor, by its shared memory, registers and threads."""
        threads, pipeline = 32 * self.warps, 2 * self.stages * sum(self.size) * self.k + 2048
        registers = min(255, self.size[0] * self.size[1] // threads + 64) * threads
        return self.persistent or max(1, min(230_000 // pipeline, 65536 // registers, 2048 // threads))


class PipelineConfig(NamedTuple):
    """A configuration of sm_90's kernel in gemm/hopper.py."""

    rows: int  # of a tile: 64 or 128, or fewer of x that is stored by rows, beside which the tensor core adds nothing
    columns: int
    k: int  # of a stage
    stages: int
    groups: int  # that compute, in turns where there are two
    resident: int = 1  # programs on a multiprocessor
    group: int = 8  # row tiles that share one column of w before the next column

    @property
    def size(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def part(self) -> int:
        """Tells how much of k a block in shared memory has: of few rows, as much as one line of the tensor core's, so
        that the rows of nobody are found in what follows and take no memory."""
        return 64 if self.rows < 64 else self.k

    @property
    def shared(self) -> int:
        """Tells the bytes of shared memory of a program, barriers among them."""
        beyond = max(0, 64 - self.rows) * 64
        return 2 * (self.stages * self.k * sum(self.size) + beyond) + 16 * self.stages + 1024


class Cost(NamedTuple):
    start: float  # µs
    step: float  # ns for 16 of k
    leave: float  # µs for 8 bytes an element


def _read(kind: type, table: str) -> dict[str, dict]:
    """Returns {use: {configuration: cost}}."""
    found: dict[str, dict] = {use: {} for use in WRITES}
    for entry in FITTED[table]:
        costs = entry["cost"]
        for use, numbers in costs.items():
            found[use][kind(**{k: v for k, v in entry.items() if k != "cost"})] = Cost(*numbers)
    return found


TILES, RINGS = _read(Tile, "tile"), _read(PipelineConfig, "ring")
LIBRARY = FITTED["library"]


def reached(peak: float) -> float:
    """Returns the TB/s that products reach of a memory whose clock allows `peak`; 0: as of the GPU of the fit."""
    return DEVICE["dram"] * (peak / DEVICE["peak"] if peak else 1)


def memory_us(M: int, N: int, K: int, use: str, peak: float = 0) -> float:
    """Returns the microseconds that a 16-bit product's operands and result take in memory; peak: see `reached`."""
    return (2 * K * (M + N) + M * N * WRITES[use]) / (reached(peak) * 1e6)


def _slower(a: float, b: float) -> float:
    return (a**SOFTMAX_EXPONENT + b**SOFTMAX_EXPONENT) ** (1 / SOFTMAX_EXPONENT)


def predicted_us(
    way: Tile | PipelineConfig,
    cost: Cost,
    M: int,
    N: int,
    K: int,
    use: str,
    transposed: tuple[bool, bool] | None = None,
    peak: float = 0,
) -> float:
    """Returns the microseconds that a product takes by the model. transposed: of x and w, which ones are stored by
    columns; what `use` tells of both, unless given. peak: of the GPU's memory, see `reached`."""
    m, n = way.size
    tiles, room = ceil(M / m) * ceil(N / n), DEVICE["multiprocessors"] * way.resident
    each, together = (m + n) * 32 / 1e6, min(way.resident, ceil(tiles / DEVICE["multiprocessors"]))
    read = max(min(tiles, room) * each / DEVICE["l2"], together * each / DEVICE["port"])  # 16 of k, by all that run
    x_t, w_t = transposed or (use != "rows",) * 2
    crooked = m * bool((M if x_t else K) % CACHE_LINE_ELEMENTS) + n * bool(
        (N if w_t else K) % CACHE_LINE_ELEMENTS
    )  # rows that begin within a line
    slower = 1 + DEVICE["crooked_ring" if isinstance(way, PipelineConfig) else "crooked_tile"] * crooked / (m + n)
    fold = ceil(K / way.k) * way.k / 16 * max(cost.step / 1000, read * slower)
    leave = cost.leave * WRITES[use] / 8
    waves = ceil(tiles / room)
    turns = isinstance(way, PipelineConfig) and way.groups == 2  # one result leaves while the other is added up
    busy = waves * max(fold, leave) + leave if turns else waves * (fold + leave)
    return cost.start + _slower(busy, memory_us(M, N, K, use, peak))


@lru_cache(maxsize=4096)
def tile_for(M: int, N: int, K: int, use: str, transposed: tuple[bool, bool] | None = None, peak: float = 0) -> Tile:
    """Returns the cheapest tile of Triton's kernel for a 16-bit product."""
    ways = TILES[use]
    return min(ways, key=lambda way: predicted_us(way, ways[way], M, N, K, use, transposed, peak))


@lru_cache(maxsize=4096)
def ring_for(
    M: int, N: int, K: int, use: str, transposed: tuple[bool, bool], peak: float = 0
) -> tuple[PipelineConfig, float] | None:
    """Returns the cheapest ring for a 16-bit product, and its microseconds; None where no ring is for it.

    A result that neither goes on nor fills one wave is left to what writes it in wider pieces; a fold of operands whose
    rows begin within a line, to what keeps more of them on their way.
    """
    if use == "fold" and (
        (M if transposed[0] else K) % CACHE_LINE_ELEMENTS or (N if transposed[1] else K) % CACHE_LINE_ELEMENTS
    ):
        return None
    costs = RINGS[use]
    room = lambda way: DEVICE["multiprocessors"] * way.resident
    ways = [
        way
        for way in costs
        if (way.rows >= 64 or not transposed[0])
        and (way.columns >= 16 or not transposed[1])
        and (use == "fold" or way.groups == 1 and ceil(M / way.rows) * ceil(N / way.columns) <= room(way))
    ]
    few = [way for way in ways if way.rows < max(16, 2 * M)]  # copies of rows beyond the last are slow
    ways = few or (ways if use == "fold" else [])
    if not ways:
        return None
    us = {way: predicted_us(way, costs[way], M, N, K, use, transposed, peak) for way in ways}
    best = min(us, key=us.get)
    return best, us[best]


def library_us(M: int, N: int, K: int, transposed: tuple[bool, bool], waves: float, use: str, peak: float = 0) -> float:
    """Returns the microseconds of cuBLASLt's program whose tiles fill so many waves. Where w alone is stored by
    columns, its tiles of 128 rows and a number of columns that is no multiple of 64 are slow."""
    tile = M * N / (waves * DEVICE["multiprocessors"])
    sixteens = round(tile / 128 / 16)
    whole = sixteens % 4 == 0 or abs(tile / 128 / 16 - sixteens) > 0.01 or sixteens < 4
    slow = transposed == (False, True) and not whole
    fold = max(2 * tile * K / (LIBRARY["slow" if slow else "rate"] * 1e6), K / 16 * LIBRARY["step"] / 1000)
    return LIBRARY["start"] + _slower(ceil(round(waves, 2)) * fold, memory_us(M, N, K, use, peak))


def way_for(
    M: int, N: int, K: int, use: str, transposed: tuple[bool, bool], rings: bool, waves: float | None, peak: float = 0
) -> tuple[float, PipelineConfig | None]:
    """Returns the microseconds of the cheapest of cuBLASLt's program, whose tiles fill so many waves (None: it has no
    program), and of the rings, if they are to be had; and the ring, if it is one. 0, where there is neither, or a fold
    is left to Triton's tiles."""
    ring = ring_for(M, N, K, use, transposed, peak) if rings else None
    if ring and use == "fold":
        tile = tile_for(M, N, K, use, transposed, peak)
        left = predicted_us(tile, TILES[use][tile], M, N, K, use, transposed, peak) * MIN_SPEEDUP < ring[1]
        return (0, None) if left else ring[::-1]
    us = library_us(M, N, K, transposed, waves, use, peak) if waves else 0
    return (us, None) if ring is None or us and us < ring[1] * MIN_SPEEDUP else (ring[1], ring[0])


def best_cut(N: int, us: Callable[[int], float]) -> int:
    """Returns the column at which a product of N columns is best cut in two, so that each part fills whole waves: 0 for
    nowhere. us: of a product of so many columns, 0 where there is no program for it."""
    whole = us(N)
    if whole < MIN_SPLIT_US:
        return 0
    step = max(256, N // 8 // 256 * 256)
    parts = {cut: (us(cut), us(N - cut)) for cut in range(step * -(-N // 2 // step), N, step)}
    cuts = {cut: sum(both) for cut, both in parts.items() if all(both)}
    cut = min(cuts, key=cuts.get, default=0)
    return cut if cut and cuts[cut] * MIN_SPEEDUP < whole else 0
