"""Invariance on inputs that show more than the user's own, and of more samples than the user gave."""

from triton.runtime.interpreter import interpreter_builder

from bi_kernels.audit.adversarial_inputs import edges, wanted
from bi_kernels.audit.checks.any_callable import gradients, invariance, plan
from bi_kernels.audit.findings import Row, sentence
from bi_kernels.audit.targets.any_callable import CallableTarget, Layout
from bi_kernels.audit.targets.callable_step import Step
from bi_kernels.contract import rows as row_counts

SHARP = "cancelling", "brink"  # kinds of inputs
ALONE, BRINK = 4, 64  # samples that are computed alone; that a call of few samples is made for, on the brink
FEWER = 129  # samples on the interpreter
LARGEST = 2**22  # numbers that the arguments of more samples may hold


def more(t: CallableTarget) -> CallableTarget:
    """Returns the target with as many samples as the sweep has rows, drawn from those given, and fewer where it runs
    on the interpreter; itself where it has as many, and where it does not take them."""
    size = sum(t.values[k].numel() for k in t.batched) // t.count
    interpreter_builder.grid_dim = None
    t.whole()
    most = wanted(t) if interpreter_builder.grid_dim is None else FEWER
    count = next((m for m in reversed(row_counts(min(most, wanted(t)))) if m * size <= LARGEST), 0)
    if count <= t.count:
        return t
    many = t.resampled(count)
    try:
        many.whole("resampled")
    except Exception as error:
        t.refused[f"{count} samples, drawn from the {t.count} given"] = sentence(error)
        return t
    return many


def layouts(t: CallableTarget, kind: str) -> dict[str, Layout]:
    """Returns the layouts that a threshold on the number of samples changes, wherever it lies. On the brink one sample
    in five or so shows another order of a sum, so calls of few samples are made of several."""
    counts = set(edges(t.count, t.given_count))
    if kind == "resampled":
        counts = {m for m in counts.union(row_counts(t.count - 1)) if m >= t.given_count}
    least = BRINK if kind == "brink" else 1
    calls = lambda m: [list(range(at, at + m)) for at in range(0, t.count - m + 1, m)][: -(-least // m)]
    alone = [[i] for i in t.every][:: -(-t.count // (ALONE if least == 1 else BRINK // 2))]
    some = {"singles": alone} if kind != "resampled" else {}
    return some | {f"rows:{m}": calls(m) for m in sorted(counts) if m > 1}


def gradient_layouts(t: CallableTarget) -> dict[str, Layout]:
    """Returns the few layouts in which gradients of cancelling inputs are compared."""
    some = {"micro_batches:ragged": plan(t.count, t.seed)["micro_batches:ragged"]}
    return some | {f"rows:{m}": [list(range(m))] for m in edges(t.count, t.given_count)[1::2]}


def judged(t: CallableTarget, kind: str) -> list[Row]:
    """Compares every sample's bits under each layout with those of the whole batch, on one kind of inputs. Inputs that
    the callable does not take, or of which it makes nothing finite, are not judged, and a note says so."""
    try:
        if t.given(kind) is None:
            return []
        whole = {kind: t.whole(kind)}
        if not any(y.isfinite().any() for y in whole[kind]):
            raise ValueError("nothing finite comes of them")
    except Exception as error:
        t.refused[f"{kind} inputs"] = sentence(error)
        return []
    return [row for layout, calls in layouts(t, kind).items() for row in invariance(t, layout, calls, whole)]


def gradients_judged(t: CallableTarget) -> list[Row]:
    """Compares every gradient on cancelling inputs, with cancelling upstream gradients, under few layouts."""
    step = Step(t, SHARP[0])
    try:
        whole = step.gradients()
    except Exception as error:
        t.refused[f"a backward of {SHARP[0]} inputs"] = sentence(error)
        return []
    return [row for layout, calls in gradient_layouts(t).items() for row in gradients(t, step, layout, calls, whole)]
