"""Parallel strategies whose ranks end badly, for tests/test_tensor_parallel.py."""

import os
import time

import torch.distributed as dist

from bi_kernels.audit.targets.distributed.step import ParallelStrategy
from bi_kernels.parallel.tensor import TensorParallel


def dies(group, tokens):
    dist.barrier()  # so that every rank has told of the job before
    if dist.get_rank() == 1:
        os._exit(9)
    return TensorParallel(group, tokens)


def hangs(group, tokens):
    if dist.get_rank() == 1:
        time.sleep(600)
    return TensorParallel(group, tokens)


def raises(group, tokens):
    dist.barrier()  # as above
    if dist.get_rank() == 1:
        raise ValueError("this rank has no luck")
    return TensorParallel(group, tokens)


DIES, HANGS, RAISES = (ParallelStrategy(ops, forward=True) for ops in (dies, hangs, raises))
