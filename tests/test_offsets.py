"""The judge of offsets beyond 2**31 elements: what passes at a small size, and what it must find."""

import json
import os
import subprocess
import sys
from pathlib import Path

import offsets
import pytest
import torch

import bi_kernels
from bi_kernels.audit.problem.registry import OPS
from bi_kernels.tokens import TokenLayout

SMALL, FEWER = 2**13, 2**11  # elements in place of 2**31, on the interpreter; of attention, which takes long there
GOLDEN = Path(__file__).parent / "golden"
TINY = {call.name: call for call in offsets.every("tiny")}


@pytest.mark.parametrize("name", TINY)
def test_every_op_gives_in_one_call_what_it_gives_its_sequences(name):
    found = offsets.judge(TINY[name], FEWER if TINY[name].problem.op.cache else SMALL)
    assert found["passed"], found["differs"]


@pytest.mark.parametrize("call", offsets.every(), ids=lambda call: call.name)
def test_the_widest_tensor_goes_on_for_two_sequences_beyond_what_32_bits_reach(call):
    length, count = call.sizes()
    assert (count - 2) * length * call.width >= 2**31 > (count - 3) * length * call.width
    assert length % 16 and count * length < 2**20
    assert length * call.width < 2**31 / 4


def test_every_op_of_the_registry_is_asked():
    assert {call.problem.op.name for call in offsets.every()} == set(OPS)


def test_every_call_was_made_on_an_h200_and_passed():
    found = {one["op"]: one for one in map(json.loads, (GOLDEN / "offsets_h200.jsonl").read_text().splitlines())}
    assert found.keys() == {call.name for call in offsets.every()}
    for call in offsets.every():
        one, (length, count) = found[call.name], call.sizes()
        assert one["passed"] and not one["differs"] and one["elements"] == length * count * call.width > 2**31
    said = " ".join((Path(__file__).parents[1] / "docs" / "limits.md").read_text().split())
    assert f"all of its {len(found)} calls passed on an H200" in said


def wrapped(x: torch.Tensor) -> torch.Tensor:
    """Returns the rows at which those of x are found by offsets that wrap."""
    return torch.arange(len(x)) % (SMALL // x.shape[1])


def read_wrapped(x: torch.Tensor) -> torch.Tensor:
    return bi_kernels.silu(x[wrapped(x)])


def written_wrapped(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).index_copy(0, wrapped(x), bi_kernels.silu(x))


@pytest.mark.parametrize("function, first", [(read_wrapped, SMALL // 96), (written_wrapped, 0)])
def test_an_offset_that_wraps_is_found_in_an_output_and_a_gradient(function, first):
    differs = offsets.judge(TINY["silu"], SMALL, function)["differs"]
    assert {"out", "dx"} == set(differs)
    assert differs["out"]["first"][0] == first


def without_the_last(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product whose weight has no gradient of the last sequence, but of a sequence alone."""
    length, _ = TINY["linear, o"].sizes(SMALL)
    parts = []
    for part, w in ((x[:-length], weight), (x[-length:], weight.detach())) if len(x) > length else ((x, weight),):
        with TokenLayout.packed(range(0, len(part) + 1, length)):
            parts.append(bi_kernels.linear(part, w))
    return torch.cat(parts)


def test_a_sequence_that_a_parameters_gradient_misses_is_found():
    differs = offsets.judge(TINY["linear, o"], SMALL, without_the_last)["differs"]
    assert set(differs) == {"dweight"} and differs["dweight"]["count"] > 64 * 64 / 2


def small(*arguments: object) -> int:
    return offsets.main([*map(str, arguments), "--elements", str(SMALL), "--shapes", "tiny"])


def test_the_program_says_a_line_of_each_call_and_goes_on_behind_one_that_raises(tmp_path, monkeypatch, capsys):
    file = tmp_path / "runs" / "found.jsonl"
    assert small("scale", "--json", file) == 0
    monkeypatch.setattr(bi_kernels, "silu", lambda x: 1 / 0)
    monkeypatch.setattr(bi_kernels, "soft_cap", lambda x, cap: bi_kernels.gelu(x[wrapped(x)]))
    assert small("silu", "soft_cap", "add", "--json", file) == 1
    lines = capsys.readouterr().out.splitlines()
    said = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["op"] for one in said] == ["scale", "silu", "soft_cap", "add"] and len(lines) == 4
    assert [one["passed"] for one in said] == [True, False, False, True]
    assert all(one["device"] == "interpreter" and one["commit"] and one["date"] for one in said)
    assert "silu: x of 10,560 elements: ZeroDivisionError: division by zero" in lines[1]
    assert "out differs in" in lines[2] and "first at (85, 0)" in lines[2]
    with pytest.raises(SystemExit):
        small("sillu")
    assert "no op is called sillu" in capsys.readouterr().err


def test_where_the_gpu_is_lost_a_new_process_goes_on(tmp_path, monkeypatch, capsys):
    started = []

    def execv(program: str, command: list[str]) -> None:
        started.extend(command[2:])
        raise SystemExit

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(offsets, "lost", lambda: True)
    monkeypatch.setattr(bi_kernels, "silu", lambda x: 1 / 0)
    with pytest.raises(SystemExit):
        small("silu", "add", "linear", "--json", tmp_path / "found.jsonl")
    assert started[:3] == ["add", "linear, lm_head", "linear, o"]
    assert offsets.main(started) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["silu", *started[:3]]
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 4


HEADS_FIRST = """
import sys, torch, bi_kernels
q, k, v = torch.randn(3, 40, 5, 16).bfloat16()
apart = int(sys.argv[1])
far = torch.empty(4 * apart + 40 * 16, dtype=torch.bfloat16).as_strided(k.shape, (16, apart, 1)).copy_(k)
given = [t[None] for t in (q, k, v, far)]
attention = lambda k: bi_kernels.attention(given[0], k, given[2])[0]
sys.exit(not torch.equal(attention(given[3]), attention(given[1])))
"""


@pytest.mark.parametrize(
    "apart",
    [
        2**28,
        pytest.param(2**29, marks=pytest.mark.xfail(strict=True, reason="docs/limits.md: head · stride in 32 bits")),
    ],
)
def test_heads_that_lie_far_apart_are_read_where_they_lie(apart):
    command = [sys.executable, "-c", HEADS_FIRST, str(apart)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
