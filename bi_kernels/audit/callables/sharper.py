"""Invariance on inputs that show more than the user's own, and of more samples than the user gave."""

from bi_kernels.audit.callables.drawn import edges, wanted
from bi_kernels.audit.callables.relations import gradients, invariance, plan
from bi_kernels.audit.callables.step import Step
from bi_kernels.audit.callables.target import Layout, Target
from bi_kernels.audit.evidence.verdicts import Row, sentence
from bi_kernels.contract import rows as row_counts

SHARP = "cancelling", "brink"  # kinds of inputs
ALONE, BRINK = 4, 64  # samples that are computed alone; that a call of few samples is made for, on the brink
LARGEST = 2**22  # numbers that the arguments of more samples may hold


def more(t: Target) -> Target:
    """Returns the target with as many samples as the sweep has rows, drawn from those given; itself where it has as
    many, where so many would be large, and where it does not take them."""
    size = sum(t.values[k].numel() for k in t.batched) // t.count
    count = next((m for m in reversed(row_counts(wanted(t))) if m * size <= LARGEST), 0)
    if count > t.count:
        many = t.resampled(count)
        try:
            many.whole("resampled")
            return many
        except Exception as error:
            t.refused[f"{count} samples, drawn from the {t.count} given"] = sentence(error)
    return t


def layouts(t: Target, given: int, kind: str) -> dict[str, tuple[Layout, str]]:
    """Returns the layouts that a threshold on the number of samples changes, wherever it lies. On the brink one sample
    in five or so shows another order of a sum, so calls of few samples are made of several."""
    known = plan(t.count, t.seed)
    counts = edges(t.count, given)
    if kind == "resampled":
        counts = sorted({*counts, *(m for m in row_counts(t.count - 1) if m >= given)})
    least = BRINK if kind == "brink" else 1
    calls = lambda m: [list(range(at, at + m)) for at in range(0, t.count - m + 1, m)][: -(-least // m)]
    some = {"permuted": known["permuted"], "micro_batches:ragged": known["micro_batches:ragged"]}
    found = {f"rows:{m}": (calls(m), "stale") for m in counts if m > 1}
    alone = [[i] for i in range(t.count)][:: -(-t.count // (ALONE if least == 1 else BRINK // 2))]
    return {"singles": (alone, "stale")} | some | found


def judged(t: Target, kind: str, given: int) -> list[Row]:
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
    return [
        row
        for layout, (calls, filler) in layouts(t, given, kind).items()
        for row in invariance(t, layout, calls, filler, whole)
    ]


def gradients_judged(t: Target, given: int) -> list[Row]:
    """Compares every gradient on cancelling inputs, with cancelling upstream gradients, under few layouts."""
    step = Step(t, SHARP[0])
    try:
        whole = step.gradients([t.every])
    except Exception as error:
        t.refused[f"a backward of {SHARP[0]} inputs"] = sentence(error)
        return []
    known = plan(t.count, t.seed)
    some = {name: known[name] for name in ("permuted", "micro_batches:ragged")}
    some |= {f"rows:{m}": ([list(range(m))], "stale") for m in edges(t.count, given) if m > 2}
    return [row for layout, (calls, filler) in some.items() for row in gradients(t, step, layout, calls, filler, whole)]
