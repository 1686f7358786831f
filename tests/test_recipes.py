"""What others do to keep cuBLAS from splitting K: a drift is found, said either way, and shown by torch alone."""

import json
import os
import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import slow_but

from bi_kernels.audit import start
from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import NEEDS_FIX, PASS, Row, verdict_of
from bi_kernels.audit.index import page, report
from helpers.recipes import products, script, summary
from helpers.recipes import session as sessions
from helpers.recipes.products import DIRECTIONS, PLAIN, STARVED, THEIRS, UNSPLIT, Recipe, numbers

TOLD = {"largest": 9, "rows": [1, 2, 8], "timed": [], "shapes": {"a": (16, 64)}}
TOLD |= {"device": "cpu", "dtype": "bf16", "seed": 0}


def halved(x, weight):
    """Splits K and N of two rows or fewer, as no library should."""
    if len(x) > 2:
        return F.linear(x, weight)
    rows = [sum(map(F.linear, x.chunk(2, -1), part.chunk(2, -1))) for part in weight.chunk(2)]
    return torch.cat(rows, -1)


def test_a_recipe_that_depends_on_m_is_found_at_the_m_at_which_it_does():
    found = summary.collected(products.measured(Recipe("fake", "", linear=f"{__name__}:halved"), TOLD))
    assert {d: summary.counts(found, d) for d in DIRECTIONS} == {"forward": [1, 2], "dX": [1, 2]} and not found["why"]
    assert found["asked"] == {"forward": {"a": 3}, "dX": {"a": 3}}
    (mine,) = found["drifts"]["forward"].values()
    assert mine["2"][1] == 2 * 16 and 0 < mine["2"][0] <= 32


def test_another_order_of_a_sum_shows_in_what_is_drawn_of_either():
    x, w, dy = numbers(3, 96, 64, torch.float32, "cpu", 0)
    for plain, reverse in ((x @ w.t(), x.flip(1) @ w.flip(1).t()), (dy @ w, dy.flip(1) @ w.flip(0))):
        assert (plain != reverse).double().mean() > 0.5
    assert (x @ w.t()).abs().mean() < (x.abs() @ w.abs().t()).mean() / 4, "it vanishes"
    assert (dy @ w).abs().mean() < (dy.abs() @ w.abs()).mean() / 4


def test_what_raises_leaves_a_sentence_and_the_other_shapes():
    def refuses(x, weight):
        if weight.shape[0] == 16:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore")
        return F.linear(x, weight)

    products.refuses = refuses
    try:
        told = TOLD | {"shapes": {"a": (16, 64), "b": (32, 64)}}
        found = summary.collected(products.measured(Recipe("fake", "", linear=f"{products.__name__}:refuses"), told))
    finally:
        del products.refuses
    assert found["why"] == [f"a, {d}: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED" for d in DIRECTIONS]
    assert found["asked"]["forward"] == {"b": 3}


def test_a_torch_without_the_setting_is_named(monkeypatch):
    class Old:
        def __setattr__(self, name, value):
            if not isinstance(value, bool):
                raise RuntimeError(f"set_{name} expects a bool, but got tuple")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name: None)
    monkeypatch.setattr(torch.backends.cuda, "matmul", Old())
    with pytest.raises(RuntimeError, match=r"^torch \S+ takes no pair \(allow_reduced_.*; expected 2.10 or newer$"):
        products.without_split()


def test_the_users_own_environment_is_not_a_recipe(monkeypatch):
    seen = []
    monkeypatch.setattr(products, "cells", lambda *_: seen.append(dict(os.environ)) or [])
    for name in STARVED.environment:
        monkeypatch.setenv(name, "mine")
    products.measured(STARVED, TOLD)
    products.measured(PLAIN, TOLD)
    assert all(seen[0][name] == "mine" for name in STARVED.environment), "what the process was started with"
    assert not STARVED.environment.keys() & seen[1].keys()


def test_report_and_index_lead_with_the_finding_and_our_verdict_comes_after_it(tmp_path):
    place = tmp_path / "gpu" / "recipes"
    place.mkdir(parents=True)
    ours = Row("recipes", "linear", "o", "bi_kernels", "bf16", "gpu", "invariance", "rows", "", "", 1, PASS, 0, 64)
    rows = [ours.json(), ours.as_control().json() | {"caught": True}]
    (place / "verdicts.json").write_text(json.dumps(rows))
    found, verdict = "A finding about cuBLAS.", "very bit agrees"
    (place / report.FINDING).write_text(found)
    first = report.page("# Does it help?\n\nText.", place, rows).splitlines()[4]
    assert first.startswith(found) and found in first.partition(verdict)[0] and "linear" not in found
    (line,) = (row for row in page.report(tmp_path)["README.md"].splitlines() if row.startswith("| [recipes](gpu/"))
    cell = line.split("|")[3].strip()
    assert cell.startswith(found) and cell.index("✅") < cell.index(verdict)


@pytest.mark.parametrize("direction, of", slow_but([("forward", 32), ("dX", 128)], "forward"))
def test_a_script_runs_by_torch_alone_and_prints_what_differs(direction, of, tmp_path):
    text, path = script.text(STARVED, direction, (2, 16, 64), TOLD), tmp_path / "script.py"
    assert "bi_kernels" not in re.sub("#.*", "", text)
    assert text.index('os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"') < text.index("import torch")
    stock = "linear = torch.nn.functional.linear\n"
    assert stock in text
    broken = "linear = lambda x, w: torch.nn.functional.linear(x, w) + (len(x) < 3) * x.sum()\n"
    for linear, shows in ((stock.replace("linear\n", "linear  # as it is\n"), None), (broken, True)):
        path.write_text(text.replace(stock, linear))
        shown, last = script.run(path)
        count = int(re.fullmatch(rf"(\d+) of {of} elements differ", last)[1])
        assert shown == bool(count) and (shows is None or shown), last
    path.write_text("raise ValueError('no GPU')")
    assert script.run(path) == (False, "ValueError: no GPU")


class Process:
    """Stands for a worker: computes nothing, and one recipe's ends without a word."""

    def __init__(self, function, recipe, told, environment):
        self.recipe, self.told = recipe, told
        assert dict(environment) == dict(recipe.environment)

    def result(self):
        if self.recipe is UNSPLIT:
            raise sessions.Died("a:b", 1, ["RuntimeError: torch 2.9 takes no pair"])
        wrong = lambda m: 5 if self.recipe in (PLAIN, STARVED) and m < 3 else 0
        every = product(self.told["shapes"], DIRECTIONS, self.told["rows"])
        return [{"case": c, "direction": d, "M": m, "drift": Drift(wrong(m), 64)} for c, d, m in every]


def test_a_recipe_whose_process_ends_leaves_a_sentence_and_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(sessions, "begin", Process)
    monkeypatch.setattr(sessions.RecipesSession, "theirs", THEIRS)
    monkeypatch.setattr(sessions.RecipesSession, "full", True)
    monkeypatch.setenv("BI_AUDIT_OUT", str(tmp_path))
    run = start("recipes", device="cpu")
    run.parameters["dtype"] = "bf16"
    rows = run.judge()
    assert {r.verdict for r in rows if r.relation != "reproducer"} == {PASS}
    (lost,) = (r for r in rows if r.relation == "reproducer")
    assert (lost.layout, lost.verdict) == (UNSPLIT.name, NEEDS_FIX)
    assert lost.detail == "not measured: RuntimeError: torch 2.9 takes no pair"
    monkeypatch.setattr(script, "run", lambda path: ("starved" in path.name, "5 of 64 elements differ"))
    shown = {r.layout: r.verdict for r in run.reproduce()}
    assert shown == {PLAIN.name: NEEDS_FIX, STARVED.name: PASS}
    assert {p.name for p in (tmp_path / "repro").iterdir()} == {"plain_cuBLAS.py", "starved_cuBLAS.py"}
    found = run.document()
    assert (tmp_path / report.FINDING).read_text().strip() == summary.finding(found)
    assert json.loads((tmp_path / summary.FILE).read_text())["recipes"] == json.loads(json.dumps(found))["recipes"]
    assert found["recipes"][STARVED.name]["script"] == "repro/starved_cuBLAS.py"
    controls = run.controls()
    names = [products.BROKEN.name] * 2 + [PLAIN.name] * 2
    assert [(r.candidate, r.caught) for r in controls] == [(name, True) for name in names]
    assert verdict_of(run.rows) == NEEDS_FIX


def test_ours_needs_a_fix_where_it_drifts_or_was_not_run(monkeypatch):
    monkeypatch.setattr(sessions, "begin", Process)
    for recipe, wanted in ((STARVED, "dX"), (UNSPLIT, "")):
        monkeypatch.setattr(sessions, "OURS", recipe)
        run = start("recipes", device="cpu")
        rows = [r for r in run.judge() if r.relation != "reproducer"]
        assert len(rows) == 2 * len(run.told["shapes"]) * len(run.told["rows"])
        bad = [r for r in rows if r.verdict == NEEDS_FIX]
        assert {r.rows for r in bad} == ({1, 2} if wanted else {*run.told["rows"]})
        assert {(r.tensor, r.side) for r in bad} == {("out", "forward"), ("dx", "input gradients")}
