"""Asks every op for a tensor of more than 2**31 elements, whose last ones no offset of 32 bits reaches.

    python tests/offsets.py [OP ...]      # of those named, or all; the registry's, on a GPU
    python tests/offsets.py --json FILE   # appends a line of each call, with date, commit and versions

One packed call holds sequences of one length: all have the content A, but for the last two, which have another, B, and
lie wholly beyond `elements`. So what is read from, or written to, an offset that wrapped is A where B belongs, or the
reverse, or nothing at all. Every sequence's outputs and gradients must be bit-identical to those of its own call, and
the gradients of parameters to what the sequences' own calls, one after another, leave in main_grad.
"""

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import bi_kernels
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.evidence.provenance import provenance
from bi_kernels.audit.problem.problem import Problem
from bi_kernels.audit.problem.registry import OPS
from bi_kernels.audit.problem.subject import SHARPEST, Subject, of_candidate, poisoned_memory
from bi_kernels.audit.relations.step import Step
from bi_kernels.checks import INTERPRETED
from bi_kernels.contract import SHAPES, evaluate
from bi_kernels.tokens import SLAB, TokenLayout

ELEMENTS = 2**31
LONGEST, FEWEST = 4090, 8  # tokens of a sequence at most; sequences with A at least
BEYOND = 2  # sequences with B
CASES = {"linear": ("lm_head", "o"), "attention": ("mha",)}  # the widest output, and all of one width
OUTPUTS = {"linear": "N", "linear_bias": "N", "matmul": "N", "embedding": "hidden"}  # as wide as no input
MADE = "date", "commit", "device", "driver", "torch", "Triton"  # what a line says of how it was made
KEPT = {"keep_bytes": 10**12}  # of lm_head_logprob: all of the logits


@dataclass(frozen=True)
class Asked:
    """One call of an op, and its widest tensor."""

    name: str
    problem: Problem
    tensor: str
    width: int  # its elements of a token
    told: dict = field(default_factory=dict)  # further arguments, by which the tensor is one inside the op

    def sizes(self, elements: int = ELEMENTS) -> tuple[int, int]:
        """Returns the tokens of a sequence, which fill no number of slabs, and how many sequences there are."""
        length = max(1, min(LONGEST, elements // FEWEST // self.width))
        length -= 3 * (length % SLAB == 0)
        return length, -(-elements // (length * self.width)) + BEYOND


def every(shapes: str = "qwen3-8b", device: torch.device | str = "cpu") -> list[Asked]:
    """Returns the calls of all ops in bf16."""
    found = []
    for op in OPS.values():
        sizes = {"kv_heads": SHAPES[shapes]["heads"]} if op.cache else {}  # keys as wide as queries
        cases = CASES.get(op.name, list(op.cases(shapes))[:1])
        for case in cases:
            problem = Problem(op, case, torch.bfloat16, shapes, torch.device(device), sizes=sizes)
            elements = lambda dims: math.prod(int(evaluate(d, **problem.dims)) for d in dims.split(","))
            widths = {k: elements(dims.partition(":")[0]) for k, dims in op.tokens.items() if not dims.endswith(":id")}
            widths |= {"out": elements(OUTPUTS[op.name])} if op.name in OUTPUTS else {}
            widest = max(widths, key=widths.get)
            name = f"{op.name}, {case}" if len(cases) > 1 else op.name
            found.append(Asked(name, problem, widest, widths[widest]))
            if op.name == "lm_head_logprob":
                found.append(Asked(f"{name}, logits kept", problem, "logits", problem.dims["vocab"], KEPT))
    return found


def spread(pair: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Returns the first half of `pair` `a` times, and then the second one `b` times."""
    first, second = pair.unflatten(0, (2, -1))
    whole = pair.new_empty(a + b, *first.shape)
    whole[:a], whole[a:] = first, second
    return whole.flatten(0, 1)


def parameters(step: Step) -> dict[str, torch.Tensor]:
    """Returns new ones, each with a main_grad of zeros."""
    made = {k: t.detach().clone().requires_grad_() for k, t in step.shared.items()}
    for t in made.values():
        t.main_grad = torch.zeros_like(t, dtype=torch.float32, memory_format=torch.contiguous_format)
    return made


def computed(step: Step, shared: dict, told: dict, a: int, b: int) -> dict[str, torch.Tensor]:
    """Returns the outputs of one packed call of `a` sequences with A and `b` with B, and the gradients of its tokens;
    those of parameters are added to their main_grad. Raises ValueError where one is returned instead."""
    s, ends = step.subject, tuple(range(0, (a + b + 1) * step.lengths[0], step.lengths[0]))
    tokens = {k: spread(t, a, b) for k, t in step.tokens.items()}
    trained = {k: t.requires_grad_() for k, t in tokens.items() if t.is_floating_point()}
    tensors, where = s.arguments(tokens, shared, (ends[-1],), None, ends)
    with TokenLayout.packed(ends):
        outputs = s.outputs(s.called(*tensors, **where, **told))
    if not step.dy:
        step.upstream(outputs, 1)
    upstream = [spread(dy, a, b) for dy in step.dy]
    with poisoned_memory(s.calls), of_candidate():
        grads = torch.autograd.grad(outputs, [*trained.values(), *shared.values()], upstream, allow_unused=True)
    if any(g is not None for g in grads[len(trained) :]):
        raise ValueError(f"gradients of {', '.join(shared)} were returned, expected them in main_grad")
    return s.named(outputs) | {f"d{k}": g for k, g in zip(trained, grads)}


def at(drift: Drift, row: int) -> tuple[int, ...] | None:
    """Returns the first index of a drift of rows that begin at `row`."""
    return drift.first_index and (drift.first_index[0] + row, *drift.first_index[1:])


def judge(asked: Asked, elements: int = ELEMENTS, function: Callable | None = None) -> dict:
    """Judges one call, of the package's op or of a function in its place. Returns what it found: of each tensor that
    differs, how many elements do, and the index of the first."""
    op, (length, count) = asked.problem.op, asked.sizes(elements)
    function = function or getattr(bi_kernels, op.function or op.name)
    subject = Subject(asked.problem, function, "bi_kernels", "", own_lengths=(length, length))
    step = Step(subject, SHARPEST, (length, length))
    shared = parameters(step)
    whole = computed(step, shared, asked.told, count - BEYOND, BEYOND)
    widest = max(t.numel() for t in whole.values())
    if not asked.told and widest != count * length * asked.width:
        raise ValueError(f"the widest tensor has {widest} elements, expected {count * length * asked.width}")
    folded = {f"d{k}": t.main_grad for k, t in shared.items()}
    shared, alone, differs = parameters(step), {}, {}

    def note(name: str, drift: Drift, row: int = 0) -> None:
        if drift.mismatches:
            found = differs.setdefault(name, {"count": 0, "first": at(drift, row)})
            found["count"] += drift.mismatches

    for i in range(count):
        b = int(i >= count - BEYOND)
        if shared or b not in alone:
            alone[b] = None  # before the next is made
            alone[b] = computed(step, shared, asked.told, 1 - b, b)
        for name, t in alone[b].items():
            note(name, compare(whole[name][i * length : (i + 1) * length], t), i * length)
    for k, t in shared.items():
        note(f"d{k}", compare(folded[f"d{k}"], t.main_grad))
    return {"length": length, "sequences": count, "differs": differs, "passed": not differs}


def attempt(asked: Asked, elements: int, gpu: bool) -> dict:
    """Judges one call, and says what it took, or what it raised."""
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    length, count = asked.sizes(elements)
    said = {"op": asked.name, "tensor": asked.tensor, "elements": length * count * asked.width}
    start = time.perf_counter()
    try:
        said |= judge(asked, elements)
    except Exception as error:
        said |= {"passed": False, "raised": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    said["seconds"] = round(time.perf_counter() - start, 1)
    return said | ({"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)} if gpu else {})


def line(said: dict) -> str:
    """Returns what a call came to, in a line."""
    verdict = "passed" if said["passed"] else said.get("raised", "")
    for name, found in said.get("differs", {}).items():
        verdict += f"{'; ' if verdict else ''}{name} differs in {found['count']:,} elements, first at {found['first']}"
    took = f"{said['seconds']} s" + (f", {said['peak_gib']} GiB" if "peak_gib" in said else "")
    return f"{said['op']}: {said['tensor']} of {said['elements']:,} elements: {verdict}; {took}"


def lost() -> bool:
    """Tells whether a GPU serves this process no more, as after an access to memory that is not there."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


def main(arguments: list[str]) -> int:
    """Judges the calls that are named. Returns 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", help="an op, or one of its calls as a line names it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="that no tensor of a small call reaches")
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--wrong", action="store_true", help=argparse.SUPPRESS)  # a call was, of those before
    given, gpu = parser.parse_args(arguments), not INTERPRETED
    if gpu and not torch.cuda.is_available():
        parser.error("there is no GPU; on the interpreter, which is TRITON_INTERPRET=1, give fewer --elements")
    calls = every(given.shapes, "cuda" if gpu else "cpu")
    known = {name for call in calls for name in (call.name, call.problem.op.name)}
    if unknown := [name for name in given.ops if name not in known]:
        parser.error(f"no op is called {', '.join(unknown)}; there are {', '.join(OPS)}")
    calls = [c for c in calls if not given.ops or c.name in given.ops or c.problem.op.name in given.ops]
    made = provenance(calls[0].problem.device, {})
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
    wrong = given.wrong
    for i, call in enumerate(calls):
        said = attempt(call, given.elements, gpu)
        wrong |= not said["passed"]
        print(line(said), flush=True)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(said | {k: v for k, v in made.items() if k in MADE}) + "\n")
        rest = [c.name for c in calls[i + 1 :]]
        if "raised" in said and rest and lost():  # a new process has a GPU that serves, and all of its memory
            more = ["--json", str(given.json)] if given.json else []
            more += ["--elements", str(given.elements), "--shapes", given.shapes, "--wrong"]
            os.execv(sys.executable, [sys.executable, __file__, *rest, *more])
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
