"""The session of an audit of whole models: of the decoder, as `chain` and `training` are, or of `transformers`."""

import importlib
import importlib.util
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field

import torch

from bi_kernels.audit import parallel
from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import Row, control_row, up_to_a_drift
from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.session import Session
from bi_kernels.audit.targets.candidates import Candidate

LIBRARY = "transformers"  # that an audit of this name needs


def start(audit: str, given: dict) -> "ModelSession":
    """Begins an audit of models with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    if audit == LIBRARY:
        check_library()
    device = choose(p.device, p.shapes)
    if audit == "chain":
        p.check(device)
    found = ModelSession(audit, asdict(p), device, Candidate("bi_kernels", {}))
    with warnings.catch_warnings(action="ignore"):  # of a library that asks a notebook for widgets
        found.adapter("")
    return found


def check_library() -> None:
    """Raises ValueError where Transformers is missing."""
    if importlib.util.find_spec(LIBRARY) is None:
        raise ValueError(f"{LIBRARY} is not installed, expected the extra: pip install bi-kernels[{LIBRARY}]")


@dataclass
class ModelSession(Session):
    """A session whose targets are whole models."""

    drifts: dict[str, dict[str, dict[str, Drift]]] = field(default_factory=dict)  # by model: see ModelTarget
    reports: list[tuple] = field(default_factory=list)  # the name of each model and what `apply` reported
    errors: list[dict] = field(default_factory=list)  # of each model's logits, the lines of a table

    def adapter(self, part: str = ""):
        """Returns the module that adapts the audit's models, or its part, as "_controls"."""
        kind = LIBRARY if self.audit == LIBRARY else "decoder"
        return importlib.import_module(f"{__package__}.{kind}{part}")

    def quiet(self) -> AbstractContextManager:
        """Keeps Transformers, if it is audited, from printing progress and advice."""
        return getattr(self.adapter(), "quiet", nullcontext)()

    def judge(self) -> list[Row]:
        """Judges every layout of every model in every dtype; returns the rows, which it records as they come."""
        with self.quiet():
            return self._recorded(row for dtype in self.dtypes for row in self.adapter().rows(self, dtype))

    def controls(self) -> list[Row]:
        """Judges models with one thing broken or forgotten: each must be flagged by its relation; returns the rows."""
        torch.cuda.empty_cache()  # the processes that judge them need memory too
        names = [c.name for c in self.adapter("_controls").CONTROLS]
        return self._recorded(parallel.each(self, control, names[1:2] if self.quick else names))

    def _recorded(self, rows: Iterable[Row]) -> list[Row]:
        found = []
        for row in rows:
            self.add([row])
            found.append(row)
        return found


def control(session: ModelSession, name: str) -> Row:
    """Returns the row that flags a control, or the first of the relation that must flag it."""
    torch.cuda.empty_cache()
    found = next(c for c in session.adapter("_controls").CONTROLS if c.name == name)
    with session.quiet():
        rows = up_to_a_drift(row for row in found.rows(session) if row.relation == found.relation)
    return control_row(name, rows)
