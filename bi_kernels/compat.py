"""What is private in Triton and PyTorch, and needed all the same: nothing else in the package reaches into them.

`launch_compiled` launches what Triton compiled without asking Triton again: `kernel[grid](...)` binds its arguments,
and works out by each what the kernel is specialised for, which takes several times as long as the launch.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from inspect import getclosurevars, isfunction
from itertools import count

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.contract import CONTRACT

# Triton decides when a kernel is defined, so it is asked once, before any kernel of the package is
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLAIN = torch.Tensor, torch.nn.Parameter  # types whose numbers stand in their memory

_RUN = JITFunction.run  # whoever records launches replaces it, and is shown every one
# these versions' CompiledKernel has `run`, which takes a grid, a stream, `function`, `packed_metadata`, what hooks are
# told, two hooks, and the arguments, a pointer as an address if need be
_TESTED = CONTRACT["triton"]["compiled"]
KNOWN = not INTERPRETED and triton.__version__.startswith(tuple([f"{version}." for version in _TESTED]))
if not (INTERPRETED or KNOWN):
    warnings.warn(
        f"bi_kernels: Triton is {triton.__version__}, expected {' or '.join(_TESTED)}; kernels that another version "
        "compiles are not tested, and no bits of theirs are promised: audit them with `bi-audit run`",
        stacklevel=2,
    )

_HEAD = 13  # what 3.6 passes its compiled launcher before the kernel's arguments; 3.7 passes these in one tuple
_MOST = 8192  # encoded maps, and kinds of descriptors, that are kept

current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # of a device, raw


def is_recorded() -> bool:
    """Tells whether somebody records what Triton launches, as the static audit does."""
    return JITFunction.run is not _RUN


def is_direct() -> bool:
    """Tells whether a launch may pass Triton by: nobody records it, or wants to be called then, as a profiler does."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return KNOWN and not (is_recorded() or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch_compiled(compiled: CompiledKernel, device: int, grid: tuple[int, int, int], values: Sequence) -> None:
    """Launches what Triton compiled on a device's current stream, where that `is_direct`."""
    stream, run = current_stream(device), _launcher(compiled)
    run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


@lru_cache(maxsize=4096)
def _launcher(compiled: CompiledKernel) -> Callable:
    return keeping_maps(compiled.run)


def keeping_maps(run: Callable) -> Callable:
    """Returns a launcher like Triton's `run`, which encodes the map of a descriptor once for an address, where Triton's
    encodes it in each launch."""
    encoding = getattr(run, "launch", None)
    found = getclosurevars(encoding) if isfunction(encoding) else None
    if found is None or not {"launcher", "tensordesc_indices", "tensordesc_meta"} <= found.nonlocals.keys():
        return run
    launcher, places, metas = (found.nonlocals[n] for n in ("launcher", "tensordesc_indices", "tensordesc_meta"))
    encode, packed = found.globals["make_tensordesc_arg"], hasattr(run, "kernel_signature")
    metas = [(at, meta, meta and _intern_id(repr(meta))) for at, meta in zip(sorted(places), metas)]

    def launch(*given):
        head, values = (given[:-1], given[-1]) if packed else (given[:_HEAD], given[_HEAD:])
        expanded, done = [], 0
        for at, meta, number in metas:
            blocks = values[at]
            key = vars(blocks).get("number"), number, blocks.base.data_ptr()
            arguments = None if None in key else _maps.get(key)
            if arguments is None:
                arguments = encode(blocks, meta)
                if len(_maps) >= _MOST:
                    _maps.clear()
                if None not in key:
                    _maps[key] = arguments
            expanded += values[done:at]
            expanded += arguments
            done = at + 1
        expanded += values[done:]
        launcher(*head, expanded) if packed else launcher(*head, *expanded)

    kept = copy(run)
    kept.launch = launch
    return kept


_fields: dict[tuple, dict] = {}  # of a descriptor, but for its base
_ids: dict = {}
_count = count()
_maps: dict[tuple, list] = {}  # what a launcher is given, by the numbers of a descriptor's kind and layout, and address


def _intern_id(kind) -> int:
    """Returns a number of its own for each kind."""
    return _ids.setdefault(kind, next(_count))


def descriptor(
    t: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], kind=TensorDescriptor, *layout
) -> TensorDescriptor:
    """Returns a TMA descriptor of t, whose base is a multiple of 16 bytes; Triton checks the rest once of each kind:
    its own, or Gluon's with a layout."""
    key = t.dtype, kind, *shape, *strides, *block
    fields = _fields.get(key)
    if fields is None:
        made = kind(t, [*shape], [*strides], [*block], *layout)
        if len(_fields) >= _MOST:
            _fields.clear()
            _ids.clear()
        fields = _fields[key] = {**vars(made), "base": None, "number": _intern_id(key)}
    made = kind.__new__(kind)
    vars(made).update(fields, base=t)
    return made


def is_fake(t: torch.Tensor) -> bool:
    """Tells whether a tensor has a shape and no numbers, as those have with which torch.compile traces a backward."""
    if type(t) in PLAIN:
        return False
    from torch._subclasses import FakeTensor  # noqa: PLC0415  (whoever made one has loaded it)
    from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: PLC0415

    return isinstance(t, (FakeTensor, FunctionalTensor))


def is_subclass(t: torch.Tensor) -> bool:
    """Tells whether Python, and not PyTorch's kernels, computes with a tensor, as of a DTensor."""
    return torch._C._dispatch_keys(t).has(torch._C.DispatchKey.Python)


def in_transform() -> bool:
    """Tells whether a torch.func transform is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed(tensors: list[torch.Tensor]) -> bool:
    """Tells whether a torch.func transform, or forward-mode differentiation, follows what is computed."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    forward = torch.autograd.forward_ad
    return forward._current_level >= 0 and any(forward.unpack_dual(t).tangent is not None for t in tensors)


def apply_of(function: type[torch.autograd.Function]) -> Callable:
    """Returns `function.apply` without what it does for torch.func, which takes a third of the time of a call."""
    return super(torch.autograd.Function, function).apply


def current_backward() -> int:
    """Returns the number that autograd gives the backward under way, or -1."""
    return torch._C._current_graph_task_id()


def current_node() -> str:
    """Returns the name of the node whose backward is under way."""
    return type(torch._C._current_autograd_node()).__name__


def will_run(node: torch.autograd.graph.Node) -> bool:
    """Tells whether the backward under way comes to a node. Raises RuntimeError for a leaf of autograd.grad."""
    return torch._C._will_engine_execute_node(node)


def overlaps_itself(t: torch.Tensor) -> bool:
    """Tells whether several elements of a tensor share memory."""
    return torch._debug_has_internal_overlap(t) == 1


def mark_thread(name: str) -> None:
    """Marks this thread, and those of the backwards that it calls."""
    torch._C._stash_obj_in_tls(name, True)


def is_marked(name: str) -> bool:
    """Tells whether `mark_thread` marked this thread, or that which called the backward under way."""
    return torch._C._is_key_in_tls(name)


def fsdp_states() -> list:
    """Returns the state of each module that `fully_shard` was given."""
    from torch.distributed._composable_state import _module_state_mapping  # noqa: PLC0415  (not in every build)

    states = [ref() for ref in list(_module_state_mapping.values())]
    return [s for s in states if hasattr(s, "_fsdp_param_groups") or hasattr(s, "_fsdp_param_group")]


def fsdp_groups(state) -> list:
    """Returns the groups of parameters of a module that `fully_shard` was given."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def was_interrupted(state) -> bool:
    """Tells whether an exception ended a backward, which FSDP2 still takes for under way."""
    return state._state_ctx.post_backward_final_callback_queued and current_backward() < 0
