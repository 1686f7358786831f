"""Ops broken on purpose in how they are used: what they return hangs on the mode, on which gradients are asked for, on
what memory holds, on the calls before, or on arguments, sizes and samples that no shape set has."""

from collections.abc import Callable

import torch
from torch import Tensor

import bi_kernels
from bi_kernels.audit.controls.forward import Control
from bi_kernels.audit.registry import OPS
from bi_kernels.contract import EPS

TRAINED = "trained"  # outputs of calls that train, against those of calls that do not
DRAWN = "drawn"  # cases of the random audit
FAMILIES = {"backward": ("swiglu", "linear"), "rms_norm": ("add_rms_norm",), "vocabulary": ("lm_head_logprob",)}
FAMILIES |= {"attention": ("attention",)}


def _each(function: Callable, out):
    """Applies a function to the floating tensors of a call."""
    change = lambda t: function(t) if isinstance(t, Tensor) and t.is_floating_point() else t
    return type(out)(map(change, out)) if isinstance(out, (tuple, list)) else change(out)


def _wanted(given: tuple) -> list[Tensor]:
    return [t for t in given if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()]


def _scaled_where(condition: Callable[[tuple, dict], bool]) -> Callable[[Callable], Callable]:
    """Returns what makes an op's outputs other ones where the condition holds of a call."""

    def broken(function: Callable) -> Callable:
        def op(*given, **constants):
            out = function(*given, **constants)
            return _each(lambda t: t * 1.015625, out) if condition(given, constants) else out

        return op

    return broken


trains_otherwise = _scaled_where(lambda given, _: bool(_wanted(given)))
in_inference_mode = _scaled_where(lambda *_: torch.is_inference_mode_enabled())
under_autocast = _scaled_where(lambda given, _: torch.is_autocast_enabled(given[0].device.type))
compiled_otherwise = _scaled_where(lambda *_: torch.compiler.is_compiling())
with_an_empty_sequence = _scaled_where(
    lambda _, told: bool((told.get("cu_seqlens_q", torch.arange(2)).diff() == 0).any())
)
without_a_batch = _scaled_where(lambda given, _: given[0].dim() == 1)
with_one_id = _scaled_where(lambda given, _: int(given[0].flatten().bincount().max()) > 128)
in_four_dimensions = _scaled_where(lambda given, _: given[0].dim() == 4)
in_shifted_views = _scaled_where(
    lambda given, _: given[0].dim() > 2 and given[0].stride(0) > given[0].shape[1] * given[0].stride(1)
)
of_ids_in_uint8 = _scaled_where(lambda given, _: any(t.dtype == torch.uint8 for t in given))
with_heads_first = _scaled_where(lambda given, _: given[1].dim() == 4 and given[1].stride(2) > given[1].stride(1))
with_more_keys = _scaled_where(
    lambda given, told: len(told.get("cu_seqlens_q", ())) > 2 and len(given[0]) < len(given[1])
)


class _Gradient(torch.autograd.Function):
    """Returns x; its gradient is what change(dy, n) makes of it, in the n-th backward of this graph."""

    @staticmethod
    def forward(ctx, change, x):
        ctx.change, ctx.times = change, 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.times += 1
        return None, ctx.change(dy, ctx.times)


def _gradient(change: Callable[[Tensor, int], Tensor]) -> Callable[[Callable], Callable]:
    """Returns what changes the gradients of an op's outputs."""
    return lambda function: lambda *given, **told: _each(lambda t: _Gradient.apply(change, t), function(*given, **told))


doubled_for_several = _gradient(lambda dy, _: 2 * dy if dy.shape[:-1].numel() > 1 else dy)
halved_again = _gradient(lambda dy, times: dy / times)
writes_upstream = _gradient(lambda dy, _: (dy.clone(), dy.zero_())[0])


def doubled_alone(function: Callable) -> Callable:
    """Returns an op that doubles a gradient where no other one is wanted."""

    def op(*given, **constants):
        double = lambda t: _Gradient.apply(lambda dy, _: 2 * dy, t) if t.requires_grad else t
        return function(*(_each(double, given) if len(_wanted(given)) == 1 else given), **constants)

    return op


def _recomputed() -> bool:
    return torch._C._current_graph_task_id() != -1


def otherwise_again(function: Callable) -> Callable:
    """Returns an op that takes other numbers where it is computed again, in a backward."""
    return lambda *given, **told: function(*(_each(lambda t: t * 1.015625, given) if _recomputed() else given), **told)


def into_frozen_again(function: Callable) -> Callable:
    """Returns an op that, computed again, adds to the main_grad of parameters that do not train."""

    def op(*given, **constants):
        for t in given:
            if _recomputed() and isinstance(t, Tensor) and not t.requires_grad and hasattr(t, "main_grad"):
                t.main_grad += 1
        return function(*given, **constants)

    return op


def one_buffer(function: Callable) -> Callable:
    """Returns an op that gives every rollout of a shape the same memory."""
    held: dict = {}

    def op(*given, **constants):
        out = function(*given, **constants)
        return out if _wanted(given) else _each(lambda t: held.setdefault((t.shape, t.dtype), t).copy_(t), out)

    return op


def remembers(function: Callable) -> Callable:
    """Returns an op that keeps a copy of each tensor it is given for a rollout, and reads that from then on."""

    def op(*given, **constants):
        kept = lambda t: t.__dict__.setdefault("kept", t.clone())
        return function(*(given if _wanted(given) else _each(kept, given)), **constants)

    return op


def whole_vectors_only(function: Callable) -> Callable:
    """Returns an op that leaves out the features behind the last multiple of 8."""
    whole = lambda t: t * (torch.arange(t.shape[-1], device=t.device) < t.shape[-1] // 8 * 8)
    return lambda *given, **constants: function(*_each(whole, given), **constants)


def with_argument(name: str, change: Callable) -> Callable[[Callable], Callable]:
    """Returns what makes an op take another value of an argument than the one that it is given."""
    return lambda function: lambda *given, **told: function(*given, **told | {name: change(told.get(name))})


def _control(title: str, audit: str, name: str, relation: str, broken: Callable) -> Control:
    op = OPS[name]
    function = broken(getattr(bi_kernels, op.function or name))
    return Control(f"{name} {title}", audit, name, relation, function, case=next(iter(op.cases("tiny"))))


ANOTHER = "that is another"
_OF_EACH_FAMILY = (
    (f"{ANOTHER} in inference mode", "mode", in_inference_mode),
    ("with a gradient doubled where it alone is wanted", "demand", doubled_alone),
    ("that gives every rollout the same memory", "memory", one_buffer),
    ("that reads what a tensor held when it first came", "history", remembers),
    (f"{ANOTHER} in views that are shifted by a token", "placement", in_shifted_views),
)
_OF_LINEAR = (
    (f"{ANOTHER} under autocast", "mode", under_autocast),
    (f"{ANOTHER} under torch.compile", "mode", compiled_otherwise),
    (f"{ANOTHER} where it is computed again", "mode", otherwise_again),
    ("that folds into frozen parameters where it is computed again", "demand", into_frozen_again),
    ("whose second backward gives half", "demand", halved_again),
    ("whose backward writes into what comes from upstream", "memory", writes_upstream),
)
_DRAWN = (
    ("without the columns behind a multiple of 8", "swiglu", whole_vectors_only),
    ("without the columns behind a multiple of 8", "linear", whole_vectors_only),
    ("with gradients doubled in calls of several rows", "swiglu", doubled_for_several),
    ("that knows one eps", "rms_norm", with_argument("eps", lambda eps: EPS)),
    ("that takes padding id 0 for none", "embedding", with_argument("padding_id", lambda n: n or None)),
    ("that knows one temperature", "lm_head_logprob", with_argument("temperature", lambda t: 1.0)),
    ("that knows one scale", "attention", with_argument("scale", lambda scale: None)),
    ("whose window holds at least 8 keys", "attention", with_argument("window", lambda n: n and max(n, 8))),
    (f"{ANOTHER} where a sequence is empty", "attention", with_an_empty_sequence),
)
_SAMPLES = dict.fromkeys(FAMILIES, (f"{ANOTHER} for a token without a batch", "population", without_a_batch))
_KEYS = f"{ANOTHER} for several samples with more keys than queries"
_SAMPLES["attention"] = _KEYS, "population", with_more_keys
_ONE_ID = f"{ANOTHER} where one id is in most positions"
USE_CONTROLS = (
    *(
        _control(f"{ANOTHER} where a gradient is wanted", audit, op.name, TRAINED, trains_otherwise)
        for op in OPS.values()
        for audit in ["backward" if op.audit in ("elementwise", "gemm") else op.audit]
    ),
    *(
        _control(title, audit, name, axis, broken)
        for audit, names in FAMILIES.items()
        for name in names
        for title, axis, broken in (*_OF_EACH_FAMILY, _SAMPLES[audit])
    ),
    _control(_ONE_ID, "vocabulary", "embedding", "population", with_one_id),
    _control(f"{ANOTHER} for ids in uint8", "vocabulary", "embedding", "indices", of_ids_in_uint8),
    _control(f"{ANOTHER} in four dimensions", "backward", "routed_linear", "placement", in_four_dimensions),
    _control(f"{ANOTHER} for a cache with heads first", "attention", "attention", "cache", with_heads_first),
    *(_control(title, "backward", "linear", axis, broken) for title, axis, broken in _OF_LINEAR),
    *(_control(title, "random", name, DRAWN, broken) for title, name, broken in _DRAWN),
)
