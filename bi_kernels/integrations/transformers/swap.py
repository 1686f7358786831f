"""Swaps a module's class for a subclass with our forward and the same name, until `restore`."""

import functools
import zlib
from collections.abc import Container
from types import CodeType

from torch import nn

PARTS = "bi_kernels_parts"
FORWARDS = "bi_kernels_forwards"
FOLDED = "bi_kernels_folded"
WITHIN = "bi_kernels_within"  # of a module: that a model of ours calls it
OPS = "bi_kernels_ops"  # of a module whose weight ranks share; see ranks.py


class Swapped:
    """The base of a class that takes the place of `replaces`, and subclasses it too."""

    replaces: type[nn.Module]
    kind: type["Swapped"]  # what is put in, whatever it replaces
    whole = False  # a model whose attention is ours too

    @classmethod
    def members(cls, replaces: type[nn.Module]) -> dict:
        """Returns more members of the class that takes the place of `replaces`."""
        return {}

    def __new__(cls, *args, **kwargs) -> nn.Module:
        """Returns a new module of the replaced class, so that `type(model)(config)` works."""
        return cls.replaces(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        _, _, *state = super().__reduce_ex__(protocol)
        return _made_again, (type(self).replaces, type(self).kind), *state


def _made_again(replaces: type[nn.Module], kind: type[Swapped]) -> nn.Module:
    module = object.__new__(replaces)  # of a copy or a pickle
    module.__class__ = swapped(replaces, kind)
    return module


@functools.cache
def swapped(replaces: type[nn.Module], kind: type[Swapped]) -> type[nn.Module]:
    """Returns the class of a kind that takes the place of `replaces`, under its name."""
    body = {"replaces": replaces, "kind": kind}
    body |= {"__module__": replaces.__module__, "__qualname__": replaces.__qualname__}
    made = type(replaces.__name__, (kind, replaces), body | kind.members(replaces))
    made.code = _code(made)
    return made


def _code(kind: type[nn.Module]) -> int:
    """Returns a checksum of a class's forward, and of the one that it takes the place of. Copies and pickles keep
    it."""
    codes = (getattr(k.forward, "__code__", None) for k in (kind, getattr(kind, "replaces", kind)))
    said = [(c.co_code, c.co_names, [x for x in c.co_consts if not isinstance(x, CodeType)]) for c in codes if c]
    return zlib.crc32(repr(said).encode())


def causal_lm(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Returns (the swapped module with a head, or None; its head, or None unless the architecture is swapped whole and
    the head is a linear without bias)."""
    owner = next((m for m in model.modules() if isinstance(m, Swapped) and hasattr(m, "get_output_embeddings")), None)
    head = None if owner is None else owner.get_output_embeddings()
    return owner, head if isinstance(head, Swapped) and owner.whole and head.bias is None else None


def remember_parts(model: nn.Module, folded: set[str]) -> None:
    """Remembers the modules within a model, without a cycle, so that a dropped model is freed at once, and the names of
    its parameters whose gradients are promised to be folded."""
    model.__dict__[FOLDED] = folded
    for part in model.modules():
        if isinstance(part, Swapped) and folded:
            part.__dict__[WITHIN] = True
    model.__dict__[PARTS] = [
        (name, isinstance(m, (nn.ModuleList, nn.ModuleDict, nn.Sequential)), m._modules, dict(m._modules))
        for name, m in model.named_modules()
        if m._modules
    ]
    by_class: dict[type, list] = {}
    for name, m in model.named_modules():
        if not hasattr(m, "naming"):  # a model's may be set
            by_class.setdefault(type(m), []).append((name, m))
    model.__dict__[FORWARDS] = [
        (kind.code if issubclass(kind, Swapped) else _code(kind), parts) for kind, parts in by_class.items()
    ]


def check_parts(op: str, model: nn.Module) -> None:
    """Raises ValueError if a module has taken another's place since `apply`, or a part's forward was set. A module that
    was added beside them is called by none that `apply` saw, except in a list of modules."""
    for code, parts in model.__dict__.get(FORWARDS, ()):
        is_changed = _code(type(parts[0][1])) != code
        for name, m in parts:
            if is_changed or "forward" in m.__dict__:
                raise ValueError(
                    f"{op}: the forward of {name}, a {type(m).__name__}, was set after apply(model), expected the one "
                    "that apply saw: set it on the class before apply; after it only a whole model's may be set"
                )
    for name, is_list, now, before in model.__dict__.get(PARTS, ()):
        if now != before:
            for part in [*before, *now] if is_list else before:
                if now.get(part) is not before.get(part):
                    what = "missing" if now.get(part) is None else f"a {type(now[part]).__name__} put in"
                    raise ValueError(
                        f"{op}: {f'{name}.{part}'.lstrip('.')} is {what} after apply(model), expected the module that "
                        "apply saw: restore and apply again"
                    )


SHARDED = {  # by attributes of a parameter, or of a module
    "placements": "a DTensor",
    "_is_fsdp_managed_module": "sharded by FSDP1 or FSDP2",
    "ds_id": "sharded by DeepSpeed",
    "_hp_mapping": "held by DeepSpeed's optimizer",
}


def check_whole(model: nn.Module, gathered: Container[int] = ()) -> None:
    """Raises ValueError for a model whose parameters something shards: it takes gradients from autograd, which a fold
    passes by. gathered: ids of the shards that FSDP2 gathers."""
    modules = () if gathered else model.named_modules()
    for name, t in (*modules, *model.named_parameters()):
        of_module = isinstance(t, nn.Module)  # whose own lookup of what is not there is slow
        for attribute, said in SHARDED.items():
            if (attribute in t.__dict__ if of_module else hasattr(t, attribute)) and id(t) not in gathered:
                raise ValueError(
                    f"apply: {name or 'the model'} is {said}, expected whole parameters: gradients would stay None; "
                    "call apply before fully_shard, or share weights by apply(model, group=...)"
                )
