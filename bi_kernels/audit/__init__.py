"""The auditor: does a token's result depend on what else was in the batch?

`start` begins the audit of a notebook, `audit` judges a callable of yours, `locate` names the op of a model that
drifts, and `certify` compares the logprobs of a rollout and of training.
"""

import importlib
import sys

from bi_kernels.audit.parameters import find_helpers
from bi_kernels.extras import extra

SESSIONS = {  # the module whose `start` begins an audit, by the kind of its parameters
    "registry": "bi_kernels.audit.session",
    "callable": "bi_kernels.audit.callable_session",
    "third-party": "helpers.third_party",  # next to the notebooks
    "model": "bi_kernels.audit.targets.session",
    "bench": "benchmarks.session",
    "world": "bi_kernels.audit.targets.distributed.session",
    "recipes": "helpers.recipes.session",
    "families": "helpers.families",
}


def start(audit: str, **parameters) -> "Session":  # noqa: F821
    """Checks the parameters of an audit, chooses the device, and returns the session that judges, shows and records.

    Without a CUDA device it turns Triton's interpreter on, so it must come before triton is imported; with one, the
    processes that judge parts of the audit begin beside this one. Raises ValueError: one sentence with the parameter,
    its value and what is allowed.
    """
    from bi_kernels.audit import parallel  # noqa: PLC0415 (imports torch)
    from bi_kernels.audit.parameters import OTHERS, choose, read  # noqa: PLC0415 (likewise)
    from bi_kernels.audit.timing import GPU  # noqa: PLC0415 (likewise)

    on_gpu = choose(read(audit, parameters).device).type == "cuda"
    pool = (
        parallel.begin(audit, parameters) if on_gpu and (audit not in OTHERS or audit in parallel.PROCESSES) else None
    )
    found = load(audit, parameters)
    found.pool = pool
    if parameters.get("checks") == "quick":
        print(f"Quick form: a few checks of each op. The whole audit: `bi-audit run {audit}`, or `-p checks all`.")
    if on_gpu:
        GPU.share()
    return found


def load(audit: str, parameters: dict) -> "Session":  # noqa: F821
    """Returns the session of an audit, which judges in this process alone."""
    from bi_kernels.audit.parameters import CHECKOUT, choose, read  # noqa: PLC0415 (imports torch)

    checked = read(audit, parameters)
    choose(checked.device)
    if checked.kind == "bench":
        sys.path.insert(0, str(CHECKOUT))  # nobody else's `benchmarks` comes first
    find_helpers()
    return importlib.import_module(SESSIONS[checked.kind]).start(audit, parameters)  # only now, for it imports triton


LATER = {  # what is loaded when it is first named; the first two import triton, and `start` chooses the device before
    "audit": "callable_audit",
    "locate": "localiser.locate",
    "certify": "certificate.certify",
    "Recorder": "certificate.capture",
}


def __getattr__(name: str):
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra("audit"):
        return getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
