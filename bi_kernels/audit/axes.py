"""What a row is about: whose bits it compares, what differs between the two calls, and so what the bits depend on."""

import re
from collections.abc import Iterable
from enum import StrEnum

from bi_kernels.audit.findings import NEEDS_FIX, Row, grouped, values_of


class Side(StrEnum):
    """Whose bits a row compares."""

    FORWARD = "forward"
    CALL = "outputs and gradients"  # of a call, together
    INPUT = "input gradients"
    WEIGHT = "weight gradients"
    GRADIENT = "gradients"  # of inputs or weights
    TRAINED = "weights after training"


class Kind(StrEnum):
    """What bits may depend on (an axis), the most basic cause first; then what else may be wrong."""

    RANDOM = "another run"
    BEFORE = "other calls between two of the same"
    NEIGHBOURS = "neighbours"
    COUNT = "number of rows"
    PLACE = "place"
    PADDING = "padding"
    CACHE = "decode"
    MODE = "mode"
    HISTORY = "calls before"
    KEPT = "a later call"
    MEMORY = "memory"
    DEMAND = "what is asked of the backward"
    LAYOUT = "layout"
    ATOMICS = "no order"
    ACCURACY = "accuracy"
    OTHER = "other"
    ERROR = "not compared"


RANK, SIDES = list(Kind), list(Side)
WHOLE = "the whole batch"  # what parts of it are compared with
NO_GRAD_NEEDED = "no gradient wanted"
AXES = {  # what differs between a layout, by the first word of its name, and the packed call
    "packed": [Kind.COUNT],
    "rows": [Kind.COUNT],
    "beyond": [Kind.COUNT],
    "singles": [Kind.COUNT, Kind.PLACE],
    "micro_batches": [Kind.COUNT, Kind.PLACE],
    "neighbours": [Kind.COUNT],
    "permuted": [Kind.PLACE],
    "batch": [Kind.PADDING],
    "padded": [Kind.PADDING],
    "left_padded": [Kind.PADDING],
    "chunked": [Kind.CACHE],
    "decode": [Kind.CACHE],
    "prefill": [Kind.CACHE],
    "generate": [Kind.CACHE],
    "cuda_graph": [Kind.MODE],
    "torch": [Kind.MODE],  # torch.compile
}
RELATIONS = {"accuracy": Kind.ACCURACY, "gradient accuracy": Kind.ACCURACY, "atomics-free": Kind.ATOMICS}
HASH = "SHA-256"  # how the tensor of a row begins that compares hashes
INVARIANCES = "invariance", "gradient invariance", "parity"
BITS = *INVARIANCES, "determinism", Side.TRAINED  # relations that compare bits


def axes_of(relation: str, layout: str, inputs: str) -> list[Kind]:
    """Returns what differs between a row's two calls, where its check does not say. A sample with NaN or Inf among
    others may show in theirs."""
    if relation == "determinism":
        return [Kind.RANDOM]
    if relation not in INVARIANCES:
        return [Kind.LAYOUT]
    found = AXES.get(re.match(r"\w*", layout)[0], [Kind.LAYOUT])
    return [Kind.NEIGHBOURS, *found] if inputs == "nonfinite" else found


def side_of(relation: str) -> Side:
    """Returns whose bits a relation compares, where the tensor does not say."""
    if relation == Side.TRAINED:
        return Side.TRAINED
    return Side.GRADIENT if relation.startswith("gradient") else Side.FORWARD


def compares_bits(rows: Iterable[Row | dict]) -> bool:
    """Tells whether some row, but for the controls', compares bits: those of a benchmark do not."""
    return any(r["relation"] in BITS and not r["control"] for r in map(values_of, rows))


def side(r: dict) -> str:
    """Returns whose bits a row compares."""
    return r.get("side") or side_of(r["relation"])


def by_kind(rows: Iterable[Row | dict]) -> dict[tuple[str, str], list[dict]]:
    """Groups the rows of one op by side and kind, in the order of the ranks.

    Two calls may differ along several axes. The cause is the first of them along which alone other calls drift, of the
    same side (of any side, where the same call is repeated); where none do, the first.
    """
    every = [*map(values_of, rows)]
    alone = {(side(r), *r["axes"]) for r in every if r["verdict"] == NEEDS_FIX and len(r.get("axes", ())) == 1}
    alone |= {(s, a) for _, a in alone if a in (Kind.RANDOM, Kind.BEFORE) for s in SIDES}

    def kind(r: dict) -> str:
        if r["verdict"] == NEEDS_FIX and r["mismatches"] is None:
            return Kind.ERROR
        if r["relation"] not in BITS:
            return RELATIONS.get(r["relation"], Kind.OTHER)
        axes = r.get("axes") or [Kind.LAYOUT]
        if axes[0] == Kind.COUNT and side(r) in (Side.WEIGHT, Side.GRADIENT):
            return Kind.COUNT  # a split of the step moves every token, too
        return Kind(next((a for a in axes if (side(r), a) in alone), axes[0]))

    found = grouped(every, lambda r: (side(r), kind(r)))
    order = sorted(found, key=lambda at: (SIDES.index(at[0]), RANK.index(at[1])))
    return {at: found[at] for at in order}
