"""The project's own promises: one list of dependencies, links that lead somewhere, no circle of imports, no machine."""

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import NOTEBOOKS, tracked

import bi_kernels

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_conda_installs_what_pip_does():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = next(d["pip"] for d in environment if isinstance(d, dict))
    extras = re.fullmatch(r"--editable \.\[([\w,]+)\]", pip)[1].split(",")
    assert {*extras} <= PYPROJECT["optional-dependencies"].keys()
    newest = max(int(c.rpartition(".")[2]) for c in PYPROJECT["classifiers"])  # conda takes the newest that it may
    assert f"python{PYPROJECT['requires-python']},<3.{newest + 1}" in environment


def test_constraints_pin_every_dependency_within_its_range():
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().lower().splitlines() if "==" in line
    )
    for line in PYPROJECT["dependencies"] + [d for e in PYPROJECT["optional-dependencies"].values() for d in e]:
        requirement = Requirement(line)
        if requirement.name != PYPROJECT["name"]:
            assert requirement.specifier.contains(pins[requirement.name.lower()]), line


def test_kernels_need_torch_and_triton_alone():
    from packaging.requirements import Requirement

    assert {Requirement(line).name for line in PYPROJECT["dependencies"]} == {"torch", "triton"}


MISSING = {  # what is not installed, and what is done: the extra that brings it
    "interpreter": ("numpy numba", "os.environ['TRITON_INTERPRET'] = '1'; import bi_kernels; bi_kernels.linear"),
    "audit": ("rich", "from bi_kernels.audit import cli; cli.run(['list'])"),
    "transformers": ("transformers", "from bi_kernels.integrations.transformers import apply"),
}
FORKED = """
import os, sys, torch, triton
for blocked, code in {cases}:
    if not os.fork():
        sys.modules.update(dict.fromkeys(blocked.split()))  # as if they were not installed
        try:
            exec(code)
        except BaseException as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_what_an_extra_brings_is_said_in_one_sentence():
    code, environment = FORKED.format(cases=[*MISSING.values()]), {**os.environ}
    environment.pop("TRITON_INTERPRET", None)
    told = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(told, cwd=ROOT, capture_output=True, text=True, env=environment)
    said = done.stdout.splitlines()
    assert len(said) == len(MISSING), done
    for line, extra in zip(said, MISSING):
        assert line.endswith(f"run pip install 'bi-kernels[{extra}]'"), line


def test_import_bi_kernels_loads_nothing_that_is_not_needed():
    """An op of a GPU loads torch and Triton; the package alone not even these."""
    code = "import sys, bi_kernels; print(*sys.modules); import torch, triton; before = {*sys.modules};"
    code += "bi_kernels.linear, bi_kernels.attention, bi_kernels.MainGrads; print(*({*sys.modules} - before))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    alone, ops = (line.split() for line in done.stdout.splitlines())
    known = {*sys.stdlib_module_names, "bi_kernels", "torch", "triton"}
    top = lambda names: {name.partition(".")[0] for name in names if not name.startswith("_")}
    assert not {"torch", "triton", "numpy"} & {*alone} and not top(ops) - known, top(ops) - known


def test_every_link_leads_somewhere():
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "audits" / "README.md"):
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_no_machine_is_named():
    home = re.compile(r"/(?:home|Users)/\w|/" + r"root/|/" + r"tmp/\w")
    for path in tracked() or pytest.skip("not a git checkout"):
        if path.is_file() and path.suffix in (".ipynb", ".md", ".json", ".py", ".toml", ".txt", ".yml"):
            found = home.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert not found, f"{path.relative_to(ROOT)}: {found and found.group()}"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {_module(p): ast.parse(p.read_text(encoding="utf-8")) for p in sorted((ROOT / "bi_kernels").rglob("*.py"))}


def bound(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields (name, module of the package) for every import, also of a function; '' for a name that is no module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                yield a.asname or a.name, a.name
        elif isinstance(node, ast.ImportFrom):
            for a in node.names:
                whole = f"{node.module}.{a.name}"
                yield (a.asname or a.name, whole) if whole in TREES else ("", node.module)


def imported(name: str) -> set[str]:
    """Returns the modules of the package that a module imports, anywhere in it, or names as "module:function"."""
    texts = {
        n.value.partition(":")[0] if ":" in n.value else n.value.removesuffix(".")
        for n in ast.walk(TREES[name])
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.startswith("bi_kernels.")
    }
    found = {module for _, module in bound(TREES[name])} | texts
    if name == "bi_kernels":
        found |= {getattr(bi_kernels, op).__module__ for op in bi_kernels.__all__}  # when it is first named
    return found & TREES.keys() - {name}


def test_there_is_no_circle_of_imports():
    """Not even one that an import in a function hides."""
    try:
        graphlib.TopologicalSorter({name: imported(name) for name in TREES}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("folder, users", [("audit", ("audit", "workbench")), ("workbench", ("workbench",))])
def test_imports_point_from_the_workbench_to_the_audit_to_the_ops(folder, users):
    beside = {name for name in TREES if not name.startswith(tuple(f"bi_kernels.{user}" for user in users))}
    assert not {name for name in beside if any(m.startswith(f"bi_kernels.{folder}") for m in imported(name))}


def test_no_module_writes_into_another():
    """By assignment to an attribute of a module of the package, or by setattr."""
    for name, tree in TREES.items():
        modules = {bind for bind, module in bound(tree) if module in TREES}
        for node in ast.walk(tree):
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
            called = isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr")
            owner = ast.unparse(node.value if stored else node.args[0]) if stored or called else ""
            assert not owner or owner not in modules, f"{name}, line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.slow
def test_numba_is_loaded_when_a_product_is_interpreted_and_not_before():
    known = "import sys, torch, bi_kernels, bi_kernels.audit.session; print('numba' in sys.modules)"
    product = "x = torch.ones(2, 16); bi_kernels.linear(x, x); print('numba' in sys.modules)"
    told = [sys.executable, "-c", f"{known}\n{product}"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(told, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("command", (["check"], ["format", "--check"]), ids=" ".join)
def test_ruff_has_nothing_to_say(command):
    files = [path for path in tracked() or () if path.suffix in (".py", ".ipynb") and path.is_file()] or [ROOT]
    told = [sys.executable, "-m", "ruff", *command, "--force-exclude", *files]
    done = subprocess.run(told, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_notebooks_that_make_test_runs_are_there():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} >= NOTEBOOKS
