"""A product that is looked up has the bits of one that is asked for the first time, whatever was asked in between: the
GEMM audit's experiment, and what it finds of a package that forgets."""

from collections.abc import Sequence

import pytest
import torch

from bi_kernels.audit import start
from bi_kernels.audit.findings import NEEDS_FIX
from bi_kernels.ops.gemm import gemm, launch_cache
from helpers import gemm as experiments
from helpers import products

BF16 = torch.bfloat16
ASKED = products.asked(products.SIZES["cpu"][0], BF16, torch.device("cpu"))
LOOKED_UP = [k for k in ASKED if not any(word in k for word in ("start", "out", "unaligned", "8 bytes", "strided"))]


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return products.alone(ASKED)


def differing(names: Sequence[str], alone: dict[str, torch.Tensor]) -> set[str]:
    """Returns those that do not have the bits, after those before them, that they have alone."""
    found = products.in_a_thread(ASKED[name] for name in names)
    return {name for name, ys in zip(names, found) if products.differing(ys, alone[name]).mismatches}


def test_what_is_remembered_is_looked_up():
    found = dict(zip(ASKED, products.in_a_thread(ASKED.values())))
    assert [name for name, ys in found.items() if len(ys) == 3] == LOOKED_UP
    assert products.names() == [*ASKED]


@pytest.mark.parametrize("name", ["x unaligned", "w unaligned", "bias, unaligned", "bias, strided"])
def test_a_lookup_that_does_not_see_where_tensors_lie_is_found(name, alone, monkeypatch):
    blind = lambda *given: (run := vars(launch_cache._thread).get(launch_cache.kind_of(*given))) and run(*given[:3])
    names = "bias" if "bias" in name else "plain", name
    assert differing(names, alone) == set()
    monkeypatch.setattr(gemm, "cached_launch", blind)
    assert differing(names, alone) == {name}


def test_the_experiment_asks_all_that_is_required_and_finds_a_package_that_forgets(monkeypatch):
    run = start("gemm", device="cpu", dtype="bf16")
    rows, table = experiments.remembered(run)
    layouts = {r.layout for r in rows}
    asked, controls = [r for r in rows if not r.control], [r for r in rows if r.control]
    assert len(layouts) == 1 and {r.verdict for r in asked} == {"pass"} and len(asked) == 2 * len(ASKED)
    assert [r.candidate for r in controls] == [f"a key that forgets {what}" for what in products.TOLD_APART]
    assert all(r.caught for r in controls)
    run.rows = asked
    assert layouts.isdisjoint(r.layout for r in experiments.missing(run))
    run.rows = asked[1:]
    assert [r.detail for r in experiments.missing(run) if r.layout in layouts] == [
        f"{asked[0].detail}: required, not run"
    ]
    assert {line["asked"]: line["looked up"] > 0 for line in table} == {name: name in LOOKED_UP for name in ASKED}
    whole = launch_cache.kind_of
    monkeypatch.setattr(launch_cache, "kind_of", lambda x, w, bias, _: whole(x, w, bias, None))
    found = {r.detail.partition(", in order")[0] for r in experiments.remembered(run)[0] if r.verdict == NEEDS_FIX}
    assert "plain, in fp32" in found and "start" not in found


def test_a_library_that_serves_nothing_is_missing(monkeypatch):
    run = start("gemm", device="cpu", dtype="bf16")
    monkeypatch.setitem(run.parameters, "shapes", "qwen3-8b")
    said = lambda: [r.detail for r in experiments.missing(run) if experiments.LIBRARY in r.detail]
    assert not said(), "there is none on a CPU"
    monkeypatch.setattr(experiments, "library_expected", lambda device: True)
    assert said() == ["cuBLASLt: required, not run"]
