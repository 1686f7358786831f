"""Calls whose widest tensor has more than 2**31 elements, the last of which no offset of 32 bits reaches. On a GPU, in
bf16; gradients and all.

An op is given packed sequences of one length: all have the content A, but for the last two, which have another, B, and
lie wholly beyond `elements`. So what is read from, or written to, an offset that wrapped is A where B belongs, or the
reverse, or nothing at all. Every sequence's outputs and gradients must be bit-identical to those of its own call, and
the gradients of parameters to what the sequences' own calls, one after another, leave. Any other callable is given its
first sample over and over, and its last one where no offset of 32 bits reaches.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from bi_kernels.audit.axes import Side
from bi_kernels.audit.compare import AT_ONCE, Drift, compare, joined
from bi_kernels.audit.findings import INVARIANCE, NEEDS_FIX, UNSUPPORTED, Row
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.memory import in_turn
from bi_kernels.audit.step import left, prepare
from bi_kernels.audit.targets.any_callable import CallableTarget, OutOfTime, by_sample, tensors
from bi_kernels.audit.targets.callable_step import gradients_kept
from bi_kernels.audit.targets.fresh_memory import of_candidate, poisoned_memory
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import evaluate
from bi_kernels.tokens import SLAB, TokenLayout

LOST = getattr(torch, "AcceleratorError", ())  # of an access to memory that is not there
WRAPPED = "samples beyond 2**31 elements read from the first on"
OVER_INT32, LOGITS_KEPT = "beyond 2**31 elements", "beyond 2**31 elements, logits kept"
OFFSETS = "offsets"  # what flags a control that only they show
ELEMENTS = 2**31
LONGEST, FEWEST = 4090, 8  # tokens of a sequence at most; sequences with A at least
LAST = 2  # sequences with B
CASES = {"linear": ("lm_head", "o"), "attention": ("mha",)}  # the widest output, and all of one width
OUTPUTS = {
    "linear": "N",
    "linear_bias": "N",
    "matmul": "N",
    "routed_linear": "N",
    "embedding": "hidden",
}  # as wide as no input
KEEP = "keep_bytes"  # the argument by which the LM head keeps its logits


@dataclass(frozen=True)
class Call:
    """One call of an op, and its widest tensor."""

    layout: str
    problem: OpConfig
    tensor: str
    width: int  # its elements of a token
    told: dict = field(default_factory=dict)  # further arguments, by which the tensor is one inside the op

    def sizes(self, elements: int = ELEMENTS) -> tuple[int, int]:
        """Returns the tokens of a sequence, which fill no number of slabs, and how many sequences there are."""
        length = max(1, min(LONGEST, elements // FEWEST // self.width))
        length -= 3 * (length % SLAB == 0)
        return length, -(-elements // (length * self.width)) + LAST


def applies(subject: OpUnderTest) -> bool:
    """Tells whether a subject is asked: in bf16, at the first case of its op or those of CASES, on a GPU and not at
    tiny shapes. torch's own ops are not: in so large a call they allocate many times what these do."""
    p = subject.problem
    full = p.device.type == "cuda" and p.shapes != "tiny" and subject.candidate != "torch"
    return full and p.dtype == torch.bfloat16 and p.case in CASES.get(p.op.name, list(p.op.cases(p.shapes))[:1])


def calls(subject: OpUnderTest) -> list[Call]:
    """Returns the calls that a subject is asked."""
    p = subject.problem
    if p.op.cache:  # keys as wide as queries
        p = replace(p, sizes=p.sizes | {"kv_heads": p.dims["heads"]})
    elements = lambda dims: math.prod(int(evaluate(d, **p.dims)) for d in dims.split(","))
    widths = {k: elements(dims.partition(":")[0]) for k, dims in p.op.tokens.items() if not dims.endswith(":id")}
    widths |= {"out": elements(OUTPUTS[p.op.name])} if p.op.name in OUTPUTS else {}
    widest = max(widths, key=widths.get)
    found = [Call(OVER_INT32, p, widest, widths[widest])]
    if KEEP in subject.free:
        found.append(Call(LOGITS_KEPT, p, "logits", p.dims["vocab"], {KEEP: max(subject.free[KEEP])}))
    return found


def judge(subject: OpUnderTest, backward: bool) -> list[Row]:
    """Judges a subject that is asked; backward: whether gradients are, of another candidate than this package."""
    return [*by_call(subject, backward or subject.candidate == "bi_kernels")] if applies(subject) else []


def by_call(subject: OpUnderTest, backward: bool = True, elements: int = ELEMENTS) -> Iterator[Row]:
    """Yields the row of every call, of all outputs and gradients together; takes its turn for the memory."""
    for call in calls(subject):
        length, count = call.sizes(elements)
        detail = f"{call.tensor} of {length * count * call.width} elements"
        said = {"against": "singles", "inputs": CANCELLING, "rows": length * count, "detail": detail}
        made = partial(_row, subject, call, backward, elements, said)
        yield from subject.attempt("invariance", call.layout, partial(in_turn, made), **said)


def _row(subject: OpUnderTest, call: Call, backward: bool, elements: int, said: dict) -> Row:
    found = drifts(subject, call, backward, elements)
    drift, names = joined([*found.values()]), list(found)
    if wrong := [f"{k}: {d.mismatches}, first at {d.first_index}" for k, d in found.items() if d.mismatches]:
        said = said | {"detail": "; ".join([said["detail"], *wrong])}
    side = {"side": Side.CALL} if backward else {}
    return subject.row("invariance", call.layout, replace(drift, part=0), tensor=names[drift.part], **said | side)


def drifts(subject: OpUnderTest, call: Call, backward: bool = True, elements: int = ELEMENTS) -> dict[str, Drift]:
    """Returns the drift of every output and gradient of one call from the sequences' own calls."""
    length, count = call.sizes(elements)
    s = replace(subject, problem=call.problem, memo={}, own_lengths=(length, length))
    step = Step(s, CANCELLING, (length, length))
    shared = _parameters(step)
    whole = _computed(step, shared, call.told, count - LAST, LAST, backward)
    folded, shared, alone = _folded(shared) if backward else {}, _parameters(step), {}
    for i in range(count) if folded else (0, count - 1):  # each adds to the gradients of parameters
        b = int(i >= count - LAST)
        alone.setdefault(b, _computed(step, shared, call.told, 1 - b, b, backward))
    found = slice_drifts({k: t.unflatten(0, (count, length)) for k, t in whole.items()}, *alone.values())
    of_token = lambda at: at and (at[0] * length + at[1], *at[2:])
    found = {k: replace(d, first_index=of_token(d.first_index)) for k, d in found.items()}
    return found | {k: compare(folded[k], t) for k, t in (_folded(shared) if folded else {}).items()}


def slice_drifts(whole: dict, first: dict, last: dict) -> dict[str, Drift]:
    """Compares what a large call gave each sequence, or sample, with what calls of two give: the last of them with that
    of `last`, all others with that of `first`."""
    found = {}
    for k, one in first.items():
        count, step, parts = len(whole[k]), max(1, AT_ONCE // max(1, one.numel())), []
        starts = [*range(0, count - LAST, step), count - LAST]
        for at, end in zip(starts, [*starts[1:], count]):
            drift = compare(whole[k][at:end], (last[k] if end == count else one).expand(end - at, *one.shape))
            first_at = drift.first_index and (drift.first_index[0] + at, *drift.first_index[1:])
            parts.append(replace(drift, first_index=first_at))
        found[k] = joined(parts)
    return found


def spread(t: torch.Tensor, a: int, b: int, dim: int = 0) -> torch.Tensor:
    """Returns the first slice of a tensor along a dimension `a` times, and then its last one `b` times."""
    whole = t.new_empty(*t.shape[:dim], a + b, *t.shape[dim + 1 :])
    whole.narrow(dim, 0, a).copy_(t.narrow(dim, 0, 1))
    whole.narrow(dim, a, b).copy_(t.narrow(dim, t.shape[dim] - 1, 1))
    return whole


def _parameters(step: Step) -> dict[str, torch.Tensor]:
    """Returns new ones, each with a main_grad of zeros."""
    made = {k: t.detach().clone().requires_grad_() for k, t in step.shared.items()}
    prepare(made.values(), main_grad=True)
    return made


def _folded(shared: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the gradients of parameters, where the candidate left them."""
    return {f"d{k}": left(t) for k, t in shared.items()}


def _computed(step: Step, shared: dict, told: dict, a: int, b: int, backward: bool) -> dict[str, torch.Tensor]:
    """Returns the outputs of one packed call of `a` sequences with A and `b` with B, and the gradients of its tokens;
    those of parameters are added to theirs. Raises ValueError for one that is missing, and where this package leaves
    one in .grad."""
    s, ends = step.subject, tuple(range(0, (a + b + 1) * step.lengths[0], step.lengths[0]))
    in_row = lambda pair: spread(pair.unflatten(0, (2, -1)), a, b).flatten(0, 1)
    tokens = {k: in_row(t) for k, t in step.tokens.items()}
    trained = {k: t.requires_grad_(backward) for k, t in tokens.items() if t.is_floating_point()}
    tensors, where = s.arguments(tokens, shared, (ends[-1],), None, ends)
    with TokenLayout.packed(ends), torch.set_grad_enabled(backward):
        outputs = s.outputs(s.called(*tensors, **where, **told))
    if not backward:
        return s.named(outputs)
    step.draw(outputs)
    upstream = [(y, in_row(dy)) for y, dy in zip(outputs, step.dy) if y.requires_grad]
    if not upstream:
        raise ValueError("no output of the candidate requires a gradient")
    with poisoned_memory(s.calls), of_candidate():
        torch.autograd.backward(*zip(*upstream))
    if missing := [k for k, t in trained.items() if t.grad is None]:
        raise ValueError(f"the candidate's backward left no gradient for {', '.join(missing)}")
    if s.candidate == "bi_kernels" and (left := [k for k, t in shared.items() if t.grad is not None]):
        raise ValueError(f"gradients of {', '.join(left)} were left in .grad, expected them in main_grad")
    return s.named(outputs) | {f"d{k}": t.grad for k, t in trained.items()}


# any callable


def applies_to(t: CallableTarget) -> bool:
    """Tells whether a batch beyond 2**31 elements is asked of a callable: on a GPU, in bf16."""
    return t.device.type == "cuda" and t.dtype == torch.bfloat16


def beyond(t: CallableTarget, elements: int = ELEMENTS, seconds: float = 120) -> list[Row]:
    """Compares the results and the gradients of a batch whose largest tensor has more than so many elements with those
    of two samples: the first one over and over, and the last one where no offset of 32 bits reaches. A callable that
    refuses so many samples, or for which memory is lacking, is not judged; one after which the GPU answers no more
    needs a fix."""
    clear = lambda error: NEEDS_FIX if isinstance(error, LOST) or "CUDA error" in str(error) else UNSUPPORTED
    made = partial(in_turn, partial(_of_callable, t, elements))
    t.deadline = time.monotonic() + seconds
    try:
        return t.attempt("invariance", OVER_INT32, made, clear, against="two samples")
    except OutOfTime:
        return [t.row("invariance", OVER_INT32, verdict=UNSUPPORTED, detail=f"not made within {seconds:g} s")]
    finally:
        t.deadline = math.inf


def wrapped(t: CallableTarget) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns twice the input, of which the last samples of a large batch have the results of the first: the control of
    `beyond`."""

    def op(x: torch.Tensor) -> torch.Tensor:
        rows = (2.0 * x).movedim(t.batch, 0)
        return torch.cat((rows[:-LAST], rows[:LAST] if len(rows) > LAST else rows[-LAST:])).movedim(0, t.batch)

    return op


def _of_callable(t: CallableTarget, elements: int) -> list[Row]:
    upstream: list[torch.Tensor] = []
    few = _two_samples(t, 1, 1, upstream)
    held = [v.movedim(t.batch, 0) for k, v in tensors(t.values).items() if k in t.batched]
    width = max(v[0].numel() for v in (*held, *few.values()))
    count = -(-elements // width) + LAST
    many, rows = _two_samples(t, count - LAST, LAST, upstream), []
    said = {"against": "two samples", "rows": count, "detail": f"{count * width} elements in the largest tensor"}
    first, last = ({k: pair[i] for k, pair in few.items()} for i in (0, 1))
    for name, drift in slice_drifts(many, first, last).items():
        of_input = name not in t.output_names()
        told = said | ({"side": Side.INPUT} if of_input else {})
        rows.append(t.row(INVARIANCE if of_input else "invariance", OVER_INT32, drift, tensor=name, **told))
    return rows


def _two_samples(t: CallableTarget, a: int, b: int, upstream: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns what a call on the first sample `a` times and the last one `b` times gives, a row a sample: results and,
    where there is a backward, gradients of inputs; upstream: of two samples, drawn where there is none."""
    arguments, leaves = dict(t.values), {}
    for k, v in tensors(t.values).items():
        arguments[k] = spread(v, a, b, t.batch) if k in t.batched else v.clone()
        if k in t.batched and k not in t.outputs and f"d{k}" in t.trained:
            leaves[k] = arguments[k].requires_grad_()
            arguments[k] = leaves[k].clone()  # so that it may work in place
    with gradients_kept(t.module), torch.set_grad_enabled(bool(leaves)):
        prepare(t.module.parameters() if t.module is not None else (), main_grad=False)
        outputs = t.results(arguments)
        found = dict(zip(t.output_names(), (y.detach() for y in t.rows(outputs, a + b))))
        trained = [(y, d) for y, d in zip(outputs, t.dims) if d is not None and y.requires_grad]
        if not leaves or not trained:
            return found
        if not upstream:
            g = generator(t.device, t.seed, OVER_INT32)
            made = (by_sample(y, d, 2) for y, d in trained)
            upstream += [torch.randn(y.shape, generator=g, device=t.device).to(y.dtype) for y in made]
        given = [spread(dy, a, b).movedim(0, d).flatten(d, d + 1) for dy, (_, d) in zip(upstream, trained)]
        grads = torch.autograd.grad([y for y, _ in trained], [*leaves.values()], given, allow_unused=True)
    return found | {f"d{k}": g.movedim(t.batch, 0) for k, g in zip(leaves, grads) if g is not None}
