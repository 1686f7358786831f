"""An op that ran: the tensors it read and wrote, as digests, and which ops had written them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from bi_kernels.audit.localiser.tracing.digest import Digest

EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
CONSTANT = ("zeros", "ones", "full", "arange", "scalar_tensor", "zeros_like", "ones_like", "full_like", "new_zeros")
CONSTANT += ("new_ones", "new_full", "zero_", "fill_", "eye", "linspace")
SILENT = ("_unsafe_view", "_reshape_alias", "_local_scalar_dense", "lift_fresh", "equal", "is_same_size", "set_")
OUTPUT = "(output)"
At = tuple[int, int]  # the call and the number of an event in it
Wrote = tuple[int, int, int]  # and of its output


@dataclass(slots=True)
class Slot:
    """A tensor that an op reads or writes. parameter: its name in the model, and size: its elements, if it is one;
    digests: None where it is not compared; writers: the events that wrote into its memory before."""

    parameter: str = ""
    size: int | None = None
    digests: tuple[Digest, ...] | None = None
    writers: tuple[Wrote, ...] = ()
    floating: bool = True
    fresh: bool = False  # allocated, and not written yet


@dataclass(slots=True)
class Event:
    """An op that ran."""

    phase: str  # forward or backward
    path: str
    op: str
    source: str
    node: str  # of the autograd graph, in the backward
    inputs: list[Slot]
    outputs: list[Slot] = field(default_factory=list)
    launch: bool = False  # of a Triton kernel: outputs are all its tensors, in the order of its inputs

    def left(self, k: int) -> bool:
        """Tells whether a launch left a tensor as it was."""
        if not self.launch or not self.inputs[k].digests or not self.outputs[k].digests:
            return False
        return all(np.array_equal(a.rows, b.rows) for a, b in zip(self.inputs[k].digests, self.outputs[k].digests))

    @property
    def signature(self) -> tuple:
        """Returns what the same op has in another layout."""
        like = lambda slots: tuple(s.digests[0][1:3] if s.digests else (s.size, False) for s in slots)
        return self.phase, self.path, self.op, like(self.inputs), like(self.outputs)


@dataclass(slots=True)
class Store:
    """A storage in a run. found: digests of views of it, until it is written; version: of the tensors at that time;
    grouped: how many rows, sorted by expert, it holds, none of which is a token's."""

    alive: StorageWeakRef
    parameter: str = ""
    writers: list[Wrote] = field(default_factory=list)
    fresh: bool = False  # allocated, and not written yet
    version: int = -1
    found: dict = field(default_factory=dict)
    grouped: int = 0


class Edit(NamedTuple):
    """A change or a copy of a tensor of an event, before the op (io: in) or after it (out)."""

    io: str
    slot: int
    change: Callable[[torch.Tensor], None]


def tensors_in(value) -> list[torch.Tensor]:
    """Lists the tensors of an op's arguments, in order; of a TMA descriptor, of Triton or of Gluon, its base."""
    leaves = (v.base if hasattr(v, "block_shape") else v for v in tree_leaves(value))
    return [v for v in leaves if isinstance(v, torch.Tensor)]


def named_tensors(value, name: str = "out", opened: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the floating-point tensors of what a model returned, each with the Python that reaches it, such as
    out.logits[2]; opened: whether an attribute of a plain object led here, behind which no other object is opened."""
    fields = None
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        fields, attributes = value, is_dataclass(value)
    elif isinstance(value, list | tuple):
        attributes = hasattr(value, "_fields")
        fields = value._asdict() if attributes else dict(enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
        plain = not is_dataclass(value)
        fields, attributes, opened = {} if plain and opened else vars(value), True, plain or opened
    for k, v in (fields or {}).items():
        yield from named_tensors(v, f"{name}.{k}" if attributes else f"{name}[{k!r}]", opened)


class Kind(NamedTuple):
    """An operator. written: the names of the arguments that it writes into; None for one that computes nothing; empty:
    whether it only allocates."""

    op: str
    written: tuple[str, ...] | None
    empty: bool


@cache
def kind_of(func) -> Kind:
    """Reads an operator's schema."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    silent = name in SILENT or name in CONSTANT or not schema.returns and name.startswith("_assert")
    none = silent or views and not written
    return Kind(str(func).removesuffix(".default"), None if none else written, name in EMPTY)
