"""Every public name under odd calls: a sample of the fuzz, and its judge on functions that are broken on purpose.

    FUZZ="1000 2000" pytest tests/test_fuzz.py -n 2 --dist load    # 2,000 calls from number 1000 on

A worker of pytest-xdist that a call crashes, or that has no answer after two minutes, fails that call alone.
"""

import os
import resource
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fuzz
import pytest
import torch
from fuzz_calls import CALLS
from fuzz_judge import Case, judge
from fuzz_values import OTHERWISE, TENSORS

import bi_kernels as bi
from bi_kernels.scalars import check_type

FIRST, COUNT = map(int, os.environ.get("FUZZ", "0 150").split())
SECONDS, MEMORY = 120, 24 * 2**30  # of a call without an answer; of a process's addresses, where many are called
VERDICTS: Counter = Counter()


@pytest.fixture(scope="module", autouse=True)
def world():
    """One process that stands for all ranks, as TensorParallel wants it."""
    before = Path.cwd()
    fuzz.world()
    if "FUZZ" in os.environ:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    yield
    torch.distributed.destroy_process_group()
    os.chdir(before)


def test_every_public_name_is_called():
    called = {name.partition(".")[0] for name in CALLS}
    assert called >= {*bi.__all__} - {"RopeTable", "Groups"}  # tuples of tensors, which rope and dispatch look at
    assert {*OTHERWISE} <= {*TENSORS}


@pytest.mark.parametrize("number", range(FIRST, FIRST + COUNT))
def test_an_odd_call_is_right_or_one_sentence(number):
    signal.alarm(SECONDS)
    try:
        case = fuzz.drawn(number)
        verdict, said = judge(case)
    finally:
        signal.alarm(0)
    assert verdict != "wrong", f"{case.name}, {case.said}: {said}"
    VERDICTS[verdict] += 1


def test_many_calls_are_right_and_many_refused():
    if VERDICTS.total() >= 100:
        assert min(VERDICTS["right"], VERDICTS["refused"]) > VERDICTS.total() / 6


def test_an_embedding_that_is_shared_knows_its_padding_and_asks_for_tensors_that_can_be_saved():
    parallel = bi.TensorParallel(torch.distributed.group.WORLD)
    weight, ids = parallel.share(torch.ones(5, 2), together=None), torch.arange(3)
    with pytest.raises(ValueError, match="^embedding: padding_id is -100, expected None or 0 to 4$"):
        parallel.embedding(ids, weight, -100)
    with pytest.raises(TypeError, match="^bi_kernels: an op that needs a gradient got tensors made in inference_mode"):
        parallel.embedding(torch.inference_mode()(ids.clone)(), weight)
    with pytest.raises(TypeError, match="^TensorParallel: sequence is 'no', expected True or False$"):
        bi.TensorParallel(torch.distributed.group.WORLD, sequence="no")
    with pytest.raises(TypeError, match="^TensorParallel: weight is a list, expected a torch.Tensor$"):
        parallel.share([1.0])
    with pytest.raises(TypeError, match="^linear: x is a list, expected a torch.Tensor$"):
        parallel.linear([1.0], torch.ones(2, 2))


# The judge: what is planted, its verdict, and a word of why


def raising(error: Exception) -> Callable:
    def silu(x):
        raise error

    return silu


def telling(op: str, name: str, expected: str = "another") -> Callable:
    return lambda x: check_type(op, name, 1, str, expected)


def returning(of: Callable) -> Callable:
    """What only an odd tensor is given."""
    return lambda x: bi.silu(x) if x.is_contiguous() else of(x)


def first_other(y: torch.Tensor) -> torch.Tensor:
    return y.index_fill(0, torch.tensor([0]), 1.0)


PLANTED = {
    "right": (bi.silu, "right", ""),
    "a sentence": (telling("silu", "x"), "refused", "silu: x is 1, expected another"),
    "no argument": (telling("silu", "it"), "wrong", "silu: it is 1"),
    "no op": (telling("it", "x"), "wrong", "it: x is 1"),
    "two lines": (telling("silu", "x", "another,\nor none"), "wrong", "\n"),
    "torch's own": (lambda x: torch.ops.bi_kernels.elementwise("silu", "x", None, 0.0, None), "wrong", "elementwise"),
    "another exception": (raising(KeyError("silu: x is odd, expected another")), "wrong", "KeyError"),
    "raised elsewhere": (raising(ValueError("silu: x is odd, expected another")), "wrong", "ValueError"),
    "another number": (returning(lambda x: first_other(bi.silu(x))), "wrong", "other bits"),
    "another zero": (returning(lambda x: -bi.silu(x * 0)), "wrong", "other bits"),
    "another dtype": (returning(lambda x: bi.silu(x).double()), "wrong", "torch.float64"),
    "another shape": (returning(lambda x: bi.silu(x)[:1]), "wrong", "(1, 4)"),
    "a write": (returning(lambda x: (bi.silu(x), x.zero_())[0]), "wrong", "it wrote"),
    "no plain call": (lambda x: check_type("silu", "x", x, int, "") if x.is_contiguous() else x, "wrong", "the plain"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_judge_tells_what_is_planted(name):
    function, verdict, why = PLANTED[name]
    silu = lambda x: function(x)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).t()
    found, said = judge(Case("silu", silu, (x,)))
    assert found == verdict and why in said, said


def test_a_gradient_of_other_bits_is_told():
    double = lambda x: bi.silu(x) if x.is_contiguous() else bi.silu(x) + (x - x.detach()).transpose(0, 1).t() * 0.5
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).t().requires_grad_()
    assert judge(Case("silu", lambda x: bi.silu(x), (x,), backward=True)) == ("right", "")
    found, said = judge(Case("silu", lambda x: double(x), (x.detach().requires_grad_(),), backward=True))
    assert found == "wrong" and said.startswith("result 1 has other bits"), said
