"""Digests of a candidate's bits, which a user keeps: when they change, some version beside them did.

Golden digests (golden.py) say what our ops must give; these say what anybody's candidate gave, forward and backward, on
inputs that come from integers by exact arithmetic.
"""

import hashlib
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

KEY = ("architecture", "candidate", "shapes", "op", "case", "dtype", "what", "seed")
VERSIONS = ("torch", "Triton", "CUDA", "driver", "numpy", "bi-kernels", "candidate's code")
KINDS = ("normal", "wide", "cancelling")


def read(file: Path) -> list[dict]:
    """The digests in a file; ValueError in one sentence if it holds something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, list) and all({*KEY, "sha256"} <= set(r) for r in found):
            return found
    except (OSError, ValueError, TypeError):
        pass
    raise ValueError(f"{str(file)!r} holds no digests, expected a file that `bi-audit digest` wrote")


def measure(names: list[str], parameters: dict) -> tuple[list[dict], list[str]]:
    """(digests, what could not be computed) of every op of these audits, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        order = json.dumps({"names": names, "parameters": parameters, "answer": str(answer)})
        done = subprocess.run(
            [sys.executable, "-m", "bi_kernels.audit.digests.candidate", order],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if not answer.exists():
            return [], [f"digests: could not be computed ({(done.stderr.strip() or 'killed').splitlines()[-1]})"]
        return tuple(json.loads(answer.read_text(encoding="utf-8")))


def changes(recorded: list[dict], found: list[dict], problems: list[str], file: Path) -> list[str]:
    """The warnings: one an op whose bits are not those recorded, naming the versions that changed."""
    key = lambda r: tuple(r[k] for k in KEY)
    known = {key(r): r for r in recorded}
    moved: dict[str, list[dict]] = {}
    for r in found:
        if key(r) in known and known[key(r)]["sha256"] != r["sha256"]:
            moved.setdefault(r["op"], []).append(r)
    warnings = list(problems)
    for op, rows in moved.items():
        since = {k: (known[key(r)].get(k), r[k]) for r in rows for k in VERSIONS if known[key(r)].get(k) != r[k]}
        which = ", ".join(" ".join(filter(None, (r["case"], r["dtype"], r["what"]))) for r in rows)
        why = ", ".join(f"{k} {old} → {new}" for k, (old, new) in since.items()) or "no version that is recorded"
        warnings.append(
            f"{op}: other bits on {rows[0]['architecture']} than {file} holds ({which}); changed since: {why}"
        )
    unknown = [r for r in found if key(r) not in known]
    if unknown:
        r = unknown[0]
        warnings.append(
            f"digests: {file} holds {len(found) - len(unknown)} of {len(found)} that were computed, and not "
            f"{' '.join(filter(None, (r['op'], r['case'], r['dtype'], r['what'])))} of {r['candidate']} on "
            f"{r['architecture']}; record them with `bi-audit digest`"
        )
    return warnings


def merged(recorded: list[dict], found: list[dict]) -> list[dict]:
    """Both, in a fixed order; a digest that was computed again replaces the one recorded."""
    by_key = {tuple(r[k] for k in KEY): r for r in (*recorded, *found)}
    return [by_key[k] for k in sorted(by_key, key=str)]


def _hash(*files: Path) -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:8]


def _code(function: Callable) -> str:
    """A short hash of the file that a function stands in; '' where there is none."""
    try:
        return _hash(Path(inspect.getsourcefile(inspect.unwrap(function))))
    except (TypeError, OSError):
        return ""


def compute(names: list[str], parameters: dict) -> tuple[list[dict], list[str]]:
    """As `measure`, in this process."""
    from bi_kernels.audit.session import start

    # decides first whether Triton interprets; what the audit `any` judges is no op, and has no inputs of ours
    sessions = [start(name, dict(parameters)) for name in names if name != "any"]
    import torch

    import bi_kernels
    from bi_kernels.audit.digests.exact_inputs import ExactProblem, ExactStep
    from bi_kernels.audit.evidence.drift import raw
    from bi_kernels.audit.evidence.provenance import architecture, provenance
    from bi_kernels.audit.evidence.verdicts import sentence
    from bi_kernels.contract import dtype_name

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


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    Path(task["answer"]).write_text(json.dumps(compute(task["names"], task["parameters"])), encoding="utf-8")
