"""Judges whether attention's kernels for sm_90, which wait for their copies themselves, wait for all of them.

Some copies are made late, and no bit may change: what is read too early would be of an earlier block."""

import importlib.util
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from bi_kernels.audit.broken.attention import changed
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.experiments.common import sixteen_bits
from bi_kernels.audit.problem.call_layouts import pack, spans
from bi_kernels.audit.problem.subject import SHARPEST, Subject
from bi_kernels.audit.relations import gradient as gradients
from bi_kernels.audit.relations.step import Step
from bi_kernels.ops.attention.schedule import is_hopper

MODULE, LAYOUT = "bi_kernels.ops.attention.hopper.forward", "late copies"
NANOSECONDS = 20_000  # some ten times what a block takes
LENGTHS = (2049, 300)


def applies(session) -> bool:
    """Returns whether these kernels run: heads of the tiny shapes are too narrow for them."""
    wide = session.on_gpu and session.parameters["shapes"] != "tiny"
    return wide and is_hopper(session.device) and session.dtypes != ["fp32"]


def late(session, number: int) -> list[Row]:
    """Judges out, LSE and gradients with late copies against those without."""
    return _against_late(session.make()[number])


def unwaited(session, _) -> list[Row]:
    """Judges the control that does not wait for K."""
    s = session.subject("attention", sixteen_bits(session), candidate="K not waited for")
    return [_against_late(s, hopper_prefill=without_wait().prefill)[0].as_control()]


def _against_late(s: Subject, **schedule) -> list[Row]:
    calls, said = [pack(spans(LENGTHS))], {"against": "prompt copies", "inputs": SHARPEST, "rows": sum(LENGTHS)}

    def computed(**more) -> tuple:
        own = replace(s, function=changed(**schedule, **more), own_lengths=LENGTHS, memo={})
        return own.compute(calls), Step(own, SHARPEST, LENGTHS).gradients(calls)

    def judged() -> list[Row]:
        (out, grads), (late_out, late_grads) = computed(), computed(pause=NANOSECONDS)
        row = s.row("invariance", LAYOUT, compare(late_out, out), **said)
        return [row, *gradients.compared(s, gradients.INVARIANCE, LAYOUT, lambda: late_grads, lambda: grads, **said)]

    return s.attempt("invariance", LAYOUT, judged, **said)


@cache
def without_wait(module: str = MODULE) -> ModuleType:
    """Returns a module of sm_90's prefill, made from its source without the wait for K."""
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    edited, found = re.subn(r"wait\(k_full, i \+ 2, [^()]*\)", "wait(k_full, i + 2, i < 0)", source)
    if not found:
        raise ValueError(f"{module} has no wait for K that this control could leave out")
    folder = TemporaryDirectory()
    path = Path(folder.name, f"{module.rpartition('.')[2]}_without_wait.py")
    path.write_text(edited, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.folder = folder  # there as long as the module is
    return made
