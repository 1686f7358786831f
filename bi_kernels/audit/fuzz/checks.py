"""Judges drawn cases: splits of the samples, a rollout without gradients, arguments that change no bit, and fp64."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from bi_kernels.audit.axes import Side
from bi_kernels.audit.checks import forward, gradient
from bi_kernels.audit.checks.single_call import compared
from bi_kernels.audit.compare import Tensors, compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.fuzz.cases import FEW, Case
from bi_kernels.audit.layouts import Call, pack, spans
from bi_kernels.audit.targets import op_config as problem
from bi_kernels.audit.targets.op import refusal
from bi_kernels.audit.targets.op_step import Step

ALONE, GROUPS, ROLLOUT, ARGUMENT, ROWS = "singles", "micro_batches:drawn", "rollout:drawn", "argument", "rows"
HEADS = 128  # of attention's sequences together, that are held against fp64
QUESTIONS = (  # of which some full case of any few holds each
    *(("gradient invariance", layout) for layout in (ALONE, GROUPS)),
    *(("invariance", ROLLOUT), ("accuracy", ROWS), ("gradient accuracy", ROWS)),
)


def judge(case: Case) -> list[Row]:
    """Returns a row a question of one case; of one that is not full the whole call against one other way."""
    s = case.subject
    said = {"inputs": case.kind, "rows": sum(s.lengths), "detail": case.said}
    rows: list[Row] = []
    whole = [pack(spans(s.lengths))]

    def compute() -> tuple[Step, dict, tuple]:
        step = Step(s, case.kind, s.lengths)
        return step, step.gradients(whole), tuple(step.outputs)

    first, raised = s.computed("invariance", "packed", compute, lambda error: refusal(s, error), **said)
    if raised:
        return raised
    step, base, outputs = first
    both = lambda outputs, gradients: s.named(outputs) | {f"d{k}": t for k, t in gradients.items()}
    expected = both(outputs, base)

    def asked(relation: str, layout: str, thunk: Callable, against: str = "packed") -> None:
        rows.extend(s.attempt(relation, layout, thunk, against=against, **said))

    def same(layout: str, step: Step, calls: list[Call], against: str = "packed") -> None:
        def row() -> Row:
            gradients = step.gradients(calls)
            drift, tensor = compared(both(step.outputs, gradients), expected)
            told = {"tensor": tensor} | ({} if drift.mismatches and tensor[:1] == "d" else {"side": Side.CALL})
            return s.row("gradient invariance", layout, drift, against, **told, **said)

        asked("gradient invariance", layout, row, against)

    joined = lambda outputs: problem.joined(outputs if len(outputs) > 1 else outputs[0])  # as OpUnderTest.call does

    def argument(name: str, value) -> None:
        other = Step(replace(s, function=partial(s.function, **{name: value}), memo={}), case.kind, s.lengths)
        other.dy = step.dy
        same(ARGUMENT, other, whole, f"{name} = {value}")

    def rollout() -> None:
        s.memo["inputs", case.kind, step.count, ()] = step.tokens, step.shared
        asked("invariance", ROLLOUT, lambda: compare(_rollout(case), joined(outputs)))

    ways: list[Callable] = []
    if sum(n > 0 for n in s.lengths) <= FEW:
        ways.append(lambda: same(ALONE, step, [Call(x[None, :]) for x in spans(s.lengths) if len(x)]))
    ways.append(lambda: same(GROUPS, step, case.groups))
    ways += [rollout] * s.problem.op.constants.get("causal", True)
    ways += [partial(argument, name, value) for name, values in s.free.items() for value in values]
    for way in ways if case.full else ways[case.number % len(ways) :][:1]:
        way()
    if case.full:
        part, outputs, base = _beginning(step, outputs, base)
        reference = joined(outputs), part.tokens, part.shared, part.at, part.lengths, case.kind
        asked("accuracy", ROWS, lambda: forward.against_fp64(s, *reference), "fp64")
    if case.full and case.kind in gradient.ACCURATE:
        found = {f"d{k}": (k, y) for k, y in base.items()}
        asked("gradient accuracy", ROWS, lambda: gradient.against_fp64(part, found), "fp64")
    s.forget()
    return [replace(r, detail=r.detail if case.said in r.detail else f"{case.said}; {r.detail}") for r in rows]


def _beginning(step: Step, outputs: tuple, base: dict) -> tuple[Step, tuple, dict]:
    """Returns a step, its outputs and gradients; those of attention's first sequences alone, since its fp64 reference
    goes head by head. A parameter's gradient, a sum over all of them, is left out where some are."""
    p = step.subject.problem
    if not p.op.cache:
        return step, outputs, base
    part, counts = copy(step), np.cumsum([n > 0 for n in step.lengths])
    part.lengths = step.lengths[: 1 + int(np.searchsorted(counts, max(1, HEADS // p.dims["heads"])))]
    part.count = n = sum(part.lengths)
    part.tokens, part.at = {k: t[:n] for k, t in step.tokens.items()}, step.at[:n]
    part.dy = [dy[:n] for dy in step.dy]
    held = {k: t[:n] if k in step.tokens else t for k, t in base.items() if k in step.tokens or n == step.count}
    return part, tuple(t[:n] for t in outputs), held


@torch.no_grad()
def _rollout(case: Case) -> Tensors:
    with torch.inference_mode(case.number % 2 == 1):
        return case.subject.compute(case.parts, case.kind, poisoned_sample=-1)
