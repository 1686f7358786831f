"""Draws in which order the gradient of a norm's weight is added over tokens, for one step of two sequences in one call
and in two: ours and stock PyTorch's on a CPU, a figure each. Found by probing the kernels from outside.

    python tools/draw_fold.py docs
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch.nn.functional as F

import bi_kernels
from bi_kernels import workbench as wb

LENGTHS = [20, 28]
STEPS = {"one call": [LENGTHS], "a call each": [[n] for n in LENGTHS]}
OPS = {"bi_kernels": bi_kernels.rms_norm, "torch": lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps)}


def orders(op) -> dict[str, object]:
    return {
        step: wb.order(wb.over_tokens(op, calls, eps=0.0), sum(LENGTHS), at_once=128) for step, calls in STEPS.items()
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/draw_fold.py FOLDER")
    for name, op in OPS.items():
        trees = orders(op)
        same = "the same additions" if len(set(trees.values())) == 1 else "other additions"
        figure = wb.draw(trees, f"{name}: one step, cut otherwise, is {same}", marks=[LENGTHS[0]], xlabel="token")
        figure.savefig(f"{sys.argv[1]}/fold_{name}.png", dpi=100)
