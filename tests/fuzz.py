"""Calls every public name but RopeTable with odd arguments, drawn by a seed: each call is right, or one sentence.

    python tests/fuzz.py [COUNT] [--seed N]      # 2,000 calls unless given, in child processes
    python tests/fuzz.py --one NUMBER            # one of them, and all that is known of it

What is right, and what a sentence, is said in fuzz_judge.py; what is called in fuzz_calls.py, how it is made odd in
fuzz_values.py.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import conftest  # turns the interpreter on  # noqa: F401
import torch
from fuzz_calls import CALLS, Draw
from fuzz_judge import CONTEXTS, WITHOUT_OP, Case, judge, signature_of, tensors_of
from fuzz_values import odd, odd_tensor
from torch import Tensor

import bi_kernels as bi
from bi_kernels.audit import audit, locate

CHUNK, SECONDS, MEMORY = 500, 120, 24 * 2**30  # calls of a child; of a call without an answer; of a child's addresses


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


def one(number: int) -> tuple[Case, str, str]:
    case = drawn(number)
    return case, *judge(case)


def world() -> None:
    """A process group of this process alone, in a folder of its own, into which calls may write."""
    os.chdir(tempfile.mkdtemp())
    store = Path.cwd() / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def child(first: int, end: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in range(first, end):
        print(f"begin\t{number}\t{drawn(number).name}", flush=True)
        case, verdict, said = one(number)
        print(f"{verdict}\t{'; '.join(case.said)!r:.150}\t{said!r:.300}", flush=True)


def in_children(first: int, count: int, script: str = __file__) -> Iterator[tuple[int, str, str, str]]:
    """Yields (number, name, verdict, said) of calls, in child processes of a script, which may crash."""
    at, end = first, first + count
    while at < end:
        command = [sys.executable, script, "--chunk", str(at), str(min(at + CHUNK, end))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        begun, name = at, "?"
        while True:
            late = threading.Timer(SECONDS, process.kill)
            late.start()
            line = process.stdout.readline()
            late.cancel()
            if not line:
                break
            kind, *rest = line.rstrip("\n").split("\t")
            if kind == "begin":
                begun, name = int(rest[0]), rest[1]
            elif kind in ("right", "refused", "wrong"):
                yield begun, name, kind, " → ".join(rest)
                at = begun + 1
        if process.wait():
            yield begun, name, "wrong", f"the process ended with {process.returncode}"
            at = begun + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", type=int)
    parser.add_argument("--chunk", nargs=2, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None or given.chunk:
        world()
    if given.chunk:
        child(*given.chunk)
        return 0
    if given.one is not None:
        case, verdict, said = one(given.one)
        print(case, verdict, said, sep="\n")
        return verdict == "wrong"
    table, started = defaultdict(Counter), time.monotonic()
    for number, name, verdict, said in in_children(given.seed * 10**6, given.count):
        table[name][verdict] += 1
        if verdict == "wrong":
            print(f"wrong: {name}, --one {number}: {said}", flush=True)
        if not (done := number % 10**6 + 1) % 500:
            print(f"{done} calls, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{'':28}{'right':>8}{'refused':>8}{'wrong':>8}")
    for name, counts in sorted(table.items()):
        print(f"{name:28}" + "".join(f"{counts[v]:8}" for v in ("right", "refused", "wrong")))
    return any(counts["wrong"] for counts in table.values())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a process group has threads that may not end
