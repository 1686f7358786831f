"""Kernels launched through their compiled form: it is the one that Triton would have launched."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import triton

from bi_kernels.launch import jit
from bi_kernels.ops.gemm import hopper_cublaslt as cublaslt
from bi_kernels.ops.gemm.cost import Tile
from bi_kernels.ops.gemm.gemm import cheapest
from bi_kernels.ops.gemm.kernel import FP32_TILE

SCRIPT = Path(__file__).with_name("compiled_launches.py")


def test_what_is_launched_is_what_triton_would_launch():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=env, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, again = (tuple(map(int, line.split())) for line in ended.stdout.splitlines())
    assert first[1] > 0, "calls of one kind share what was compiled"
    assert again[0] == first[0] and again[1] > 2 * first[1], "the same calls again ask Triton nothing"


def test_interpreted_kernels_are_tritons_own():
    def kernel(x, n):
        pass

    assert type(jit(kernel)) is type(triton.jit(kernel)) is type(jit(do_not_specialize=["n"])(kernel))


@pytest.mark.parametrize("version, off, taken", [(130100, False, True), (130101, False, False), (130100, True, False)])
def test_a_library_that_was_not_swept_serves_nothing(monkeypatch, version, off, taken):
    library = MagicMock()
    library.cublasLtGetVersion.return_value = version
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cublaslt, "OFF", off)
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", {"libcublasLt.so.13": library}.get)
    assert (cublaslt._library.__wrapped__() is library) == taken


def test_no_library_and_no_gpu_serve_nothing(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    assert cublaslt._library.__wrapped__() is None
    assert not cublaslt.serves(torch.device("cpu"))
    assert cublaslt.launch(torch.zeros(32, 16).bfloat16(), torch.zeros(8, 16).bfloat16()) is None
    sizes, dtypes, cpu = (32, 8, 16), (torch.bfloat16,) * 2, torch.device("cpu")
    assert cublaslt.waves(sizes, ((16, 1),) * 2, dtypes, cpu) is None
    assert isinstance(cheapest(sizes, ((16, 1),) * 2, False, dtypes, cpu)[0], Tile)
    assert cheapest(sizes, ((16, 1),) * 2, False, (torch.float32,) * 2, cpu) == (FP32_TILE, 0)
