"""Judges attention where something is unusual: sequences without tokens or keys, heads of other widths."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import bi_kernels
from bi_kernels import reference
from bi_kernels.audit.axes import Side
from bi_kernels.audit.checks import forward as judge
from bi_kernels.audit.checks import gradient as gradients
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.layouts import Call, spans
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import DTYPES
from bi_kernels.ops.attention.schedule import SCHEDULE
from bi_kernels.reference_gradients import gradient
from helpers.attention_generation import against_one_call, as_control, bounded, bounded_outputs, parts, scheduled

Lengths = list[tuple[int, int]]  # queries and keys of each sequence
# of 32 sequences, as many as a kernel looks through, so that none behind the last is masked by chance
EDGES = [(n, n) for n in (0, 1, 15, 16, 17, 127, 128, 129)] + [(5, 0), (40, 9), (9, 40), (0, 7), (70, 132), (130, 161)]
EDGES += [(2, 65), (31, 31), *((i % 3, 3 * i) for i in range(16))]
FEW = [(i % 2, 4 * i) for i in range(32)]  # of one head, so few queries that steps apart compute them
HUGE = 2**13  # of q and of k: the roundings of such scores are large numbers, and a probability is still none above 1
TRAINED = ("edges", "edges, huge scores", "edges, padded")
LAYOUTS = (*TRAINED, "few queries, padded", "edges, as prefill", "edges, padded, as prefill")
# the last two as GPT-NeoX-20B and Falcon-40B have them: as many heads as others are wide, and more than they are wide
HEADS = {f"{width} wide": {"head_dim": width} for width in (64, 96, 256)}
HEADS["64 heads, 96 wide"] = {"head_dim": 96, "heads": 64, "kv_heads": 64}
HEADS["128 heads, 64 wide"] = {"head_dim": 64, "heads": 128, "kv_heads": 8}
WIDTHS = {True: tuple(HEADS), False: ("96 wide",)}
FAR, APART = "heads 2**29 elements apart", 2**29  # of so many, offsets of 32 bits wrap at the fifth head
CROWD, CROWDED = (1, 2, 3) * 100, "300 samples, left_padded"  # more samples than a program looks up
WIDE_LAYOUTS = ("singles", "left_padded", "chunked:16", "decode of the last two")
WIDE_GRADIENTS = ("micro_batches:each", "batch")


def nan_for_no_key(q, k, v, defect=True, **told):
    out, lse = bi_kernels.attention(q, k, v, **told)
    none = (lse == -torch.inf) & defect
    return out.masked_fill(none[..., None], torch.nan), lse.masked_fill(none, torch.nan)


def reads_wrapped_heads(q, k, v, defect=True, **told):
    """Reads heads that begin 2**31 elements and more behind the first from the first on."""
    near = lambda t: t[:, :, torch.arange(t.shape[2], device=t.device) % max(1, 2**31 // t.stride(2))]
    return bi_kernels.attention(q, *(near(t) if defect and t.stride(2) > 2**28 else t for t in (k, v)), **told)


def forgets_samples(q, k, v, defect=True, **told):
    """Gives zeros to a batch's samples behind the 256th."""
    out, lse = bi_kernels.attention(q, k, v, **told)
    late = torch.arange(len(q), device=q.device).view(-1, *[1] * (q.dim() - 1)) >= 256
    return out.masked_fill(late & (q.dim() == 4) & defect, 0), lse


def edges(session, number: int) -> list[Row]:
    """Judges sequences of no tokens, of no keys, of more queries than keys, and lengths around the tile, in one packed
    call and in a padded batch, against fp64."""
    s = session.make()[number]
    decode = scheduled(session, s, few=10**9, split=64)  # several splits
    prefill = scheduled(session, s, few=0, split=SCHEDULE.split)
    plain, huge, padded, few, prefilled, padded_prefill = LAYOUTS
    return [
        *packed_edges(decode, plain),
        *packed_edges(decode, huge, HUGE),
        *padded_edges(decode, padded, backward=True),
        *padded_edges(_with_heads(decode, 1), few, FEW),
        *packed_edges(prefill, prefilled, backward=False),
        *padded_edges(prefill, padded_prefill),
    ]


def nan_without_keys(session, _) -> list[Row]:
    """Judges the control that answers NaN where there is no key."""
    s = session.subject("attention", session.dtypes[0], nan_for_no_key, "−inf rows giving NaN")
    return [as_control(packed_edges(s))]


def far_heads(session, number: int) -> list[Row]:
    """Judges heads of k and v that lie far apart, in prefill with its gradients and in decode, against heads side by
    side."""
    return apart(session.make()[number])


def wrapped_heads(session, _) -> list[Row]:
    """Judges the control that reads heads beyond 2**31 elements from the first on."""
    s = session.subject("attention", session.dtypes[0], reads_wrapped_heads, "offsets of heads in 32 bits")
    return [as_control(apart(s))]


def crowd(session, number: int) -> list[Row]:
    """Judges a padded batch of many short samples, and its gradients, against the same samples packed."""
    return crowded(session.make()[number])


def forgotten(session, _) -> list[Row]:
    """Judges the control that gives zeros to samples behind the 256th."""
    s = session.subject("attention", session.dtypes[0], forgets_samples, "samples behind the 256th forgotten")
    return [as_control(crowded(s))]


def _with_heads(s: OpUnderTest, heads: int) -> OpUnderTest:
    """Returns the subject with so many heads, of keys as of queries."""
    return replace(s, problem=replace(s.problem, sizes=s.problem.sizes | {"heads": heads, "kv_heads": heads}), memo={})


def crowded(s: OpUnderTest) -> list[Row]:
    s = replace(_with_heads(s, 1), own_lengths=CROWD)
    step, padded, said = Step(s, CANCELLING, CROWD), "left_padded", {"against": "packed", "inputs": CANCELLING}
    said["rows"] = step.count
    outputs, whole = lambda: compare(s.layout(padded), s.layout("packed")), lambda: step.gradients("packed")
    rows = s.attempt("invariance", CROWDED, outputs, **said)
    return rows + gradients.compared(s, gradients.INVARIANCE, CROWDED, lambda: step.gradients(padded), whole, **said)


def apart(s: OpUnderTest, elements: int = APART) -> list[Row]:
    """Judges heads of k and v that begin so many elements one behind the other."""
    s = _with_heads(s, 5)
    n, rows = min(600, s.largest), []
    near = {name: t[None] for name, t in s.inputs(CANCELLING, n)[0].items()}

    def far(t: torch.Tensor) -> torch.Tensor:
        _, n, heads, width = t.shape
        whole = t.new_empty((heads - 1) * elements + n * width)
        return whole.as_strided(t.shape, (len(whole), width, elements, 1)).copy_(t)

    def made(given: dict, queries: int, trains: bool) -> tuple[torch.Tensor, ...]:
        q, k, v = (t.detach().requires_grad_(trains) for t in given.values())
        found = s.called(q[:, n - queries :], k, v, **s.problem.op.constants)
        grads = torch.autograd.grad(found[0], (q, k, v), torch.ones_like(found[0])) if trains else ()
        return tuple(t.detach() for t in (*found, *grads))

    def compared(*how) -> Drift:
        return compare(made({"q": near["q"], "k": far(near["k"]), "v": far(near["v"])}, *how), made(near, *how))

    for queries, trains in ((n, True), (1, False)):
        detail = f"{queries} of {n} queries" + ", with gradients" * trains
        said = {"against": "heads side by side", "inputs": CANCELLING, "rows": queries, "detail": detail}
        said |= {"side": Side.CALL} if trains else {}
        rows += s.attempt("invariance", FAR, partial(compared, queries, trains), **said)
    return rows


def _counts(lengths: Lengths) -> dict[str, tuple[int, ...]]:
    return dict(zip("qk", zip(*lengths)))


def _edge_inputs(s: OpUnderTest, large: int = 1, of: Lengths = EDGES) -> tuple[dict, tuple]:
    """Returns q, k and v of the edges, and what fp64 makes of them."""
    key = "edges", large, tuple(of)
    if key not in s.memo:
        queries, keys = map(sum, _counts(of).values())
        tokens, _ = s.problem.inputs("normal", max(queries, keys))
        given = {"q": tokens["q"][:queries] * large, "k": tokens["k"][:keys] * large, "v": tokens["v"][:keys]}
        s.memo[key] = given, reference.attention(*given.values(), lengths=of, **s.problem.op.constants)
    return s.memo[key]


def packed_edges(s: OpUnderTest, layout: str = "edges", large: int = 1, backward: bool = True) -> list[Row]:
    """Judges the edges in one packed call, with their gradients; large: the factor of q and of k."""
    p, constants = s.problem, s.problem.op.constants
    ends = {
        f"cu_seqlens_{name}": torch.tensor([0, *np.cumsum(n)], device=p.device) for name, n in _counts(EDGES).items()
    }

    def judged() -> list[Row]:
        inputs, exact = _edge_inputs(s, large)
        given = {name: t.clone().requires_grad_() for name, t in inputs.items()}
        found = s.called(*given.values(), **ends, **constants)
        rows = bounded_outputs(s, [y.detach() for y in found], exact, layout)
        if backward:
            step = Step(s, "normal", (len(given["q"]),))
            step.draw(found)
            exact = gradient("attention", inputs, constants, step.dy, EDGES)
            for (name, e), y in zip(exact.items(), torch.autograd.grad(found, [*given.values()], step.dy)):
                rows.append(bounded(s, y, e, p.dtype, layout, f"d{name}", name))
        return rows

    return s.attempt("accuracy", layout, judged, against="fp64")


def padded_edges(s: OpUnderTest, layout: str, of: Lengths = EDGES, backward: bool = False) -> list[Row]:
    """Judges the edges in a batch, whose padding gives 0 and −inf, has the gradient 0 whatever comes upstream, and
    whose lengths have another behind the last."""
    p, counts = s.problem, _counts(of)
    lengths = {f"lengths_{name}": torch.tensor([*n, 1], device=p.device)[:-1] for name, n in counts.items()}

    def judged() -> list[Row]:
        given, exact = _edge_inputs(s, of=of)
        side = {name: "q" if name == "q" else "k" for name in given}
        wide = {name: pad_sequence(t.split(counts[side[name]]), True, 7.0) for name, t in given.items()}
        wide = {name: t.requires_grad_(backward) for name, t in wide.items()}
        s.over_ones()
        found = s.called(*wide.values(), **lengths, **p.op.constants)
        place = {n: torch.arange(wide[n].shape[1], device=p.device) < lengths[f"lengths_{n}"][:, None] for n in "qk"}
        every = []
        for y, own, nothing in zip(found, exact, (0.0, -torch.inf), strict=True):
            y64, size = (torch.full_like(y, value, dtype=torch.float64) for value in (nothing, 0.0))
            y64[place["q"]], size[place["q"]] = own
            every.append((y64, size))
        rows = bounded_outputs(s, [y.detach() for y in found], every, layout)
        if backward:
            step = Step(s, "normal", (place["q"].numel(),))
            step.draw([y.flatten(0, 1) for y in found])
            upstream = [dy.unflatten(0, place["q"].shape) for dy in step.dy]
            exact = gradient("attention", given, p.op.constants, [dy[place["q"]] for dy in upstream], of)
            for (name, e), y in zip(exact.items(), torch.autograd.grad(found, [*wide.values()], upstream)):
                real = place[side[name]]
                rows.append(bounded(s, y[real], e, p.dtype, layout, f"d{name}", name))
                left = compare(y[~real], torch.zeros_like(y[~real]))
                said = {"against": "zeros", "rows": len(y[~real]), "tensor": f"d{name}", "detail": "padding"}
                rows.append(s.row("invariance", layout, left, **said))
        return rows

    return s.attempt("accuracy", layout, judged, against="fp64")


def in_first_dtype(session) -> list[int]:
    """Returns the numbers of the subjects without a window, in the first dtype; the heads of the first get other
    widths."""
    wanted, problems = DTYPES[session.dtypes[0]], [s.problem for s in session.make()]
    return [i for i, p in enumerate(problems) if p.op.name == "attention" and p.dtype == wanted]


def widths(session, case: str) -> list[Row]:
    """Judges other heads: layouts, decode, gradients, and both against fp64."""
    n, own = 1500 if session.on_gpu else 70, session.make()[in_first_dtype(session)[0]]
    op = replace(own.problem.op, cases=lambda shapes: {case: HEADS[case]})
    s = replace(own, problem=replace(own.problem, op=op, case=case), own_lengths=(n, 1, n // 11, 5))
    *layouts, decode = WIDE_LAYOUTS
    calls = [*parts(n, 2, 1), *(Call(x[None]) for x in spans(s.lengths)[1:])]
    rows = [*judge.by_layout(s, only=layouts)]
    rows += against_one_call(s, decode, calls, lambda: s.layout("packed"))
    step = Step(s, CANCELLING, s.lengths)
    whole = cache(lambda: step.gradients(step.layouts["packed"]))
    for name in WIDE_GRADIENTS:
        made, said = lambda: step.gradients(step.layouts[name]), {"inputs": CANCELLING, "rows": step.count}
        rows += gradients.compared(s, gradients.INVARIANCE, name, made, whole, against="packed", **said)
    accuracies = ("accuracy", judge.accuracy), (gradients.ACCURACY, gradients.gradient_accuracy)
    for relation, measure in accuracies:
        rows += s.attempt(relation, "rows", lambda: measure(s, "normal"), against="fp64")
    return rows
