"""Runs the localiser on faults planted in models: does it name the op that is broken, and no other?

Run them all on a GPU: PYTHONPATH=tests python -m locator.run cuda
On the CPU: TRITON_INTERPRET=1 PYTHONPATH=tests python -m locator.run cpu
The exit status is 1 if a fault is not named, or another op is.
"""

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from locator.faults import FAULTS, Fault

from bi_kernels.audit.findings import sentence
from bi_kernels.audit.localiser.locate import locate


def run_fault(fault: Fault, device: torch.device | str, folder: Path | None = None) -> dict:
    """Returns the fault, what was named first, and whether it and every other op named is the one that was planted."""
    line = {"fault": fault.name, "expected": f"{fault.direction}: {fault.module or '(the model)'}, {fault.op}"}
    try:
        model, batch, *loss = fault.build(device)
        report = locate(model, batch, ("batch", "singles"), *loss, folder=folder)
    except Exception as error:
        return line | {"right": False, "named": f"raised {sentence(error)}", "causes": 0}
    first = report.first
    said = f"{first.direction}: {first.path or '(the model)'}, {first.op}, {first.source}" if first else "nothing"
    named = all(fnmatchcase(c.path, fault.module) and fnmatchcase(c.op, fault.op) for c in report.causes)
    right = bool(first) and first.direction == fault.direction and named
    scripts = [c.script for c in report.causes if c.script]
    return line | {"right": right, "named": said, "causes": len(report.causes), "scripts": scripts, "report": report}


def run_faults(
    device: torch.device | str, names: Sequence[str] = (), folder: Path | None = None, faults: Sequence[Fault] = FAULTS
) -> list[dict]:
    """Returns a line for each fault, or for each of `names`. folder: gets a folder of reproducers for each."""
    chosen = [f for f in faults if not names or f.name in names]
    return [run_fault(f, device, folder and Path(folder) / f"{i:02}") for i, f in enumerate(chosen)]


if __name__ == "__main__":
    lines = run_faults(sys.argv[1])
    wrong = [line for line in lines if not line["right"]]
    print(*(f"{line['fault']}: expected {line['expected']}; named {line['named']}" for line in wrong), sep="\n")
    print(f"{len(lines) - len(wrong)} of {len(lines)} planted faults named, and nothing else")
    sys.exit(bool(wrong))
