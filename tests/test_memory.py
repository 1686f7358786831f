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
    monkeypatch.setattr(memory, "_in_vain", set())
    monkeypatch.setattr(memory, "LOOK", 0.001)
    monkeypatch.setattr(memory, "STILL", 0.05)
    return held


def check(fits_at: int, error: type = OutOfMemoryError):
    """A check that fits when it is called for the n-th time, and how often it was called."""
    called = []

    def thunk():
        called.append(0)
        if len(called) < fits_at:
            raise error("too little")
        return len(called)

    return thunk, called


@pytest.mark.parametrize("how", [memory.patiently, memory.in_turn])
@pytest.mark.parametrize("fits_at", [1, 5])
def test_a_check_is_made_again_while_others_give_back(how, fits_at, others):
    assert how(check(fits_at)[0]) == fits_at and not memory._mine


def test_where_nobody_gives_back_it_raises_and_does_not_wait_again(others):
    others["less"] = 0
    thunk, called = check(10**9)
    waited = []
    for _ in range(2):
        with pytest.raises(OutOfMemoryError):
            memory.patiently(thunk)
        waited.append(len(called))
    assert waited[0] > 3 and waited[1] == waited[0] + 2


def test_a_check_inside_one_that_waited_does_not_wait_for_itself(others):
    inner, called, ended = check(3)[0], [], []

    def outer():
        called.append(0)
        if len(called) < 2:
            raise OutOfMemoryError("too little")
        return memory.patiently(inner)

    thread = threading.Thread(target=lambda: ended.append(memory.patiently(outer)), daemon=True)
    thread.start()
    thread.join(20)
    assert ended == [3] and not memory._mine


def test_another_error_is_raised_at_once(others):
    thunk, called = check(2, ValueError)
    with pytest.raises(ValueError, match="too little"):
        memory.patiently(thunk)
    assert len(called) == 1
