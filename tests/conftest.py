"""The tests run the kernels on Triton's interpreter, on a GPU machine too."""

import functools
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the kernels and processes that tests start, as in here

import pytest
import torch
from hypothesis import settings

import bi_kernels
from bi_kernels import contract
from bi_kernels.audit import cli, executor
from bi_kernels.audit.compare import compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.contract import DTYPES

torch.set_num_threads(1)  # the interpreter uses one, and two runs share the machine
gc.set_threshold(50_000)  # as in audits
settings.register_profile("tests", deadline=None, max_examples=50)
settings.load_profile("tests")

ROOT = Path(__file__).parents[1]
OF = "gemm", "linear", "o", "bi_kernels", "bf16", "interpreter"  # audit, op, case, candidate, dtype and device
ROW = Row(*OF, "invariance", "rows", "300 rows", "normal", 9, "pass", 0, 100)  # a verdict that others are changed from


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


def slow_but(cases: Iterable, *quick: object) -> list:
    """Parameters of a test, all of them slow but for those named, by a first value, that `make test` runs too."""
    several = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in quick)) for case in several]


# of the notebooks, those that `make test` runs; `make audit` runs the others, all but `world` and `recipes`
NOTEBOOKS = {"workbench", "paste_your_kernel", "gallery_of_bugs", "4_rms_norm", "7_any", "8_zoo", "14_bench"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the slow notebooks, and leaves out those that git does not track."""
    for item in items:
        if item.path.suffix == ".ipynb" and item.path.stem not in NOTEBOOKS:
            item.add_marker(pytest.mark.slow)
    if tracked() is not None:
        others = [item for item in items if item.path.suffix == ".ipynb" and item.path not in tracked()]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def run(*command: object, **how) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **how)


def build(source: Path, folder: Path, *targets: str) -> list[Path]:
    """Returns what hatchling builds of a source tree: no environment of its own, no network."""
    flags = [flag for target in targets for flag in ("-t", target)]
    done = run(sys.executable, "-m", "hatchling", "build", *flags, "-d", folder, cwd=source)
    assert done.returncode == 0, done.stderr
    return [next(folder.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[target])) for target in targets]


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> list[Path]:
    return build(ROOT, tmp_path_factory.mktemp("built"), "sdist", "wheel")


@pytest.fixture(scope="session")
def installed(built, tmp_path_factory) -> Path:
    """A folder into which pip put the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    done = run(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "-t", folder, built[1])
    assert done.returncode == 0, done.stderr
    return folder


def run_ranks(count: int, function: str, *arguments) -> None:
    """Calls `module:function` in so many processes, the ranks of one process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    ranks = [executor.begin(function, *arguments, environment=group | {"RANK": str(i)}) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        try:
            for done in as_completed([pool.submit(rank.result, seconds=240) for rank in ranks]):
                done.result()
        finally:
            for rank in ranks:
                rank.stop()


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


def op_under_test(op: str, function=None, dtype: str = "bf16", case: str | None = None, **more) -> OpUnderTest:
    """An op at tiny shapes: this package's function, or another."""
    entry = OPS[op]
    case = next(iter(entry.cases("tiny"))) if case is None else case
    problem = OpConfig(entry, case, contract.DTYPES[dtype], "tiny", torch.device("cpu"))
    function = function or getattr(bi_kernels, entry.function or op)
    return OpUnderTest(problem, function, "test", "interpreter", **more)


def wait_for(path: Path, child: subprocess.Popen) -> None:
    """Until a process has written a file; it must not end before."""
    while not path.exists():
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
        assert child.poll() is None, child.stderr.read()


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    drift = compare(actual, expected)
    assert not drift.mismatches, f"{what}: {drift}"


def assert_within(row: str, y: torch.Tensor, expected: Sequence, n: int = 1, **more) -> None:
    """Asserts that `y` is within the contract's bound of (y64, S), or of a gradient's (y64, S, n); more: what else the
    bound is told. What fp64 puts beyond the dtype must be infinite."""
    exact, magnitude, *own = expected
    assert y.shape == exact.shape
    limit = contract.bound(row, y.dtype, exact, magnitude, *(own or [n]), **more)
    close = (y.double() - exact).abs() <= limit
    overflow = (exact.abs() + limit >= torch.finfo(y.dtype).max) & (y == exact.sign() * torch.inf)
    wrong = (~(close | overflow)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        share = (y[at].double() - exact[at]).abs() / limit[at]
        raise AssertionError(
            f"{row} {more} {y.dtype}: {len(wrong)} of {y.numel()} exceed the bound, first at {at}: {y[at]} "
            f"instead of {exact[at]}, {share:.3g} × the bound"
        )


def under_test(
    name: str, dtype: str = "bf16", case: str = "", function: Callable | None = None, **sizes
) -> OpUnderTest:
    """Returns an op of the registry as an audit on the interpreter has it; sizes: dimensions in place of `tiny`'s."""
    op = OPS[name]
    problem = OpConfig(op, case or next(iter(op.cases("tiny"))), DTYPES[dtype], "tiny", torch.device("cpu"), 0, sizes)
    return OpUnderTest(problem, function or getattr(bi_kernels, op.function or name), "bi_kernels", "interpreter")
