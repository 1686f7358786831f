"""A new user's first hour: clone, install, README's audit, their own function from the shell, the script that shows the
drift, the op mended, green. The clone stays clean; what each step took is printed (pytest -s)."""

import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from test_docs import PYTHON, ROOT

FIRST_ANSWER, COMMAND = 60, 60  # seconds of CPU at most, on whatever else runs beside this test
MINE = """import torch

import bi_kernels as bi


def scores(x, weight):
    return torch.nn.functional.linear(x, weight).softmax(-1)


def mended(x, weight):
    return bi.linear(x, weight).softmax(-1)
"""
AUDIT = "bi-audit run any --candidate mine.py:{} --inputs 'x:fp32[16,512] weight:fp32[64,512]'"


def git(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cloned(root: Path, place: Path) -> None:
    """Clones a checkout as it would be if all that lies there were committed, what git does not track yet included."""
    git("clone", "--quiet", str(root), str(place), cwd=root)
    for name in git("ls-files", "-z", "--modified", "--others", "--exclude-standard", cwd=root).split("\0")[:-1]:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_file():
            shutil.copy(root / name, place / name)
        else:
            (place / name).unlink()
    git("add", "--all", cwd=place)
    who = ["-c", "user.name=test", "-c", "user.email=test"]
    git(*who, "commit", "--quiet", "--no-verify", "--allow-empty", "--message", "changed", cwd=place)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with its own environment, which takes the dependencies from this one's: no network is asked."""
    place = tmp_path_factory.mktemp("hour") / "bi-kernels"
    if (ROOT / ".git").exists():
        cloned(ROOT, place)
    else:
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".venv", "__pycache__", "runs"))
        git("init", "--quiet", cwd=place)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / ".venv"], check=True)
    site = next((place / ".venv" / "lib").iterdir()) / "site-packages"
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = ["-m", "pip", "--python", place / ".venv/bin/python", "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([sys.executable, *install, "--no-build-isolation", place], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place


def shell(command: str, clone: Path) -> tuple[str, float]:
    """What a command prints in the activated environment, and the seconds of CPU that it took; its status is in the
    text's last line."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment["JUPYTER_PATH"] = f"{sys.prefix}/share/jupyter"  # where the dependencies have their templates
    script = "\n".join([". .venv/bin/activate", "export TRITON_INTERPRET=1", command, "echo status $?"])
    done = subprocess.run(["bash"], input=script, cwd=clone, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = sum(getattr(after, k) - getattr(before, k) for k in ("ru_utime", "ru_stime"))
    print(f"{took:5.1f} s of CPU, {time.monotonic() - began:5.1f} s: {command.splitlines()[0]}")
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, took


@pytest.mark.slow
def test_the_first_hour(clone):
    (clone / "first.py").write_text(PYTHON["README.md:1"])
    said, took = shell("python first.py", clone)
    assert said.startswith("needs-fix  scores: ") and said.endswith("status 0\n"), said
    assert took <= FIRST_ANSWER
    (clone / "first.py").unlink()

    (clone / "mine.py").write_text(MINE)
    said, took = shell(AUDIT.format("scores"), clone)
    assert said.endswith("status 1\n") and "stopped" not in said, said
    assert took <= COMMAND
    scripts = re.findall(r"python (runs/\S+\.py)", said)
    assert scripts, said
    said, _ = shell(f"python {scripts[0]}", clone)
    assert re.search(r"[1-9][\d,]* of \d+", said) and said.endswith("status 1\n"), said
    said, _ = shell(AUDIT.format("mended"), clone)
    assert said.endswith("status 0\n") and " 0 need a fix" in said, said
    assert git("status", "--porcelain", cwd=clone) == "", "a run leaves the clone as it was"


@pytest.mark.slow
def test_the_quick_run_of_every_op(clone):
    said, _ = shell("bi-audit run --quick", clone)
    assert said.endswith("status 0\n") and " 0 need a fix" in said, said
    assert git("status", "--porcelain", cwd=clone) == "", "a run leaves the clone as it was"


@pytest.mark.slow
def test_a_cheap_command_leaves_nothing_in_the_clone(clone):
    said, _ = shell("bi-audit report", clone)
    assert said.endswith("status 0\n") and "??" not in git("status", "--porcelain", cwd=clone), said
