"""Judges attention where only a GPU can: under CUDA graphs and torch.compile, and whether its kernels for sm_90, which
wait for their copies themselves, wait for all of them.

Some copies are made late, and no bit may change: what is read too early would be of an earlier block."""

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from unittest import mock

import torch

import bi_kernels
from bi_kernels.audit.checks import gradient as gradients
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.layouts import pack, spans, unaligned
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.ops.attention.schedule import is_hopper
from helpers.common import replayed, sixteen_bits

MODULE, LAYOUT = "bi_kernels.ops.attention.hopper.forward", "late copies"
COMMON = "bi_kernels.ops.attention.hopper.common"  # the interpreter does not know Gluon
NANOSECONDS = 20_000  # some ten times what a block takes
LENGTHS = (2049, 300)
UNALIGNED = "cuda_graph, unaligned"
NOBODYS, FEW_NOBODYS = "cuda_graph, rows of no sequence", "cuda_graph, rows of no sequence, few queries"
ENDS = {  # of two sequences' queries and keys, when captured and when replayed again
    NOBODYS: (dict.fromkeys("qk", (0, 700, 1500)), dict.fromkeys("qk", (0, 400, 1100))),
    FEW_NOBODYS: ({"q": (0, 3, 6), "k": (0, 700, 1500)}, {"q": (0, 2, 4), "k": (0, 400, 1100)}),
}


def applies(session) -> bool:
    """Returns whether these kernels run: heads of the tiny shapes are too narrow for them."""
    wide = session.on_gpu and session.parameters["shapes"] != "tiny"
    return wide and is_hopper(session.device) and session.dtypes != ["fp32"]


def late(session, number: int) -> list[Row]:
    """Judges out, LSE and gradients with late copies against those without."""
    return _against_late(session.make()[number])


def unwaited(session, _) -> list[Row]:
    """Judges the control that does not wait for K."""
    s = session.subject("attention", sixteen_bits(session), candidate="K not waited for")
    with mock.patch.object(importlib.import_module(MODULE), "prefill", without_wait().prefill):
        return [_against_late(s)[0].as_control()]


def _against_late(s: OpUnderTest) -> list[Row]:
    calls, said = [pack(spans(LENGTHS))], {"against": "prompt copies", "inputs": CANCELLING, "rows": sum(LENGTHS)}

    def computed(pause: int = 0) -> tuple:
        own = replace(s, function=bi_kernels.attention, own_lengths=LENGTHS, memo={})
        with mock.patch.object(importlib.import_module(COMMON), "PAUSE", pause):
            return own.compute(calls), Step(own, CANCELLING, LENGTHS).gradients(calls)

    def judged() -> list[Row]:
        (out, grads), (late_out, late_grads) = computed(), computed(NANOSECONDS)
        row = s.row("invariance", LAYOUT, compare(late_out, out), **said)
        return [row, *gradients.compared(s, gradients.INVARIANCE, LAYOUT, lambda: late_grads, lambda: grads, **said)]

    return s.attempt("invariance", LAYOUT, judged, **said)


@cache
def without_wait(module: str = MODULE) -> ModuleType:
    """Returns a module of sm_90's prefill, made from its source without the wait for K."""
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    edited, found = re.subn(r"wait\(k_full, i \+ 2, [^()]*\)", "wait(k_full, i + 2, i < 0)", source)
    if not found:
        raise ValueError(f"{module} has no wait for K that this control could leave out")
    folder = TemporaryDirectory()
    path = Path(folder.name, f"{module.rpartition('.')[2]}_without_wait.py")
    path.write_text(edited, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.folder = folder  # there as long as the module is
    return made


def captured(session, number: int) -> list[Row]:
    """Judges prefill, a chunk and decode under a CUDA graph, captured with as many keys as queries, and under
    torch.compile; and a step under a CUDA graph of which some rows are nobody's."""
    n, s = 9000, session.make()[number]
    rows = [row for layout in ENDS for row in nobodys(s, layout)]
    compiled = torch.compile(
        lambda q, k, v, n: bi_kernels.attention(q, k, v, lengths_k=n), fullgraph=True, dynamic=True
    )
    q, k, v = s.inputs(CANCELLING, n)[0].values()
    whole = bi_kernels.attention(q[None], k[None], v[None])
    for queries, length in ((1, n), (1, 4097), (1, 300), (100, 8200), (n, n)):
        at = slice(length - queries, length)
        values, expected = (q[at], k, v), tuple(t[:, at] for t in whole)
        detail = f"{queries} of {length} queries, in a cache of {n}"
        said = {"against": "eager, one call", "inputs": CANCELLING, "rows": queries, "detail": detail}

        def replay(placed: Callable) -> Drift:
            lengths = torch.full((1,), queries, device=q.device, dtype=torch.int32)
            given = [placed(torch.zeros_like(t))[None] for t in values]
            call = partial(bi_kernels.attention, *given, lengths_k=lengths)
            return compare(tuple(replayed(call, [*zip(given, values), (lengths, length)])), expected)

        def compiled_call() -> Drift:
            lengths = torch.full((1,), length, device=q.device, dtype=torch.int32)
            with torch._dynamo.config.patch(recompile_limit=64):
                return compare(tuple(compiled(*(t[None] for t in values), lengths)), expected)

        ways = {"cuda_graph": partial(replay, torch.clone), UNALIGNED: partial(replay, unaligned)}  # that ran aligned
        for layout, made in (ways | {"torch.compile": compiled_call}).items():
            rows += s.attempt("invariance", layout, made, **said)
    return rows


class _Kept(torch.autograd.Function):
    """Returns x, of which some rows' gradients stay what they were in the call before."""

    @staticmethod
    def forward(ctx, x, held, mine):
        ctx.save_for_backward(held, mine)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        held, mine = ctx.saved_tensors
        return held.copy_(torch.where(mine[:, None, None], dx, held)).clone(), None, None


def of_nobody(session, number: int) -> list[Row]:
    """Judges the controls that give rows that no sequence holds to the last, or leave their gradients unwritten."""
    own, held = session.make()[number], {}

    def to_the_last(q, k, v, cu_seqlens_q: torch.Tensor, **told) -> tuple[torch.Tensor, ...]:
        ends = torch.cat((cu_seqlens_q[:-1], cu_seqlens_q.new_full((1,), len(q))))
        return bi_kernels.attention(q, k, v, cu_seqlens_q=ends, **told)

    def unwritten(q, k, v, cu_seqlens_q: torch.Tensor, **told) -> tuple[torch.Tensor, ...]:
        buffer = held.setdefault(q.shape, torch.zeros_like(q))  # of before a capture
        mine = torch.arange(len(q), device=q.device) < cu_seqlens_q[-1]
        return bi_kernels.attention(_Kept.apply(q, buffer, mine), k, v, cu_seqlens_q=cu_seqlens_q, **told)

    broken = {"rows of no sequence given to the last": (to_the_last, "out")}
    broken |= {"gradients of rows of no sequence left unwritten": (unwritten, "dq")}
    made = {name: nobodys(replace(own, function=f, candidate=name), NOBODYS) for name, (f, _) in broken.items()}
    counts = lambda row, tensor: row.tensor == tensor or row.mismatches is None  # it raised
    return [r.as_control() for name, (_, tensor) in broken.items() for r in made[name] if counts(r, tensor)]


def nobodys(s: OpUnderTest, layout: str) -> list[Row]:
    """Judges a step under a CUDA graph, gradients and all, whose ends leave the last rows to no sequence where it is
    replayed again: their outputs are 0 and −inf, their gradients 0, and the others those of a call without them."""
    ends, fewer = ENDS[layout]
    device, count = s.problem.device, {x: of[-1] for x, of in ends.items()}
    q, k, v = (t.detach() for t in s.inputs(CANCELLING, max(count.values()))[0].values())
    values, drawn = (q[: count["q"]], k, v), generator(device, s.problem.seed, NOBODYS)
    upstream = q.flip(0)[: count["q"]], torch.randn(q[: count["q"]].shape[:-1], generator=drawn, device=device)
    on_device = lambda of: [torch.tensor(e, device=device, dtype=torch.int32) for e in of.values()]

    def step(given: Sequence[torch.Tensor], at: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves, (at_q, at_k) = [t.detach().requires_grad_() for t in given], at
        out = s.function(*leaves, cu_seqlens_q=at_q, cu_seqlens_k=at_k, **s.problem.op.constants)
        grads = torch.autograd.grad(out, leaves, [dy[: len(y)] for dy, y in zip(upstream, out)])
        return *(y.detach() for y in out), *grads

    def judged() -> list[Row]:
        given, at = [torch.zeros_like(t) for t in values], on_device(ends)
        step(given, at)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(given, at)
        for t, value in zip(given, values):
            t.copy_(value)
        graph.replay()  # whose gradients lie where those of the next are to be 0
        for t, value in zip(at, on_device(fewer)):
            t.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        alone = step([t[: fewer[x][-1]] for x, t in zip("qkk", values)], on_device(fewer))
        rows = []
        for tensor, y, own, empty in zip(("out", "lse", "dq", "dk", "dv"), found, alone, (0, -torch.inf, 0, 0, 0)):
            wanted = torch.cat((own, own.new_full((len(y) - len(own), *own.shape[1:]), empty)))
            relation = gradients.INVARIANCE if tensor[0] == "d" else "invariance"
            rows.append(s.row(relation, layout, compare(y, wanted), tensor=tensor, **said))
        return rows

    said = {"against": "eager, without these rows", "inputs": CANCELLING, "rows": count["q"]}
    said["detail"] = " and ".join(f"{fewer[x][-1]} of {n} rows of {x} are a sequence's" for x, n in count.items())
    return s.attempt("invariance", layout, judged, **said)
