"""The audit of families: its models at published widths, tiny on a CPU; its routers, its clock, its controls."""

import json

import pytest
import torch

from bi_kernels.audit import start
from bi_kernels.audit.findings import PRECONDITION, needs_fix
from bi_kernels.contract import CONTRACT
from helpers import families_at_width, families_routers, families_speed


@pytest.fixture(scope="module")
def session():
    return start("families", device="cpu")


@pytest.mark.parametrize("name", families_at_width.WIDTHS)
def test_published_sizes_are_fields_of_the_configuration(name):
    config = families_at_width.config_of(name)
    for field, size in families_at_width.WIDTHS[name][1].items():
        assert field == "rope_parameters" or getattr(config, field) == size, field
    assert config.vocab_size == families_at_width.VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("name", families_at_width.WIDTHS)
def test_what_runs_at_published_widths_runs_tiny(name, session, tmp_path):
    rows = families_at_width.real_widths(session, [name], tmp_path, small=True)
    assert not needs_fix(rows), [(r.layout, r.detail, r.mismatches) for r in needs_fix(rows)]
    splits = {r.layout for r in rows if r.relation == "gradient invariance" and r.inputs == "normal" and not r.control}
    assert len(splits) == families_at_width.SMALL.splits - 1, "each against one call"
    layouts = {r.layout for r in rows}
    assert {"batch", "left_padded", "packed", "chunked", "decode", "generate, batch 3", "cuda_graph"} <= layouts
    assert sum(r.control for r in rows) == 2
    assert len(json.loads((tmp_path / f"{name}.json").read_text())) == len(rows)
    (line,) = families_at_width.table(rows)
    assert line["else"] == "as expected" and line["splits"].startswith("0 of ")


def test_what_a_model_raises_is_a_row(session, monkeypatch):
    monkeypatch.setattr(families_at_width, "build", lambda *given: 1 / 0)
    (row,) = families_at_width.real_widths(session, ["Phi-4"], small=True)
    assert (row.relation, row.verdict) == (PRECONDITION, "needs-fix") and "ZeroDivisionError" in row.detail
    session.rows.remove(row)


def test_a_step_is_cut_in_its_order_and_never_twice_alike():
    found = families_at_width.cuts(12, 12, 0)
    assert len(found) == 12 and all(sum(cut, []) == list(range(12)) for cut, _ in found)
    assert all(one not in found[:i] for i, one in enumerate(found)) and {how for _, how in found} == {
        *families_at_width.HOWS
    }


def test_routers_break_ties_and_add_in_one_order(session):
    rows = families_routers.judge(session, small=True)
    assert not needs_fix(rows) and sum(r.control for r in rows) == 3


def test_a_tie_that_a_higher_id_wins_is_counted():
    model = families_at_width.build("Qwen3-30B-A3B", torch.device("cpu"), small=True)
    families_routers.plant_ties(model)
    ids = [torch.arange(8, 40)]
    turned = torch.Tensor.topk
    try:
        torch.Tensor.topk = lambda t, *given, **more: _turned(turned(t.flip(-1), *given, **more), t.shape[-1])
        torch_topk, torch.topk = torch.topk, torch.Tensor.topk
        wrong, split, tokens = families_routers.count_ties(model, ids)
    finally:
        torch.Tensor.topk, torch.topk = turned, torch_topk
    assert wrong and split and tokens == 2 * 32


def _turned(found, count):
    return type("Found", (tuple,), {"indices": count - 1 - found[1], "values": found[0]})(
        (found[0], count - 1 - found[1])
    )


def test_everything_that_is_timed_runs(session):
    def clock(calls, rounds=3):
        for call in calls.values():
            call()
        return {name: 1.0 + i for i, name in enumerate(calls)}

    lines = [
        line
        for measure in (families_speed.experts, families_speed.models, families_speed.attention)
        for line in measure(session, clock, small=True)
    ]
    found = families_speed.summary(lines)
    assert [line["what"] for line in found] == [g["what"] for g in CONTRACT["families"]["goals"]]
    assert len(families_speed.slowest(lines, 3)) == 3 and families_speed.draw(lines).axes


def test_drawn_products_are_of_the_seed_and_within_bounds():
    draw = lambda seed: [*families_speed.products(seed, families_speed.Sizes(), {})]
    found = draw(0)
    assert found == draw(0) != draw(1) and len(found) == families_speed.Sizes().drawn
    for p in found:
        assert 8 <= p.experts <= 256 and 1 <= p.rows <= 65536 and p.n % 8 == p.k % 8 == 0 < p.n * p.k


def test_an_unknown_model_is_one_sentence():
    with pytest.raises(ValueError, match="models holds 'Qwen9', expected all, none, or some of Qwen3-30B-A3B; gpt-oss"):
        start("families", device="cpu", models="Qwen9")
