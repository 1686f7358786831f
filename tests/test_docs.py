"""docs/add-an-op.md and the README are executed: what they say is what happens."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```(\w*)(?: title="([^"\n]*)")?(?: in="([^"\n]*)")?\n(.*?)^```$', re.M | re.S)


def blocks(name: str) -> list[tuple[str, str, str, str]]:
    """(language, title, what it goes into, text) of every fenced block."""
    return FENCE.findall((ROOT / name).read_text(encoding="utf-8"))


def test_an_op_is_added_as_the_document_says(tmp_path):
    """In a copy of the package, by nothing but the document's blocks."""
    for folder in ("bi_kernels", "notebooks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    written, commands = 0, []
    for language, title, place, text in blocks("docs/add-an-op.md"):
        if language == "bash":
            commands += text.splitlines()
            continue
        path = tmp_path / title
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = old.splitlines(keepends=True)
        at = next(i for i, line in enumerate(lines) if line.startswith(place)) + 1 if place else len(lines)
        gap = "" if place or not old else "\n\n"
        path.write_text("".join(lines[:at]) + gap + text + "".join(lines[at:]), encoding="utf-8")
        written += len([line for line in text.splitlines() if line.strip()])
    assert written < 60, f"{written} lines are not a short example"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for command in commands:
        arguments = command.split()
        assert arguments[0] == "bi-audit"
        done = subprocess.run([sys.executable, "-m", "bi_kernels.audit.cli", *arguments[1:], "--dtype", "bf16", "--out", "out"],
                              cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "0 need a fix" in done.stdout, done.stdout + done.stderr
