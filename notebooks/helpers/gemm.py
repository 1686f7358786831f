"""The experiments of the GEMM audit."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

import bi_kernels
from bi_kernels import contract
from bi_kernels.audit.axes import Kind
from bi_kernels.audit.compare import compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.report.sizes import steps
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.checks import is_hopper
from bi_kernels.contract import CONTRACT, DTYPES, SWEEP, linears
from bi_kernels.ops.gemm.cost import RINGS, PipelineConfig, Tile
from bi_kernels.ops.gemm.gemm import cheapest
from bi_kernels.ops.gemm.hopper_cublaslt import LIBRARY, OFF, VERSIONS, serves, waves
from bi_kernels.ops.gemm.hopper_cublaslt import launch as launch_library
from bi_kernels.ops.gemm.kernel import FP32_TILE, launch
from bi_kernels.ops.gemm.kernel import tiles as every_tile
from helpers import coverage, products
from helpers.common import Counts, Found, replayed

FIXED = Tile(128, 128, 64, 8, 3)  # what every tile is held against
ORDERS = {"in order": 1, "backwards": -1}  # in which products are asked that are remembered


def _subject(session, case: str, dtype: str) -> OpUnderTest:
    return replace(session.subject("linear", dtype), problem=session.problem("linear", case, dtype))


def _name(tile: Tile | PipelineConfig) -> str:
    if isinstance(tile, PipelineConfig):
        turns = ", in turns" * (tile.groups == 2)
        size = "×".join(map(str, (*tile.size, tile.k)))
        return f"ring of {size}, {tile.stages} stages, {tile.resident} a multiprocessor{turns}"
    width = f"{tile.n}+{tile.extra_n}" if tile.extra_n else str(tile.n)
    return (
        f"{tile.m}×{width}×{tile.k}, {tile.warps} warps, {tile.stages} stages, groups of {tile.group}"
        + ", swapped" * tile.swap
        + ", persistent" * tile.persistent
        + ", in halves" * tile.halves
    )


def tiles(session, case: str = "o") -> tuple[list[Row], Counts]:
    """Returns every configuration that the cost model may choose, and the library's program, at every row count against
    one fixed tile at the largest; and a split-K for contrast.

    Each runs plain, with a bias, and with both operands stored transposed besides. Returns the rows, and
    {configurations of one kind: {M: elements that differ}}.
    """
    rows, seen = [], {}
    for dtype in session.dtypes:
        subject = _subject(session, case, dtype)
        x, w = subject.problem.arguments(*subject.inputs(CANCELLING, subject.largest))
        transposed = [t.t().contiguous().t() for t in (x, w)]
        bias = x[0, :1] * torch.ones_like(w[:, 0])
        variants = {"": (x, w, None), ", bias": (x, w, bias), ", bias, both operands transposed": (*transposed, bias)}
        fixed = FP32_TILE if dtype == "fp32" else FIXED
        whole = {name: launch(x, w, b, fixed) for name, (_, _, b) in variants.items()}
        ways = _ways(dtype, x.device)
        for way, computed in ways.items():
            alike = [w for w in ways if _kind(w) == _kind(way)]
            line = seen.setdefault(f"{len(alike)} × {_kind(way)} ({dtype})", {})
            for m in _tile_rows(session):
                found = []
                for name, (a, v, b) in variants.items():
                    if (y := computed(a[:m], v, b)) is None:  # not for such operands
                        continue
                    drift = compare(y, whole[name][:m])
                    said = {"against": _name(fixed), "inputs": CANCELLING, "rows": m, "detail": way + name}
                    found.append(subject.row("invariance", "tiles", drift, **said))
                line[str(m)] = line.get(str(m), 0) + sum(r.mismatches for r in found)
                rows += found
        line = seen[f"split-K of two, for contrast ({dtype})"] = {}
        summed = lambda a, v: launch(a.float(), v.float(), None, FP32_TILE)
        for m in _tile_rows(session):
            first, second = map(summed, x[:m].chunk(2, 1), w.chunk(2, 1))
            line[str(m)] = compare((first + second).to(x.dtype), summed(x[:m], w).to(x.dtype)).mismatches
    return rows, seen


def _kind(way: str) -> str:
    return way if way == LIBRARY else way.partition(" of ")[0] if way.startswith("ring") else "tile"


def _ways(dtype: str, device: torch.device) -> dict[str, Callable]:
    """Returns what a product may be computed by, of x, w and bias: the library, sm_90's kernel, and each tile."""
    ways = {_name(t): lambda x, w, bias, tile=t: launch(x, w, bias, tile) for t in every_tile(DTYPES[dtype])}
    if is_hopper(device) and dtype != "fp32":
        rings = dict.fromkeys(ring for use in RINGS for ring in RINGS[use])
        ways = {_name(r): lambda x, w, bias, ring=r: _by_ring(x, w, bias, ring) for r in rings} | ways
    return ({LIBRARY: launch_library} if serves(device) and dtype != "fp32" else {}) | ways


def library_expected(device: torch.device) -> bool:
    """Tells whether PyTorch's cuBLASLt is of a version whose programs are to serve."""
    if OFF or not is_hopper(device):
        return False
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return library.cublasLtGetVersion() in VERSIONS
    except (OSError, AttributeError):
        return False


def _by_ring(x: Tensor, w: Tensor, bias: Tensor | None, ring: PipelineConfig) -> Tensor | None:
    """Computes a product by sm_90's kernel; None where the ring takes no operand that is stored transposed."""
    from bi_kernels.ops.gemm.hopper import launch

    narrow = ring.rows < 64 and x.stride(1) != 1 or ring.columns < 16 and w.stride(1) != 1
    return None if narrow else launch(x, w, bias, ring)


@cache
def _taken(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> str:
    """Returns what computes a product of this size whose operands are stored by rows."""
    way, cut = cheapest((m, n, k), ((k, 1), (k, 1)), False, (dtype, dtype), device)
    if cut:
        parts = dict.fromkeys(_taken(m, columns, k, dtype, device) for columns in (cut, n - cut))
        return " and ".join(parts) + f", in two at {cut}"
    return way if way is LIBRARY else _name(way)


@cache
def _served(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tells whether the library has a program for a product of this size."""
    return waves((m, n, k), ((k, 1), (k, 1)), (dtype, dtype), device) is not None


def _tile_rows(session) -> list[int]:
    return SWEEP["rows"] if session.on_gpu else [17]  # the interpreter's tl.dot knows no tile


def slabs(session) -> Found:
    """Returns what moves the bits of a sum over K: orders of the same products. The first three must not; they are the
    rows."""
    m, k = 64, 256
    g = torch.Generator().manual_seed(session.parameters["seed"])
    x, w = (torch.randn(m, k, generator=g).bfloat16().to(session.device) for _ in range(2))
    fp32 = lambda a, b: launch(a, b, None, Tile(64, 64, 64, 4, 3), torch.float32)
    whole = fp32(x, w)
    inside = torch.cat([row[torch.randperm(16, generator=g)] for row in torch.arange(k).split(16)])
    swapped = torch.arange(k).reshape(-1, 2, 16).flip(1).flatten()
    zeros = lambda t, width: torch.cat((t[:, :64], t.new_zeros(m, width), t[:, 64:]), 1)
    orders = {
        "the same order again": lambda t: t,
        "permuted inside each slab of 16": lambda t: t[:, inside],
        "a slab of zeros put in at k = 64": lambda t: zeros(t, 16),
        "neighbouring slabs exchanged": lambda t: t[:, swapped],
        "rotated by 8: every slab cut in two": lambda t: t.roll(8, 1),
        "8 zeros put in at k = 64": lambda t: zeros(t, 8),
        "reversed": lambda t: t.flip(1),
    }
    subject = _subject(session, "o", "bf16")
    rows, out = [], []
    for name, change in orders.items():
        drift = compare(fp32(change(x).contiguous(), change(w).contiguous()), whole)
        if len(rows) < 3:
            rows.append(subject.row("invariance", "slabs", drift, "ascending k", "normal", m, detail=name))
        differ = f"{drift.mismatches} of {drift.elements}"
        out.append({"order of k": name, "fp32 results that differ": differ, "max ULP": steps([drift.json()]) or "–"})
    return rows, out


def remembered(session) -> Found:
    """Returns products of the same operands, each after all of the others, against a thread of its own, in which
    nothing is remembered; and, as controls in bf16, those that a key confuses which forgets what tells them apart."""
    rows, lines, device = [], {}, session.device
    every_size = products.SIZES[device.type]
    drawn = lambda sizes, dtype: products.asked(sizes, DTYPES[dtype], device, session.parameters["seed"])
    for dtype, sizes in product(session.dtypes, every_size):
        s, every = _subject(session, "o", dtype), drawn(sizes, dtype)
        alone = products.alone(every)
        for order, step in ORDERS.items():
            names, found = [*every][::step] * 2, {}  # all once more, after all
            for name, ys in zip(names, products.in_a_thread(every[name] for name in names)):
                found.setdefault(name, []).extend(ys)
                line = lines.setdefault(name, {"asked": name, "calls": 0, "looked up": 0, "that differ": 0, "by": {}})
                line["calls"] += 2
                line["looked up"] += len(ys) % 2
                line["that differ"] += sum(products.differing([y], alone[name]).mismatches > 0 for y in ys)
                line["by"][_chosen(*every[name])] = None
            compared = {name: products.differing(ys, alone[name]) for name, ys in found.items()}
            rows += [
                s.row(**_after(name, order, sizes), drift=drift, axes=[Kind.BEFORE]) for name, drift in compared.items()
            ]
    s, every = _subject(session, "o", "bf16"), drawn(every_size[0], "bf16")
    alone = products.alone(every)
    for what, (before, name) in products.TOLD_APART.items():
        drift = products.differing(products.confused(every[before], every[name]), alone[name])
        row = s.row(**_after(name, f"after {before}", every_size[0]), drift=drift, axes=[Kind.BEFORE])
        rows.append(replace(row, candidate=f"a key that forgets {what}").as_control())
    return rows, [line | {"by": ", ".join(line["by"])} for line in lines.values()]


def _after(name: str, order: str, sizes: tuple[int, int, int]) -> dict:
    """Returns the fields of a row of a product that is asked after others."""
    said = {"relation": "determinism", "layout": "after other products", "against": "a thread of its own"}
    return said | {"inputs": "normal", "rows": sizes[0], "detail": f"{name}, {order}, {'×'.join(map(str, sizes))}"}


def _chosen(x: Tensor, w: Tensor, bias: Tensor | None, told: dict) -> str:
    dtypes = x.dtype, told.get("out_dtype") or x.dtype
    way, cut = cheapest(
        (x.shape[:-1].numel(), *w.shape), (x.stride()[-2:], w.stride()), "start" in told, dtypes, x.device
    )
    return "two products" if cut else way if way is LIBRARY else _kind(_name(way))


def stock_drift(session, dtype: str = "bf16") -> Counts:
    """torch's own linear: {shape: {M: elements of the M rows that differ from the same rows in the largest call}}."""
    out = {}
    for case, (n, k) in linears(session.parameters["shapes"]).items():
        s = _subject(session, case, dtype)
        x, w = s.problem.arguments(*s.inputs("normal", 8192 if session.on_gpu else s.largest))
        whole = F.linear(x, w)
        differ = lambda m: compare(F.linear(x[:m], w), whole[:m]).mismatches
        out[f"{case} {k}→{n}"] = {str(m): differ(m) for m in contract.rows(s.largest)}
    return out


def captured(session) -> list[Row]:
    """Under CUDA graphs and under torch.compile, every linear layer at every row count: the bits of the eager call, by
    whatever computes a product of its size. GPU only.

    With static shapes every M is compiled anew, so there the sweep takes every eighth M.
    """
    rows = []
    torch._dynamo.config.recompile_limit = 64
    static = torch.compile(lambda x, w: bi_kernels.linear(x, w), fullgraph=True, dynamic=False)
    dynamic = torch.compile(lambda x, w: bi_kernels.linear(x, w), fullgraph=True, dynamic=True)
    for dtype, case in product(session.dtypes, linears(session.parameters["shapes"])):
        s = _subject(session, case, dtype)
        x, w = s.problem.arguments(*s.inputs(CANCELLING, s.largest))
        whole = bi_kernels.linear(x, w)
        for number, m in enumerate(contract.rows(s.largest)):
            part = torch.zeros_like(x[:m])
            out = replayed(lambda: bi_kernels.linear(part, w), [(part, x[:m])])
            found = {"cuda_graph": out, "torch.compile": dynamic(part, w)}
            if number % 8 == 0:
                found["torch.compile:static"] = static(part, w)
            said = {"against": f"{s.largest} rows, eager", "inputs": CANCELLING, "rows": m}
            said["detail"] = _taken(m, *w.shape, x.dtype, x.device)
            rows += [s.row("invariance", name, compare(y, whole[:m]), **said) for name, y in found.items()]
    return rows


def larger(session) -> list[Row]:
    """Every linear layer at each M that a figure of the benchmark shows beyond the sweep's largest: its first and last
    rows against calls of their own. On a GPU, at a model's shapes."""
    rows = []
    for dtype, case, m in product(session.dtypes, linears(session.parameters["shapes"]), _larger(session)):
        s = _subject(session, case, dtype)
        x, w = s.problem.arguments(*s.inputs(CANCELLING, m))
        whole = bi_kernels.linear(x, w)
        for name, part in (("the first", slice(s.largest)), ("the last", slice(m - s.largest, m))):
            drift = compare(whole[part], bi_kernels.linear(x[part], w))
            said = {"against": f"{name} {s.largest} rows", "inputs": CANCELLING, "rows": m}
            rows.append(s.row("invariance", "rows", drift, **said, detail=_taken(m, *w.shape, x.dtype, x.device)))
        del whole, s
    return rows


def _larger(session) -> list[int]:
    shown = (CONTRACT["benchmark"]["gemm"]["rows"], CONTRACT["benchmark"]["gradients"]["tokens"])
    wanted = session.on_gpu and session.parameters["shapes"] != "tiny"
    return sorted({m for some in shown for m in some if m > max(SWEEP["rows"])}) if wanted else []


def missing(session) -> list[Row]:
    """Returns a row that needs a fix for every tile × M, every product asked after others, and on a GPU every layer × M
    captured and compiled, or larger, that was not run."""
    found = []
    for dtype, (case, shape) in product(session.dtypes, linears(session.parameters["shapes"]).items()):
        s = _subject(session, case, dtype)
        every = product(_tile_rows(session), _ways(dtype, session.device)) if case == "o" else ()
        served = lambda m: _served(m, *shape, DTYPES[dtype], session.device)
        required = [("tiles", m, way) for m, way in every if way != LIBRARY or served(m)]
        serves_none = session.parameters["shapes"] != "tiny" and not any(served(m) for m in _tile_rows(session))
        if case == "o" and dtype != "fp32" and serves_none and library_expected(session.device):
            required.append(("tiles", max(_tile_rows(session)), LIBRARY))
        for layout in ("cuda_graph", "torch.compile") if session.on_gpu else ():
            taken = lambda m: _taken(m, *shape, DTYPES[dtype], session.device)
            required += [(layout, m, taken(m)) for m in contract.rows(s.largest)]
        required += [("rows", m, _taken(m, *shape, DTYPES[dtype], session.device)) for m in _larger(session)]
        said = {"relation": "invariance", "inputs": CANCELLING}
        wanted = [said | {"layout": layout, "rows": m, "detail": way} for layout, m, way in required]
        sizes = products.SIZES[session.device.type] if case == "o" else ()
        wanted += [_after(*told) for told in product(products.names(), ORDERS, sizes)]
        found += coverage.missing(session.rows, s, wanted)
    return found
