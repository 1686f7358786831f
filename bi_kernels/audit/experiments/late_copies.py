"""Whether attention's kernels for sm_90, which wait for their copies themselves, wait for all of them: some copies are made
late, and no bit may change. What is read too early would be of an earlier block."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch

import bi_kernels
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import Row, sentence
from bi_kernels.audit.problem.call_layouts import pack, spans
from bi_kernels.audit.problem.subject import SHARPEST, Subject
from bi_kernels.audit.relations import gradient as gradients
from bi_kernels.audit.relations.step import Step
from bi_kernels.ops.attention.forward import is_hopper

MODULE, LAYOUT = "bi_kernels.ops.attention.hopper_forward", "late copies"
NANOSECONDS = 20_000  # some ten times what a block takes
LENGTHS = (2049, 300)


def late(session) -> list[Row]:
    """Out, LSE and gradients with late copies against those without, and the control that does not wait for K."""
    if not applies(session):
        return []
    rows = [
        r
        for s in session.make()
        if s.problem.op.name == "attention" and s.problem.dtype.itemsize == 2
        for r in _late(s)
    ]
    broken = session.subject(
        "attention", "bf16" if "bf16" in session.dtypes else session.dtypes[0], _no_wait_for_k, "K not waited for"
    )
    return [*rows, *(r.as_control() for r in _late(broken)[:1])]


def applies(session) -> bool:
    """Heads of the tiny shapes are too narrow for these kernels."""
    return (
        session.on_gpu
        and is_hopper(session.device)
        and session.parameters["shapes"] != "tiny"
        and bool({"bf16", "fp16"} & {*session.dtypes})
    )


def _late(s: Subject) -> list[Row]:
    s = replace(s, own_lengths=LENGTHS, memo={})
    step, calls = Step(s, SHARPEST, LENGTHS), [pack(spans(LENGTHS))]
    row = lambda relation, drift, **more: s.row(
        relation, LAYOUT, drift, "prompt copies", SHARPEST, sum(LENGTHS), **more
    )
    try:
        out, grads = s.compute(calls), step.gradients(calls)
        with _late_copies():
            late_out, late_grads = s.compute(calls), step.gradients(calls)
        return [
            row("invariance", compare(late_out, out)),
            *(row(gradients.INVARIANCE, compare(late_grads[k], grads[k]), tensor=f"d{k}") for k in grads),
        ]
    except Exception as error:
        return [row("invariance", None, detail=sentence(error))]


@contextmanager
def _late_copies() -> Iterator[None]:
    module = sys.modules[MODULE]
    module.PAUSE = NANOSECONDS
    try:
        yield
    finally:
        module.PAUSE = 0


@cache
def _unwaited() -> ModuleType:
    """The module of sm_90's prefill, from its source without the wait for K."""
    source = Path(sys.modules[MODULE].__file__).read_text(encoding="utf-8")
    changed = source.replace("_wait(k_full, i + 2, i + 2 <= last)", "_wait(k_full, i + 2, i < 0)")
    if changed == source:
        raise ValueError(f"{MODULE} has no wait for K that this control could leave out")
    folder = TemporaryDirectory()
    path = Path(folder.name, "attention_hopper_unwaited.py")
    path.write_text(changed, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.folder = folder  # there as long as the module is
    return module


def _no_wait_for_k(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **told) -> tuple[torch.Tensor, torch.Tensor]:
    own, broken = sys.modules[MODULE], _unwaited()
    broken.PAUSE, sys.modules[MODULE] = own.PAUSE, broken
    try:
        return bi_kernels.attention(q, k, v, **told)
    finally:
        sys.modules[MODULE] = own
