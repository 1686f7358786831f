"""Judges drawn cases: splits of the samples, a rollout without gradients, arguments that change no bit, and fp64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bi_kernels.audit.drawn.cases import FEW, Case
from bi_kernels.audit.evidence.drift import Drift, Tensors, compare, joined
from bi_kernels.audit.evidence.verdicts import Row, sentence
from bi_kernels.audit.problem import problem
from bi_kernels.audit.problem.call_layouts import Call, pack, spans
from bi_kernels.audit.problem.subject import refusal
from bi_kernels.audit.relations import forward, gradient
from bi_kernels.audit.relations.step import Step

ALONE, GROUPS, ROLLOUT, ARGUMENT, ROWS = "singles", "micro_batches:drawn", "rollout:drawn", "argument", "rows"
QUESTIONS = (  # of which some case of any few holds each
    *(("gradient invariance", layout) for layout in (ALONE, GROUPS)),
    *(("invariance", ROLLOUT), ("accuracy", ROWS), ("gradient accuracy", ROWS)),
)


def judge(case: Case) -> list[Row]:
    """Returns a row a question of one case."""
    s = case.subject
    said = {"inputs": case.kind, "rows": sum(s.lengths), "detail": case.said}
    rows: list[Row] = []
    try:
        step = Step(s, case.kind, s.lengths)
        whole = [pack(spans(s.lengths))]
        base, outputs = step.gradients(whole), tuple(step.outputs)
    except Exception as error:
        refused = {"verdict": refusal(s, error), "detail": f"{case.said}; {sentence(error)}"}
        return [s.row("invariance", "packed", **said | refused)]

    def same(step: Step, calls: list[Call]) -> Drift:
        found = step.gradients(calls)
        return joined([compare(tuple(step.outputs), outputs), compare(tuple(found.values()), tuple(base.values()))])

    def asked(relation: str, layout: str, thunk: Callable, against: str = "packed") -> None:
        rows.extend(s.attempt(relation, layout, thunk, against=against, **said))

    if sum(n > 0 for n in s.lengths) <= FEW:
        asked("gradient invariance", ALONE, lambda: same(step, [Call(x[None, :]) for x in spans(s.lengths) if len(x)]))
    asked("gradient invariance", GROUPS, lambda: same(step, case.groups))
    if s.problem.op.constants.get("causal", True):
        s.memo["inputs", case.kind, step.count, ()] = step.tokens, step.shared
        asked("invariance", ROLLOUT, lambda: compare(_rollout(case), together(outputs)))
    for name, values in s.problem.op.free.items():
        for value in values:
            other = Step(replace(s, function=partial(s.function, **{name: value}), memo={}), case.kind, s.lengths)
            other.dy = step.dy
            asked("gradient invariance", ARGUMENT, lambda: same(other, whole), f"{name} = {value}")
    reference = together(outputs), step.tokens, step.shared, step.at, s.lengths, case.kind
    asked("accuracy", ROWS, lambda: forward.against_fp64(s, *reference), "fp64")
    if case.kind in gradient.ACCURATE:
        asked("gradient accuracy", ROWS, lambda: _gradients(step, base), "fp64")
    s.forget()
    return [replace(r, detail=r.detail if case.said in r.detail else f"{case.said}; {r.detail}") for r in rows]


def _gradients(step: Step, base: dict) -> list[Row]:
    return gradient.against_fp64(step, {f"d{k}": (k, y) for k, y in base.items()})


@torch.no_grad()
def _rollout(case: Case) -> Tensors:
    return case.subject.compute(case.parts, case.kind, poisoned_sample=-1)


def together(outputs: tuple[torch.Tensor, ...]) -> Tensors:
    """Returns outputs as `Subject.call` does."""
    return problem.joined(outputs if len(outputs) > 1 else outputs[0])
