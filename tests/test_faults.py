"""A candidate after which the GPU no longer answers: its check keeps the row, and the rest is judged in other
processes."""

import textwrap
from pathlib import Path

import pytest
import torch
from conftest import slow_but

from bi_kernels.audit import faults, load, parallel
from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import NEEDS_FIX

ROOT = Path(__file__).parents[1]

LOSES = """
import torch

LOST = []


def lose(why):
    \"\"\"From now on every call of the GPU raises in this process, as after an illegal access.\"\"\"
    def raises(*_):
        raise RuntimeError("CUDA error: misaligned address")

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = torch.cuda.empty_cache = raises
    torch.cuda.memory_reserved = lambda: 2**40
    torch.cuda.memory_allocated = lambda: 0
    LOST.append(why)


def scale(x, factor=0.5, **_):
    if LOST:
        raise RuntimeError("CUDA error: misaligned address")
    if WHERE(x):
        lose(x.shape)
        if not LATE:
            raise RuntimeError("CUDA error: misaligned address")
    return x * factor
"""
GIVEN = {"dtype": "fp32", "device": "cpu", "op": "scale", "seed": 3}
THERE = "; the GPU no longer answered this process"


def judged(tmp_path, where: str, late: bool = False):
    """Returns the rows of a candidate in two processes, and of one that loses nothing."""
    path = tmp_path / "mine.py"
    rows = []
    for condition in (where, "lambda x: False"):
        path.write_text(textwrap.dedent(LOSES) + f"\n\nWHERE, LATE = {condition}, {late}\n", encoding="utf-8")
        given = GIVEN | {"candidate": f"{path}:scale"}
        session = load("elementwise", given)
        session.pool = parallel.Processes(1, "elementwise", given)
        with session.pool:
            rows.append(session.judge())
    return rows


def named(row) -> tuple:
    return row.op, row.relation, row.layout, row.against, row.inputs, row.rows


VIEWS = "lambda x: x.dim() > 1 and x.stride(-1) != 1"


@pytest.mark.parametrize("late", slow_but([False, True], True), ids=["at once", "late"])
def test_a_check_that_loses_the_gpu_has_its_row_and_all_others_are_judged(late, tmp_path):
    """Also where the last call of a check returns, and the GPU raises later."""
    rows, clean = judged(tmp_path, "lambda x: len(x) == 255" if late else VIEWS, late)
    lost = [r for r in rows if THERE in r.detail]
    if late:
        assert [(r.layout, r.rows) for r in lost] == [("rows", 255)]
    else:
        assert {r.layout for r in lost} >= {"every other column", "transposed view"} and len(lost) < faults.MOST
    assert all(r.verdict == NEEDS_FIX and r.mismatches is None for r in lost)
    others = [vars(r) for r in rows if r not in lost]
    assert [named(r) for r in rows] == [named(r) for r in clean]
    assert others == [vars(r) for r in clean if named(r) not in [named(r) for r in lost]]


@pytest.mark.slow
def test_a_candidate_that_loses_it_more_often_is_asked_up_to_the_last_that_may_be_lost(tmp_path):
    rows, clean = judged(tmp_path, "lambda x: len(x) < 60")
    lost = [r for r in rows if THERE in r.detail]
    assert len(lost) == faults.MOST and [named(r)[:3] for r in rows] == [named(r)[:3] for r in clean]
    last = rows.index(lost[-1])
    assert all("not asked" in r.detail and r.verdict == NEEDS_FIX for r in rows[last + 1 :]) and last < len(rows) - 1
    assert not any("not asked" in r.detail for r in rows[:last])


def test_a_check_asked_twice_has_two_names_and_none_where_no_other_process_would_go_on():
    assert faults.key("row") == "" and faults.instead("", "row") is None and faults.raised("", "row") == "row"
    with faults.going_on({}):
        assert faults.key("row") != faults.key("row")
    with faults.going_on({}):
        assert faults.key("row").startswith("1 ")


@pytest.mark.parametrize("others", [True, False], ids=["another process goes on", "in one process"])
def test_what_goes_wrong_late_is_said_of_the_check_that_did_it(others, monkeypatch):
    dead = []

    def synchronize():
        if dead:
            raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    s = load("elementwise", GIVEN).make()[0]
    asked = lambda: s.attempt("invariance", "late", lambda: dead.append(1) or Drift(0, 1))
    if others:
        with faults.going_on({}), pytest.raises(faults.Lost) as lost:
            asked()
        (row,) = [lost.value.row]
    else:
        (row,) = asked()
    assert row.layout == "late" and row.verdict == NEEDS_FIX and "misaligned address" in row.detail
