"""Runs, steps through, audits and writes out a kernel of a notebook's cell, and finds the order in which it adds."""

import os
import sys

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise RuntimeError(
            "bi_kernels.workbench needs Triton's interpreter, for there is no GPU, but triton was imported before it: "
            "restart Python and import the workbench first, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"

from bi_kernels.audit.kernel_error import KernelError
from bi_kernels.workbench.audit import audit, drift
from bi_kernels.workbench.run import asm, first_launch, run
from bi_kernels.workbench.source import command, write_op
from bi_kernels.workbench.step import step
from bi_kernels.workbench.summation_order import draw, first_divergence, order, over_k, over_tokens

__all__ = [
    "KernelError",
    "asm",
    "audit",
    "command",
    "draw",
    "drift",
    "first_launch",
    "first_divergence",
    "order",
    "over_k",
    "over_tokens",
    "run",
    "step",
    "write_op",
]
