"""The inputs that a command names: read, and held against what a callable takes."""

import ast
import math
import re
from collections.abc import Callable

import torch

from bi_kernels import contract
from bi_kernels.audit.targets.candidates import load, signature_of

TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:<(?P<below>\d+))?")
FUNCTION = re.compile(r"[^\s:()]+:[A-Za-z_]\w*")  # path/to/file.py:function, or package.module:function
DTYPES = contract.DTYPES | {"fp64": torch.float64}
ELEMENTS = 2**31  # of one input
# arguments of `audit`: no argument of a callable that has such a name is told by it
OPTIONS = "batch", "shared", "outputs", "reference", "backward", "seconds", "seed", "name", "names", "candidate"
OPTIONS += "imports", "folder", "record", "quiet"


def named(text: str) -> tuple[str, ...]:
    """Returns the names in a parameter, between commas or spaces."""
    return tuple(str(text).replace(",", " ").split())


def read_inputs(spec: str, device, seed: int) -> dict:
    """Returns {name: value} of a parameter `inputs`.

    'name:dtype[shape]' draws normal numbers, 'name:int64[shape]<n' integers below n, 'name:bool[shape]' flips coins,
    and 'name:literal' is a Python value; or what `file.py:function` returns, a tuple or a dict. Raises ValueError.
    """
    if "[" not in spec and FUNCTION.fullmatch(spec):
        return _returned(spec, device)
    there, out = {"generator": torch.Generator(device).manual_seed(seed), "device": device}, {}
    for part in re.findall(r"\w+:\s*(?:\w+\[[^\]]*\](?:<\d+)?|\S+)", spec):
        name, _, text = (x.strip() for x in part.partition(":"))
        tensor = TENSOR.fullmatch(text)
        if not tensor:
            try:
                out[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                raise ValueError(f"inputs: {part!r} is neither name:dtype[shape] nor name:literal") from None
            continue
        dtype = DTYPES.get(tensor["dtype"], getattr(torch, tensor["dtype"], None))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"inputs: {part!r} has dtype {tensor['dtype']!r}, expected one of torch's, or {', '.join(DTYPES)}"
            )
        shape = tuple(int(n) for n in tensor["shape"].split(",") if n.strip())
        below = int(tensor["below"] or 2)
        whole = not dtype.is_floating_point and dtype != torch.bool
        if whole and not 1 <= below <= torch.iinfo(dtype).max + 1:
            raise ValueError(f"inputs: {part!r} holds integers below {below}, which {tensor['dtype']} does not have")
        if math.prod(shape) > ELEMENTS:
            raise ValueError(f"inputs: {part!r} has {math.prod(shape):.3g} elements, expected at most {ELEMENTS:.3g}")
        try:
            if dtype == torch.bool:
                out[name] = torch.rand(shape, **there) < 0.5
            elif whole:
                out[name] = torch.randint(0, below, shape, **there).to(dtype)
            else:
                out[name] = torch.randn(shape, **there).to(dtype)
        except (RuntimeError, MemoryError) as error:
            raise ValueError(f"inputs: {part!r} cannot be made ({str(error).splitlines()[0]:.100})") from None
    if not out:
        raise ValueError(f"inputs is {spec!r}, expected 'name:dtype[shape] …' or path/to/file.py:function")
    return out


def _returned(spec: str, device) -> dict:
    """Returns {name: value} of what a function without arguments returns, tensors on the device. Raises ValueError."""
    function = load(spec, "inputs")
    try:
        found = function()
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ValueError(f"inputs is {spec!r}, which raised {type(error).__name__}: {said}") from None
    if not isinstance(found, (dict, tuple, list)):
        raise ValueError(f"inputs is {spec!r}, which returned {type(found).__name__}, expected a tuple or a dict")
    found = found if isinstance(found, dict) else {f"input{i}": v for i, v in enumerate(found)}
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def bound(what: str, function: Callable, inputs: dict) -> tuple[list, dict]:
    """Returns the arguments of a call on these inputs: those by position, as long as names are those of the parameters
    in turn, and those by name. Of a callable that does not say what it takes all are by position. Raises ValueError
    where it does not take them.
    """
    unnamed = all(re.fullmatch(r"input\d+", k) for k in inputs)  # as of a tuple
    if (signature := signature_of(function)) is None:
        return list(inputs.values()), {}
    names = [k for k, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values())
    if unnamed or anything:
        given, told = list(inputs.values()), {}
    else:
        count = next((i for i, (k, name) in enumerate(zip(inputs, names)) if k != name), min(len(inputs), len(names)))
        given, told = list(inputs.values())[:count], dict(list(inputs.items())[count:])
    try:
        signature.bind(*given, **told)
    except TypeError as error:
        takes = ", ".join(str(p) for p in signature.parameters.values()) or "nothing"
        raise ValueError(f"inputs name {', '.join(inputs)}, but {what} takes {takes}: {error}") from None
    if clash := told.keys() & set(OPTIONS):
        raise ValueError(f"inputs name {min(clash)!r} out of turn, expected the order in which {what} takes them")
    return given, told
