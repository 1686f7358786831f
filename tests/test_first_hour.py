"""A new user's first hour, by the README's own blocks: clone, install, demo, an audit of a function of theirs that
drifts, the script that shows it, the op mended, green. The clone stays clean; what it took is printed (pytest -s)."""

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from test_docs import COMMANDS, DEMO, MINE, ROOT

DEMO_SECONDS, QUICK_SECONDS = 10, 2 * 60  # of CPU; a minute on two cores
SLACK = 2  # for what runs beside this test, and for slower machines; what it took is printed
OF_MINE = "mine.py:my_scores", "python runs/", "mine.py:mended", "run --quick"
TRY = [c for c in COMMANDS if any(part in c for part in OF_MINE)]


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


@pytest.mark.parametrize(
    "name, text", [("test.log", "a line"), ("a note.md", "# A"), ("x.py", "import os"), ("a", "2")]
)
def test_a_checkout_with_a_file_of_ones_own_is_cloned_and_the_clone_is_clean(name, text, tmp_path):
    root, place = tmp_path / "checkout", tmp_path / "clone"
    root.mkdir()
    git("init", "--quiet", cwd=root)
    (root / "a").write_text("1")
    git("add", "--all", cwd=root)
    git("-c", "user.name=a", "-c", "user.email=a", "commit", "--quiet", "--message", "first", cwd=root)
    (root / name).write_text(text)
    cloned(root, place)
    assert git("status", "--porcelain", cwd=place) == "" and (place / name).read_text() == text


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
    setting_up = [c for c in COMMANDS if c.startswith((". ", "export "))]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment["JUPYTER_PATH"] = f"{sys.prefix}/share/jupyter"  # where the dependencies have their templates
    script = "\n".join([*setting_up, command, "echo status $?"])
    done = subprocess.run(["bash"], input=script, cwd=clone, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = sum(getattr(after, k) - getattr(before, k) for k in ("ru_utime", "ru_stime"))
    print(f"{took:5.1f} s of CPU, {time.monotonic() - began:5.1f} s: {command.splitlines()[0]}")
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, took


def test_the_first_hour(clone):
    said, took = shell(f"python - <<'END'\n{DEMO}\nEND", clone)
    torch_, ours = (int(n) for n in re.findall(r": (\d+) of 192 elements", said))
    assert torch_ > 0 and ours == 0, said
    assert "my_scores" in said and "needs-fix" in said and said.endswith("status 0\n")
    assert took <= SLACK * DEMO_SECONDS

    (clone / "mine.py").write_text(MINE)
    audit, script, mended, _ = TRY
    said, _ = shell(audit, clone)
    assert said.endswith("status 1\n") and "stopped" not in said, said
    named = re.findall(r"python (runs/\S+\.py)", said)
    path = shlex.split(script.split("#")[0])[1]
    assert path in named, f"the report names {named}"
    said, _ = shell(script, clone)
    assert re.search(r"[1-9]\d* of \d+", said), said
    said, _ = shell(mended, clone)
    assert said.endswith("status 0\n") and " 0 need a fix" in said, said
    assert git("status", "--porcelain", cwd=clone) == "", "a run leaves the clone as it was"


@pytest.mark.slow
def test_the_quick_run_of_every_op(clone):
    said, took = shell(TRY[-1], clone)
    assert said.endswith("status 0\n") and " 0 need a fix" in said, said
    assert took <= SLACK * QUICK_SECONDS
    assert git("status", "--porcelain", cwd=clone) == "", "a run leaves the clone as it was"


@pytest.mark.parametrize("command", ["bi-audit list", "bi-audit report"])
def test_a_cheap_command_leaves_nothing_in_the_clone(command, clone):
    assert command in COMMANDS + ["bi-audit list"]
    said, _ = shell(command, clone)
    assert said.endswith("status 0\n") and "??" not in git("status", "--porcelain", cwd=clone), said
