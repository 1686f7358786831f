"""Checks of arguments that are no tensors: one sentence naming the op, the argument, its value and what is allowed."""

import math
from collections.abc import Iterable
from operator import index

import torch


def truncated_repr(value: object) -> str:
    """Returns what a sentence says of a value: one line, and no long one."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of {value.dtype}"
    if isinstance(value, int) and abs(value) >= 10**80:
        return f"an integer of {int(math.log10(abs(value))) + 1} digits"
    text = one_line(value)
    return text if len(text) <= 80 else text[:79] + "…"


def one_line(value: object) -> str:
    """Returns repr on one line."""
    try:
        return " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a {type(value).__name__} that holds an integer of thousands of digits"


def check_number(op: str, name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {truncated_repr(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{op}: {name} is {truncated_repr(value)}, expected a number") from None


def check_fp32(op: str, name: str, value: float) -> float:
    """Returns a number as it is, where fp32 holds it, 0 or with all its bits."""
    if value and not 2.0**-126 <= abs(value) < 2.0**128:
        raise ValueError(f"{op}: {name} is {truncated_repr(value)}, expected a number of fp32, from 2**-126 to 2**128")
    return value


def check_positive(op: str, name: str, value: float) -> float:
    """Returns a number that is positive in fp32, and has all its bits there."""
    if not 2.0**-126 <= check_number(op, name, value) < 2.0**128:
        raise ValueError(
            f"{op}: {name} is {truncated_repr(value)}, expected a positive number of fp32, from 2**-126 to 2**128"
        )
    return float(value)


def check_flag(op: str, name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {truncated_repr(value)}, expected True or False")
    return value


def check_integer(op: str, name: str, value: int, expected: str = "an integer") -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {truncated_repr(value)}, expected {expected}")
    return value


def integer_of(op: str, name: str, value: int) -> int:
    """Returns an int of what stands for one, as a numpy integer does."""
    try:
        return index(value)
    except (TypeError, RuntimeError):
        raise TypeError(f"{op}: {name} is {truncated_repr(value)}, expected an integer") from None


def check_type(op: str, name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> object:
    if not isinstance(value, kinds):
        raise TypeError(f"{op}: {name} is {truncated_repr(value)}, expected {expected}")
    return value


def strings_of(op: str, name: str, values: Iterable[str]) -> list[str]:
    """Returns a list of strings, which one string is none of."""
    try:
        found = [None] if isinstance(values, str) else list(values)
    except TypeError:
        found = [None]
    if not all(isinstance(value, str) for value in found):
        raise TypeError(f"{op}: {name} is {truncated_repr(values)}, expected a list of strings")
    return found
