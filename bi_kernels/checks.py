"""Argument checks that every op shares: one sentence naming the op, the argument, its value and what is allowed."""

import threading
from collections.abc import Callable, Sequence
from functools import cache, wraps
from operator import index

import torch

from bi_kernels.compat import INTERPRETED, PLAIN, in_transform, is_fake, is_subclass
from bi_kernels.contract import check_dtype
from bi_kernels.scalars import truncated_repr

if INTERPRETED:
    from bi_kernels import interpreter

    interpreter.install()

INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8}
INTEGERS |= {torch.uint64, torch.uint32, torch.uint16, torch.uint8}
INFERENCE = "bi_kernels: an op that needs a gradient got tensors made in inference_mode; pass their clones"
KEPT = 4096  # kinds of arguments of a check
_UNKNOWN = object()
_thread = threading.local()


def once(check: Callable) -> Callable:
    """Makes of a check, or of what follows from checked arguments, one that is asked once for each kind of them: of a
    tensor it may look at shape, dtype, device and how it holds its numbers. What was refused is asked, and refused,
    again."""
    passed: dict[tuple, object] = {}

    @wraps(check)
    def checked(*args):
        if torch.compiler.is_compiling():
            return check(*args)
        try:
            key = tuple([_kind(a) if isinstance(a, torch.Tensor) else (type(a), a) for a in args])
            result = passed.get(key, _UNKNOWN)
        except (TypeError, RuntimeError):  # what is wrong, or traced, may have no hash, what is nested no shape
            result = key = _UNKNOWN
        if result is _UNKNOWN:
            result = check(*args)
            if len(passed) >= KEPT:
                passed.clear()
            if key is not _UNKNOWN:
                passed[key] = result
        return result

    return checked


def _kind(t: torch.Tensor) -> tuple:
    kind = type(t)
    if kind not in PLAIN:
        kind = kind, getattr(getattr(t, "fake_mode", None), "allow_non_fake_inputs", None)
    return t.shape, t.dtype, t.device, t.layout, t.is_neg(), kind


def check_plain(op: str, name: str, t: torch.Tensor) -> bool:
    """Raises TypeError for a tensor whose numbers do not stand in its memory. Tells of one that has none."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {name} is a {type(t).__name__}, expected a torch.Tensor")
    if t.is_nested:
        raise TypeError(f"{op}: {name} is nested, expected a tensor of one shape, padded or packed")
    if t.layout != torch.strided:
        raise TypeError(f"{op}: {name} has layout {t.layout}, expected torch.strided, as {name}.to_dense() has")
    if torch.compiler.is_compiling():
        return False
    if t.is_neg():
        raise TypeError(f"{op}: {name} is a view that is negated when it is read, expected {name}.resolve_neg()")
    if type(t) in PLAIN:
        return False
    if is_fake(t):
        return True
    if is_subclass(t):
        plain = f"{name}.to_local()" if hasattr(t, "to_local") else "a torch.Tensor"
        raise TypeError(f"{op}: {name} is a {type(t).__name__}, expected {plain}")
    return False


def _mixed(x: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Tells whether a fake tensor may be given with others that are none."""
    return is_fake(x) and x.fake_mode.allow_non_fake_inputs and all(type(t) in PLAIN for t in others)


def check_numbers(op: str, name: str, t: torch.Tensor) -> None:
    """Raises TypeError for a tensor that holds no numbers in its memory."""
    if check_plain(op, name, t) or t.is_meta:
        raise TypeError(f"{op}: {name} is a {type(t).__name__} on {t.device} without numbers, expected some")


def check(op: str, same_dtype: bool = True, optional: tuple[str, ...] = (), **tensors: torch.Tensor | None) -> None:
    """Tensors all (those in `optional` may be None), dtypes in the contract's set and equal, one device, and one that
    Triton can run on."""
    given = {name: t for name, t in tensors.items() if t is not None or name not in optional}
    fake = [check_plain(op, name, t) for name, t in given.items()]
    (first, x), *rest = given.items()
    if True in fake and False in fake and not _mixed(x, [t for t, one in zip(given.values(), fake) if not one]):
        names = [list(given)[fake.index(one)] for one in (True, False)]
        raise TypeError(f"{op}: {names[0]} is a fake tensor and {names[1]} is none, expected fake tensors alone")
    if same_dtype:
        for name, t in given.items():
            check_dtype(op, name, t)
    for name, t in rest:
        if t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device} but {first} is on {x.device}; they must share one device")
        if same_dtype and t.dtype != x.dtype:
            raise TypeError(f"{op}: {name} has dtype {t.dtype} but {first} has {x.dtype}; they must be equal")
    if x.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            f"{op}: {first} is on cpu and Triton's interpreter is off; set TRITON_INTERPRET=1 before "
            "Python starts, or move it to a CUDA device"
        )
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{op}: {first} is on {x.device.type}; supported are cuda, and cpu under TRITON_INTERPRET=1")


def integers_of(op: str, name: str, values: torch.Tensor | Sequence[int]) -> list[int]:
    if isinstance(values, torch.Tensor):
        check_numbers(op, name, values)
        if values.dim() != 1 or not integers(values):
            has = f"shape {tuple(values.shape)} and dtype {values.dtype}"
            raise ValueError(f"{op}: {name} has {has}, expected one dimension of integers")
        return values.tolist()
    try:
        return [index(v) for v in values]
    except (TypeError, RuntimeError):
        raise TypeError(f"{op}: {name} is {truncated_repr(values)}, expected a sequence of integers") from None


def check_shape(op: str, name: str, tensor: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(expected)} ({why})")


@once
def check_alike(op: str, name: str, x: torch.Tensor, *others: str | torch.Tensor) -> None:
    """`check`, and others, each behind its name, of the shape of x."""
    given = dict(zip(others[::2], others[1::2]))
    check(op, **{name: x}, **given)
    for other, t in given.items():
        check_shape(op, other, t, x.shape, f"that of {name}")


@cache
def is_hopper(device: torch.device) -> bool:
    """Returns whether the device is an sm_90."""
    there = device.type == "cuda" and torch.cuda.is_available()
    return there and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns how many multiprocessors a GPU has; 1 of a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def memory_peak(device: torch.device) -> float:
    """Returns the TB/s that the clock of a GPU's memory allows, twice its width in each cycle; 0 where nobody says."""
    told = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return 2e3 * getattr(told, "memory_clock_rate", 0) * getattr(told, "memory_bus_width", 0) / 8e12  # kHz, bits


def integers(t: torch.Tensor) -> bool:
    return t.dtype in INTEGERS


def can_wait(t: torch.Tensor) -> bool:
    """Returns whether a check may look at the values of `t`: not under torch.compile or in the capture of a CUDA
    graph, and not where there are none."""
    if torch.compiler.is_compiling() or t.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not is_fake(t) and not in_transform()


def _written(t: torch.Tensor) -> tuple[int, int] | None:
    """Returns what changes whenever PyTorch writes to `t`; None where nothing tells."""
    return None if t.is_inference() else (t._version, t.data_ptr())


def needs_validation(question: tuple, *tensors: torch.Tensor) -> bool:
    """Returns whether a check may and has to wait for the values of tensors: every layer of a model asks the same of
    the same ones, and they remember that they were `seen` together. What PyTorch does not notice, as a graph's replay,
    may write to them behind that, so sentences may hang on this, memory may not."""
    if not can_wait(tensors[0]):
        return False
    together = None
    for t in tensors:
        written, mark = t.__dict__.get("_bi_kernels_seen", {}).get(question, (None, None))
        if written is None or written != _written(t) or together not in (None, mark):
            return True
        together = mark
    return False


def mark_validated(question: tuple, *tensors: torch.Tensor) -> None:
    """Remembers that the values of tensors, as they are now, passed the check."""
    mark = object()
    for t in tensors:
        written = _written(t)
        if written is not None:
            t.__dict__.setdefault("_bi_kernels_seen", {})[question] = written, mark


def aligned(t: torch.Tensor) -> torch.Tensor:
    """`t` contiguous, its base a multiple of 16 bytes: for less, Triton compiles narrower loads, whose layout gives the
    sum of a row another order."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def ensure_cuda_context(t: torch.Tensor) -> torch.Tensor:
    """Returns `t`, of which a TMA descriptor can be made in this thread from now on.

    The driver makes one in the thread's CUDA context, which PyTorch binds with the first kernel that it launches there;
    in autograd's thread, ours may be the first.
    """
    if t.is_cuda and getattr(_thread, "bound", None) != t.device:
        _thread.bound = t.new_zeros(1).device
    return t


def widened(t: torch.Tensor) -> torch.Tensor:
    """Returns integers as they are, or in 64 bits where they are narrow or have no sign: −100 is none of theirs."""
    return t if t.dtype in (torch.int32, torch.int64) else t.long()


def refuse_inference(*tensors: torch.Tensor) -> None:
    """Raises TypeError for tensors that autograd saves for no backward."""
    if any(t.is_inference() for t in tensors):
        raise TypeError(INFERENCE)
