"""Inputs as production has them: views of one storage that are shifted by a token, four dimensions, rows that lie in
memory once, and indices of every integer dtype."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from bi_kernels.audit.checks.requests import Variant
from bi_kernels.audit.step import Results
from bi_kernels.audit.targets.op import CANCELLING
from bi_kernels.audit.targets.op_step import Step, token_layout

BATCH, FOUR = (3, 21), (3, 3, 7)  # leading shapes of the tokens of one call
DIMENSIONS, SHIFTED, EXPANDED = "four dimensions", "shifted views", "one row for all"
LEAD = 3  # rows before the first sequence
OFTEN, MANY = "ids in thousands of positions", {"cpu": (1500, 1, 600), "cuda": (9000, 1, 4000)}  # tokens of samples
LATE = f"cu_seqlens from {LEAD} on"


def shifted(t: Tensor, dim: int = 1) -> Tensor:
    """Returns the tensor as `h[:, :-1]` of a longer one, or, if it holds no floats, as `labels[:, 1:]`."""
    behind = t.is_floating_point() or t.is_complex()
    beside = [0, 0] * (t.dim() - 1 - dim) + [1 - behind, int(behind)]
    longer = pad(t, beside, value=float("nan") if behind else 0)
    return longer.narrow(dim, 1 - behind, t.shape[dim])


def expanded(t: Tensor) -> Tensor:
    """Returns the first row of the tensor for all rows, as `expand` does. Behind it in memory there is NaN, or 0."""
    whole = torch.full_like(
        t, float("nan") if t.is_floating_point() or t.is_complex() else 0, memory_format=torch.contiguous_format
    )
    whole[0] = t[0]
    return whole[:1].expand(t.shape)


def apart(t: Tensor) -> Tensor:
    """Returns every other column of a wider tensor, the others of which hold the same numbers in reverse."""
    return torch.stack((t, t.flip(0)), -1)[..., 0]


def op_placement(u: Step) -> dict[str, Variant]:
    """Returns what an op is asked of where its tokens lie: views of a longer batch, in four dimensions, in one row for
    all of a batch."""
    if u.subject.problem.op.cache:
        return {
            SHIFTED: lambda: (_batch(u, shifted), _batch(u)),
            EXPANDED: lambda: (_batch(u, expanded), _batch(u, lambda t: expanded(t).contiguous())),
        }
    return {
        DIMENSIONS: lambda: (_in_shape(u, FOUR), u.base),
        SHIFTED: lambda: (_in_shape(u, BATCH, shifted), u.base),
        EXPANDED: lambda: _one_row(u),
    }


def _in_shape(u: Step, lead: tuple[int, ...], view: Callable[[Tensor], Tensor] = lambda t: t) -> Results:
    """Returns what is made of the packed call's tokens in another leading shape, a row a token."""
    leaves = {k: t.requires_grad_(k in u.floating) for k, t in u.inputs().items()}
    tokens, shared = u.parts(leaves)
    given = {k: view(t.reshape(*lead, *t.shape[1:])) for k, t in tokens.items()}
    with token_layout(u.call, u.lengths):
        outputs = u.subject.outputs(u.subject.forward(given, shared, lead, view(u.at.reshape(lead))))
    made = u.with_gradients(outputs, {k: leaves[k] for k in u.floating}, u.dy)
    return {k: t if k[1:] in leaves else t.flatten(0, len(lead) - 1) for k, t in made.items()}


def _one_row(u: Step) -> tuple[Results, Results]:
    """Gives every row of a batch the tokens of the first; compares outputs and gradients of tokens with theirs."""
    rows, length = BATCH
    tokens, shared = u.parts(u.inputs())
    given = {k: expanded(t.reshape(*BATCH, *t.shape[1:])) for k, t in tokens.items()}
    leaves = {k: given[k].requires_grad_() for k in u.of_tokens}
    at = u.at.reshape(BATCH)[:1].expand(BATCH)
    first = {k: u.base[k][:length] for k in (*u.results, *(f"d{k}" for k in leaves))}
    outputs = u.subject.outputs(u.subject.forward(given, shared, BATCH, at))
    made = u.named(outputs)
    if leaves:
        made = u.with_gradients(outputs, leaves, [torch.cat([dy[:length]] * rows) for dy in u.dy])
    return {k: t.flatten(0, 1) for k, t in made.items()}, {k: torch.cat([t] * rows) for k, t in first.items()}


def _batch(u: Step, view: Callable[[Tensor], Tensor] = lambda t: t) -> Results:
    """Returns what attention makes of the tokens as sequences of one length, in a view."""
    tokens, shared = u.parts(u.inputs())
    given = {k: view(t.reshape(*BATCH, *t.shape[1:])) for k, t in tokens.items()} | shared
    leaves = {k: t.detach().requires_grad_() for k, t in given.items()}
    outputs = u.subject.outputs(u.subject.called(*leaves.values(), **u.subject.constants()))
    return u.with_gradients(outputs, leaves, u.dy)


# indices

INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    f"in {str(dtype).partition('.')[2]}": partial(Tensor.to, dtype=dtype)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
}
INTEGERS["in every other column"] = apart


def op_indices(u: Step) -> dict[str, Variant]:
    """Returns what an op is asked of ids, positions and the ends of its sequences: every integer dtype, indices that do
    not lie side by side, and sequences that begin behind the first row."""
    op = u.subject.problem.op
    found: dict[str, Variant] = {}
    if ids := [k for k, dims in op.tokens.items() if dims.endswith(":id")]:
        for way, view in INTEGERS.items():
            found[f"ids {way}"] = partial(_ids, u, ids, view)
    if "padding_id" in op.constants:
        found[OFTEN] = partial(_often, u)
    where = ("positions", "cu_seqlens") if op.positions else ("cu_seqlens",) if op.cache else ()
    for name, (way, view) in product(where, INTEGERS.items()):
        function = partial(_told, u.subject.called, view, u.at if name == "positions" else None)
        found[f"{name} {way}"] = lambda f=function: (u.rolled(function=f), u.results)
    return found | ({LATE: partial(_from_three, u)} if where else {})


def _ids(u: Step, names: Sequence[str], view: Callable[[Tensor], Tensor]) -> tuple[Results, Results]:
    """Compares ids in a view with the same where they lie side by side in int64; larger ones than it holds are none."""
    most = torch.iinfo(view(u.inputs()[names[0]]).dtype).max
    given = {k: t % (most + 1) if k in names and most < 2**31 else t for k, t in u.inputs().items()}
    same = all(t.equal(given[k]) for k, t in u.inputs().items())
    found = u.made({k: view(t) if k in names else t.clone() for k, t in given.items()})
    return found, u.base if same else u.made(given)


def _often(u: Step) -> tuple[Results, Results]:
    """Compares gradients of one call and of a call a sample, where an id, and the padding id, are in thousands of
    positions."""
    p = u.subject.problem
    narrow = replace(u.subject, problem=replace(p, sizes=p.sizes | {"hidden": 8}), memo={})
    step, padding = Step(narrow, CANCELLING, MANY[p.device.type]), p.op.constants["padding_id"]
    place = torch.arange(step.count, device=step.at.device) % 100
    for k, dims in p.op.tokens.items():
        if dims.endswith(":id"):
            step.tokens[k] = torch.where(place == 9, step.tokens[k], torch.where(place < 45, padding, padding + 2))
    named = lambda made: {f"d{k}": t for k, t in made.items()}
    return named(step.gradients()), named(step.gradients("micro_batches:each"))


def _told(function: Callable, view: Callable[[Tensor], Tensor], positions: Tensor | None, *tensors, **told):
    """Calls a function whose indices are in a view; positions: in place of cu_seqlens, new in every sequence."""
    if positions is not None:
        told = {k: v for k, v in told.items() if k != "cu_seqlens"} | {"positions": positions}
    return function(*tensors, **{k: view(v) if isinstance(v, Tensor) else v for k, v in told.items()})


def _from_three(u: Step) -> tuple[Results, Results]:
    """Compares what packed sequences give that begin at row 3 with what they give from row 0 on."""
    tensors, told = u.arguments(u.call, *u.parts(u.inputs()))
    later = lambda k, t: t + LEAD if k.startswith("cu_seqlens") else t
    moved = [torch.cat((t[:LEAD], t)) if k in u.tokens else t for k, t in zip(u.inputs(), tensors)]
    with torch.no_grad():
        outputs = u.subject.outputs(u.subject.called(*moved, **{k: later(k, t) for k, t in told.items()}))
    return {k: t[LEAD:] for k, t in u.named(outputs).items()}, u.results
