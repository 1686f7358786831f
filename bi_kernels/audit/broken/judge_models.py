"""Judges the localiser by faults planted in models: does it name the op that is broken, and no other?"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from bi_kernels.audit.broken.model_faults import FAULTS, Fault
from bi_kernels.audit.evidence.verdicts import sentence
from bi_kernels.audit.localiser.cause import Cause
from bi_kernels.audit.localiser.locate import locate


def names_it(fault: Fault, cause: Cause) -> bool:
    """Returns whether a cause is in the op that was planted."""
    return fnmatchcase(cause.path, fault.module) and fnmatchcase(cause.op, fault.op)


def judge_fault(fault: Fault, device: torch.device | str, folder: Path | None = None) -> dict:
    """Returns a line: what was planted, what was named first, and whether that and all else that was named is right."""
    line = {"fault": fault.name, "expected": f"{fault.direction}: {fault.module or '(the model)'}, {fault.op}"}
    try:
        model, batch, *loss = fault.build(device)
        report = locate(model, batch, fault.layouts, *loss, folder=folder)
    except Exception as error:
        return line | {"right": False, "named": f"raised {sentence(error)}", "causes": 0}
    first = report.first
    said = f"{first.direction}: {first.path or '(the model)'}, {first.op}, {first.source}" if first else "nothing"
    right = bool(first) and first.direction == fault.direction and all(names_it(fault, c) for c in report.causes)
    scripts = [c.script for c in report.causes if c.script]
    return line | {"right": right, "named": said, "causes": len(report.causes), "scripts": scripts, "report": report}


def judge_faults(
    device: torch.device | str, names: Sequence[str] = (), folder: Path | None = None, faults: Sequence[Fault] = FAULTS
) -> list[dict]:
    """Returns a line a fault, all of them unless named; folder: of a folder of reproducers each."""
    chosen = [f for f in faults if not names or f.name in names]
    return [judge_fault(f, device, folder and Path(folder) / f"{i:02}") for i, f in enumerate(chosen)]
