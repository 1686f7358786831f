"""The gallery's six bugs are told from their fixes by its checks, and each check can fail."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bi_kernels import workbench as wb
from bi_kernels.audit.static.source import source

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "gallery_of_bugs.ipynb"
CELLS = [
    "".join(c["source"]) for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"
]
CHECKS = [ast.parse(cell).body[0].value.args for cell in CELLS if cell.startswith("check(")]
BUGS = {name.value: (bug.id, fix.id, ast.unparse(reference)) for name, bug, fix, reference in CHECKS}


@pytest.fixture(scope="module")
def gallery(tmp_path_factory) -> ModuleType:
    """The cells that define something, as a module whose kernels have a source."""
    path = tmp_path_factory.mktemp("gallery") / "gallery.py"
    path.write_text("\n\n".join(cell for cell in CELLS if "def " in cell or "import " in cell), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("gallery", path)
    module = sys.modules["gallery"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gallery"]


@pytest.fixture
def check(gallery, monkeypatch):
    """The notebook's check, with a few calls and the source in place of a whole audit, which the notebook makes."""

    def audit(function, *inputs, reference, quiet):
        drifts, exact = wb.drift(function, *inputs, rows=(1, 2, 3)).drifts, reference(*(t.double() for t in inputs))
        wrong = (function(*inputs) - exact).abs().max() > exact.abs().max() / 2**10
        rows = [SimpleNamespace(relation="accuracy", verdict="needs-fix" if wrong else "pass")]
        return SimpleNamespace(verdict="needs-fix" if drifts or source(function) else "pass", rows=rows)

    monkeypatch.setattr(wb, "audit", audit)
    return gallery.check


def named(gallery, name: str) -> list:
    return [eval(text, vars(gallery)) for text in BUGS[name]]


@pytest.mark.parametrize("name", BUGS)
def test_a_check_fails_where_the_bug_is_none_the_fix_is_none_or_the_result_is_wrong(name, gallery, check):
    bug, fix, reference = named(gallery, name)
    with pytest.raises(AssertionError, match="pass"):
        check(name, fix, fix, reference)
    with pytest.raises(AssertionError, match=r"needs-fix|refused"):
        check(name, bug, bug, reference)
    with pytest.raises(AssertionError, match="inaccurate"):
        check(name, bug, fix, lambda *inputs: 2 * reference(*inputs))


def test_the_shift_of_the_stepped_softmax_is_its_neighbours(gallery):
    cell = next(cell for cell in CELLS if cell.startswith("row = int("))
    head, call = ast.parse(cell).body
    scope = dict(vars(gallery))
    exec(compile(ast.Module([head], []), "cell", "exec"), scope)
    steps, row, x = eval(ast.unparse(call), scope), scope["row"], gallery.x
    assert steps["shift"] == x[row + 1, :64].max() > x[row].max()
    assert torch.equal(steps["value"], torch.cat([x[row], x[row + 1, :64]]))
