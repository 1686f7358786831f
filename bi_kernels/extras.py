"""Names the extra of `pip install` that brings a missing package."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turns the import error of an optional package into one sentence that names the extra.

    Raises ModuleNotFoundError: what is missing, and `pip install 'bi-kernels[name]'`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "bi_kernels").partition(".")[0] == "bi_kernels":
            raise
        raise ModuleNotFoundError(
            f"{error.name} is not installed; run pip install 'bi-kernels[{name}]'", name=error.name
        ) from None
