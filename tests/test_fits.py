"""No launch asks for more than a program on sm_90 may have, whatever the tile, the width, the dtype and the tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import slow_but

from bi_kernels.audit.static.finding import SHARED
from bi_kernels.ops.gemm.cost import RINGS, TILES

SCRIPT = Path(__file__).with_name("fitting_launches.py")


@pytest.fixture(scope="module", params=slow_but(["some", "whole"], "some"))
def variants(request) -> list[dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), request.param]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_every_variant_is_compiled_and_fits(variants):
    assert not [v for v in variants if v.get("error")]
    assert not [v for v in variants if v["shared"] > SHARED]
    assert max(v["shared"] for v in variants) > SHARED * 0.9, "nothing that comes near the limit was compiled"


def test_every_kernel_with_a_pipeline_is_among_them(variants):
    names = {v["kernel"] for v in variants}
    assert "_sums_kernel" in names
    assert names >= {"_gemm_kernel", "_hopper_gemm_kernel", "_rms_norm_backward_kernel", "attention_kernel"}
    assert names >= {
        "keys_backward_kernel",
        "queries_backward_kernel",
        "scores_kernel",
        "weights_kernel",
        "values_kernel",
    }
    decode = {(v["of"]["PAGE"], v["of"]["num_stages"]) for v in variants if v["kernel"] == "attention_kernel"}
    assert decode >= {(16, 4), (64, 2), (64, 4)}, "pages of whole blocks, by two programs a multiprocessor or one"
    tiles = {(v["of"]["BLOCK_M"], v["of"]["BLOCK_N"], v["of"]["BLOCK_K"]) for v in variants if "EXTRA_N" in v["of"]}
    assert tiles >= {(t.m, t.n, t.k) for t in TILES["fold"]}


def test_rings_spill_no_register_where_rows_are_multiples_of_16(variants):
    spills = {}
    for v in variants:
        if "spills" in v:
            spills.setdefault(v["of"]["UNIT"], []).append(v["spills"])
    compiled = {tuple(v["ring"]) for v in variants if "ring" in v and v["of"]["UNIT"] == 16}
    assert compiled == {ring._replace(resident=1, group=8) for found in RINGS.values() for ring in found}, "every ring"
    assert not any(spills[16])
    assert any(spills[8]), "the widest ring spills where they are not, and so a spill is seen"


def test_rings_fit():
    """What a ring allocates is written in it: its stages, what the tensor core reads beside few rows, its barriers."""
    for ring in {ring for found in RINGS.values() for ring in found}:
        assert ring.shared <= SHARED and ring.shared * ring.resident <= 228 * 1024, ring


def test_rings_allocate_what_is_written_in_them(variants):
    found = [v for v in variants if "said" in v]
    assert {v["ring"][0] for v in found} >= {8, 16, 32, 64}
    assert not [v for v in found if not 0 <= v["said"] - v["shared"] < 2048]
