"""A Triton kernel that does not compile, or raises, is told by its own last sentence and its line."""

import inspect
import traceback

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.runtime.jit import JITFunction

from bi_kernels.audit import audit, locate
from bi_kernels.audit.findings import sentence


@triton.jit
def three(v):
    return v + tl.arange(0, 3)


@triton.jit
def in_a_helper(x, y, N, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(y + at, three(tl.load(x + at, mask=at < N)), mask=at < N)


@triton.jit
def in_the_kernel(x, y, N, B: tl.constexpr):
    at = tl.arange(0, B)
    at += tl.arange(0, B + 1)
    tl.store(y + at, tl.load(x + at, mask=at < N), mask=at < N)


def line_of(function, text: str) -> str:
    """Returns "tests/test_errors.py:LINE" of a text in a kernel."""
    lines, first = inspect.getsourcelines(function.fn)
    return f"tests/test_errors.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def launched(kernel):
    def op(x):
        y = torch.empty_like(x)
        kernel[(1,)](x, y, x.numel(), B=64)
        return y

    return op


def compiled(kernel) -> Exception:
    """Returns what Triton's compiler raises: without a GPU, and without its interpreter."""
    source = ASTSource(JITFunction(kernel.fn), {"x": "*fp32", "y": "*fp32", "N": "i32", "B": "constexpr"}, {"B": 64})
    with pytest.raises(CompilationError) as raised:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return raised.value


CASES = [
    (in_a_helper, "ValueError: arange's range must be a power of 2", line_of(three, "tl.arange(0, 3)")),
    (in_the_kernel, "ValueError: arange's range must be a power of 2", line_of(in_the_kernel, "B + 1")),
]


@pytest.mark.parametrize("kernel, message, place", CASES, ids=["in a helper", "in the kernel"])
def test_a_kernel_that_does_not_compile_is_told_in_a_sentence(kernel, message, place, monkeypatch):
    monkeypatch.setitem(globals(), "three", JITFunction(three.fn))
    error = compiled(kernel)
    assert str(error).startswith("at ") and len(str(error).splitlines()) > 3, "the compiler quotes its source"
    assert message in sentence(error) and sentence(error).endswith(f"({place})"), sentence(error)
    assert "\n" not in sentence(error)


@pytest.mark.parametrize("ask", [audit, lambda op, x: locate(op, x[:, None])], ids=["audit", "locate"])
def test_audit_and_locate_show_the_sentence_and_not_the_source(ask):
    with pytest.raises(ValueError, match="a power of 2") as raised:
        ask(launched(in_a_helper), torch.randn(8, 8))
    shown = "".join(traceback.format_exception(raised.value))
    assert line_of(three, "tl.arange(0, 3)") in str(raised.value) and "InterpreterError" not in shown
    assert str(raised.value).count("ValueError") == 1


def test_what_the_interpreter_wraps_once_a_function_is_told_once():
    with pytest.raises(Exception) as raised:
        launched(in_a_helper)(torch.randn(8, 8))
    said = sentence(raised.value)
    assert said == f"ValueError: arange's range must be a power of 2 ({line_of(three, 'tl.arange(0, 3)')})"
    assert sentence(ValueError("one\ntwo")) == "ValueError: one", "what is no kernel's stays as it was"


def test_a_line_that_ends_in_a_colon_is_said_with_the_next_one():
    error = RuntimeError("backend='inductor' raised:\nFileNotFoundError: no compiler\n\nSet TORCHDYNAMO_VERBOSE=1")
    assert sentence(error) == "RuntimeError: backend='inductor' raised: FileNotFoundError: no compiler"
    assert sentence(ValueError("x has 3 rows\nthe rest")) == "ValueError: x has 3 rows"
