"""Draws calls of every public name but RopeTable with odd arguments: a number always gives the same call.

fuzz_judge.py says what is right, and what a good error is; fuzz_calls.py what is called, fuzz_values.py how it is made
odd.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import conftest  # turns the interpreter on  # noqa: F401
import torch
from fuzz_calls import CALLS, Draw
from fuzz_judge import CONTEXTS, WITHOUT_OP, Case, signature_of, tensors_of
from fuzz_values import odd, odd_tensor
from torch import Tensor

import bi_kernels as bi
from bi_kernels.audit import audit, locate


def _main_grads(d: Draw) -> bi.MainGrads:
    p = torch.nn.Parameter(d.t(3, 4))
    grads = bi.MainGrads([p])
    d.state = grads.state_dict()
    p.main_grad.fill_(2.0)
    return grads


def _function(name: str, d: Draw) -> Callable:
    owner, _, method = name.partition(".")
    if name in ("audit", "locate"):
        return {"audit": audit, "locate": locate}[name]
    if not method or owner == "TokenLayout":
        return getattr(getattr(bi, owner), method) if method else getattr(bi, name)
    made = _main_grads(d) if owner == "MainGrads" else bi.TensorParallel(torch.distributed.group.WORLD)
    return getattr(made, method)


def drawn(number: int) -> Case:
    """Returns the case of a number, always the same."""
    d = Draw(number)
    name = d.choice([n for n in CALLS if n != "audit" or d.random() < 0.3])  # which takes seconds
    again = (lambda: _function(name, Draw(number))) if name.startswith("MainGrads.") else None
    function = _function(name, d)
    arguments, case = CALLS[name](d), Case(name, function, number=number, again=again)
    signature = signature_of(case)
    many = any(p.kind is p.VAR_POSITIONAL for p in signature.values())
    names = sorted(signature, key=lambda n: d.random() + (n not in arguments) * 0.6)
    for one in names[: d.choice((1, 1, 1, 2, 2, 3))]:
        what, arguments[one] = odd(d, one, arguments.get(one))
        case.said.append(f"{one}: {what}")
    _misplace(d, arguments, case)
    if d.random() < 0.15 and name not in WITHOUT_OP:
        case.context = d.choice([*CONTEXTS])
        case.said.append(f"under {case.context}")
    case.backward = d.random() < 0.4
    for t in tensors_of(arguments.values()) if case.backward else ():
        if type(t) in (Tensor, torch.nn.Parameter) and t.is_leaf and t.is_floating_point():
            t.requires_grad_(not t.is_inference())
    weight = arguments.get(d.choice(("weight", "bias", "b")))
    if case.backward and isinstance(weight, Tensor) and weight.requires_grad and d.random() < 0.3:
        buffer = d.t(*([] if weight.is_nested or weight.numel() > 10**6 else weight.shape), dtype=torch.float32)
        what, weight.main_grad = odd_tensor(d, buffer) if d.random() < 0.5 else ("plain", buffer)
        case.said.append(f"main_grad: {what}")
    given = []
    for one, p in signature.items():
        if one not in arguments or p.kind is p.KEYWORD_ONLY or d.random() < 0.2 and not many:
            break
        given.append(arguments.pop(one))
    case.given, case.named = tuple(given), arguments
    return case


def _misplace(d: Draw, arguments: dict, case: Case) -> None:
    """Leaves an argument out, sometimes, or puts one in another's place."""
    turn, (one, other) = d.random(), d.sample([*arguments, *arguments], 2)
    if turn < 0.04:
        case.said.append(f"without {one}")
        del arguments[one]
    elif turn < 0.06:
        case.said.append("unknown keyword")
        arguments["scales"] = 1.0
    elif turn < 0.1:
        case.said.append(f"{one} and {other} exchanged")
        arguments |= {one: arguments[other], other: arguments[one]}
    elif turn < 0.14:
        case.said.append(f"{one} is {other}")
        arguments[one] = arguments[other]


def world() -> None:
    """A process group of this process alone, in a folder of its own, into which calls may write."""
    os.chdir(tempfile.mkdtemp())
    store = Path.cwd() / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
