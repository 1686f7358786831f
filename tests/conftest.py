"""The tests run the kernels on Triton's interpreter, on a GPU machine too."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from bi_kernels import contract  # noqa: E402
from bi_kernels.audit.drift import compare  # noqa: E402

torch.set_num_threads(1)  # the interpreter uses one, and two runs share the machine
settings.register_profile("tests", deadline=None, max_examples=50)
settings.load_profile("tests")


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    drift = compare(actual, expected)
    assert not drift.mismatches, f"{what}: {drift}"


def assert_within(row: str, y: torch.Tensor, reference: tuple[torch.Tensor, torch.Tensor], n: int = 1) -> None:
    """`y` is within the contract's bound of (y64, S); what fp64 puts beyond the dtype's range must be infinite there."""
    exact, magnitude = reference
    assert y.shape == exact.shape
    limit = contract.bound(row, y.dtype, exact, magnitude, n)
    close = (y.double() - exact).abs() <= limit
    overflow = (exact.abs() + limit >= torch.finfo(y.dtype).max) & (y == exact.sign() * torch.inf)
    wrong = (~(close | overflow)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        share = (y[at].double() - exact[at]).abs() / limit[at]
        raise AssertionError(f"{row} {y.dtype}: {len(wrong)} of {y.numel()} exceed the bound, first at {at}: {y[at]} "
                             f"instead of {exact[at]}, {share:.3g} × the bound")
