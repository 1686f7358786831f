"""Third-party ops on the CPU: what is known is found, and every drift is shown by a script of its own."""

from dataclasses import replace

import pytest
import torch

from bi_kernels.audit import load, parallel
from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED, Row
from bi_kernels.audit.report.any_callable import Report
from helpers import corpus, third_party

SOME = (
    "F.silu",
    "F.linear, square, fp32",
    "F.rms_norm",
    "a batch's mean taken off",
    "nn.Dropout, training",
    "SDPA, math",
    "Hugging Face LlamaMLP",
)


def test_the_corpus_is_large():
    names = [name for name, _ in corpus.corpus(torch.device("cpu"), corpus.SMALL)]
    assert len(set(names)) == len(names) >= 35 and {*third_party.INVARIANT, *third_party.DRIFTING, *SOME} <= set(names)


@pytest.mark.slow
def test_the_auditor_is_right_about_what_is_known(tmp_path, monkeypatch):
    """In processes of their own, as on a GPU."""
    monkeypatch.setenv("BI_AUDIT_OUT", str(tmp_path))
    given = {"callables": "; ".join(SOME), "device": "cpu"}
    session = load("zoo", given)
    session.pool = parallel.Processes(2, "zoo", given)
    with session.pool:
        lines = {line["callable"]: line for line in session.judge()}
    assert "step.gradients(" in (tmp_path / "repro" / "F_rms_norm.py").read_text()
    assert set(lines) == set(SOME)
    assert lines["F.silu"]["verdict"] == lines["SDPA, math"]["verdict"] == PASS
    assert lines["a batch's mean taken off"]["reproducer"] == lines["F.rms_norm"]["reproducer"] == "drifts", lines
    assert (
        "random" not in lines["a batch's mean taken off"]["determinism"]
        and lines["nn.Dropout, training"]["verdict"] == NEEDS_FIX
    )
    shares = third_party.shares([*lines.values()])
    assert shares["nn.Dropout, training"] == {}  # hatched: nothing but determinism was asked
    rows = session.rows
    assert all(r.caught for r in rows if r.control) and sum(r.control for r in rows) == 2
    assert not [r for r in rows if r.verdict == NEEDS_FIX and not r.control], rows


def test_scripts_with_large_arguments_are_not_kept(tmp_path):
    """Each beside its own, and another's whose name begins as theirs."""
    for name in ("large.py", "large-mode.py", "large-more.py", "larger.py"):
        (tmp_path / name).write_text("")
    for name, size in (("large.pt", third_party.KEPT + 1), ("large-more.pt", 1), ("larger.pt", third_party.KEPT)):
        (tmp_path / name).write_bytes(b"0" * size)
    row = Row("any", "f", "", "f", "", "cpu", "invariance", "", "", "given", 3, NEEDS_FIX, 2, 9)
    repros = ("python repro/large.py", "python repro/larger.py", "")
    lines = [{"callable": name, "worst": replace(row, repro=r)} for name, r in zip(("a b", "c", "d"), repros)]
    third_party._lighten(tmp_path, [*lines, {"callable": "not judged"}])
    assert {path.name for path in tmp_path.iterdir()} == {"larger.py", "larger.pt"}
    assert [line["worst"].repro for line in lines] == ["bi-audit run zoo -p callables 'a b'", *repros[1:]]


DRIFT = Row("any", "f", "", "f", "", "cpu", "invariance", "singles", "", "given", 3, NEEDS_FIX, 2, 9, 1.0, 0.5, 3)
LATE = replace(
    DRIFT, layout="not run", mismatches=None, elements=None, verdict=UNSUPPORTED, detail="the budget of 9 s was spent"
)
SOUND = replace(DRIFT, layout="rows:1", verdict=PASS, mismatches=0)


def test_what_time_was_too_short_for_is_unsupported_in_the_table_and_among_the_rows():
    late = [LATE, replace(LATE, relation="determinism"), replace(LATE, relation="atomics-free")]
    for rows, verdict, invariance in (
        ([SOUND, *late], UNSUPPORTED, LATE.detail),
        ([SOUND, DRIFT, *late], NEEDS_FIX, "22.2% of out, 3 ULP (singles)"),
        ([SOUND, replace(DRIFT, mismatches=None, detail="raised"), *late], NEEDS_FIX, "raised"),
        ([SOUND], PASS, PASS),
    ):
        line = third_party.summary(Report("f", rows, "read")) | {"callable": "f", "reproducer": "–"}
        assert line["verdict"] == verdict and line["invariance"] == invariance, line
        assert line["atomics-free"] == ("not judged" if len(rows) > 1 else "–")
        assert {r.verdict for r in third_party.rows([line], "cpu")} == ({UNSUPPORTED} if verdict != PASS else set())


def test_a_drift_that_no_script_shows_needs_a_fix():
    line = {"callable": "F.silu", "verdict": NEEDS_FIX, "reproducer": "none found", "detail": ""}
    found = third_party.rows(
        [
            line,
            {"callable": "x", "verdict": UNSUPPORTED, "reproducer": "–", "detail": "no package"},
            {"callable": "nn.Dropout, training", "verdict": PASS, "reproducer": "–"},
        ],
        "cpu",
    )
    assert [r.verdict for r in found[:3]] == [NEEDS_FIX, NEEDS_FIX, UNSUPPORTED] and found[3].caught is False
