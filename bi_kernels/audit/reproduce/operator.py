"""Scripts that reproduce the drifts of a registered op."""

from pathlib import Path

import torch

from bi_kernels import checks
from bi_kernels.audit.axes import NO_GRAD_NEEDED
from bi_kernels.audit.checks.gradient import LEFT
from bi_kernels.audit.checks.limits import OVER_INT32
from bi_kernels.audit.checks.long_sequences import LONG
from bi_kernels.audit.checks.memory import ALIGNED
from bi_kernels.audit.checks.single_call import SINGLE_CALL
from bi_kernels.audit.findings import DETERMINISM, INVARIANCE, Row
from bi_kernels.audit.layouts import VIEWS
from bi_kernels.audit.reproduce.imports import import_of
from bi_kernels.audit.reproduce.script import MEMORIES, Calls, Script, fn_name, text, unscripted, unused
from bi_kernels.audit.targets.candidates import Candidate
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.contract import dtype_name

RELATIONS = "invariance", "parity", DETERMINISM, INVARIANCE


def scripts(s: OpUnderTest, candidate: Candidate, rows: list[Row], folder: Path) -> list[Script]:
    """Returns a script for each row of one subject that drifts; says in a row why it has none."""
    p, found, names = s.problem, [], set()
    function, imports = fn_name(*import_of(candidate, p.op, folder))
    given = {"case": p.case, "dtype": dtype_name(p.dtype), "shapes": p.shapes, "device": p.device.type, "seed": p.seed}
    given |= {"brief": True} if p.brief else {}
    listed = ", ".join(f"{k}={v!r}" for k, v in given.items())
    made = [f"torch.set_num_threads({torch.get_num_threads()})  # more may cut a sum elsewhere"]
    made.append(f"op = registered({function}, {p.op.name!r}, {listed})  # draws its inputs")
    for r in rows:
        if r.relation not in RELATIONS or not r.mismatches:
            continue
        if why := reason(r):
            unscripted([r], why)
            continue
        gradient = r.tensor if r.relation == INVARIANCE and r.against != SINGLE_CALL else ""
        layout = f"{r.layout}-{r.rows}" if r.layout == "rows" else r.layout
        parts = p.op.name, p.case, dtype_name(p.dtype)
        name, calls = unused((*parts, gradient, layout, r.inputs), names), two_calls(s, r)
        calls.setup[:0], calls.subject = made, "op"
        label = " ".join(filter(None, parts))
        written = [text(label, r, imports, calls, p.device, checks.INTERPRETED, memory) for memory in MEMORIES]
        found.append(Script(folder / f"{name}.py", r, written))
    return found


def reason(r: Row) -> str:
    """Says why no script is written for a row, '' where one is."""
    if r.layout == "random":
        return "its layouts are drawn at random; the audit draws them again"
    if r.relation == INVARIANCE and r.rows == sum(LONG["lengths"]):
        return "none replays the step of long sequences; the audit does"
    return "none makes a call of so many elements; the audit does" if r.layout.startswith(OVER_INT32) else ""


def two_calls(s: OpUnderTest, r: Row) -> Calls:
    """Returns the two results that a row compares."""
    layout, inputs, step = repr(r.layout), repr(r.inputs), [f"step = training_step(op, {r.inputs!r})"]
    if r.against == SINGLE_CALL:
        used = f"again(op, {r.detail.partition(';')[0]!r}, {layout}, once="  # the axis stands first
        return Calls([], f"flat({used}True))", f"flat({used}False))")
    if r.against == NO_GRAD_NEEDED:
        return Calls(step, "flat([*step.rolled().values()])", f"flat(trained_outputs(step, {layout}))")
    if r.relation == INVARIANCE or r.relation == DETERMINISM and r.detail.startswith("backward"):
        main_grad = ", main_grad=False" * r.tensor.endswith(LEFT)
        key = r.tensor.removeprefix("d").removesuffix(LEFT)
        rows = "[~step.poisoned]" * (key in s.problem.op.tokens and r.inputs == "nonfinite")
        against = r.layout if r.against == "itself" else r.against
        gradient = lambda given: f"step.gradients({given}{main_grad})[{key!r}]{rows}"
        viewed = f"view=VIEWS[{layout}]" if r.layout in VIEWS else layout
        return Calls(step, gradient(repr(against)), gradient(viewed))
    if r.against == ALIGNED:
        return Calls([], *(f"flat({run}(op, {layout}, {inputs}))" for run in ("run_contiguous", "run_on_view")))
    if r.layout == "rows":
        first = lambda of: f"flat(first_rows(op, {r.rows}, of={of}, inputs={inputs}))"
        return Calls([], first(s.largest), first(r.rows))
    other, against = r.layout.split("=") if r.relation == "parity" else (r.layout, r.against)
    against = other if against == "itself" else against
    return Calls([], *(f"flat(in_layout(op, {name!r}, {inputs}))" for name in (against, other)))
