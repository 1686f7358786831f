"""Questions at sizes that reach the programs for sm_90, each of a few seconds: what a mutant is asked on a GPU.

Attention's calls are large enough for its prefill by copies, its kernels for sm_90, and several splits of keys; GEMM's
ring and cuBLASLt's programs are held to Triton's kernel, bit by bit, whatever the cost model would choose.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

import bi_kernels
from bi_kernels.audit.checks import forward
from bi_kernels.audit.checks.memory import by_view
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.controls.attention import in_schedule
from bi_kernels.audit.findings import Row
from bi_kernels.audit.fuzz import checks as drawn
from bi_kernels.audit.fuzz.cases import Case
from bi_kernels.audit.layouts import Call, pack, pad, spans
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.ops.attention.schedule import SCHEDULE
from bi_kernels.ops.gemm.cost import RINGS, PipelineConfig
from bi_kernels.ops.gemm.hopper_cublaslt import LIBRARY
from bi_kernels.ops.gemm.hopper_cublaslt import launch as launch_library
from bi_kernels.ops.gemm.kernel import launch
from helpers import attention_edges, attention_on_gpu
from helpers.attention_generation import against_one_call
from helpers.gemm import FIXED, library_expected

# lengths of samples, each from the first to the last; all sizes of a kind make programs enough for prefill by copies
RAGGED = (1, 1), (2, 63), (64, 64), (65, 200), (128, 128), (200, 400), (600, 900)
KINDS: dict[str, tuple[dict, tuple, str]] = {  # sizes, lengths, and a family of inputs
    "wide": ({"heads": 32, "kv_heads": 8, "head_dim": 128}, RAGGED, CANCELLING),
    "narrow": ({"heads": 16, "kv_heads": 16, "head_dim": 64}, RAGGED, "normal"),
    "long": ({"heads": 16, "kv_heads": 8, "head_dim": 128}, ((4200, 5300), (1, 9), (100, 300), (1, 1)), CANCELLING),
    "many": ({"heads": 8, "kv_heads": 4, "head_dim": 128}, ((2, 300),) * 70, "normal"),
    # heads whose width is no power of two, and keys in several splits, which are merged
    "uneven": ({"heads": 6, "kv_heads": 3, "head_dim": 72}, ((4200, 5300), (1, 9), (100, 300), (1, 1)), CANCELLING),
    # tiles of no sample are the last of each head's, long after its first
    "crowd": ({"heads": 8, "kv_heads": 4, "head_dim": 64}, ((1, 60),) * 600, "normal"),
}
PAGES = 16, 64
PLAIN = {"attention_sinks": {"chunk": None}}  # sm_90's kernels have no chunks
# what M, N, K of a ring's products are: rows of a few tiles and of many, and less than a stage
NARROW, WIDE, ROUND = (70, 1040, 1096), (1400, 6000, 1096), (130, 520, 40)
ONE_ROW, MANY_COLUMNS = (1, 512, 1024), (1, 600_000, 64)  # of the second no zeros in the place of a bias were kept
LIBRARYS, TOP = 40, (2048, 4096, 4096)  # products that the library is asked for, of at most so many M, N, K


def case(op: str, kind: str, dtype: torch.dtype, device: torch.device, seed: int, arguments: dict) -> Case:
    """Returns the drawn case of attention of a kind, with the samples of which the last queries come one by one."""
    sizes, between, inputs = KINDS[kind]
    rng, named = np.random.default_rng([seed, *kind.encode()]), OPS[op]
    lengths = [int(n) for n in rng.permuted([rng.integers(low, high + 1) for low, high in between])]
    told = replace(named, constants=named.constants | arguments)
    problem = OpConfig(told, next(iter(named.cases("tiny"))), dtype, "tiny", device, seed, sizes)
    function = getattr(bi_kernels, named.function or op)
    subject = OpUnderTest(problem, function, "bi_kernels", "", "", own_lengths=lengths)
    samples = spans(lengths)
    half = len(samples) // 2
    groups = [pad(samples[:half], left=kind in ("wide", "many")), pack(samples[half:][::-1])]
    return Case(subject, seed, inputs, kind, arguments, groups, steps(samples), full=True)


def steps(samples: Sequence[np.ndarray]) -> list[Call]:
    """Returns a rollout's calls: two thirds of each sample packed, the rest but the last in a padded batch, and the
    last tokens together."""
    cut = [2 * len(s) // 3 for s in samples]
    first = [s[:n] for s, n in zip(samples, cut) if n]
    middle = [s[n:-1] for s, n in zip(samples, cut) if n < len(s) - 1]
    return [pack(first), pad(middle), Call(np.array([s[-1:] for s in samples]))]


def attention(of: OpUnderTest, op: str, kinds: Sequence[str], only_sm_90: bool = False) -> Iterator[Row]:
    """Yields the rows of attention at these kinds of sizes, its cache in pages too; only_sm_90: of calls that its
    kernels compute."""
    for kind in kinds:
        arguments = PLAIN.get(op, {}) if only_sm_90 else {}
        if (op, kind) == ("attention", "narrow"):
            arguments = {"causal": False}
        one = case(op, kind, of.problem.dtype, of.problem.device, of.problem.seed, arguments)
        yield from drawn.judge(one)
        s = one.subject
        if kind == "wide":  # beside samples of NaN, and as parts of other tensors
            yield from forward.by_layout(s, ("packed",))
            yield from by_view(s)
        if (op, kind) == ("attention", "wide"):
            yield from attention_edges.padded_edges(of, "edges")
            prefill = replace(of, function=in_schedule(replace(SCHEDULE, few=0)), memo={})
            yield from attention_edges.padded_edges(prefill, "edges, as prefill")
            yield from attention_edges.crowded(of)
        if not only_sm_90 and kind in ("long", "many"):
            for page in PAGES:
                whole = lambda: last(s, one, s.once("whole", lambda: s.compute([pack(spans(s.lengths))])))
                yield from against_one_call(s, f"pages of {page}", one.parts[-1:], whole, page=page)
        s.forget()


def last(s: OpUnderTest, one: Case, whole: tuple) -> tuple:
    """Returns what `compute` makes of the last tokens alone, from what it makes of all: zeros elsewhere."""
    at = torch.from_numpy(one.parts[-1].index.reshape(-1)).to(s.problem.device)
    kept = lambda t: torch.zeros_like(t).index_copy_(0, at, t[at])
    return tuple(map(kept, whole)) if isinstance(whole, tuple) else kept(whole)


def late(s: OpUnderTest) -> Iterator[Row]:
    """Yields the rows of copies that come late: who does not wait for them reads other numbers."""
    yield from attention_on_gpu._against_late(s)


def rings() -> list[PipelineConfig]:
    """Returns a ring of each kind that the kernel tells apart: rows that the tensor core has too many of, a stage in
    parts, one copied at once, two groups, columns that cannot be stored transposed, and two on a multiprocessor."""
    found: dict[tuple, PipelineConfig] = {}
    for ring in (ring for use in RINGS.values() for ring in use):
        kind = ring.rows < 64, ring.k // ring.part > 1, ring.k > 256, ring.groups, ring.columns < 16, ring.resident
        found.setdefault(kind, ring)
    return list(found.values())


def _operands(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple:
    p = OpConfig(OPS["linear"], next(iter(OPS["linear"].cases("tiny"))), dtype, "tiny", device, seed, {"N": n, "K": k})
    x, w = p.arguments(*p.inputs(CANCELLING, m))
    return x, w, x[0, :1] * torch.ones_like(w[:, 0])


def turned(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t()


def by_ring(s: OpUnderTest) -> Iterator[Row]:
    """Yields the rows of sm_90's products against Triton's: plain, with a bias, of operands that are stored transposed,
    and going on from a start."""
    from bi_kernels.ops.gemm.hopper import launch as launch_ring  # noqa: PLC0415 (the interpreter knows no Gluon)

    p, held = s.problem, {}
    for ring in sorted(rings(), key=lambda r: (r.rows < 64, r.groups)):
        for m, n, k in ((NARROW if ring.rows < 64 else WIDE), ROUND):
            if (m, n, k) not in held:
                held[m, n, k] = _ways(m, n, k, p)
            for name, (x, w, bias, told) in held[m, n, k].items():
                narrow = ring.rows < 64 and x.stride(1) != 1 or ring.columns < 16 and w.stride(1) != 1
                if narrow or ring.rows < 64 and "start" in told:
                    continue
                told_ring = lambda *of, ring=ring, **more: launch_ring(*of, ring, **more)
                yield from _against_triton(s, f"{name} by {ring}", x, w, bias, told, told_ring)


def _ways(m: int, n: int, k: int, p: OpConfig) -> dict[str, tuple]:
    x, w, bias = _operands(m, n, k, p.dtype, p.device, p.seed)
    start = torch.linspace(-1, 1, m * n, device=p.device).view(m, n)
    odd = n - 1  # whose columns lie side by side in no unit but one
    return {
        "plain": (x, w, None, {}),
        "both transposed, bias": (turned(x), turned(w), bias, {}),
        "start": (turned(x), turned(w), None, {"start": start, "out_dtype": torch.float32}),
        "an odd number of columns, bias": (x, w[:odd], bias[:odd], {}),
        "fp32": (x, turned(w), bias.float(), {"out_dtype": torch.float32}),
    }


def _against_triton(s: OpUnderTest, detail: str, x, w, bias, told: dict, computed: Callable) -> list[Row]:
    """Compares a product with Triton's: in memory that held NaN, and after another of the same kind."""
    said = {"against": "Triton's kernel", "inputs": CANCELLING, "rows": len(x), "detail": detail}

    def row() -> Row:
        expected = launch(x, w, bias, FIXED, **told)
        out = torch.full_like(expected, torch.nan)
        ys = [computed(x, w, bias, **told), computed(x, w, bias, **told | {"out": out})]
        there = tuple(y for y in ys if y is not None)  # None: the library has no program for it
        drift = compare(there, (expected,) * len(there)) if there else Drift(0, 0)
        return s.row("invariance", "tiles", drift, **said)

    return s.attempt("invariance", "tiles", row, **said)


def by_library(s: OpUnderTest) -> Iterator[Row]:
    """Yields the rows of cuBLASLt's products of any size against Triton's; one whose products vanish, and one of one
    row, among them; and one that needs a fix where it serves none of them."""
    p, rng, served = s.problem, np.random.default_rng([s.problem.seed, LIBRARYS]), []

    def computed(*of, **told):
        y = launch_library(*of, **told)
        served.append(y is not None)
        return y

    for number in range(LIBRARYS):
        m, n, k = (int(np.exp(rng.uniform(0, np.log(top)))) for top in TOP)
        m, n, k = {1: ONE_ROW, 2: MANY_COLUMNS}.get(number, (m, n, k))
        x, w, bias = _operands(m, n, k, p.dtype, p.device, p.seed + number)
        fp32, x_t, w_t, with_bias = (bool(b) for b in rng.integers(2, size=4))
        told = {"out_dtype": torch.float32} if fp32 else {}
        bias = (bias.float() if fp32 else bias) if (with_bias or number == 1) and number != 2 else None
        if number == 0:  # negative sums that are too small for any number but −0
            x, w = -torch.full_like(x, 2.0**-100), torch.full_like(w, 2.0**-100)
            bias = None
        x, w = turned(x) if x_t else x, turned(w) if w_t else w
        yield from _against_triton(s, f"{m}×{n}×{k} by {LIBRARY}", x, w, bias, told, computed)
    if library_expected(p.device) and not any(served):
        yield s.row("invariance", "tiles", against="Triton's kernel", detail=f"{LIBRARY} serves no product")
