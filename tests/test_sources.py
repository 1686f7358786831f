"""Of what sources a document is: recorded before a run, compared when the index is written, and asked of its commit."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bi_kernels.audit.index import sources
from bi_kernels.audit.recipes import products, script
from bi_kernels.contract import CONTRACT

ROOT = Path(__file__).parents[1]
NORM = "%matplotlib inline\nfrom bi_kernels.audit.experiments import norm as experiments"
SAID = b"'What it is.'\n"
DOCUMENTS = sorted((ROOT / "audits").rglob(sources.FILE))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A repository with a package of kernels and an auditor, and a document of it that is recorded and committed."""
    place = tmp_path / "bi_kernels"
    for name in (
        "ops/norm.py",
        "ops/more/rope.py",
        "audit/judge.py",
        "audit/mutants/run.py",
        *sources.WRITERS,
        "contract.toml",
        "notes.txt",
    ):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)
    for name, imports in {
        "__init__": "",
        "norm": "from bi_kernels.audit.experiments import common",
        "common": "",
    }.items():
        (place / sources.EXPERIMENTS).mkdir(parents=True, exist_ok=True)
        (place / sources.EXPERIMENTS / f"{name}.py").write_text(imports)
    for name in ("gemm", "peers"):
        (place / sources.EXPERIMENTS / f"{name}.py").write_text(name)
    (place / "audit/gemm.py").write_text("def f():\n    from bi_kernels.audit.experiments.peers import PEERS\n")
    (tmp_path / "notebooks").mkdir()
    book(tmp_path, NORM, [])
    monkeypatch.setattr(sources, "PACKAGE", place)
    monkeypatch.setattr(sources, "NOTEBOOKS", (place / "notebooks", tmp_path / "notebooks"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "first")
    (tmp_path / "document").mkdir()
    sources.record(tmp_path / "document", tmp_path / "notebooks" / "1_norm.ipynb")
    return place


def git(place: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", place, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def book(place: Path, source: str, outputs: list) -> None:
    cell = {"cell_type": "code", "source": [source], "outputs": outputs}
    (place / "notebooks" / "1_norm.ipynb").write_text(json.dumps({"cells": [cell]}))


def said(package: Path, commit: str = "HEAD") -> str:
    return sources.status(json.loads((package.parent / "document" / sources.FILE).read_text()), {"commit": commit})


def test_what_has_not_changed_is_current(package):
    assert said(package) == "current"
    (package / "notes.txt").write_text("other")
    book(package.parent, NORM, [{"text": "other"}])
    (package / "audit" / "mutants" / "run.py").write_text("other")
    assert said(package) == "current", "neither notes nor outputs judge anything, nor what breaks the kernels"
    assert sources.status({}, {"commit": "HEAD"}) == "not recorded"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("ops/norm.py", "other kernels since (ops)"),
        ("ops/more/rope.py", "other kernels since (ops/more)"),
        ("contract.toml", "other kernels since (bi_kernels)"),
        ("audit/judge.py", "another auditor since (audit)"),
        ("new/op.py", "other kernels since (new)"),
        ("audit/experiments/norm.py", "another auditor since (audit/experiments/common.py, audit/experiments/norm.py)"),
        ("audit/experiments/common.py", "another auditor since (audit/experiments/common.py)"),
        ("audit/experiments/peers.py", "another auditor since (audit/experiments/peers.py)"),
        ("audit/experiments/__init__.py", "another auditor since (audit/experiments/__init__.py)"),
        ("audit/experiments/more/deep.py", "another auditor since (audit/experiments/more)"),
        ("audit/experiments_of/mine.py", "another auditor since (audit/experiments_of)"),
        ("audit/experiments/gemm.py", "current"),
        ("audit/experiments/new.py", "current"),
    ],
)
@pytest.mark.parametrize("gone", [False, True])
def test_what_has_changed_is_named(package, name, expected, gone):
    (package / name).parent.mkdir(parents=True, exist_ok=True)
    before, stood = said(package), (package / name).exists()
    (package / name).write_text("other")
    if gone and stood:
        (package / name).unlink()
    assert before == "current" and said(package) == expected


@pytest.mark.parametrize(
    "place, text",
    [
        ("audit/judge.py", "from bi_kernels.audit import evidence, experiments"),
        ("audit/judge.py", "def f():\n    import bi_kernels.audit.experiments.gemm"),
        ("audit/judge.py", "from bi_kernels.audit.experiments import *"),
        ("audit/judge.py", "from .experiments import gemm"),
        ("audit/judge.py", "SESSIONS = {'gemm': 'bi_kernels.audit.experiments.gemm'}"),
        ("audit/experiments/common.py", "from . import gemm"),
        ("audit/experiments/__init__.py", "from bi_kernels.audit.experiments.gemm import rows"),
        ("notebook", "call('bi_kernels.audit.experiments.gemm:rows')"),
    ],
)
def test_an_experiment_is_a_source_however_it_is_named(package, place, text):
    if place == "notebook":
        book(package.parent, f"{NORM}\n{text}", [])
    else:
        (package / place).write_text(text)
    sources.record(package.parent / "document", package.parent / "notebooks" / "1_norm.ipynb")
    (package / "audit/experiments/gemm.py").write_text("other")
    assert said(package, "") == "another auditor since (audit/experiments/gemm.py)"


def test_what_no_audit_loads_is_no_source_of_it():
    loads = "import sys; from bi_kernels.audit import SESSIONS, worker; from bi_kernels.audit.runs import documents"
    every = "[__import__(name, fromlist=['start']) for name in SESSIONS.values()]"
    apart = "('bi_kernels.audit.index', 'bi_kernels.audit.mutants', 'bi_kernels.workbench')"
    script = f"{loads}; {every}; print([m for m in sys.modules if m.startswith({apart})])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    folders = {"bi_kernels/audit/index", "bi_kernels/audit/mutants", "bi_kernels/workbench", "bi_kernels/audit/static"}
    named = folders & {*sources.package()}
    assert named == {"bi_kernels/audit/static"}
    for book in (ROOT / "notebooks").glob("*.ipynb"):
        assert "audit.mutants" not in book.read_text() and "audit.index" not in book.read_text(), book


def test_the_interpreter_is_a_source_where_kernels_are_interpreted(package):
    place = package.parent / "document" / sources.FILE
    (package / "interpreter").mkdir()
    (package / "interpreter" / "builder.py").write_text("other")
    known = json.loads(place.read_text())
    for made in ({}, {"architecture": "–"}):
        assert sources.status(known, made) == "other kernels since (interpreter)"
    on_a_gpu = {"architecture": "sm_90", "commit": "HEAD"}
    assert sources.status(known, on_a_gpu) == "current"
    (package / "ops" / "norm.py").write_text("other")
    assert sources.status(known, on_a_gpu) == "other kernels since (ops)"


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """{notebook of an audit: the modules of the package that Python has loaded after every session and its own
    imports}, and what mutants load as "", each as on a GPU: without Triton's interpreter."""
    books, lines = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), []
    for path in books:
        cells = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        imports = [line for cell in cells for line in cell.splitlines() if re.match(r"\s*(from|import) ", line)]
        lines.append("\n".join(line.strip() for line in imports))
    lines.append("from bi_kernels.audit.mutants import command, document, questions, run, server")
    script = f"""
import os, sys
from bi_kernels.audit import SESSIONS
from bi_kernels.audit.runs import documents
[__import__(name, fromlist=["start"]) for name in SESSIONS.values()]
for imports in {lines!r}:
    if not os.fork():  # so that none finds what another has loaded
        exec(imports)
        print(sorted(name for name in sys.modules if name.startswith("bi_kernels.")), flush=True)
        os._exit(0)
    os.wait()
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    found = [set(ast.literal_eval(line)) for line in done.stdout.splitlines()]
    return dict(zip([*(path.name for path in books), ""], found, strict=True))


def test_the_experiments_that_an_audit_imports_are_sources_of_its_document(loaded):
    folder = f"bi_kernels/{sources.EXPERIMENTS}/"
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        recorded = {name for name in sources.package(path) if name.startswith(folder)}
        names = {f"{name.replace('.', '/')}.py" for name in loaded[path.name] if ".experiments." in name}
        assert names and names <= recorded, path
        assert len(recorded) < len([*(ROOT / folder).glob("*.py")]), "each document is of some experiments alone"


@functools.cache
def names_in(text: str) -> set[str]:
    """Returns the modules that a file imports, or names in a string, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "no relative imports here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_no_audit_loads_the_interpreter_on_a_gpu(loaded):
    """Nor names it, in whatever function: but where kernels are interpreted, and in the workbench."""
    folder = f"bi_kernels.{sources.INTERPRETER}"
    those = [name for name, modules in loaded.items() if any(m.startswith(folder) for m in modules)]
    assert not those
    texts = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in ROOT.glob("bi_kernels/**/*.py")}
    named = {name for name, text in texts.items() if any(name.startswith(folder) for name in names_in(text))}
    named = {name for name in named if not name.startswith(f"bi_kernels/{sources.INTERPRETER}/")}
    assert {n for n in named if not n.startswith(f"bi_kernels/{sources.WORKBENCH}/")} == {"bi_kernels/checks.py"}
    assert "if INTERPRETED:\n    from bi_kernels import interpreter\n" in texts["bi_kernels/checks.py"]


def test_the_localiser_is_a_source_of_the_chains_document_alone(package, loaded):
    """No other notebook loads it, nor names it, nor does what they load, but where a user asks for it by name."""
    folder = f"bi_kernels.{sources.LOCALISER}".replace("/", ".")
    assert [book for book, names in loaded.items() if any(n.startswith(folder) for n in names)] == ["10_chain.ipynb"]
    texts = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in ROOT.glob("bi_kernels/**/*.py")}
    chains, users = {"audit/chain/localising.py"}, {"audit/__init__.py", "audit/commands.py"}  # users': in a function
    asks = {folder: {*chains, *users, "audit/broken/judge_models.py"}, "bi_kernels.audit.locate": chains}
    asks |= {"bi_kernels.audit.broken.judge_models": chains, "bi_kernels.audit.chain.localising": set()}
    asks |= {"bi_kernels.audit.commands": {"audit/cli.py"}}
    for name, known in asks.items():
        named = {path for path, text in texts.items() if any(n.startswith(name) for n in names_in(text))}
        named = {path.removeprefix("bi_kernels/") for path in named if not path.startswith(folder.replace(".", "/"))}
        assert named <= known, name
    books = {p.name: json.loads(p.read_text(encoding="utf-8"))["cells"] for p in (ROOT / "notebooks").glob("*.ipynb")}
    codes = {
        name: "".join(line for c in cells if c["cell_type"] == "code" for line in c["source"])
        for name, cells in books.items()
    }
    assert {name for name, text in codes.items() if re.search(r"\blocate\b|localis", text)} == {"10_chain.ipynb"}

    (package / sources.LOCALISER / "watched").mkdir(parents=True)
    (package / sources.LOCALISER / "watched" / "plans.py").write_text("other")
    assert said(package) == "current"
    sources.record(package.parent / "document")  # of mutants
    (package / sources.LOCALISER / "watched" / "plans.py").write_text("another")
    assert said(package, "") == "current"
    book(package.parent, f"{NORM}\nfrom bi_kernels.audit.chain import {sources.LOCALISING}", [])
    sources.record(package.parent / "document", package.parent / "notebooks" / "1_norm.ipynb")
    (package / sources.LOCALISER / "watched" / "plans.py").write_text("other")
    assert said(package, "") == "another auditor since (audit/localiser/watched)"


def test_what_reads_a_command_line_is_no_source(package, loaded):
    modules = {name.removesuffix(".py").replace("/", ".") for name in sources.COMMANDS}
    assert modules == {"bi_kernels.audit.cli", "bi_kernels.audit.runs.command"}
    assert not [book for book, names in loaded.items() if modules & names], "no kernel of a notebook loads it"
    for name in sources.COMMANDS:
        (package.parent / name).parent.mkdir(exist_ok=True)
        (package.parent / name).write_text("other")
        assert (ROOT / name).is_file() and said(package) == "current"
    (package / "audit/runs/documents.py").write_text("other")
    assert said(package) == "another auditor since (audit/runs)"


def test_mutants_are_of_every_experiment(package):
    sources.record(package.parent / "document")
    (package / sources.EXPERIMENTS / "gemm.py").write_text("other")
    assert said(package) == "another auditor since (audit/experiments)"


def test_mutants_record_what_breaks_the_package_too_and_no_notebook(package):
    sources.record(package.parent / "document")
    assert said(package) == "current"
    recorded = json.loads((package.parent / "document" / sources.FILE).read_text())
    assert recorded.keys() - sources.package().keys() == {
        sources.RULE,
        "bi_kernels/audit/mutants",
        f"bi_kernels/{sources.EXPERIMENTS}",
        sources.PAGE,
    }
    assert not any(name.endswith(".ipynb") for name in recorded)
    (package / "audit" / "mutants" / "equivalents.toml").write_text("other")
    assert said(package) == "another auditor since (audit/mutants/page)", "which judges nothing, and can follow"
    sources.record(package.parent / "document")
    assert said(package) == "current", "though the commit has another page"
    (package / "audit" / "mutants" / "run.py").write_text("other")
    assert said(package) == "another auditor since (audit/mutants)"


def test_a_notebook_of_other_cells_is_another(package):
    book(package.parent, f"{NORM}\ny", [])
    assert said(package) == "another notebook since (1_norm.ipynb)"


CODE = '''"""What a file is
for."""


class Pass:
    """What a class is."""


def f(x):  # a remark
    """Says what it does,

    in three lines."""; y = "# no remark"
    return x + y
'''


@pytest.mark.parametrize(
    "words, others, expected",
    [
        ("What a file is\nfor", "What a file\nis for", "current"),
        ("Says what it does,\n\n", "Does what\n\nit says,", "current"),
        ("What a class is", "That of which objects are", "current"),
        ("What a file is\nfor", "What a file is for", "other kernels since (ops)"),
        ("# a remark", "# another", "other kernels since (ops)"),
        ("# no remark", "# another", "other kernels since (ops)"),
        ("x + y", "y + x", "other kernels since (ops)"),
        ("(x)", "( x)", "other kernels since (ops)"),
        ("    return x + y", "    return (x + y", "other kernels since (ops)"),
        ("# a remark", "# a remark\r    x += 1", "other kernels since (ops)"),
    ],
)
def test_words_of_docstrings_judge_nothing_and_their_lines_do(package, words, others, expected):
    (package / "ops/norm.py").write_text(CODE)
    git(package.parent, "-c", "user.name=a", "-c", "user.email=a", "commit", "-qam", "second")
    sources.record(package.parent / "document", package.parent / "notebooks" / "1_norm.ipynb")
    assert CODE.count(words) == 1 and said(package) == "current"
    (package / "ops/norm.py").write_bytes(CODE.replace(words, others).encode())
    assert said(package) == expected
    sources.record(package.parent / "document", package.parent / "notebooks" / "1_norm.ipynb")
    assert said(package) == ("current" if expected == "current" else "not of its commit (ops)")


@pytest.mark.parametrize(
    "content", [SAID + b"\rx = 1", b"\xef\xbb\xbf" + SAID, SAID + b"\xe9", SAID + b"(", SAID + b"\0"]
)
def test_what_is_no_python_as_here_is_taken_whole(content):
    assert sources.judging(content) == content and sources.judging(SAID) != SAID


@pytest.mark.parametrize("name", sources.CITED)
def test_words_that_a_document_may_hold_are_a_source(package, name):
    place = package / name if name.endswith(".py") else package / name / "norm.py"
    place.parent.mkdir(parents=True)
    place.write_text(CODE)
    sources.record(package.parent / "document", package.parent / "notebooks" / "1_norm.ipynb")
    place.write_text(CODE.replace("in three lines", "in 3 lines"))
    assert said(package, "").endswith(f" since ({place.parent.relative_to(package).as_posix()})")


def test_docstrings_that_a_document_may_hold_are_those_of_known_places():
    """Else words that judge nothing would stand in a document that they do not make older. What else reads sources
    cites lines, or does so for a user."""
    known = {"integrations/transformers/replace.py", "audit/recipes/script.py"}
    known |= {f"audit/{name}" for name in ("digests/candidate.py", "localiser/replay.py", "kernel_error.py")}
    known |= {"workbench/source.py", "workbench/step.py"}
    known |= {f"audit/static/{name}" for name in ("function.py", "launches.py")}
    reads = re.compile(r"__doc__|getdoc\(|getsource|getlines|findsource|linecache")
    files = {path.relative_to(sources.PACKAGE).as_posix(): path for path in sources.PACKAGE.rglob("*.py")}
    assert {name for name, path in files.items() if reads.search(path.read_text(encoding="utf-8"))} == known
    replace = pytest.importorskip("bi_kernels.integrations.transformers.replace", exc_type=ImportError)
    kinds = replace.Swapped.__subclasses__()
    told = [recipe.told for recipe in vars(products).values() if isinstance(recipe, products.Recipe) and recipe.told]
    assert len(kinds) > 3 and told
    for cited in (*kinds, script.cancel, script.numbers, *products.DIRECTIONS.values(), *told):
        name = f"{cited.__module__.removeprefix('bi_kernels.').replace('.', '/')}.py"
        assert name.startswith(sources.CITED), cited


def test_a_document_that_was_recorded_by_another_rule_says_so(package):
    place = package.parent / "document" / sources.FILE
    known = json.loads(place.read_text())
    for rule in ({}, {sources.RULE: "another"}):
        place.write_text(json.dumps({k: v for k, v in known.items() if k != sources.RULE} | rule))
        assert said(package) == "recorded by another rule"


def test_a_commit_that_holds_something_else_is_told(package):
    (package / "ops" / "norm.py").write_text("changed, and not committed")
    sources.record(package.parent / "document", package.parent / "notebooks" / "1_norm.ipynb")
    commit = git(package.parent, "rev-parse", "--short=12", "HEAD")
    for name in (commit, f"{commit}+changes"):
        assert said(package, name) == "not of its commit (ops)"
    assert said(package, "0123456789ab") == "current", "of a commit that nobody knows, nothing is said"


def test_a_package_that_is_installed_in_a_repository_is_not_its_own(package, monkeypatch):
    place = package.parent / "site-packages" / "bi_kernels"
    place.parent.mkdir()
    package.rename(place)
    monkeypatch.setattr(sources, "PACKAGE", place)
    assert said(place.parent, "HEAD") == "current"


def test_a_claim_of_the_readme_is_of_these_kernels_or_names_the_commit_that_it_is_of():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = set()
    for paragraph in readme.split("\n\n"):
        for place in re.findall(r"\((audits/[\w./-]+)/README\.md\)", paragraph):
            linked.add(place)
            made = json.loads((ROOT / place / "provenance.json").read_text())
            recorded = ROOT / place / sources.FILE
            stale = recorded.exists() and sources.changed(json.loads(recorded.read_text()), made)
            current = stale and not stale[sources.KERNELS]
            assert current or made["commit"][:7] in paragraph, f"{place} is of other kernels: README names no commit"
    shown = set(re.findall(r"\((audits/[\w./-]+)/[\w-]+\.png\)", readme))
    assert shown <= linked, "a figure whose document the README does not link"


def test_a_document_of_the_promised_device_is_of_these_kernels():
    for path in DOCUMENTS:
        made = json.loads(path.with_name("provenance.json").read_text())
        stale = sources.changed(json.loads(path.read_text()), made)[sources.KERNELS]
        promised = made["architecture"] in CONTRACT["architectures"]["promised"]
        assert not (promised and stale), f"{path.parent.relative_to(ROOT)}: other kernels since, in {stale}"


def test_limits_say_where_the_drawn_cases_have_no_document_of_a_gpu():
    said = " ".join((ROOT / "docs/limits.md").read_text(encoding="utf-8").split())
    missing = not any((ROOT / "audits").glob("nvidia-*/random"))
    assert ("The audit `random` has no document of a GPU here" in said) == missing
