"""Scripts that show the drifts of an op of the registry, one for each of its relations."""

import re
from pathlib import Path

import torch

from bi_kernels.audit.evidence.verdicts import Row, grouped
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.relations.gradient import DETERMINISM, INVARIANCE, UNTRAINED
from bi_kernels.audit.relations.long_sequences import LONG
from bi_kernels.audit.relations.offsets import BEYOND
from bi_kernels.audit.relations.uses import ONCE
from bi_kernels.audit.relations.views import ALIGNED
from bi_kernels.audit.reproduce.imports import import_of
from bi_kernels.audit.reproduce.replay import TRAINED
from bi_kernels.audit.reproduce.script import Script, unscripted
from bi_kernels.contract import dtype_name

RELATIONS = "invariance", "parity", DETERMINISM, INVARIANCE


def words(r: Row, largest: int) -> tuple[str, str, str, str]:
    """Returns a row's two layouts, its inputs and, of a gradient, the tensor, as a script is told them."""
    if r.against == ONCE:
        way = f"{r.detail.partition(';')[0]}: {r.layout}"  # its axis stands first
        return way, f"{way}, as {ONCE}", r.inputs, r.tensor
    if r.against == UNTRAINED:
        return r.layout, UNTRAINED, r.inputs, TRAINED
    if r.relation == INVARIANCE or r.relation == DETERMINISM and r.detail.startswith("backward"):
        return r.layout, r.layout if r.against == "itself" else r.against, r.inputs, r.tensor
    if r.against == ALIGNED:
        return f"as: {r.layout}", f"{ALIGNED}: {r.layout}", r.inputs, ""
    if r.layout == "rows":
        first = f"the first {r.rows} of {largest} rows"
        return f"{first} in one call", first, r.inputs, ""
    if r.relation == "parity":
        return (*r.layout.split("="), r.inputs, "")
    return r.layout, r.layout if r.against == "itself" else r.against, r.inputs, ""


def _long(r: Row) -> bool:
    """Tells whether a row is of the gradients of long sequences, whose step is not the one that is replayed."""
    return r.relation == INVARIANCE and r.rows == sum(LONG["lengths"])


def scripts(s: Subject, candidate: Candidate, rows: list[Row], folder: Path) -> list[Script]:
    """Returns the scripts of what drifts among `rows`, all of one subject; says in a row why it has none."""
    p, found = s.problem, []
    drifting = [r for r in rows if r.relation in RELATIONS and r.mismatches]
    unscripted([r for r in drifting if r.layout == "random"], "hypothesis drew its layouts; the audit draws them again")
    unscripted([r for r in drifting if _long(r)], "none replays the step of long sequences; the audit does")
    large = [r for r in drifting if r.layout.startswith(BEYOND)]
    unscripted(large, "none makes a call of so many elements; the audit does")
    drifting = [r for r in drifting if r.layout != "random" and not _long(r) and r not in large]
    drifting.sort(key=lambda r: (r.layout != "rows", r.rows))

    def relation(r: Row) -> str:
        backward = r.relation == INVARIANCE or r.against == UNTRAINED or r.detail.startswith("backward")
        return "-".join(["gradient"] * backward + [DETERMINISM] * (r.relation == DETERMINISM))

    for suffix, mine in grouped(drifting, relation).items():
        stem = re.sub(r"[^\w-]", "_", "-".join(filter(None, (p.op.name, p.case, dtype_name(p.dtype), suffix))))
        given = (p.op.name, p.case, dtype_name(p.dtype), p.shapes, p.device.type, p.seed, torch.get_num_threads())
        asked = [(words(r, s.largest), r) for r in mine]
        (one, other, inputs, tensor), _ = asked[0]
        title = f"{' '.join(filter(None, (p.op.name, p.case)))}, {dtype_name(p.dtype)}: {tensor} {one} against {other}."
        imports = import_of(candidate, p.op, folder)
        found.append(Script(folder / f"{stem}.py", title, imports, f"Operator{given}", s.device, asked))
    return found
