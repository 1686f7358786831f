"""Of what kind a row's drift is: what it depends on, and whether it is the forward's or a gradient's."""

import re
from collections.abc import Iterable
from enum import StrEnum

from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, Row, grouped


class Side(StrEnum):
    """Whose bits a row compares."""

    FORWARD = "forward"
    CALL = "outputs and gradients"  # of a call, together
    INPUT = "input gradients"
    WEIGHT = "weight gradients"
    GRADIENT = "gradients"  # of which it is not known
    TRAINED = "weights after training"


class Kind(StrEnum):
    """What bits depend on, the most basic cause first; then what is wrong otherwise."""

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
LAID_OUT = Kind.COUNT, Kind.PLACE, Kind.PADDING, Kind.CACHE, Kind.LAYOUT  # kinds of the layout of a call's tokens
WHOLE, AS_GIVEN, SINGLE_CALL = "the whole batch", "padded as given", "one packed call"  # what a layout is compared with
NO_GRAD, NO_GRAD_NEEDED = "no_grad", "no gradient wanted"
AFTER_OTHERS = "at the end", "after other products"
AXES = {"mode": Kind.MODE, "demand": Kind.DEMAND, "memory": Kind.KEPT, "history": Kind.BEFORE}  # of usage_modes
LAYOUTS = {  # a pattern of names: the kind of what differs there, the first that fits
    r"rows(:\d+)?|singles|micro_batches.*|packed|beyond .*|.*, few samples": Kind.COUNT,
    r"permuted.*|.*, the batch in reverse": Kind.PLACE,
    r"(left_|right_)?padded.*|batch(:\d+)?|unpadded|packed:positions": Kind.PADDING,
    r"decode.*|chunked.*|prefill.*|generate.*": Kind.CACHE,
    r"inference_mode|deterministic algorithms|autocast|compiled|captured|cuda_graph|torch\.compile.*": Kind.MODE,
    r"kept: .*": Kind.KEPT,
    r"after .*|weights updated in place": Kind.HISTORY,
    r".* view|.*slice of .*|strides as given|every (address|other column)|heads .* apart": Kind.MEMORY,
    r".* alone .*|.*upstream gradient.*|.*backward twice": Kind.DEMAND,
}
MOVED = "singles|micro_batches"  # layouts of fewer rows, that lie elsewhere
RELATIONS = {"accuracy": Kind.ACCURACY, "gradient accuracy": Kind.ACCURACY, "atomics-free": Kind.ATOMICS}
HASH = "SHA-256"  # how the tensor of a row begins that compares hashes
INVARIANCES = "invariance", "gradient invariance", "parity"
BITS = *INVARIANCES, "determinism", Side.TRAINED  # relations that compare bits


def fields(row: Row | dict) -> dict:
    """Returns what a row says, by name."""
    return row if isinstance(row, dict) else vars(row)


def compares_bits(rows: Iterable[Row | dict]) -> bool:
    """Tells whether some row, but for the controls', compares bits: those of a benchmark do not."""
    return any(r["relation"] in BITS and not r["control"] for r in map(fields, rows))


def side(r: dict) -> str:
    """Says whose bits a row compares: the forward's, those of gradients, of which where it is known, or weights."""
    if r["relation"] == Side.TRAINED:
        return Side.TRAINED
    if r["against"] == SINGLE_CALL:
        return r.get("gradient") or Side.CALL
    return r.get("gradient") or (Side.GRADIENT if r["relation"].startswith("gradient") else Side.FORWARD)


def kind(r: dict) -> str:
    """Says what the bits that a row compares would depend on."""
    if r["verdict"] == NEEDS_FIX and r["mismatches"] is None:
        return Kind.ERROR
    if r["relation"] == Side.TRAINED:
        return Kind.LAYOUT
    if r["relation"] == "determinism":
        return Kind.BEFORE if r["layout"] in AFTER_OTHERS or r["against"] == SINGLE_CALL else Kind.RANDOM
    if r["relation"] not in INVARIANCES:
        return RELATIONS.get(r["relation"], Kind.OTHER)
    if r["against"] == SINGLE_CALL:
        return AXES.get(r["detail"].partition(";")[0], Kind.LAYOUT)
    if r["against"] == NO_GRAD or (r["against"], r["layout"]) == (NO_GRAD_NEEDED, "packed"):
        return Kind.MODE
    if r["layout"].startswith("neighbours"):
        return Kind.NEIGHBOURS if r["against"] == WHOLE else Kind.COUNT
    name = r["layout"].partition("=")[0]  # of parity the first of two
    found = next((k for pattern, k in LAYOUTS.items() if re.fullmatch(pattern, name)), Kind.LAYOUT)
    return Kind.PADDING if r["against"] == AS_GIVEN and found == Kind.COUNT else found


def by_kind(rows: Iterable[Row | dict]) -> dict[tuple[str, str], list[dict]]:
    """Groups the rows of one op by side and kind, in the order of the ranks.

    A layout may differ in more than one thing, and what the other rows say tells which it is: see `_trained`,
    `_leaked`, `_moved` and `_aged`.
    """
    every = [fields(r) for r in rows]
    kinds = [kind(r) for r in every]
    for told in (_trained, _leaked, _moved, _aged):
        kinds = told(every, kinds)
    found = grouped(zip(every, kinds), lambda x: (side(x[0]), x[1]))
    order = sorted(found, key=lambda at: (SIDES.index(at[0]), RANK.index(at[1])))
    return {at: [r for r, _ in found[at]] for at in order}


def _leaked(every: list[dict], kinds: list[str]) -> list[str]:
    """Says that it is the values of the neighbours, of an op of the registry, where NaN comes of theirs, or where their
    NaN alone brings the drift."""
    failing = lambda r, k: r["verdict"] == NEEDS_FIX and k in LAID_OUT
    finite = {side(r) for r, k in zip(every, kinds) if failing(r, k) and r["inputs"] != "nonfinite"}
    comes = lambda r: r["layout"] == "rows" and r["max_abs"] == "inf" or side(r) not in finite
    leaks = lambda r, k: failing(r, k) and r["inputs"] == "nonfinite" and comes(r)
    return [Kind.NEIGHBOURS if leaks(r, k) else k for r, k in zip(every, kinds)]


def _moved(every: list[dict], kinds: list[str]) -> list[str]:
    """Says that it is the place, of a sample alone or in a micro-batch, where the first rows of a call keep their bits
    and permuted ones do not."""
    for whose in (Side.FORWARD, Side.INPUT):
        mine = [(r, k) for r, k in zip(every, kinds) if side(r) == whose]
        bad = [(r, k) for r, k in mine if r["verdict"] == NEEDS_FIX]
        first = any(r["layout"].startswith("rows") for r, k in mine if k == Kind.COUNT)
        stays = any(k == Kind.COUNT and not re.match(MOVED, r["layout"]) for r, k in bad)
        if first and not stays and any(k == Kind.PLACE for _, k in bad):
            counted = lambda r, k: side(r) == whose and k == Kind.COUNT and r["verdict"] == NEEDS_FIX
            kinds = [Kind.PLACE if counted(r, k) else k for r, k in zip(every, kinds)]
    return kinds


def _aged(every: list[dict], kinds: list[str]) -> list[str]:
    """Says that it is the calls before, of a backward that was repeated after others, where a repeated call has its
    bits and the last one of all does not."""
    bad = {k for r, k in zip(every, kinds) if r["verdict"] == NEEDS_FIX and r["layout"] != "backward"}
    if Kind.BEFORE not in bad or Kind.RANDOM in bad:
        return kinds
    return [Kind.BEFORE if k == Kind.RANDOM and r["layout"] == "backward" else k for r, k in zip(every, kinds)]


def _trained(every: list[dict], kinds: list[str]) -> list[str]:
    """Says that it is the mode, of what a call that trains gives in any layout, where a packed one gives other bits
    than without gradients; else it is the layout."""
    bad = [r["verdict"] == NEEDS_FIX and r["mismatches"] is not None and r["against"] == NO_GRAD_NEEDED for r in every]
    if not any(b and r["layout"] == "packed" for b, r in zip(bad, every)):
        return kinds
    return [Kind.MODE if b else k for b, k in zip(bad, kinds)]
