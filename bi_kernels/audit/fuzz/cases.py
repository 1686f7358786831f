"""Cases that nobody chose: sizes, arguments, populations of samples and families of inputs, drawn by a seed.

Arguments and populations go round, so that a few cases hold each of them and many hold their pairs; sizes are
log-uniform. On a GPU what a kernel is compiled for comes from a small pool: the widths of inputs and weights. Rows,
lengths, layouts and inputs are new in every case.
"""

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bi_kernels.audit.inputs import KINDS
from bi_kernels.audit.layouts import Call, chunks, decode, pack, pad, spans
from bi_kernels.audit.registry import Op
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.contract import CONTRACT

RANDOM: dict = CONTRACT["random"]
POPULATIONS: list[str] = RANDOM["populations"]
FINITE = [k for k in KINDS if k != "nonfinite"]
GROUPS = (1, 2, 3, 4, 8)  # query heads to a key head
NARROW = 30  # dimensions beside one that is wide
SHORT, FEW = 4, 24  # tokens of a short sample; samples of a call that is still one of a few
USUAL = 64  # divides most widths of models
TILES = (16, 32, 64, 128, 256)  # rows of a tile, at whose edges sizes lie more often than elsewhere
ROUND = len(POPULATIONS)  # cases that hold each population once


@dataclass(frozen=True)
class Case:
    """One drawn case: a candidate at a problem, its samples, and how they are split into calls."""

    subject: OpUnderTest
    number: int
    kind: str  # of the inputs
    population: str
    arguments: dict
    groups: list[Call]  # a step's micro-batches, each packed or padded, its samples in any order
    parts: list[Call]  # of a rollout: chunks, or a position a call
    full: bool  # every question is asked, fp64 among them; else the call is compared with one other way

    @property
    def said(self) -> str:
        """Says what was drawn."""
        given = {**self.subject.problem.sizes, **self.arguments}
        return ", ".join([self.population, self.kind, *(f"{k} {v}" for k, v in given.items())])


def draw(
    op: Op,
    function: Callable,
    number: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    candidate: str = "bi_kernels",
    device_name: str = "",
    command: str = "",
    full: bool | None = None,
) -> Case:
    """Returns case `number` of an op, the same whatever was drawn before; full: else by its number."""
    of = zlib.crc32(f"{op.name} {dtype}".encode())
    rng, limits = np.random.default_rng([seed, of, number]), RANDOM[device.type]
    turn = lambda place, values: _turn(values, number, np.random.default_rng([seed, of, place]))
    population, kind = turn(0, POPULATIONS), turn(1, FINITE)
    arguments: dict = {}
    for place, (names, values) in enumerate(op.arguments.items(), 2):
        one = turn(place, [{}, *(dict(zip(names.split(", "), v if ", " in names else (v,))) for v in values)])
        arguments |= one  # or as the entry has it
    full = number % limits["full"] == 0 if full is None else full
    entry = pool_entry(number, op, device.type)
    alike = zlib.crc32(f"{op.function or op.name} {dtype}".encode())  # ops of one function share what is compiled
    widths = rng if entry is None else np.random.default_rng([seed, alike, entry])
    sizes = _sizes(op, number, widths, limits, entry is not None and entry % 2 == 0)
    if entry == 1 and "K" in sizes:
        sizes["K"] = 1  # for which Triton compiles another kernel
    wide = max([1, *(math.prod(_numbers(dims, sizes)) for dims in op.tokens.values())])
    own = set(re.findall(r"[A-Za-z_]+", " ".join([*op.tokens.values(), *op.shared.values()])))
    wide = max([wide, *(sizes.get(n, 1) // 16 for n in {"vocab", "N"} & own)])  # of a result that a reference holds
    tokens = limits["attention_fp64" if full and op.cache else "tokens"]
    elements = limits["elements" if full or not op.cache else "attention_elements"]
    most = max(1, min(tokens, elements // wide))
    many = max(1, min(limits["sequences" if op.cache else "many"], limits["elements"] // (SHORT * wide)))
    total = _edge(rng, _log_uniform(rng, 1, most), limits)
    lengths = _lengths(population, total, many, rng, limits)
    case = next(iter(op.cases("tiny")))
    problem = OpConfig(
        replace(op, constants=op.constants | arguments), case, dtype, "tiny", device, seed + number, sizes
    )
    subject = OpUnderTest(
        problem, function, candidate, device_name, command, own_lengths=lengths, twins=population == "twins"
    )
    return Case(subject, number, kind, population, arguments, _groups(lengths, rng), _parts(lengths, rng, limits), full)


def pool_entry(number: int, op: Op, device: str) -> int | None:
    """Returns which widths of its pool a case has; None on the interpreter, where each case has its own."""
    pool = RANDOM[device].get("attention_pool" if op.cache else "pool")
    return pool and number // ROUND % pool


def _turn(values: Sequence, number: int, rng: np.random.Generator):
    """Returns one of the values: each once in as many numbers, in an order that changes from round to round."""
    turn, place = divmod(number, len(values))
    return values[int(rng.permuted(np.tile(np.arange(len(values)), (turn + 1, 1)), axis=1)[turn, place])]


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _numbers(dims: str, sizes: dict) -> list[int]:
    return [sizes.get(d.strip(), 1) for d in dims.split(":")[0].split(",")]


def _edge(rng: np.random.Generator, n: int, limits: dict) -> int:
    """Returns n or, of three times once on a GPU, a number near it at the edge of a tile: full, one less or more."""
    if "pool" not in limits or rng.integers(3):
        return n
    tile = int(rng.choice([t for t in TILES if t <= max(n, TILES[0])]))
    return max(1, round(n / tile) * tile + int(rng.integers(-1, 2)))


def _sizes(op: Op, number: int, rng: np.random.Generator, limits: dict, usual: bool) -> dict[str, int]:
    """Draws the op's dimensions; usual: widths are multiples of 64, as models have them."""
    words = ", ".join(d.split(":")[0] for d in (op.tokens | op.shared).values())
    names = set(re.findall(r"[A-Za-z_]+", words)) | {"vocab" for d in op.tokens.values() if d.endswith(":id")}
    sizes = {}
    if "heads" in names:
        keys = _log_uniform(rng, *limits["kv_heads"])
        sizes = {"heads": keys * int(rng.choice(GROUPS)), "kv_heads": keys}
    for name in sorted(names - {*sizes}):
        sizes[name] = _log_uniform(rng, *limits[name])
        if usual and name != "experts":
            sizes[name] = -(-sizes[name] // USUAL) * USUAL
    wide = sorted({*sizes} & {"hidden", "mlp", "N", "K"})
    if "wide" in limits and wide and not number % ROUND:  # sometimes, for a call of it takes long
        sizes = {k: min(n, NARROW) for k, n in sizes.items()}
        sizes[wide[int(rng.integers(len(wide)))]] = _log_uniform(rng, *limits["wide"])
    for dims in op.shared.values():
        while math.prod(_numbers(dims, sizes)) > limits["elements"]:
            largest = max((d.strip() for d in dims.split(":")[0].split(",")), key=sizes.__getitem__)
            sizes[largest] //= 2
    return {k: -(-n // op.multiples.get(k, 1)) * op.multiples.get(k, 1) for k, n in sizes.items() if k in names}


def _lengths(population: str, total: int, many: int, rng: np.random.Generator, limits: dict) -> list[int]:
    """Draws the lengths of samples of about `total` tokens together."""
    short, pooled = lambda n: rng.integers(1, SHORT, n).tolist(), "pool" in limits
    if population == "many":
        return short(_log_uniform(rng, min(FEW, many), many) if pooled else many)
    if population == "equal":
        n = min(total, _edge(rng, _log_uniform(rng, 1, total), limits))
        return [n] * max(1, min(2 * FEW, total // n))
    if population == "ones":
        return [1] * min(total, 3 * FEW, many if pooled else total)
    if population == "one long":
        return [*short(3), total, *short(int(rng.integers(1, 9)))]
    lengths = []
    while sum(lengths) < total and len(lengths) < FEW:
        lengths.append(_log_uniform(rng, 1, total - sum(lengths)))
    if pooled:  # else some tokens are left
        lengths[-1] += total - sum(lengths)
    if population == "sixteens":
        return [-(-n // 16) * 16 for n in lengths]
    if population == "twins":
        return [n for n in lengths for _ in range(2)]
    if population == "empty":
        for at in rng.integers(0, len(lengths) + 1, 3):
            lengths.insert(int(at), 0)
    return lengths


def _groups(lengths: Sequence[int], rng: np.random.Generator) -> list[Call]:
    """Splits samples into micro-batches in the step's order, where each lies as it likes."""
    samples, calls = spans(lengths), []
    while samples:
        take = int(rng.integers(1, len(samples) + 1))
        group, samples = samples[:take], samples[take:]
        if sum(map(len, group)):
            group = [group[i] for i in rng.permutation(take)]
            how = int(rng.integers(4)) if take * max(map(len, group)) < 4 * sum(map(len, group)) else 0
            calls.append(pack(group) if how < 2 else pad(group, left=how == 3, multiple=int(rng.choice((1, 8, 16)))))
    return calls


def _parts(lengths: Sequence[int], rng: np.random.Generator, limits: dict) -> list[Call]:
    """Splits samples as a rollout does: a position a call of all that have one, or each in chunks."""
    samples = [s for s in spans(lengths) if len(s)]
    if max(lengths) <= 2 * FEW and (len(samples) > FEW or rng.integers(2)):
        return decode(samples)
    pieces = int(rng.integers(1, FEW))
    if "pool" in limits:  # where a call takes longer than what it computes
        pieces = min(pieces, 1 + 2 * FEW // len(samples))
    return chunks(samples, -(-max(lengths) // pieces))
