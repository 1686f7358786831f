"""Judges a call of the fuzz.

Right: the bits of the same call on plain, contiguous copies of the values, whose accuracy the audits check. Refused: a
ValueError or TypeError of one line that begins with the op and names an argument. All else is wrong: another exception,
another result, a write into what was given.
"""

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from fuzz_calls import Draw
from fuzz_values import HUGE
from torch import Tensor
from torch._subclasses import FakeTensor

import bi_kernels as bi
from bi_kernels.audit.checks.modes import deterministic
from bi_kernels.tokens import SLAB

CONTEXTS: dict[str, Callable] = {
    "": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another layout": lambda: bi.TokenLayout.packed([0, 2, 7]),
    "default device meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
}
WITHOUT_OP = ("audit", "locate")  # whose sentences name what they were given, and no op
READS = "alloc", "Storage size calculation", "numel: integer multiplication overflow"  # PyTorch's, of what is huge


@dataclass
class Case:
    """One call, and what is odd about it."""

    name: str
    function: Callable
    given: tuple = ()
    named: dict = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    context: str = ""
    backward: bool = False
    number: int = 0
    again: Callable | None = None  # makes `function` once more, where a call changes what it is of

    def call(self, given: tuple, named: dict, function: Callable) -> list[Tensor]:
        """Calls, goes backward if the case does, and returns the results and then the gradients."""
        with CONTEXTS[self.context]():
            result = function(*given, **named)
        found = used(result)
        leaves = [t for t in tensors_of(given, named.values()) if t.requires_grad]
        ends = [y for y in found if y.requires_grad and y.numel() < 10**6]
        ends = [y for y in ends if not (isinstance(y, FakeTensor) or y.is_meta)]
        if self.backward and isinstance(result, (Tensor, tuple)) and ends and leaves:
            for t in leaves:
                t.retain_grad()
            d = Draw(self.number)
            upstream = [d.choice((lambda: d.t(*y.shape), lambda: d.t().expand(y.shape)))().to(y.dtype) for y in ends]
            torch.autograd.backward(ends, upstream)
            found += [t.grad for t in leaves if t.grad is not None]
            buffers = [getattr(t, "main_grad", None) for t in leaves]
            found += [b for b in buffers if isinstance(b, Tensor) and not b.is_nested and b.layout == torch.strided]
        return found


def tensors_of(*values: Iterable) -> list[Tensor]:
    flat = [u for some in values for v in some for u in (v if isinstance(v, (tuple, list)) else (v,))]
    return list({id(t): t for t in flat if isinstance(t, Tensor)}.values())


def plain(value: object, made: dict[int, object]) -> object:
    """Returns the value as anybody would have written it: a contiguous tensor of a standard type. made: what was, by
    identity."""
    if isinstance(value, bi.RopeTable):
        return bi.RopeTable(*(plain(v, made) for v in value))
    if type(value) in (list, tuple):
        return type(value)(plain(v, made) for v in value)
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided:
        return value
    if value.is_meta or value.is_quantized:
        return value
    if id(value) not in made:
        made[id(value)] = _plain(value)
    return made[id(value)]


def _plain(value: Tensor) -> Tensor:
    if isinstance(value, FakeTensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    t = value.detach().as_subclass(Tensor)
    t = torch.empty(t.shape, dtype=t.dtype).copy_(t)  # no inference tensor, and at an address of its own
    if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool):
        t = t.long()
    is_parameter, buffer = isinstance(value, torch.nn.Parameter), getattr(value, "main_grad", None)
    t = torch.nn.Parameter(t, value.requires_grad) if is_parameter else t.requires_grad_(value.requires_grad)
    if isinstance(buffer, Tensor):
        t.main_grad = value.kept
    if hasattr(value, "cut"):
        t.__class__, t.cut = type(value), value.cut
    return t


def used(result: object) -> list[Tensor]:
    """Returns what can be compared of a result; what is to be used is used."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, bi.TokenLayout):
        found = [result.slots, torch.tensor([result.rows, result.tokens, len(result.spans)]), _spans(result)]
        if result.rows < 1000:
            x = torch.ones(result.rows, 4).cumsum(0).requires_grad_()
            w = torch.ones(2, 4, requires_grad=True)
            with result:
                bi.linear(x, w).sum().backward()
            found += [x.grad, w.grad]
        return found
    if isinstance(result, bi.MainGrads):
        return _step(result)
    return [t for t in result if isinstance(t, Tensor)] if isinstance(result, (tuple, list)) else []


def _spans(layout: bi.TokenLayout) -> Tensor:
    """Where the sequences lie; the slots must say the same."""
    held = layout.slots[layout.slots >= 0].tolist()
    assert len(layout.slots) == sum(-(-n // SLAB) * SLAB for _, n in layout.spans)
    assert sorted(held) == [i for start, n in layout.spans for i in range(start, start + n)]
    return torch.tensor(layout.spans)


def _step(grads: bi.MainGrads) -> list[Tensor]:
    """The gradients, the masters and the parameters of a step, and of one that goes on from a saved state."""
    for group in grads.mine if grads.mine.stop < 100 else ():
        for p in grads.parameters:
            y = bi.linear(p.new_ones(3, p.shape[1]), p) if p.dim() == 2 else bi.scale(p, 2.0)
            y.float().sum().backward()
        grads.close(group)
    grads.join()
    found = [p.main_grad.clone() for p in grads.parameters] + [m.detach().clone() for m in grads.masters]
    grads.finish()
    grads.load_state_dict(grads.state_dict())
    found += [p.detach().clone() for p in grads.parameters]
    grads.release()
    return found


def signature_of(case: Case) -> Mapping[str, inspect.Parameter]:
    function = bi.attention if case.name == "TensorParallel.attention" else case.function
    return inspect.signature(function).parameters


def judge(case: Case) -> tuple[str, str]:
    """Returns "right", "refused" or "wrong", and what is to be said of it."""
    given, named = [_kept(v) for v in case.given], {n: _kept(v) for n, v in case.named.items()}
    case.given = tuple(v if k is v else iter(k) for v, k in zip(case.given, given))
    case.named = {n: v if named[n] is v else iter(named[n]) for n, v in case.named.items()}
    made: dict[int, object] = {}
    copies = lambda: ([plain(v, made) for v in given], {n: plain(v, made) for n, v in named.items()})
    may_write = case.name.startswith("MainGrads")
    try:
        other = copies() if may_write and not huge(case) else None
    except RuntimeError:  # of a tensor that cannot be copied
        other = None
    inputs = tensors_of(case.given, case.named.values())
    memory = [] if may_write else [s for t in inputs if (s := _storage(t))]
    before = [_bytes(s) for s in memory]
    for t in inputs:
        with suppress(RuntimeError, AttributeError):  # where there is none, or none that can be copied
            t.kept = t.main_grad.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = case.call(case.given, case.named, case.function)
        except Exception as error:
            return refusal(case, error)
        if [_bytes(s) for s in memory] != before:
            return "wrong", "it wrote into what it was given"
        try:
            other = other or copies()
            expected = case.call(*other, case.again() if case.again else case.function)
        except Exception as error:
            if huge(case):
                return "right", "by all that can be told: the plain copies find no memory"
            return "wrong", f"the plain call raised {type(error).__name__}: {error}"
    numbers = not any(isinstance(t, FakeTensor) or t.is_meta for t in found)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return "wrong", f"result {i} is {tuple(a.shape)} {a.dtype}, the plain call's {tuple(b.shape)} {b.dtype}"
        if numbers and not _same(a, b):
            return "wrong", f"result {i} has other bits than the plain call's: {a} and {b}"
    return "right", ""


def _kept(value: object) -> object:
    """Returns a list of what can be read once."""
    return [*value] if isinstance(value, Iterator) else value


def huge(case: Case) -> bool:
    shapes = [t.shape for t in tensors_of(case.given, case.named.values()) if not t.is_nested]
    return any(HUGE in shape for shape in shapes)


def _same(a: Tensor, b: Tensor) -> bool:
    """Raw bits, but for those of a NaN."""
    a, b = (t.detach().contiguous().resolve_neg().resolve_conj() for t in (a, b))
    bits = lambda t: torch.where(t == t, t, torch.zeros_like(t)).view(-1).view(torch.uint8)
    return bool(((a == a) == (b == b)).all()) and (not a.numel() or bits(a).equal(bits(b)))


def _storage(t: Tensor) -> torch.UntypedStorage | None:
    if t.is_nested:
        return None
    try:
        storage = t.untyped_storage()
        return storage if storage.device.type == "cpu" and storage.nbytes() else None
    except (RuntimeError, NotImplementedError):
        return None


def _bytes(storage: torch.UntypedStorage) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def refusal(case: Case, error: Exception) -> tuple[str, str]:
    """Judges an exception: by its text, and by where it was raised."""
    text, last = str(error), traceback.extract_tb(error.__traceback__)[-1].filename
    said = f"{type(error).__name__}: {text}"
    if huge(case) and (isinstance(error, MemoryError) or any(r in text for r in READS)):
        return "refused", said  # there is no such memory
    if re.fullmatch(r"bi_kernels: an op was called (with|inside) .*, expected .*", text):
        return "refused", said  # of whatever argument
    owner, _, method = case.name.rpartition(".")
    if type(error) is TypeError and re.match(rf"(\w+\.)*({method}|__init__)\(\) (missing|got|takes) ", text):
        return "refused", said  # Python's own, of a signature
    if (
        case.name in WITHOUT_OP
        and isinstance(error, (TypeError, ValueError))
        and re.fullmatch(".*(, expected | raised (in|on) ).*", text)
    ):
        return "refused", said
    begins = rf"({owner or method}|{method}): "
    names = [*signature_of(case), "cos", "sin", "parameter"]
    good = re.fullmatch(rf"{begins}.*\b({'|'.join(names)})\b.*", text) and len(text) < 400 and "/bi_kernels/" in last
    return ("refused" if good and type(error) in (TypeError, ValueError) else "wrong"), said
