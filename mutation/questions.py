"""What a mutant is asked: the questions of the audits of the ops that it may change, those that kill most first."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

import bi_kernels
from bi_kernels.audit import load
from bi_kernels.audit.checks import forward, gradient, limits, long_sequences, memory, single_call
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import NEEDS_FIX, Row
from bi_kernels.audit.fuzz import cases as drawn_cases
from bi_kernels.audit.fuzz import checks as drawn
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.memory import in_turn
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.ops.gemm.kernel import launch
from bi_kernels.ops.gemm.kernel import tiles as every_tile
from helpers import attention, attention_edges, elementwise, gemm, vocabulary, without_main_grad
from mutation import adapter, models, sm_90
from mutation.judge import PASSED, Patience
from mutation.reach import ALL, LARGE, SM_90

MODELS = {"experts": models.experts, "mode": models.mode, "transformers": adapter.transformers}
QUICK = ("singles", "batch", "left_padded:16", "chunked:7", "decode")
MANY = 70_000  # tokens of which the LM head computes the logits in three parts
DRAWN = 8  # cases, as in the audit of drawn cases on the interpreter
QUICK_USES = "demand", "memory", "population"  # but for modes and what came before, which compile more
MODEL = "qwen3-8b"  # whose sizes are asked of what is LARGE
SLOW = {"widths", "captured", "edges", "uneven"}  # of attention's experiments on a GPU: an interpreter asks them
# sizes that attention is asked at on a GPU, by whether in bf16, and whether itself or a variant of it; in fp32 wide
# heads compile for minutes
SIZES = {
    (True, True): ("wide", "narrow", "many", "long", "uneven"),
    (True, False): ("wide", "long"),
    (False, True): ("narrow",),
    (False, False): (),
}
# rows of several blocks, those that fill none, and an odd number of them
WIDE = {
    "embedding": {"hidden": 2_100, "vocab": 101},
    "layer_norm": {"hidden": 70},
    "qk_norm": {"heads": 3},
    "rope": {"heads": 3},
    "row_sum": {"mlp": 5_000},
    "softmax": {"vocab": 5_009},  # one more than a multiple of 16, so that rows begin anywhere
    "log_softmax": {"vocab": 113},
    "token_logprob": {"vocab": 113},
}


Stage = tuple[str, Callable[[], Iterable[Row]]]


def asked(op: str, dtype: str, device: str, depth: str = ALL, seed: int = 0, first: str = "") -> Iterator[Row]:
    """Yields the rows of one op of this package, or one of MODELS, in one dtype, as its audits have them.

    depth: ALL, SOME, those that kill most, or SM_90, those that reach its programs; first: the stage that comes before
    the others.
    """
    for _, rows in stages(op, dtype, device, depth, seed, first):
        yield from rows


def stages(op: str, dtype: str, device: str, depth: str, seed: int, first: str = "") -> Iterator[tuple[str, Iterable]]:
    """Yields (name, rows) of each stage of `asked`."""
    if op in MODELS:
        yield op, MODELS[op](dtype, device, seed)
        return
    given = {"dtype": dtype, "device": device, "op": op, "seed": seed}
    at = lambda shapes: load(OPS[op].audit, given | {"shapes": shapes})
    session = at("tiny")
    s = _as_in_the_audit(session)
    every = _of_sm_90(s, op, at) if depth == SM_90 else _stages(session, s, op, at, depth == ALL, device == "cuda")
    for name, rows in sorted(every, key=lambda stage: stage[0] != first):
        yield name, _lazily(s, rows)


def _lazily(s: OpUnderTest, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    yield from rows()
    s.forget()


def _stages(session, s: OpUnderTest, op: str, at: Callable, whole: bool, on_gpu: bool) -> list[Stage]:
    attends, bf16 = bool(OPS[op].cache), session.dtypes[0] == "bf16"
    found: list[Stage] = [("values", lambda: _values(s)), ("layouts", lambda: _quick(s))]
    if attends and on_gpu:  # drawn cases of it compile too much; what `_experiments` asks takes minutes
        found.append(("uses", lambda: single_call.by_use(s, QUICK_USES)))
        if kinds := SIZES[bf16, op == "attention"]:
            found.append(("sizes", partial(sm_90.attention, s, op, kinds)))
    else:
        found += [("drawn", lambda: _drawn(s)), ("uses", lambda: single_call.by_use(s))]
    if op in WIDE:
        found.append(("wide", lambda: _wide(replace(s, problem=replace(s.problem, sizes=WIDE[op]), memo={}))))
    if on_gpu and bf16 and op in LARGE and not attends:
        found.append(("large", lambda: _large(at(MODEL).make(), op)))
    if on_gpu and bf16 and op in IN_16_BITS:
        found.append(("in 16 bits", lambda: IN_16_BITS[op](session)))
    if whole:
        found.append(("rest", lambda: _rest(s)))
        if op in MORE and not (attends and on_gpu and op != "attention"):
            found.append(("more", lambda: MORE[op](session)))
        if on_gpu and not attends:
            found.append(("long sequences", lambda: long_sequences.judge(at(MODEL).make()[0])))
    if on_gpu and bf16 and (not attends or op == "attention"):
        found.append(("beyond", lambda: _beyond(at(MODEL).make())))
    return found


def _of_sm_90(s: OpUnderTest, op: str, at: Callable) -> list[Stage]:
    if not OPS[op].cache:
        products = [("rings", lambda: sm_90.by_ring(s)), ("library", lambda: sm_90.by_library(s))]
        more = [("remembered", lambda: MORE[op](at("tiny")))]
        return [*products * (op == "linear_bias"), ("drawn", lambda: _drawn(s)), *more * (op == "linear_bias")]
    kinds = ("wide", "narrow", "long", "crowd") if op == "attention" else ("wide", "narrow")
    sized = [(kind, partial(sm_90.attention, s, op, [kind], True)) for kind in kinds]
    return [*sized, *[("late copies", lambda: sm_90.late(at(MODEL).make()[0]))] * (op == "attention")]


def _as_in_the_audit(session) -> OpUnderTest:
    """Returns a session's only op; a variant on the interpreter is asked what it is asked beside what it varies."""
    s = session.make()[0]
    return replace(s, problem=replace(s.problem, brief=bool(s.problem.op.variant_of) and not session.on_gpu))


def _beyond(subjects: list[OpUnderTest]) -> Iterator[Row]:
    for s in subjects:
        yield from limits.judge(s, backward=True)
        s.forget()
    if subjects[0].problem.op.name == "attention":
        yield from in_turn(partial(attention_edges.apart, subjects[0]))


def _large(subjects: list[OpUnderTest], op: str) -> Iterator[Row]:
    changed, held_to_fp64 = LARGE[op]
    cases = {s.problem.dims.get("N"): s for s in subjects}  # of linear the widest and the narrowest
    for n in {min(cases), max(cases)} if op == "linear" else [next(iter(cases))]:
        s = replace(cases[n], problem=replace(cases[n].problem, **changed), memo={})
        stages = *[_values] * held_to_fp64, _quick, gradient.by_split, memory.by_view
        for stage in (*stages, *[forward.by_row_count] * (op == "linear")):  # some numbers of rows cut a product in two
            yield from stage(s)
            s.forget()


def _values(s: OpUnderTest) -> Iterator[Row]:
    yield from s.attempt("accuracy", "rows", lambda: forward.accuracy(s, "normal"))
    yield from s.attempt(gradient.ACCURACY, "rows", lambda: gradient.gradient_accuracy(s, "normal"))


def _quick(s: OpUnderTest) -> Iterator[Row]:
    yield from forward.by_layout(s, QUICK)


def _wide(s: OpUnderTest) -> Iterator[Row]:
    yield from _values(s)
    yield from _quick(s)


def _drawn(s: OpUnderTest) -> Iterator[Row]:
    p = s.problem
    for number in range(DRAWN):
        yield from drawn.judge(drawn_cases.draw(p.op, s.function, number, p.dtype, p.device, p.seed, full=True))


def _rest(s: OpUnderTest) -> Iterator[Row]:
    yield from gradient.by_split(s)
    yield from without_main_grad.of(s) if s.problem.op.shared else ()
    yield from forward.by_layout(s)
    for kind in s.problem.accurate_on:
        yield from s.attempt("accuracy", "rows", lambda: forward.accuracy(s, kind))
    for kind in gradient.ACCURATE:
        yield from s.attempt(gradient.ACCURACY, "rows", lambda: gradient.gradient_accuracy(s, kind))
    yield from memory.by_view(s)
    yield from forward.parity(s)
    yield from s.attempt("determinism", "packed", lambda: forward.determinism(s, CANCELLING))
    yield from () if s.problem.brief else [forward.random_layouts(s)]
    yield from forward.by_row_count(s)


def _experiments(session) -> Iterator[Row]:
    s = _as_in_the_audit(session)
    last = [*s.problem.op.cases(s.problem.shapes)][-1]  # as many key heads as query heads, but for a window
    s = replace(s, problem=replace(s.problem, case=last), memo={})
    yield from gradient.by_split(s)
    s.forget()
    if s.problem.op.name == "attention":
        yield from _square(s)
        yield from _narrow(s)
    without = {"late copies"} | ({"widths"} if s.problem.op.name != "attention" else set())  # those of attention alone
    without |= SLOW if session.on_gpu else set()
    for item in attention._items(session):
        if attention.EXPERIMENTS[item[0]].name not in without:
            yield from (r for r in attention._run(session, item) if not r.control)


def _vocabulary(session) -> Iterator[Row]:
    yield from vocabulary.gathered(session, session.dtypes[0])[0]
    for dtype in ("fp32", "bf16"):  # one shows sums, one the roundings between
        yield from vocabulary.handoff(session, dtype)[0]
    if session.on_gpu:
        yield from vocabulary.handoff(session, "bf16", tokens=[MANY])[0]
    yield from (r for r in vocabulary.tied(session)[0] if not r.control)


def _embedding(session) -> Iterator[Row]:
    for experiment in (vocabulary.frequent, vocabulary.tied):
        yield from (r for r in experiment(session, session.dtypes[0])[0] if not r.control)
    yield from vocabulary.outside(session)


def _gated(session) -> Iterator[Row]:
    """Judges an op's gate and factor in one tensor against both apart."""
    s, width = session.make()[0], 38
    tokens, _ = s.problem.inputs("normal", 9)
    both = torch.cat([t.flatten(1) for t in tokens.values()], 1)[:, :width].contiguous()
    gate, constants = s.problem.op.function or s.problem.op.name, s.problem.op.constants

    def made(interleaved: bool) -> Drift:
        half = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, 1)
        given = [t.detach().clone().requires_grad_() for t in (both, *half)]
        y = bi_kernels.gated(given[0], gate, interleaved=interleaved, **constants)
        expected = getattr(bi_kernels, gate)(*given[1:], **constants)
        dy = torch.ones_like(y)
        (grad,), apart = torch.autograd.grad(y, given[0], dy), torch.autograd.grad(expected, given[1:], dy)
        joined = torch.stack(apart, 2).flatten(1) if interleaved else torch.cat(apart, 1)
        return compare((y.detach(), grad), (expected.detach(), joined))

    for interleaved in (False, True):
        layout = "gate and factor in turn" if interleaved else "gate and factor in one"
        yield from s.attempt("parity", layout, partial(made, interleaved), against=gate)


def _by_columns(session) -> Iterator[Row]:
    """Judges products of experts whose rows, or weights, are stored column by column, or lie at odd distances."""
    s, ends = session.make()[0], (5, 5, 16)
    p = s.problem
    g = generator(p.device, p.seed, "mutants", "columns")
    draw = lambda *shape: torch.randn(shape, generator=g, device=p.device).to(p.dtype)
    x, w = draw(ends[-1], 64), draw(len(ends), 24, 64)
    offsets, columns = torch.tensor(ends, dtype=torch.int32, device=p.device), w.mT.contiguous()
    made = lambda *given, **how: bi_kernels.grouped_linear(*given, offsets, **how)
    drifts = {
        "rows in columns": lambda: compare(made(sm_90.turned(x), w), made(x, w)),
        "weights in columns": lambda: compare(made(x, columns.mT), made(x, w)),
        "rows of every second number": lambda: compare(made(x.repeat_interleave(2, 1)[:, ::2], w), made(x, w)),
        "weights at odd distances": lambda: compare(made(x, _at_odd_distances(w)), made(x, w)),
        "transposed weights": lambda: compare(made(x, columns, transposed=True), made(x, w)),
    }
    for name, drift in drifts.items():
        yield from s.attempt("invariance", name, drift, against="rows")


def _at_odd_distances(w: torch.Tensor) -> torch.Tensor:
    """Returns matrices (experts, N, K), each by rows, with one number between them."""
    return torch.nn.functional.pad(w.flatten(1), (0, 1))[:, :-1].unflatten(1, w.shape[1:])


def _square(s: OpUnderTest) -> Iterator[Row]:
    """Judges as many heads as there are tokens, where they come first in memory, and as tokens of a longer tensor."""
    p = s.problem
    g = generator(p.device, p.seed, "mutants", "square")
    q, k, v = (torch.randn(2, 4, 4, 16, generator=g, device=p.device).to(p.dtype) for _ in range(3))
    made = lambda view: s.called(*map(view, (q, k, v)), **p.op.constants)[0]
    first = lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)
    yield from s.attempt("invariance", "heads first", lambda: compare(made(first), made(torch.clone)), against="rows")
    few = lambda t: t[:, :3]  # of a tensor with room for one token more
    sliced = lambda: compare(made(few), made(lambda t: few(t).contiguous()))
    yield from s.attempt("invariance", "a slice of as many tokens as heads", sliced, against="rows")


def _narrow(s: OpUnderTest) -> Iterator[Row]:
    """Judges values narrower than keys against the same with zeros behind them: each column is a sum of its own."""
    p = s.problem
    g = generator(p.device, p.seed, "mutants", "narrow")
    q, k, v = (torch.randn(1, 5, 2, n, generator=g, device=p.device).to(p.dtype) for n in (32, 32, 16))
    made = lambda v: s.called(q, k, v, **p.op.constants)[0][..., :16]
    drift = lambda: compare(made(v), made(torch.nn.functional.pad(v, (0, 16))))
    yield from s.attempt("invariance", "values narrower than keys", drift, against="wide ones")


def _weightless(session) -> Iterator[Row]:
    """Judges a norm without a weight, and its gradient, compiled against not."""
    s = session.make()[0]
    x = s.problem.inputs("normal", 9)[0]["x"]

    def made(call: Callable) -> tuple[torch.Tensor, ...]:
        leaf = x.clone().requires_grad_()
        y = call(leaf, None)
        return y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y))

    torch.compiler.reset()
    compiled = torch.compile(bi_kernels.rms_norm, backend="aot_eager", fullgraph=True)
    drift = lambda: compare(made(compiled), made(bi_kernels.rms_norm))
    yield from s.attempt("parity", "without a weight, compiled", drift, against="eager")


def _norm(session) -> Iterator[Row]:
    """Judges what else a trainer does to a norm: freezes its weight and compiles it within another call's layout, and
    then has a backward compute it again without one."""
    yield from _weightless(session)
    s = session.make()[0]
    x = s.problem.inputs("normal", 9)[0]["x"]
    w, compiled = torch.ones_like(x[0]), torch.compile(bi_kernels.rms_norm, backend="aot_eager", fullgraph=True)

    def frozen() -> Drift:
        with bi_kernels.TokenLayout.packed([0, 5]):  # of other tokens, which no gradient of this weight needs
            return compare(*(f(x.clone().requires_grad_(), w).detach() for f in (compiled, bi_kernels.rms_norm)))

    yield from s.attempt("parity", "a frozen weight, compiled", frozen, against="eager")

    def refused() -> Drift:
        leaf = w.clone().requires_grad_()
        y = checkpoint(bi_kernels.rms_norm, x.clone().requires_grad_(), leaf, use_reentrant=True)
        try:
            y.backward(torch.ones_like(y))
        except ValueError as error:
            return Drift(int("layout.within" not in str(error)), 1)
        return Drift(1, 1)

    yield from s.attempt("parity", "computed again, by no layout", refused, against="refused, as one was entered")


def _into_fp32(session) -> Iterator[Row]:
    """Judges a product in fp32 of operands of 16 bits, by each tile that a GPU may take."""
    s = session.make()[0]
    x, w, *_ = s.problem.arguments(*s.inputs(CANCELLING, 300))
    made = lambda tile: launch(x, w, None, tile, out_dtype=torch.float32)
    for tile in every_tile(x.dtype):
        told = {"against": f"{gemm.FIXED}", "detail": f"fp32 by {tile}"}
        yield from s.attempt("invariance", "tiles", lambda: compare(made(tile), made(gemm.FIXED)), **told)


def _experts(session) -> Iterator[Row]:
    """Judges experts' products, and that torch's program is not taken where it has other bits."""
    yield from _by_columns(session)
    grouped_linear = sys.modules[bi_kernels.grouped_linear.__module__]
    s = session.make()[0]
    g = generator(s.problem.device, s.problem.seed, "mutants", "doubted")
    x, w = (torch.randn(n, generator=g, device=g.device).to(s.problem.dtype) for n in ((48, 72), (3, 40, 72)))
    ends = torch.tensor((5, 5, 48), dtype=torch.int32, device=x.device)

    def doubted() -> Drift:
        theirs = grouped_linear._by_torch
        with mock.patch.object(grouped_linear, "_by_torch", lambda *given: 1.01 * theirs(*given)):
            y = bi_kernels.grouped_linear(x, w, ends)
        grouped_linear._agrees.clear()  # which holds for what was patched
        return compare(y, bi_kernels.grouped_linear(x, w, ends))

    yield from s.attempt("invariance", "a program with other bits", doubted, against="ours")


def _row_sum(session) -> Iterator[Row]:
    """Judges the gradient of a sum that is rounded to another dtype."""
    s = session.make()[0]
    x = s.problem.inputs("normal", 9)[0]["x"].requires_grad_()
    y = bi_kernels.row_sum(x, 0.3, torch.bfloat16)
    dy = torch.linspace(1, 2, 9, device=x.device).to(y.dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    expected = (dy.double() * float(torch.tensor(0.3))).to(x.dtype)[:, None].expand(dx.shape)
    yield s.row("parity", "another dtype", compare(dx, expected), "fp64")


# what else the audit of an op's family judges in its notebook
MORE: dict[str, Callable] = {
    "attention": _experiments,
    **dict.fromkeys(("attention_window", "attention_soft_cap", "attention_sinks", "attention_narrow_v"), _experiments),
    "rope": lambda session: [*elementwise.packed_reset(session)[0], *elementwise.outside_table(session)],
    "linear": lambda session: [*gemm.tiles(session)[0], *gemm.slabs(session)[0]],
    "linear_bias": lambda session: (r for r in gemm.remembered(session)[0] if not r.control),
    "routed_linear": _experts,
    "rms_norm": _norm,
    "lm_head_logprob": _vocabulary,
    "embedding": _embedding,
    "row_sum": _row_sum,
    **dict.fromkeys(("swiglu", "geglu", "geglu_tanh", "clamped_swiglu"), _gated),
}
# what is asked of bf16 besides, on a GPU: of programs that compute 16 bits alone
IN_16_BITS: dict[str, Callable] = {"linear_bias": _into_fp32, "routed_linear": _experts}


def killer(
    asks: list[tuple[str, str, str]],
    seeds: Sequence[int],
    device: str,
    patience: Patience,
    only: Sequence[str] = (),
    passed: Sequence[dict] = (),
    likely: dict | None = None,
) -> dict:
    """Judges the mutant that is imported.

    Returns which check killed it with the first seed, as a dict with op, dtype and stage; `by` names those of every
    seed; its `verdict` is "survived" where none did, or none does with another seed. `longest` is the seconds that an
    answer took at most, `took` those of each stage.

    asks: ops, dtypes, and how much is asked; patience: ends this process where no answer comes; only: the stages that
    are asked, or all; passed: the stages that are known to pass with the first seed, as an earlier process printed
    them; likely: op, dtype and stage that are asked first, as what killed before.
    """
    asks, first, by_seed, likely = list(map(tuple, asks)), {}, {}, likely or {}
    for seed in seeds:
        asks.sort(key=lambda ask: ask[:2] != (likely.get("op"), likely.get("dtype")))
        found = _killer(asks, device, seed, patience, likely, only, None if first else passed)
        patience.end()
        if found["verdict"] == "survived":
            by = "killed by {relation} {layout} of {op}, {dtype}, with seed".format_map(first) if first else ""
            return found | ({"detail": f"{by} {seeds[0]}, but by nothing with seed {seed}"} if first else {})
        first = likely = first or found
        by_seed[str(seed)] = [found[k] for k in ("op", "dtype", "depth", "stage")]
    return first | {"by": by_seed}


def _of_no_machine(detail: str) -> str:
    """Returns a text without the folders of the checkout and of the package that is judged."""
    for root in (Path(bi_kernels.__file__).parents[1], Path(__file__).parents[1]):
        detail = detail.replace(f"{root}/", "")
    return detail


def _killer(
    asks: list[tuple[str, str, str]],
    device: str,
    seed: int,
    patience: Patience,
    likely: dict,
    only: Sequence[str],
    passed: Sequence[dict] | None,
) -> dict:
    """The first stage of each op and dtype is asked, then the second of each: what answers within a second comes before
    what takes minutes. likely: whose stage comes first; passed: None where nothing is told of a stage that passes."""
    count, longest, last, took = 0, 0.0, time.monotonic(), {}
    known = {(p["op"], p["dtype"], p["stage"]): p for p in passed or ()}
    first = lambda ask: likely["stage"] if ask[:2] == (likely.get("op"), likely.get("dtype")) else ""
    turns = deque((ask, stages(*ask[:2], device, ask[2], seed, first(ask))) for ask in asks)
    while turns:
        (op, dtype, depth), mine = turn = turns.popleft()
        relation, layout, detail, stage, killed = "raised", "", "", "", False
        try:
            patience.begin()
            stage, rows = next(mine, ("", ()))
            began = time.monotonic()
            if there := known.get((op, dtype, stage)):
                count, took[f"{op}, {dtype}, {stage}"] = count + there["checks"], there["seconds"]
                turns.append(turn)
                continue
            so_far = count
            for row in rows if not only or stage in only else ():
                patience.begin()
                now = time.monotonic()
                count, longest, last = count + 1, max(longest, now - last), now
                if killed := row.verdict == NEEDS_FIX:
                    relation, layout, detail = row.relation, row.layout, row.detail
                    break
            if stage:
                took[f"{op}, {dtype}, {stage}"] = round(time.monotonic() - began, 1)
                turns.append(turn)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what the device has to say of an illegal access comes here
            if not killed:
                if stage and passed is not None:
                    said = {"op": op, "dtype": dtype, "stage": stage, "checks": count - so_far}
                    said["seconds"] = round(time.monotonic() - began, 1)
                    print(PASSED + json.dumps(said), flush=True)
                continue
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
        found = {"verdict": "killed", "op": op, "dtype": dtype, "depth": depth, "stage": stage}
        return found | {"relation": relation, "layout": layout, "detail": _of_no_machine(detail)[:200], "checks": count}
    return {"verdict": "survived", "checks": count, "longest": round(longest, 1), "took": took}
