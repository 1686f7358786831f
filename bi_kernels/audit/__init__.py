"""The auditor: does a token's result depend on what else was in the batch?

`from bi_kernels.audit import audit` judges a callable of yours (see callables.py). Nothing is imported before it is
asked for: the notebooks decide first whether Triton interprets.
"""


def __getattr__(name: str):
    if name == "audit":
        from bi_kernels.audit.callables.audit import audit

        return audit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def start(audit: str, **parameters):
    from bi_kernels.audit.session import start as begin

    return begin(audit, parameters)
