"""The session of an audit of another library's models: `transformers`."""

import importlib
import importlib.util
import warnings
from dataclasses import asdict, dataclass, field

from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.session import Session


def start(audit: str, given: dict) -> "IntegrationSession":
    """Begins an audit of Transformers' models with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    if importlib.util.find_spec(audit) is None:
        raise ValueError(f"{audit} is not installed, expected the extra: pip install bi-kernels[{audit}]")
    with warnings.catch_warnings():  # of a library that it imports, which asks a notebook for widgets
        warnings.simplefilter("ignore")
        importlib.import_module(f"{audit}.utils")
    return IntegrationSession(audit, asdict(p), choose(p.device, p.shapes), Candidate("bi_kernels", {}))


@dataclass
class IntegrationSession(Session):
    """A session whose subjects are models of Transformers after `apply`; its functions import that library."""

    reports: list[dict] = field(default_factory=list)  # of `apply`, a line a model
    errors: list[dict] = field(default_factory=list)  # of the logits, likewise
    shares: dict = field(default_factory=dict)  # by model: {layout: share of the gradients' elements that differ}
