"""A check that finds too little memory waits for others, and not in vain twice."""

import threading

import pytest

from bi_kernels.audit import memory


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.fixture
def others(monkeypatch):
    """What other processes hold: one number less a look, or always the same."""
    held = {"bytes": 9, "less": 1}

    def look():
        held["bytes"] -= held["less"]
        return held["bytes"]

    monkeypatch.setattr(memory, "_held_by_others", look)
    monkeypatch.setattr(memory, "_vain", set())
    monkeypatch.setattr(memory, "LOOK", 0.001)
    monkeypatch.setattr(memory, "STILL", 0.05)
    return held


def check(fits_at: int, error: type = OutOfMemoryError):
    """A check that fits when it is called for the n-th time."""
    called = []

    def thunk():
        called.append(0)
        if len(called) < fits_at:
            raise error("too little")
        return len(called)

    return thunk, called


def test_what_fits_is_called_once(others):
    assert memory.patiently(check(1)[0]) == 1


def test_what_does_not_fit_is_called_again_while_others_give_back(others):
    assert memory.patiently(check(5)[0]) == 5


def test_where_nobody_gives_back_it_raises_and_does_not_wait_again(others):
    others["less"] = 0
    thunk, called = check(10**9)
    with pytest.raises(OutOfMemoryError):
        memory.patiently(thunk)
    waited = len(called)
    assert waited > 3
    with pytest.raises(OutOfMemoryError):
        memory.patiently(thunk)
    assert len(called) == waited + 2


def test_a_check_inside_one_that_waited_does_not_wait_for_itself(others):
    inner = check(3)[0]
    called = []

    def outer():
        called.append(0)
        if len(called) < 2:
            raise OutOfMemoryError("too little")
        return memory.patiently(inner)

    ended = []
    thread = threading.Thread(target=lambda: ended.append(memory.patiently(outer)), daemon=True)
    thread.start()
    thread.join(20)
    assert ended == [3] and not memory._mine


def test_another_error_is_raised_at_once(others):
    thunk, called = check(2, ValueError)
    with pytest.raises(ValueError, match="too little"):
        memory.patiently(thunk)
    assert len(called) == 1


def test_who_takes_much_waits_for_its_turn_and_asks_again(others, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert memory.in_turn(check(3)[0]) == 3 and not memory._mine
    assert memory.in_turn(lambda: bool(memory._mine))


def test_where_no_gpu_is_in_use_nobody_looks_what_others_hold(monkeypatch):
    monkeypatch.setattr(memory, "_held_by_others", lambda: 1 / 0)
    assert memory.in_turn(check(1)[0]) == 1
    with pytest.raises(OutOfMemoryError):
        memory.in_turn(check(2)[0])
