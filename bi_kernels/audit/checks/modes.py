"""The mode of a call: whether a gradient is wanted, inference, autocast, settings of torch, compiled, captured, another
thread or stream. The bits are one."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from triton.runtime.errors import InterpreterError

from bi_kernels.audit.axes import Kind
from bi_kernels.audit.checks.requests import CHECKPOINTED, Variant, checkpointed
from bi_kernels.audit.compare import compare
from bi_kernels.audit.findings import UNSUPPORTED, Row, sentence
from bi_kernels.audit.module_modes import hooked, training
from bi_kernels.audit.step import Results
from bi_kernels.audit.targets.any_callable import REFUSALS, CallableTarget, tensors
from bi_kernels.audit.targets.op_step import Step

INFERENCE, DETERMINISTIC, AUTOCAST = "inference_mode", "deterministic algorithms", "autocast"
AUTOCAST_FP16, PRECISION = "autocast in fp16", "other settings of matmul precision"
DEFAULT, DEVICE = "bf16 as torch's default dtype", "another default device of torch's"
THREAD, STREAM, HOOKED = "another thread", "another stream", "hooks that change nothing"
WANTED, FEW, CAPTURED = "a gradient wanted", ", few samples", "captured"
# in these a callable may compute otherwise, for all samples alike
OTHERWISE = (AUTOCAST, AUTOCAST_FP16, PRECISION, DEFAULT, DEVICE)
SLEEP = 40_000_000  # cycles of a GPU, in which the host launches a whole step

T = TypeVar("T")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Turns torch's deterministic algorithms on, without its warnings."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def other_precision() -> Iterator[None]:
    """Gives every setting of how torch multiplies matrices another value than it has by default."""
    owner = torch.backends.cuda.matmul
    names = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    before = torch.get_float32_matmul_precision(), [getattr(owner, name) for name in names]
    try:
        torch.set_float32_matmul_precision("medium" if before[0] == "highest" else "highest")
        for name, value in zip(names, before[1]):
            setattr(owner, name, not value)
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        for name, value in zip(names, before[1]):
            setattr(owner, name, value)


def in_thread(make: Callable[[], T], device: torch.device) -> T:
    """Returns what `make` makes in another thread, which has nothing but the GPU from this one."""

    def made() -> T:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return make()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(made).result()


def on_stream(make: Callable[[], T], device: torch.device) -> T:
    """Returns what `make` makes on another stream of a GPU, with proper waits. That stream is late: a kernel that is
    launched on another one finds inputs that are not written yet."""
    with torch.cuda.device(device):
        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            torch.cuda._sleep(SLEEP)
            found = make()
        current.wait_stream(other)
        torch.cuda.synchronize()  # memory of the other stream is free for this one
        return found


def elsewhere(device: torch.device) -> dict[str, Callable]:
    """Returns what makes a call elsewhere than this thread does."""
    return {THREAD: in_thread} | ({STREAM: on_stream} if device.type == "cuda" else {})


# ops of the registry


def op_modes(u: Step) -> dict[str, Variant]:
    """Returns what an op is asked in another mode of PyTorch: compiled by Inductor on a GPU, traced as it would be
    elsewhere; in a checkpoint."""
    device = u.subject.problem.device.type

    def inference() -> tuple[Results, Results]:
        given, before = u.inputs(), u.inputs()
        with torch.inference_mode():
            found = {k: t.clone() for k, t in u.named(u.outputs_of(given)).items()}
        held = lambda held: {f"{k} as given": t.detach() for k, t in held.items()}
        return found | held(given), u.results | held(before)

    def within(mode: Callable) -> tuple[Results, Results]:
        with mode():
            return u.made() | untrained(u.rolled()), u.base | untrained(u.results)

    def autocast(dtype: torch.dtype) -> tuple[Results, Results]:
        with torch.autocast(device, dtype):
            return u.made(), u.base

    def at(place: Callable) -> tuple[Results, Results]:
        made = lambda: u.made() | untrained(u.rolled())
        return place(made, u.subject.problem.device), u.base | untrained(u.results)

    def compiled() -> tuple[Results, Results]:
        torch.compiler.reset()  # what was compiled for other ops counts against the limit of recompilations
        function = torch.compile(u.subject.function, backend="inductor" if device == "cuda" else "aot_eager")
        try:
            with warnings.catch_warnings(action="ignore"):  # what Dynamo says of a kernel on Triton's interpreter
                made = u.made(function=function) | untrained(u.rolled(function=function))
        except InterpreterError as error:
            if u.subject.candidate == "bi_kernels":
                raise
            raise NotImplementedError(f"compiled, a bare kernel is traced into Triton's interpreter: {error}") from None
        return made, u.base | untrained(u.results)

    found = {
        INFERENCE: inference,
        DETERMINISTIC: lambda: within(deterministic),
        DEFAULT: lambda: within(lambda: default_dtype(torch.bfloat16)),
        PRECISION: lambda: within(other_precision),
        AUTOCAST: lambda: autocast(torch.bfloat16),
        "compiled": compiled,
        CHECKPOINTED: lambda: checkpointed(u),
    }
    if asks_once(u):
        found[AUTOCAST_FP16] = lambda: autocast(torch.float16)
        found[DEVICE] = lambda: within(lambda: _other_device(u))
        found |= {name: partial(at, place) for name, place in elsewhere(u.subject.problem.device).items()}
    return found | ({CAPTURED: partial(captured, u)} if device == "cuda" else {})


def captured(u: Step) -> tuple[Results, Results]:
    """Compares what a CUDA graph of the call gives for other numbers. Raises NotImplementedError for a candidate that
    cannot be captured."""
    tensors, told = u.arguments(u.call, *u.parts(u.others()))
    values, _ = u.arguments(u.call, *u.parts(u.inputs()))
    with torch.no_grad():
        u.subject.function(*tensors, **told)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                out = u.subject.outputs(u.subject.function(*tensors, **told))
        except Exception as error:
            if u.subject.candidate == "bi_kernels":
                raise
            raise NotImplementedError(f"{CAPTURED}: {sentence(error)}") from error
        for into, value in zip(tensors, values):
            into.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
    return u.named(out), u.results


def asks_once(u: Step) -> bool:
    """Tells whether an op is asked what one dtype answers for all."""
    return u.subject.problem.dtype == torch.bfloat16


def _other_device(u: Step) -> torch.device:
    """Returns what makes another device the default: a call's GPU. On a CPU it is one on which nothing is computed, for
    this package's ops alone: others may well make tensors where torch makes them."""
    device = u.subject.problem.device
    return torch.device("meta") if device.type == "cpu" and u.subject.candidate == "bi_kernels" else device


def untrained(made: Results) -> Results:
    """Returns the same under names that say that no gradient is wanted."""
    return {f"{k}, no gradient wanted": t for k, t in made.items()}


# any callable


def _by_design(m: nn.Module) -> bool:
    """Tells whether a module is there to compute something else in training: it draws, or it looks at the batch."""
    drops = isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
    return drops or isinstance(m, nn.modules.batchnorm._NormBase)


@contextlib.contextmanager
def _switched(module: nn.Module) -> Iterator[None]:
    """Puts a module that trains into eval(), and another into train(); leaves it as it was."""
    buffers = [(b, b.clone()) for b in module.buffers()]
    try:
        with training(module, not module.training):
            yield
    finally:
        with torch.no_grad():
            for b, value in buffers:
                b.copy_(value)


@contextlib.contextmanager
def _inference(module: nn.Module | None) -> Iterator[None]:
    """Enters inference_mode; a buffer that a module then puts another tensor in the place of comes back, for nobody may
    write into that one later."""
    held = [(m, dict(m._buffers)) for m in module.modules()] if module is not None else []
    try:
        with torch.inference_mode():
            yield
    finally:
        for m, buffers in held:
            m._buffers.update(buffers)


def modes(t: CallableTarget) -> dict[str, Callable]:
    """Returns what enters each mode but the one in which a target is judged, without gradients."""
    found = {WANTED: torch.enable_grad, INFERENCE: partial(_inference, t.module), DETERMINISTIC: deterministic}
    found[AUTOCAST] = partial(torch.autocast, t.device.type, torch.bfloat16)
    if not t.compiled:  # each would compile it anew
        found[AUTOCAST_FP16] = partial(torch.autocast, t.device.type, torch.float16)
        found |= {PRECISION: other_precision, DEFAULT: partial(default_dtype, torch.bfloat16)}
        found[DEVICE] = lambda: t.device  # which can be entered
    found |= dict.fromkeys(elsewhere(t.device), contextlib.nullcontext)
    if t.module is not None:
        found[HOOKED] = partial(hooked, t.module)
    if t.module is not None and not any(map(_by_design, t.module.modules())):
        found["eval()" if t.module.training else "train()"] = partial(_switched, t.module)
    return found


def in_mode(t: CallableTarget, mode: str, samples: list[int]) -> list[Tensor]:
    """Returns the outputs of a call on samples in a mode of PyTorch, a row a sample."""
    if place := elsewhere(t.device).get(mode):
        return place(lambda: [y.clone() for y in t.rows(t.call(samples), len(samples))], t.device)
    arguments = t.take(samples)
    with torch.no_grad(), modes(t)[mode](), t.layout(samples):
        for k, v in tensors(arguments).items() if mode == WANTED else ():
            if v.is_floating_point() and k not in t.outputs:
                arguments[k] = v.requires_grad_().clone()  # which it may write into
        outputs = t.results(arguments)
    return [y.detach().clone() for y in t.rows(outputs, len(samples))]


def refuses(t: CallableTarget, mode: str) -> bool:
    """Tells whether a callable raises in a mode."""
    try:
        in_mode(t, mode, t.every)
    except REFUSALS:
        return True
    return False


def judged(t: CallableTarget, mode: str, whole: list[Tensor]) -> list[Row]:
    """Compares the whole batch in a mode with `whole`, and few samples in it with the whole batch in it. Under autocast
    and torch's other settings it may compute otherwise, for all samples alike. A callable that refuses a mode that is
    none of its own, and says so, is not judged there, nor one that draws in the other of train() and eval()."""
    said = {"against": "no_grad", "rows": t.count, "axes": [Kind.MODE]}
    try:
        found = in_mode(t, mode, t.every)
    except REFUSALS as error:
        if mode not in (WANTED, *OTHERWISE, THREAD, STREAM):
            raise
        return [t.row("invariance", mode, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    if mode.endswith("()") and _differ(found, in_mode(t, mode, t.every)):
        return []
    rows = [] if mode in OTHERWISE else t.compared("invariance", mode, found, whole, **said)
    for few in ([0], t.every[: max(2, t.count // 3)]) if mode not in elsewhere(t.device) else ():
        said = {"against": mode, "rows": len(few), "axes": [Kind.COUNT]}
        made, wanted = in_mode(t, mode, few), [y[few] for y in found]
        if _differ(made, wanted) and _differ(t.rows(t.call(few), len(few)), [y[few] for y in whole]):
            continue  # without the mode, too: "singles" and "micro_batches:ragged" report it
        rows += t.compared("invariance", mode + FEW, made, wanted, **said)
    return rows


def _differ(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return any(compare(a, b).mismatches for a, b in zip(found, wanted))
