"""Samples and sizes that no layout holds: a token without a batch, one id everywhere, no rows, no columns."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from bi_kernels import RopeTable
from bi_kernels.audit.compare import Tensors
from bi_kernels.audit.registry import Op
from bi_kernels.audit.step import Results, prepare
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import CONTRACT
from bi_kernels.reference_gradients import gradient
from bi_kernels.tokens import TokenLayout

LENGTHS = (5, 1, 17, 40)  # tokens of the samples of one call
ALIKE = 19  # tokens of samples of one length
LEAST = 2.0**15  # −LEAST is a logit of which exp is 0 beside any other
USED = 150, 1, 40  # tokens of samples in which one id is in most positions
ONE_TOKEN = "one token without a batch"
KEYS = (5, 12), (33, 66), (2, 65), (1, 4)  # queries of samples, and their keys
NO_COLUMNS = {k: f"no {k}" for k in ("hidden", "mlp", "N", "K")}  # dimensions of which there may be none


def begun(subject: OpUnderTest, lengths: Sequence[int] = LENGTHS) -> Step:
    """Returns the step of one packed call, which was made once. Raises what the candidate raises."""
    u = Step(subject, CANCELLING, lengths)
    assert u.base
    return u


def populations(op: Op) -> dict[str, Callable[[Step], tuple[Results, Results]]]:
    """Returns what an op is asked on samples that no layout holds: a token without a batch, one id in most positions,
    what is masked, no columns."""
    found: dict = {}
    if not op.positions and not op.cache:
        found[ONE_TOKEN] = lambda u: (_one_token(u, ()), _one_token(u, (1,)))
    elif op.positions:
        found["positions for all"] = _positions_for_all
    elif op.cache:
        found["more keys than queries"] = _more_keys
        found["more keys than queries, a key head a head"] = _own_keys
    if any(dims.endswith(":id") for dims in op.tokens.values()):
        found["one id in most positions"] = _one_id
    if masks := [k for k, dims in op.tokens.items() if dims.endswith(":bool")]:
        found["NaN under the mask"] = lambda u: (u.made(_masked(u, masks[0])), u.base)
    if op.ieee and not op.positions:
        found["zeros of either sign"] = _signed_zeros
    if "logits" in op.tokens:
        found["a block of -inf"] = _block_of_nothing
    words = [word for dims in (op.tokens | op.shared).values() for word in dims.split(":")[0].split(", ")]
    none = {} if op.scale != "1" else {k: way for k, way in NO_COLUMNS.items() if k in words}
    return found | {way: partial(_no_columns, name=k) for k, way in none.items()}


def _one_token(u: Step, lead: tuple[int, ...]) -> Results:
    """Returns what is made of the first token, given with the leading shape `lead`."""
    given = {k: t[:1] if k in u.tokens else t for k, t in u.inputs().items()}
    leaves = {k: t.clone().requires_grad_(k in u.floating) for k, t in given.items()}
    tokens, shared = u.parts(leaves)
    own = {k: t.reshape(lead + t.shape[1:]) for k, t in tokens.items()}
    outputs = u.subject.outputs(u.subject.forward(own, shared, lead, u.at[:1]))
    made = u.with_gradients(outputs, {k: leaves[k] for k in u.floating}, [dy[:1] for dy in u.dy])
    return {k: t if k[1:] in leaves else t.reshape(1, *t.shape[len(lead) :]) for k, t in made.items()}


def _positions_for_all(u: Step) -> tuple[Results, Results]:
    """Gives a batch of samples of one length the positions of one of them, and a table of which every other number
    counts."""
    step = Step(u.subject, CANCELLING, [ALIKE] * 3)
    (call,) = step.layouts["batch"]
    tokens = {k: t.view(3, ALIKE, *t.shape[1:]) for k, t in step.tokens.items()}
    tensors, told = step.arguments(call, tokens, step.shared)
    one = told["positions"][0]
    one = torch.cat((one, one + 1, one + 2))[:ALIKE]  # what lies behind it in memory is not the same again
    apart = RopeTable(*(torch.stack((t, t), -1)[..., 0] for t in told["table"]))

    def made(**more) -> Results:
        x = tensors[0].clone().requires_grad_()
        outputs = u.subject.outputs(u.subject.called(x, *tensors[1:], **told | more))
        return u.with_gradients(outputs, {"x": x}, [tensors[0].flip(0)])

    return made(positions=one, table=apart), made()


def _more_keys(u: Step) -> tuple[Results, Results]:
    """Compares samples that have more keys than queries, as behind a prefix: packed, each alone, and, but for dk and
    dv, with queries for all keys, of which those before have no gradient upstream."""
    counts = [np.cumsum([0, *lengths]).tolist() for lengths in zip(*KEYS)]

    def made(samples: Sequence[int], full: bool = False) -> Results:
        rows = [[range(of[i], of[i + 1]) for i in samples] for of in counts]
        before = [[-1] * (len(k) - len(q)) * full for q, k in zip(*rows)]
        q_rows = torch.tensor([r for some, q in zip(before, rows[0]) for r in (*some, *q)], device=u.at.device)
        k_rows = torch.tensor([r % u.count for k in rows[1] for r in k], device=u.at.device)
        at = lambda k: slice(None) if k in u.shared else k_rows if k in ("k", "v") else q_rows
        leaves = {k: t[at(k)].clone().requires_grad_() for k, t in u.inputs().items()}
        ends = [np.cumsum([0, *(len(some) + len(q) for some, q in zip(before, rows[0]))])]
        ends.append(np.cumsum([0, *map(len, rows[1])]))
        cu = {f"cu_seqlens_{x}": torch.tensor(e, dtype=torch.int32, device=q_rows.device) for x, e in zip("qk", ends)}
        with TokenLayout.packed(ends[0].tolist()):
            outputs = u.subject.outputs(u.subject.called(*leaves.values(), **cu, **u.subject.constants()))
        zero = lambda dy: dy[q_rows].masked_fill((q_rows < 0).view(-1, *[1] * (dy.dim() - 1)), 0)
        found = u.with_gradients(outputs, leaves, [zero(dy) for dy in u.dy])
        of_keys = {k: found.pop(k) for k in ("dk", "dv")}
        found = {k: t for k, t in found.items() if k[1:] not in u.shared}  # one for all samples of a call
        return {k: t[q_rows >= 0] for k, t in found.items()} | ({} if full else of_keys)

    every = range(len(KEYS))
    packed, alone, full = made(every), [made([i]) for i in every], made(every, full=True)
    wanted, label = {k: torch.cat([m[k] for m in alone]) for k in packed}, "{}, queries for all keys".format
    return packed | {label(k): t for k, t in full.items()}, wanted | {label(k): packed[k] for k in full}


def _own_keys(u: Step) -> tuple[Results, Results]:
    """Compares them where each head of queries has keys of its own, whatever the case has."""
    p = u.subject.problem
    sizes = p.sizes | {"kv_heads": p.dims["heads"]}
    return _more_keys(begun(replace(u.subject, problem=replace(p, sizes=sizes), memo={}), u.lengths))


def _one_id(u: Step) -> tuple[Results, Results]:
    """Compares gradients of one call and of a call a sample, where two ids in a hundred are others."""
    step = Step(u.subject, CANCELLING, USED)
    for k, dims in u.subject.problem.op.tokens.items():
        if dims.endswith(":id"):
            others = (torch.arange(step.count, device=step.at.device) % 50 == 9).view(
                -1, *[1] * (step.tokens[k].dim() - 1)
            )
            step.tokens[k] = torch.where(others, step.tokens[k], 5)
    named = lambda made: {f"d{k}": t for k, t in made.items()}
    return named(step.gradients()), named(step.gradients("micro_batches:each"))


def _masked(u: Step, mask: str) -> dict:
    given = u.inputs()
    return {k: t.masked_fill(given[mask], float("nan")) if t.is_floating_point() else t for k, t in given.items()}


def _rounded(s: OpUnderTest, exact: Tensors, count: int) -> Results:
    """Returns the `count` outputs of a reference by name, in the dtypes that the contract promises."""
    outputs = exact if isinstance(exact, tuple) else exact.unbind(-1) if count > 1 else (exact,)
    dtypes = list(s.problem.returned.values())
    return s.named([t.to(dtype) for t, dtype in zip(outputs, dtypes * (count // len(dtypes)), strict=True)])


def _signed_zeros(u: Step) -> tuple[Results, Results]:
    """Compares zeros of either sign with fp64, whose arithmetic has the same zeros."""
    s = u.subject
    zero = lambda t: torch.zeros_like(t).copysign(t) if t.is_floating_point() else t
    given = {k: zero(t) for k, t in u.inputs().items()}
    exact, _ = s.problem.reference(*u.parts(given), s.constants(), u.at, u.lengths)
    found = u.rolled(given)
    return found, _rounded(s, exact, len(found))


def _block_of_nothing(u: Step) -> tuple[Results, Results]:
    """Compares logits of −inf in the first 4096 places, or behind them, with logits of which exp is 0 as well."""
    p, block = u.subject.problem, CONTRACT["arithmetic"]["vocabulary_block"]
    wide = replace(u.subject, problem=replace(p, sizes=p.sizes | {"vocab": block + 70}), memo={})

    def made(nothing: float) -> Results:
        other = begun(wide, [3, 2])
        given = other.inputs()
        given["logits"][:3, :block], given["logits"][3:, block:] = nothing, nothing
        if "targets" in given:
            given["targets"] = torch.tensor([block, block + 9, block + 69, 0, block - 1], device=p.device)
        return {k: t.clamp(min=-LEAST) for k, t in other.made(given).items()}

    return made(-float("inf")), made(-LEAST)


def _no_columns(u: Step, name: str) -> tuple[Results, Results]:
    """Compares calls in which a dimension is 0 with fp64: sums of nothing are zeros."""
    p = u.subject.problem
    s = replace(u.subject, problem=replace(p, sizes=p.sizes | {name: 0}), memo={})
    step, constants, found, expected = Step(s, "normal", [3]), s.constants(), {}, {}
    for t in step.shared.values():
        t[::2] = -0.0  # and 0 + -0 is 0
    for call in ("first", "second"):  # in which fresh memory holds other numbers
        made = step.gradients()
        outputs = u.named(step.outputs)
        exact, _ = s.problem.reference(step.tokens, step.shared, constants, step.at, step.lengths)
        wanted = gradient(p.op.function or p.op.name, step.tokens | step.shared, constants, step.dy, step.lengths)
        nothing = [k for k in made if not wanted[k].exact.any()]  # others are sums
        values = _rounded(s, exact, len(outputs)) | {f"d{k}": wanted[k].exact.to(made[k].dtype) for k in nothing}
        for k, t in (outputs | {f"d{k}": made[k] for k in nothing}).items():
            found[f"{k}, {call} call"] = t
            expected[f"{k}, {call} call"] = values[k]
    return found, expected


def no_rows(u: Step) -> tuple[Results, Results]:
    """Calls the candidate on no token: outputs without rows, and gradients of parameters that are zeros."""
    found, expected, wanted = {}, {}, {k: t[:0] for k, t in u.results.items()}
    for way in ("grad", "main_grad"):
        leaves = {k: t[:0].clone() if k in u.tokens else t.clone() for k, t in u.inputs().items()}
        trained = {k: leaves[k].requires_grad_() for k in u.floating}
        if way == "main_grad":
            prepare([t for k, t in trained.items() if k in u.shared], main_grad=True)
        outputs = u.subject.outputs(u.subject.forward(*u.parts(leaves), (0,), u.at[:0], (0, 0)))
        made = u.with_gradients(outputs, trained, [torch.zeros_like(y) for y in outputs])
        made |= {f"d{k}.main_grad": getattr(leaves[k], "main_grad", None) for k in u.shared}
        made = {k: t for k, t in made.items() if t is not None}  # no gradient is zeros
        found |= {f"{k}, {way}": t for k, t in made.items()}
        expected |= {f"{k}, {way}": wanted[k] if k in wanted else torch.zeros_like(t) for k, t in made.items()}
    return found, expected
