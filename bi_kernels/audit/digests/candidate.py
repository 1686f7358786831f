"""Computes digests of a candidate's bits, forward and backward, on inputs that no version of torch draws otherwise."""

import hashlib
import inspect
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

import bi_kernels
from bi_kernels.audit.digests.exact_inputs import ExactProblem, ExactStep
from bi_kernels.audit.digests.file import KEY, VERSIONS, spoken
from bi_kernels.audit.digests.golden import sha
from bi_kernels.audit.evidence.provenance import architecture, provenance
from bi_kernels.audit.evidence.verdicts import sentence
from bi_kernels.audit.parameters import OTHERS, accepted
from bi_kernels.audit.problem.subject import OpUnderTest
from bi_kernels.audit.session import start
from bi_kernels.contract import dtype_name

KINDS = ("normal", "wide", "cancelling")


def _hash(*files: Path) -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:8]


def _code(function: Callable) -> str:
    """Returns a short hash of the file that a function stands in; '' where there is none."""
    try:
        return _hash(Path(inspect.getsourcefile(inspect.unwrap(function))))
    except (TypeError, OSError):
        return ""


def _forward(s: OpUnderTest) -> list[torch.Tensor]:
    s.memo.clear()
    found = [s.layout("packed", kind) for kind in KINDS]
    return [t for y in found for t in (y if isinstance(y, tuple) else [y])]


def _gradient(s: OpUnderTest) -> list[torch.Tensor]:
    step = ExactStep(s, KINDS[-1], s.lengths)
    made = step.gradients(step.layouts["packed"])
    return [made[k] for k in sorted(made)]


def compute(names: list[str], parameters: dict) -> tuple[list[dict], list[str]]:
    """Returns (digests, what could not be computed) of every op of these audits, by the name of its audit.

    An audit of other callables than the registry's ops has none. Raises ValueError for a wrong parameter.
    """
    sessions = [start(name, accepted(name, parameters)) for name in names if name not in OTHERS]
    package = Path(bi_kernels.__file__).parent
    ours = f"{version('bi-kernels')} ({_hash(*sorted([*package.glob('*.py'), *(package / 'ops').rglob('*.py')]))})"
    found, problems, seen = [], [], set()
    for session in sessions:
        made = provenance(session.device, session.parameters) | {"bi-kernels": ours}
        for s in session.make():
            p = s.problem
            label = (p.op.name, p.case, dtype_name(p.dtype))
            if label in seen:
                continue
            seen.add(label)
            s.problem = ExactProblem(**vars(p))
            for what, bits in (("forward", _forward), ("gradient", _gradient)):
                try:
                    digest, again = sha(*bits(s)), sha(*bits(s))
                except Exception as error:
                    if what == "forward":
                        problems.append(f"{spoken(*label)}: no digest ({sentence(error)})")
                    break  # without a forward, or a backward of its own
                if digest != again:
                    problems.append(
                        f"{spoken(*label)}: no digest of its {what}, which gave other bits when called again"
                    )
                    continue
                place = (architecture(session.device), s.candidate, p.shapes, *label, what, p.seed)
                versions = {k: made[k] for k in VERSIONS if k in made} | {"candidate's code": _code(s.function)}
                found.append(dict(zip(KEY, place)) | {"sha256": digest} | versions)
            s.forget()
    return found, problems
