"""The tests run the kernels on Triton's interpreter, on a GPU machine too."""

import functools
import gc
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the kernels and processes that tests start, as in here

import pytest
import torch
from hypothesis import settings

from bi_kernels import contract
from bi_kernels.audit import cli
from bi_kernels.audit.evidence.drift import compare

torch.set_num_threads(1)  # the interpreter uses one, and two runs share the machine
gc.set_threshold(50_000)  # as in audits
settings.register_profile("tests", deadline=None, max_examples=50)
settings.load_profile("tests")

# A file is one worker's. The longest come first, so that no worker is left alone with one of them at the end.
LONGEST = (
    "9_attention.ipynb",
    "3_gemm.ipynb",
    "test_mutants.py",
    "5_vocabulary.ipynb",
    "6_backward.ipynb",
    "13_random.ipynb",
    "test_attention_audit.py",
    "test_reproducers.py",
    "test_attention.py",
    "2_elementwise.ipynb",
    "test_notebooks.py",
    "12_transformers.ipynb",
    "gallery_of_bugs.ipynb",
    "test_fair.py",
    "test_ci.py",
    "8_zoo.ipynb",
    "test_gradients.py",
    "test_audit.py",
    "4_rms_norm.ipynb",
    "test_model.py",
    "test_backward_ops.py",
    "test_callables.py",
    "workbench.ipynb",
    "paste_your_kernel.ipynb",
    "test_workbench.py",
    "test_static.py",
    "1_dtype.ipynb",
    "7_any.ipynb",
)


# What `make test` leaves to `make test-all`: tests marked slow, but for the cases that the mark names, and these.
SLOW_NOTEBOOKS = (
    "1_dtype.ipynb",
    "2_elementwise.ipynb",
    "3_gemm.ipynb",
    "4_rms_norm.ipynb",
    "5_vocabulary.ipynb",
    "6_backward.ipynb",
    "8_zoo.ipynb",
    "9_attention.ipynb",
    "10_chain.ipynb",
    "11_training.ipynb",
    "12_transformers.ipynb",
    "13_random.ipynb",
    "15_world.ipynb",
    "16_recipes.ipynb",
    "gallery_of_bugs.ipynb",
)


ROOT = Path(__file__).parents[1]
STRAY = pytest.StashKey[list]()  # cases that a mark `slow` keeps, of tests that have none such


@functools.cache
def tracked() -> frozenset[Path] | None:
    """The files of the checkout that git tracks; None where there is no git. What else lies there is nobody's
    promise."""
    try:
        told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset(ROOT / name for name in told.split("\0") if name)


def committed(*patterns: str) -> list[Path]:
    """The files of the checkout of some patterns, but for those that git does not track."""
    found = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return [path for path in found if tracked() is None or path in tracked()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-slow", action="store_true", help="leaves out what is marked slow")


def kept(item: pytest.Item) -> tuple[str, ...] | None:
    """The texts of which a case that is kept has one in its id; None where nothing is marked slow."""
    mark = item.get_closest_marker("slow")
    return mark and tuple(mark.kwargs.get("but", ()))


def is_slow(item: pytest.Item) -> bool:
    texts = kept(item)
    return item.path.name in SLOW_NOTEBOOKS or texts is not None and not any(text in item.name for text in texts)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if tracked() is not None:
        others = [item for item in items if item.path.suffix == ".ipynb" and item.path not in tracked()]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    if config.getoption("without_slow"):
        slow = [item for item in items if is_slow(item)]
        cases = {(i.location[0], i.originalname, text) for i in items for text in kept(i) or ()}
        cases -= {(i.location[0], i.originalname, text) for i in items for text in kept(i) or () if text in i.name}
        config.stash[STRAY] = sorted(cases)  # for a test: an error raised here is not seen where workers collect
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not is_slow(item)]
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture
def bi_audit(monkeypatch, capsys):
    """`bi-audit` with the arguments given, in this process: its exit status and what it printed."""

    def call(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["bi-audit", *map(str, arguments)])
        monkeypatch.setattr(signal, "signal", lambda *handler: None)  # the handlers here are pytest's
        with pytest.raises(SystemExit) as end:
            cli.main()
        return SimpleNamespace(returncode=end.value.code, **capsys.readouterr()._asdict())

    return call


def wait_for(path: Path, child: subprocess.Popen) -> None:
    """Until a process has written a file; it must not end before."""
    while not path.exists():
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
        assert child.poll() is None, child.stderr.read()


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    drift = compare(actual, expected)
    assert not drift.mismatches, f"{what}: {drift}"


def assert_within(row: str, y: torch.Tensor, reference: tuple[torch.Tensor, torch.Tensor], n: int = 1) -> None:
    """Asserts that `y` is within the contract's bound of (y64, S); what fp64 puts beyond the dtype must be infinite."""
    exact, magnitude = reference
    assert y.shape == exact.shape
    limit = contract.bound(row, y.dtype, exact, magnitude, n)
    close = (y.double() - exact).abs() <= limit
    overflow = (exact.abs() + limit >= torch.finfo(y.dtype).max) & (y == exact.sign() * torch.inf)
    wrong = (~(close | overflow)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        share = (y[at].double() - exact[at]).abs() / limit[at]
        raise AssertionError(
            f"{row} {y.dtype}: {len(wrong)} of {y.numel()} exceed the bound, first at {at}: {y[at]} "
            f"instead of {exact[at]}, {share:.3g} × the bound"
        )
