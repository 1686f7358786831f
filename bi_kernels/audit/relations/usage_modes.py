"""How an op is used: in which mode, which gradients and outputs are asked for, on which samples, what memory holds,
what was called before. None of it may change a bit.

One packed call of a few samples with its backward stands for all; it is made again in each other way.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from triton.runtime.errors import InterpreterError

from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.evidence.kinds import Kind, Side
from bi_kernels.audit.evidence.verdicts import Row, sentence
from bi_kernels.audit.problem.subject import CANCELLING, OpUnderTest
from bi_kernels.audit.relations.checkpoints import (
    CHECKPOINTED,
    FROZEN,
    FROZEN_CHECKPOINTED,
    checkpointed,
    frozen,
    trained_and_frozen,
)
from bi_kernels.audit.relations.edge_case_inputs import NO_COLUMNS, ONE_TOKEN, no_rows, populations
from bi_kernels.audit.relations.one_call import ALIKE, BaselineCall, Outputs, Variant, gradients
from bi_kernels.audit.relations.step import Step
from bi_kernels.contract import DTYPES
from bi_kernels.tokens import TokenLayout

SINGLE_CALL = "one packed call"  # what the same call made in another way is compared with
RELATIONS = {"mode": "invariance", "demand": "gradient invariance", "memory": "invariance", "history": "determinism"}
RELATIONS |= {"population": "gradient invariance"}
KINDS = {"mode": Kind.MODE, "demand": Kind.DEMAND, "memory": Kind.KEPT, "history": Kind.BEFORE}
KINDS |= {"population": Kind.LAYOUT}
NO_ROWS, DETERMINISTIC, DEFAULT = "no rows", "deterministic algorithms", "bf16 as torch's default dtype"
STRIDED = "upstream strided"
# what a refusal says of these, in any exception; of every other way it says the name, in one that means a refusal
REFUSALS = dict.fromkeys([NO_ROWS, *NO_COLUMNS.values()], ("(0,", ", 0)", " is 0", "0 elements"))
REFUSALS |= {ONE_TOKEN: ("expected (..., M, K)",)}  # a product of matrices


def judged(subject: OpUnderTest, relation: str, name: str, asked: Variant, **said) -> Row:
    """Returns the row of one way. Refused in a sentence that names it, or the shape without rows, it passes, and says
    so: nobody is given other bits."""
    try:
        found, expected = asked()
    except Exception as error:
        if not _refuses(subject, name, error):
            raise
        return subject.row(relation, name, Drift(0, 0), **said | {"detail": f"refused: {sentence(error)}"})
    drift, tensor = compared(found, expected)
    return subject.row(relation, name, drift, tensor=tensor, **said | {"side": subject.side(tensor) or Side.CALL})


def _refuses(subject: OpUnderTest, name: str, error: Exception) -> bool:
    """Tells whether what was raised is a refusal of a way. A candidate's may say what it likes where a token has no
    batch, or there are no rows or columns."""
    if name in (ONE_TOKEN, NO_ROWS, *NO_COLUMNS.values()) and subject.candidate != "bi_kernels":
        return hasattr(error, "of_candidate") and "CUDA error" not in str(error)
    clear = isinstance(error, (TypeError, ValueError, NotImplementedError))
    return any(word in str(error) for word in REFUSALS.get(name, [name] * clear))


def compared(found: Outputs, expected: Outputs) -> tuple[Drift, str]:
    """Returns the drift of all tensors together and the first that differs. Raises ValueError where one is missing."""
    for k, t in expected.items():
        if (found.get(k) is None) != (t is None):
            raise ValueError(f"{k} is {'wanted and missing' if t is not None else 'there, though nobody wants it'}")
    names = [k for k, t in expected.items() if t is not None]
    drift = compare(tuple(found[k] for k in names), tuple(expected[k] for k in names))
    return replace(drift, part=0), names[drift.part]


def modes(u: BaselineCall) -> dict[str, Variant]:
    """Asks the call in another mode of PyTorch: compiled by Inductor on a GPU, traced as it would be elsewhere; in a
    checkpoint.

    Of this package's ops a compiled call that trains breaks the graph and runs as it is.
    """
    device = u.subject.problem.device.type

    def inference() -> tuple[Outputs, Outputs]:
        given, before = u.inputs(), u.inputs()
        with torch.inference_mode():
            found = {k: t.clone() for k, t in u.named(u.outputs(given)).items()}
        held = lambda tensors: {f"{k} as given": t.detach() for k, t in tensors.items()}
        return found | held(given), u.results | held(before)

    def deterministic() -> Outputs:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            with warnings.catch_warnings(action="ignore"):
                return u.made() | u.untrained(u.rolled())
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def other_default() -> Outputs:
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16)
            return u.made() | u.untrained(u.rolled())
        finally:
            torch.set_default_dtype(before)

    def autocast() -> Outputs:
        with torch.autocast(device, torch.bfloat16):
            return u.made()

    def compiled() -> Outputs:
        torch.compiler.reset()  # what was compiled for other ops counts against the limit of recompilations
        backend = "inductor" if device == "cuda" else "aot_eager"
        function = torch.compile(u.subject.function, backend=backend)
        try:
            with warnings.catch_warnings(action="ignore"):  # what Dynamo says of a kernel on Triton's interpreter
                return u.made(function=function) | u.untrained(u.rolled(function=function))
        except InterpreterError as error:
            if u.subject.candidate == "bi_kernels":
                raise
            raise NotImplementedError(f"compiled, a bare kernel is traced into Triton's interpreter: {error}") from None

    def captured() -> Outputs:
        tensors, told = u.step.arguments(u.call, *u.parts(u.others()))
        values, _ = u.step.arguments(u.call, *u.parts(u.inputs()))
        with torch.no_grad():
            u.subject.function(*tensors, **told)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = u.subject.outputs(u.subject.function(*tensors, **told))
            for into, value in zip(tensors, values):
                into.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
        return u.named(out)

    found = {
        "inference_mode": inference,
        DETERMINISTIC: lambda: (deterministic(), u.base | u.untrained(u.results)),
        DEFAULT: lambda: (other_default(), u.base | u.untrained(u.results)),
        "autocast": lambda: (autocast(), u.base),
        "compiled": lambda: (compiled(), u.base | u.untrained(u.results)),
        CHECKPOINTED: lambda: checkpointed(u),
    }
    return found | ({"captured": lambda: (captured(), u.results)} if device == "cuda" else {})


def demands(u: BaselineCall) -> dict[str, Variant]:
    """Asks for some of the gradients, with some of the outputs in use, and with what may come upstream."""
    few = [[k] for k in u.floating] if len(u.floating) > 1 else []
    most = [[k for k in u.floating if k != frozen] for frozen in u.floating] if len(u.floating) > 2 else []
    some = lambda wanted: (u.made(wanted, main_grad=True), u.results | {f"d{k}": u.folded[f"d{k}"] for k in wanted})
    found: dict[str, Variant] = {
        f"{', '.join(f'd{k}' for k in wanted)} alone": partial(some, wanted) for wanted in few + most
    }

    def used(number: int) -> tuple[Outputs, Outputs]:
        zeros = lambda i, dy: dy if i == number else torch.zeros_like(dy)
        expected = u.made(upstream=zeros)
        found = u.made(used=[number])  # an output may be made without some of the inputs: no gradient is zeros
        missing = [k for k, t in found.items() if t is None and expected[k] is not None]
        return found | {k: torch.zeros_like(expected[k]) for k in missing}, expected

    if len(u.step.dy) > 1:
        found |= {f"{name} alone in use": partial(used, i) for i, name in enumerate(u.results)}

    def expanded() -> tuple[Outputs, Outputs]:
        one = lambda i, dy: dy.flatten()[:1].view([1] * dy.dim()).expand(dy.shape)  # as of a sum
        return u.made(upstream=one), u.made(upstream=lambda i, dy: one(i, dy).contiguous())

    found["upstream expanded"] = expanded
    found[STRIDED] = lambda: (u.made(upstream=lambda i, dy: torch.stack((dy, dy), -1)[..., 0]), u.base)
    found["second backward"] = lambda: (u.made(times=2), u.base)
    for name, values in u.subject.free.items():
        for value in values:
            function = partial(u.subject.function, **{name: value})
            found[f"second backward, {name} = {value}"] = partial(
                lambda function: (u.made(times=2, function=function), u.base), function
            )
    if all(trained_and_frozen(u)):
        found |= {FROZEN: partial(frozen, u), FROZEN_CHECKPOINTED: partial(frozen, u, again=True)}
    return found


def memories(u: BaselineCall) -> dict[str, Variant]:
    """Asks what is written where: inputs, what comes upstream, outputs that a caller keeps, and no rows at all."""

    def untouched() -> tuple[Outputs, Outputs]:
        given, seen = u.inputs(), {}

        def upstream(number: int, dy: torch.Tensor) -> torch.Tensor:
            seen[f"upstream[{number}]"] = dy.clone()
            return seen[f"upstream[{number}]"]

        u.made(given=given, upstream=upstream)
        rolled = u.inputs()
        with torch.no_grad():
            u.outputs(rolled)
        expected = u.inputs() | {f"upstream[{i}]": dy for i, dy in enumerate(u.step.dy)}
        held = {k: t.detach() for k, t in given.items()} | seen
        return held | u.untrained(rolled), {k: expected[k] for k in held} | u.untrained(u.inputs())

    def kept() -> tuple[Outputs, Outputs]:
        with torch.no_grad():
            rolled = u.named(u.outputs(u.inputs()))
        made = u.made()
        u.made(given=u.others())
        u.rolled(u.others())
        return made | u.untrained(rolled), u.base | u.untrained(u.results)

    def shapes_alone() -> tuple[Outputs, Outputs]:
        """Compares gradients of samples of one length where a token layout says so and where shapes do."""
        step = Step(u.subject, CANCELLING, [ALIKE] * 3)
        told = gradients(step, "batch")
        with TokenLayout([0], [step.count], step.count):
            pass  # what was left again must not count
        step.says_layout = False
        return gradients(step, "batch"), told

    return {
        "no token layout": shapes_alone,
        "inputs and upstream": untouched,
        "outputs kept": kept,
        "backward after a later call": lambda: (u.made(between=lambda: u.made(given=u.others())), u.base),
        NO_ROWS: lambda: no_rows(u),
    }


def histories(u: BaselineCall) -> dict[str, Variant]:
    """Asks for the call after others: in other shapes and dtypes, and on the same tensors when they held others."""

    def after_others() -> tuple[Outputs, Outputs]:
        for dtype in DTYPES.values():
            with contextlib.suppress(Exception):  # what the candidate refuses; in its own dtype it is judged
                u.first(dtype)
        return u.made(), u.base

    def refilled() -> tuple[Outputs, Outputs]:
        given = u.inputs()
        u.rolled(given)
        for k, t in u.others().items():
            given[k].copy_(t)
        rolled = u.untrained(u.rolled(given))
        expected = u.made(given=u.others())
        others = {k: expected[k] for k in u.results}
        return u.made(given=given) | rolled, expected | u.untrained(others)

    return {"after other calls": after_others, "tensors written to": refilled}


def _populations(u: BaselineCall) -> dict[str, Variant]:
    return {name: partial(way, u) for name, way in populations(u.subject.problem.op).items()}


AXES = {"mode": modes, "demand": demands, "memory": memories, "history": histories, "population": _populations}


def by_use(subject: OpUnderTest, only: Sequence[str] = tuple(AXES)) -> Iterator[Row]:
    """Judges the axes, or those named in `only`: a row a way, of all outputs and gradients together."""
    u, raised = subject.computed("invariance", SINGLE_CALL, lambda: BaselineCall(subject))
    if raised:
        yield from raised
        return
    for axis in only:
        relation, said = (
            RELATIONS[axis],
            {"against": SINGLE_CALL, "inputs": CANCELLING, "rows": u.step.count, "detail": axis},
        )
        said |= {"axes": [KINDS[axis]], "side": Side.CALL}
        for name, asked in AXES[axis](u).items():
            yield from subject.attempt(relation, name, partial(judged, subject, relation, name, asked, **said), **said)


def again(subject: OpUnderTest, axis: str, name: str, once: bool) -> list[torch.Tensor]:
    """Returns what a way of an axis gives, or, once, what it is compared with, without what is rightly not there."""
    found, expected = AXES[axis](BaselineCall(subject))[name]()
    return [(expected if once else found)[k] for k, t in expected.items() if t is not None]


def required(subject: OpUnderTest) -> Iterator[dict]:
    """Yields what every op is asked."""
    op, device = subject.problem.op, subject.problem.device.type
    floating = [k for k, dims in (op.tokens | op.shared).items() if not dims.endswith((":id", ":bool"))]
    names = {
        "mode": ["inference_mode", "autocast", "compiled", CHECKPOINTED, DETERMINISTIC, DEFAULT],
        "demand": [
            *("upstream expanded", STRIDED, "second backward", *[f"d{k} alone" for k in floating if len(floating) > 1]),
            *(f"second backward, {name} = {value}" for name, values in subject.free.items() for value in values),
            *[FROZEN, FROZEN_CHECKPOINTED] * (0 < sum(k in op.shared for k in floating) < len(floating)),
        ],
        "memory": ["no token layout", "inputs and upstream", "outputs kept", "backward after a later call", NO_ROWS],
        "history": ["after other calls", "tensors written to"],
        "population": [*populations(op)],
    }
    names["mode"] += ["captured"] * (device == "cuda")
    for axis, ways in names.items():
        yield from ({"relation": RELATIONS[axis], "layout": name, "against": SINGLE_CALL} for name in ways)
