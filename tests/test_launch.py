"""Kernels launched through their compiled form: it is the one that Triton would have launched."""

import os
import subprocess
import sys
from pathlib import Path

import triton

from bi_kernels.launch import jit

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
