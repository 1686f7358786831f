"""The experiments of the elementwise and RoPE audit."""

import torch

import bi_kernels
from bi_kernels import reference
from bi_kernels.audit import stock
from bi_kernels.audit.broken.forward import leaks_nan_neighbour, rope_bf16_positions, rope_by_row
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.experiments.timing import times_ms
from bi_kernels.audit.problem.call_layouts import layouts
from bi_kernels.audit.problem.problem import Problem
from bi_kernels.audit.problem.registry import OPS
from bi_kernels.audit.problem.subject import SHARPEST, Subject
from bi_kernels.contract import DTYPES, SHAPES


def layout_map(session, rows: list[Row], dtype: str) -> dict[str, dict[str, float]]:
    """{op: {layout: elements that differ}} of the candidate, and of two broken ops for contrast."""
    names = list(layouts(SHAPES[session.parameters["shapes"]]["lengths"]))
    seen: dict[str, dict[str, float]] = {}
    for r in rows:
        if r.relation == "invariance" and r.layout in names and r.dtype == dtype:
            line = seen.setdefault(r.op, dict.fromkeys(names, 0))
            line[r.layout] += float("nan") if r.mismatches is None else r.mismatches
    for op, function in (("rope", rope_by_row), ("silu", leaks_nan_neighbour)):
        s = Subject(Problem(OPS[op], "", DTYPES[dtype], session.parameters["shapes"], session.device), function, "", "")
        kind = "nonfinite" if op == "silu" else SHARPEST
        seen[f"broken: {function.__name__}"] = {
            n: compare(s.layout(n, kind), s.layout("singles" if n == "packed" else "packed", kind)).mismatches
            for n in names
        }
    return seen


def rope_positions(session) -> tuple[list[int], dict[str, list[float]]]:
    """(positions, {variant: largest error of a token at that position against fp64, relative to the token's norm})."""
    heads, dim = SHAPES[session.parameters["shapes"]]["heads"], SHAPES[session.parameters["shapes"]]["head_dim"]
    positions = [1, *(2**e + 1 for e in range(12)), 4095]  # one more than a power of two is where bf16 rounds first
    g = torch.Generator().manual_seed(session.parameters["seed"])
    x = torch.randn(len(positions), heads, dim, generator=g).bfloat16().to(session.device)
    at = torch.tensor(positions, device=session.device)
    table = bi_kernels.rope_table(4096, dim, device=session.device)
    exact, _ = reference.rope(x, table, at)
    out = {}
    for name, fn in (
        ("bi_kernels: fp32 table from fp64", bi_kernels.rope),
        (
            "cos and sin rounded to bf16",
            lambda x, t, p: bi_kernels.rope(x, bi_kernels.RopeTable(*(part.bfloat16().float() for part in t)), p),
        ),
        ("positions rounded to bf16", rope_bf16_positions),
    ):
        error = (fn(x, table, at).double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        out[name] = error.tolist()
    return positions, out


def packed_reset(session, lengths: tuple[int, ...] = (5, 1, 17, 9)) -> tuple[list[Row], list[dict]]:
    """Returns the same sequences packed: positions from cu_seqlens, positions given, and positions that never reset.
    The first two must give the bits of each sequence alone; they are the rows."""
    heads, dim = SHAPES[session.parameters["shapes"]]["heads"], SHAPES[session.parameters["shapes"]]["head_dim"]
    g = torch.Generator().manual_seed(session.parameters["seed"])
    x = torch.randn(sum(lengths), heads, dim, generator=g).bfloat16().to(session.device)
    table = bi_kernels.rope_table(4096, dim, device=session.device)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(session.device)
    alone = torch.cat(
        [bi_kernels.rope(part, table, torch.arange(len(part), device=session.device)) for part in x.split(lengths)]
    )
    given = torch.cat([torch.arange(n) for n in lengths]).to(session.device)
    ways = {
        "cu_seqlens": bi_kernels.rope(x, table, cu_seqlens=ends),
        "positions": bi_kernels.rope(x, table, given),
        "one running count, for contrast": bi_kernels.rope(x, table, torch.arange(len(x), device=session.device)),
    }
    s = Subject(
        Problem(OPS["rope"], "", torch.bfloat16, session.parameters["shapes"], session.device),
        bi_kernels.rope,
        "bi_kernels",
        session.device_label,
        session.command,
    )
    drifts = {name: compare(y, alone) for name, y in ways.items()}
    rows = [
        s.row("parity", "packed=alone", drifts[name], "each sequence alone", "normal", sum(lengths), detail=name)
        for name in ("cu_seqlens", "positions")
    ]
    return rows, [{"positions from": name, "against each sequence alone": str(d)} for name, d in drifts.items()]


def bandwidth(session) -> list[dict]:
    """Bytes read and written over time, as a share of a device copy in the same run, against stock torch. GPU only."""
    size = SHAPES[session.parameters["shapes"]]
    rows = 16384
    make = lambda *shape: torch.randn(*shape, device=session.device, dtype=torch.bfloat16)
    g, u, q = make(rows, size["mlp"]), make(rows, size["mlp"]), make(rows, size["heads"], size["head_dim"])
    b, at = make(size["mlp"]), torch.arange(rows, device=session.device)
    table, mask = bi_kernels.rope_table(rows, size["head_dim"], device=session.device), g > 0
    cases = {
        "silu": (lambda m: m.silu(g), 2 * g.nbytes),
        "gelu": (lambda m: m.gelu(g), 2 * g.nbytes),
        "gelu_tanh": (lambda m: m.gelu(g, approximate="tanh"), 2 * g.nbytes),
        "swiglu": (lambda m: m.swiglu(g, u), 3 * g.nbytes),
        "add": (lambda m: m.add(g, u), 3 * g.nbytes),
        "scale": (lambda m: m.scale(g, 0.5), 2 * g.nbytes),
        "bias_add": (lambda m: m.bias_add(g, b), 2 * g.nbytes),
        "mask_fill": (lambda m: m.mask_fill(g, mask, -1.0), 2 * g.nbytes + mask.nbytes),
        "cast": (lambda m: m.cast(g, torch.float32), 3 * g.nbytes),
        "rope": (lambda m: m.rope(q, table, at), 2 * q.nbytes),
        "rope_interleaved": (lambda m: m.rope(q, table, at, interleaved=True), 2 * q.nbytes),
    }
    copied = torch.empty_like(g)
    copy = 2 * g.nbytes / times_ms(lambda: copied.copy_(g))[0]
    out = []
    for name, (call, moved) in cases.items():
        ours, theirs = times_ms(lambda: call(bi_kernels), lambda: call(stock))
        out.append(
            {"op": name, "TB/s": moved / ours / 1e9, "of a copy": moved / ours / copy, "times torch": theirs / ours}
        )
    return out
