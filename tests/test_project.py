"""The project's own promises: one list of dependencies, a README that is true, nothing of a machine in it."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_says_what_pyproject_says():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(d["pip"] for d in environment if isinstance(d, dict))
    wanted = PYPROJECT["dependencies"] + [d for extra in PYPROJECT["optional-dependencies"].values() for d in extra]
    assert sorted(d for d in pip if not d.startswith("-")) == sorted(wanted)
    assert f"python{PYPROJECT['requires-python']}" in environment


def test_constraints_pin_every_dependency_within_its_range():
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().lower().splitlines() if "==" in line
    )
    for line in PYPROJECT["dependencies"] + [d for e in PYPROJECT["optional-dependencies"].values() for d in e]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), line


def test_ci_runs_the_readme_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text() and "make test" in (ROOT / "README.md").read_text()


def test_every_link_of_the_readme_leads_somewhere():
    for document in (ROOT / "README.md", ROOT / "audits" / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_no_machine_is_named():
    try:
        tracked = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    home = re.compile(r"/(?:home|Users)/\w|/" + r"root/|/" + r"tmp/\w")
    for name in tracked:
        if (ROOT / name).is_file() and Path(name).suffix in (".ipynb", ".md", ".json", ".py", ".toml", ".txt", ".yml"):
            found = home.search((ROOT / name).read_text(encoding="utf-8", errors="ignore"))
            assert not found, f"{name}: {found and found.group()}"
