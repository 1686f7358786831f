"""Computes digests of a candidate's bits, forward and backward, on inputs that no version of torch draws otherwise."""

import hashlib
import inspect
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

import bi_kernels
from bi_kernels.audit.digests.exact_inputs import ExactProblem, ExactStep
from bi_kernels.audit.digests.file import VERSIONS
from bi_kernels.audit.evidence.drift import raw
from bi_kernels.audit.evidence.provenance import architecture, provenance
from bi_kernels.audit.evidence.verdicts import sentence
from bi_kernels.audit.parameters import OF_CALLABLES, accepted
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


def compute(names: list[str], parameters: dict) -> tuple[list[dict], list[str]]:
    """Returns (digests, what could not be computed) of every op of these audits, by the name of its audit.

    An audit of other callables than the registry's ops has none. Raises ValueError for a wrong parameter.
    """
    sessions = [start(name, accepted(name, parameters)) for name in names if name not in OF_CALLABLES]
    package = Path(bi_kernels.__file__).parent
    ours = f"{version('bi-kernels')} ({_hash(*sorted([*package.glob('*.py'), *(package / 'ops').rglob('*.py')]))})"

    def sha(tensors: list[torch.Tensor]) -> str:
        return hashlib.sha256(b"".join(raw(t.detach()).cpu().numpy().tobytes() for t in tensors)).hexdigest()

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

            def forward(s=s) -> str:
                s.memo.clear()
                found = [s.layout("packed", kind) for kind in KINDS]
                return sha([t for y in found for t in (y if isinstance(y, tuple) else [y])])

            def gradient(s=s) -> str:
                step = ExactStep(s, KINDS[-1], s.lengths)
                made = step.gradients(step.layouts["packed"])
                return sha([made[k] for k in sorted(made)])

            for what, once in (("forward", forward), ("gradient", gradient)):
                try:
                    digest, again = once(), once()
                except Exception as error:
                    if what == "forward":
                        problems.append(f"{' '.join(filter(None, label))}: no digest ({sentence(error)})")
                        break
                    continue  # no backward of its own
                if digest != again:
                    problems.append(
                        f"{' '.join(filter(None, label))}: no digest of its {what}, which gave other bits when "
                        "called again"
                    )
                    continue
                found.append(
                    {
                        "architecture": architecture(session.device),
                        "candidate": s.candidate,
                        "shapes": p.shapes,
                        "op": label[0],
                        "case": label[1],
                        "dtype": label[2],
                        "what": what,
                        "seed": p.seed,
                        "sha256": digest,
                        **{k: made[k] for k in VERSIONS if k in made},
                        "candidate's code": _code(s.function),
                    }
                )
            s.forget()
    return found, problems
