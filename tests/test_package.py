"""What is installed: the sdist, the wheel, the Pythons that run it, and the versions of Triton."""

import os
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import build, run
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from bi_kernels.audit.runs.runner import audits
from bi_kernels.contract import CONTRACT

ROOT = Path(__file__).parents[1]
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TRITON = TOML["project"], CONTRACT["triton"]
PYTHONS = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: 3.")]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
RUNNING = "{}.{}".format(*sys.version_info)
FOLDERS = "bi_kernels", "benchmarks", "mutation", "notebooks", "tests"
COMPILE = "import sys; [compile(open(p, encoding='utf-8').read(), p, 'exec') for p in sys.argv[1:]]"
MINOR = "import sys; print('{}.{}'.format(*sys.version_info))"


def files(folder: str) -> set[str]:
    """The files of a folder of the checkout, but for what running it leaves."""
    kept = [
        p
        for p in (ROOT / folder).rglob("*")
        if p.is_file() and not {"__pycache__", ".ipynb_checkpoints", ".hypothesis"} & {*p.parts}
    ]
    return {p.relative_to(ROOT).as_posix() for p in kept}


def test_the_sdist_holds_what_the_wheel_is_made_of(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    beside = {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", ".gitignore", "PKG-INFO"}
    assert names == files("bi_kernels") | files("notebooks") | beside
    assert built[0].stat().st_size < 2_500_000, "executed notebooks are most of it"


def test_a_wheel_of_the_sdist_is_that_of_the_checkout(built, tmp_path):
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    (wheel,) = build(next(tmp_path.iterdir()), tmp_path / "wheel", "wheel")
    record = f"bi_kernels-{PROJECT['version']}.dist-info/RECORD"  # every file with its SHA-256
    assert zipfile.ZipFile(wheel).read(record) == zipfile.ZipFile(built[1]).read(record)


def test_the_wheel_holds_every_file_of_the_package_and_the_notebooks(built):
    names = {name for name in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in name}
    assert names == files("bi_kernels") | {f"bi_kernels/{name}" for name in files("notebooks")}


SMOKE = """
import sys
from importlib.metadata import version

import torch

import bi_kernels
from bi_kernels.audit.digests import golden
from bi_kernels.ops.gemm import cost

x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
together = bi_kernels.rms_norm(x, weight)
alone = torch.cat([bi_kernels.rms_norm(row[None], weight) for row in x])
assert together.view(torch.int16).equal(alone.view(torch.int16))
assert cost.FITTED and golden.FILE.is_file()
print(bi_kernels.__file__, version("bi-kernels"), "{}.{}".format(*sys.version_info))
"""


def smoke(python: str, installed: Path, folder: Path) -> None:
    """Asserts that the wheel runs outside of the checkout: an interpreted op, its data, and `bi-audit list`; and that
    an audit which needs a checkout says so."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(installed)}
    done = run(python, "-c", SMOKE, cwd=folder, env=environment | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    minor = run(python, "-c", MINOR).stdout.strip()
    assert done.stdout.split() == [str(installed / "bi_kernels" / "__init__.py"), PROJECT["version"], minor]
    done = run(python, installed / "bin" / "bi-audit", "list", cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert all(re.search(rf"^\W*{name}\b", done.stdout, re.M) for name in audits()), done.stdout
    done = run(python, installed / "bin" / "bi-audit", "bench", cwd=folder, env=environment)
    assert done.returncode == 2 and "a checkout" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def python_of(version: str) -> str:
    """Returns a Python of this version: this one, that of `make VENV=.venv-3.x`, or one on PATH; skips without any."""
    if version == RUNNING:
        return sys.executable
    for found in (ROOT / f".venv-{version}" / "bin" / "python", shutil.which(f"python{version}")):
        environment = os.environ | {"PYENV_VERSION": version}  # pyenv's shims ask for one
        if found and Path(found).exists():
            done = run(found, "-c", f"{MINOR}; print(sys.executable)", env=environment)
            if done.returncode == 0 and done.stdout.startswith(f"{version}\n"):
                return done.stdout.split("\n")[1]
    pytest.skip(f"no Python {version} here")


@pytest.mark.parametrize("version", sorted({*PYTHONS, RUNNING}))
def test_every_python_reads_the_sources_and_with_an_environment_runs_the_wheel(version, installed, tmp_path):
    python = python_of(version)
    sources = [ROOT / name for folder in FOLDERS for name in sorted(files(folder)) if name.endswith(".py")]
    done = run(python, "-W", "error", "-c", COMPILE, *sources)
    assert done.returncode == 0, done.stderr
    if run(python, "-c", "import torch, triton, numba, papermill, rich", cwd=tmp_path).returncode:
        pytest.skip(f"Python {version} has no environment here: make test PYTHON=python{version} VENV=.venv-{version}")
    smoke(python, installed, tmp_path)


def test_pythons_and_what_builds_are_said_alike():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert not [v for v in PINNED.values() if "+" in v], "2.13.0 is also the CPU index's 2.13.0+cpu"
    assert PINNED["hatchling"] == TOML["build-system"]["requires"][0].split("==")[1]


def after(version: str) -> str:
    """Returns the minor version that follows: 3.8 after 3.7."""
    major, minor = version.split(".")
    return f"{major}.{int(minor) + 1}"


def test_versions_of_triton_are_said_alike():
    (told,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "triton"]
    compiled = TRITON["compiled"]
    assert [after(v) for v in compiled[:-1]] == compiled[1:], "a range of pip's has no hole"
    assert told.specifier == SpecifierSet(f">={compiled[0]},<{after(compiled[-1])}")
    assert PINNED["triton"] in TRITON["interpreter"]
    assert all(told.specifier.contains(version) for version in TRITON["interpreter"])


def test_another_triton_is_warned_of_once_where_kernels_are_compiled(tmp_path):
    """By one process for all versions: to load torch and Triton takes seconds."""
    warned = {"3.5.1": 1, "3.6.0": 0, "3.7.1": 0, "3.8.0": 1, "3.60.0": 1}
    code = f"""if True:
        import os, torch, triton
        for version in {[*warned]}:
            print("@@", version, flush=True)
            if not os.fork():
                os.dup2(1, 2)
                triton.__version__ = version
                import bi_kernels
                bi_kernels.linear, bi_kernels.rms_norm
                os._exit(0)
            assert os.wait()[1] == 0
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = run(sys.executable, "-c", code, cwd=tmp_path, env=environment)
    said = dict(part.split("\n", 1) for part in done.stdout.split("@@ ")[1:])
    assert done.returncode == 0 and {*said} == {*warned}, done
    for version, times in warned.items():
        sentence = f"UserWarning: bi_kernels: Triton is {version}, expected {' or '.join(TRITON['compiled'])}; "
        assert said[version].count(sentence) == said[version].count("Warning") == times, said[version]
