"""Run by tests/test_launch.py without the interpreter: prints how many variants of each kernel calls of many sizes
compile, as JSON, and the same where attention is compiled for each number of sequences."""

import json

import torch

from bi_kernels.audit.static.binary import without_gpu

without_gpu()
torch.cuda.current_device = lambda: 0

import bi_kernels
from bi_kernels import checks
from bi_kernels.audit.static.variants import served
from bi_kernels.ops.attention import backward, forward

if __name__ == "__main__":
    loaded = [getattr(bi_kernels, name) for name in bi_kernels.__all__]  # their kernels are not interpreted ones
    checks.INTERPRETED = True  # from here on a CPU is let through
    print(json.dumps(served("cpu", 60, shapes="tiny", longest=256)))
    backward.round_up_sequences = forward.round_up_sequences = lambda sequences: sequences
    print(json.dumps(served("cpu", 20, seed=1, shapes="tiny", longest=256)))
