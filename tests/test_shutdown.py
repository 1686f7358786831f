"""A notebook's kernel that is shut down prints no KeyboardInterrupt: nothing was interrupted."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from bi_kernels.audit import parallel


@pytest.fixture
def interruptible():
    """Has an interrupt raise KeyboardInterrupt here, as in a kernel that handles a request."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_a_kernel_that_is_interrupted_as_it_says_what_it_is_answers_all_the_same(interruptible, monkeypatch):
    """papermill asks for that last, and begins to shut the kernel down once it has the answer."""
    answered = []
    handlers = {"kernel_info_request": lambda *request: answered.append(interruptible() or request)}
    shell = SimpleNamespace(kernel=SimpleNamespace(shell_handlers=handlers))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with pytest.raises(KeyboardInterrupt):
        handlers["kernel_info_request"]("without a session")
    parallel.answer_uninterrupted()
    handlers["kernel_info_request"]("stream", "idents", "message")
    assert answered == [("stream", "idents", "message")]


@pytest.mark.parametrize("modules", [{}, {"IPython": SimpleNamespace(get_ipython=lambda: None)}], ids=["none", "shell"])
def test_where_there_is_no_kernel_nothing_is_changed(modules, monkeypatch):
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != "IPython"} | modules)
    parallel.answer_uninterrupted()
