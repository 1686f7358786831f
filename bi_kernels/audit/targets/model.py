"""A whole model: the same logprobs and gradients in every layout, and the same logprobs when it rescores what it
generated."""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from bi_kernels.audit.axes import Kind, Side
from bi_kernels.audit.compare import Drift, compare, joined
from bi_kernels.audit.findings import NEEDS_FIX, PASS, PRECONDITION, Row
from bi_kernels.audit.inputs import on
from bi_kernels.audit.layouts import Call, shapes_launched
from bi_kernels.audit.module_modes import MODES
from bi_kernels.audit.targets.base import Target
from bi_kernels.contract import CONTRACT

THREADS = 12  # that hash
TOGETHER, LATER = ("inference_mode", "hooks", "eval"), 40  # modes of a late call; which call it is, on a GPU


class Relation(StrEnum):
    """What a row says of a model."""

    INVARIANCE = "invariance"
    GRADIENT = "gradient invariance"
    PARITY = "parity"
    DETERMINISM = "determinism"
    ACCURACY = "accuracy"
    CONTRACTED = "contract"


class ModelTarget(Target):
    """A model and one training step of uneven sequences; a subclass adapts a kind of model.

    layouts: the calls of the step by name; every layout is compared with `packed`. cached: by name of a layout, the
    size of a chunk and how many first tokens of each sequence one call prefills; empty without such a cache. drifts:
    {layout: {tensor: drift from `packed`}}, of the layouts compared so far.
    """

    layouts: dict[str, list[Call]]
    lengths: Sequence[int]
    device: torch.device
    cached: dict[str, tuple[int, list[int]]]
    drifts: dict[str, dict[str, Drift]]
    model: torch.nn.Module
    first: Tensor | None = None  # `logprob` of the first packed call

    @property
    def count(self) -> int:
        return sum(self.lengths)

    def run(self, layout: str, generated: Tensor | None = None) -> dict[str, Tensor]:
        """Runs forward and backward of a layout's calls; returns `logprob`, (…, tokens) fp32, and each parameter's
        gradient by name, where the layout has the step's. generated: (tokens,) logprobs of the old policy."""
        raise NotImplementedError

    def logprobs(self) -> Tensor:
        """Returns `logprob` of the packed call without a backward, in whichever mode it is called."""
        raise NotImplementedError

    def run_cached(self, chunk: int, first: Sequence[int]) -> Tensor:
        """Returns the logprobs (tokens,) fp32, computed against a cache."""
        raise NotImplementedError

    def about(self, relation: str, layout: str, drifts: dict[str, Drift], against: str = "packed", **more) -> Row:
        """Returns the row of several tensors' drifts, which names the first tensor that differs."""
        drift = joined([*drifts.values()])
        return self.row(relation, layout, drift, against, **{"tensor": [*drifts][drift.part]} | more)


def gathered(calls: Sequence[Call], count: int, device: torch.device, compute: Callable) -> Tensor:
    """Returns what calls compute of each token, in logical order: (…, count).

    compute: of a call, of the token at each of its places, 0 for padding, and of which places hold tokens; returns a
    tensor (…, *places).
    """
    found = None
    for call in calls:
        index = on(device, call.index)
        real = index >= 0
        values = compute(call, index.clamp(min=0), real)
        found = values.new_zeros(*values.shape[: -index.dim()], count) if found is None else found
        found[..., index[real]] = values[..., real]
    return found


def layout_rows(target: ModelTarget, only: Collection[str] = ()) -> Iterator[Row]:
    """Yields the rows of every layout, or of those named, against one packed call: of the logprobs, and of every
    parameter's gradient; of chunked prefill and decode the logprobs, and the gradients of a packed step whose old
    logprobs they are. The first row says whether every tensor holds anything but zeros."""
    first = {name: t.clone() for name, t in target.run("packed").items()}
    target.first = first["logprob"]
    zero = sum(not t.any() for t in first.values())
    said = {"rows": target.count, "tensor": "tensors that are zero", "detail": f"SHA-256 {sha256(first)}"}
    yield target.row(PRECONDITION, "packed", Drift(zero, len(first)), **said)
    runs = CONTRACT["sweep"]["runs" if target.device.type == "cuda" else "interpreter_gradient_runs"]
    asked = {layout: calls for layout, calls in target.layouts.items() if not only or layout in only}
    for layout, calls in asked.items():
        again = layout == "packed"
        for _ in range(runs - 1 if again else 1):
            found = target.run(layout)
            drifts = {name: compare(t, first[name]) for name, t in found.items()}
            if any(d.mismatches for d in drifts.values()):
                break
        target.drifts[layout] = drifts
        detail = f"{runs} runs" if again else shapes_launched(calls)
        if layout == [*asked][-1]:
            detail += f"; SHA-256 {sha256(found)}"
        said, logprob = {"rows": target.count, "detail": detail}, {"logprob": drifts["logprob"]}
        forward, backward = [Relation.DETERMINISM] * 2 if again else (Relation.INVARIANCE, Relation.GRADIENT)
        yield target.about(forward, layout, logprob, **said)
        if gradients := _gradients(drifts):
            yield target.about(backward, layout, gradients, side=Side.GRADIENT, **said)
    torch.cuda.empty_cache()
    for layout, (chunk, prefilled) in target.cached.items():
        if not only or layout in only:
            yield from _cached_rows(target, first, layout, chunk, prefilled)


def mode_rows(target: ModelTarget) -> Iterator[Row]:
    """Yields the row of a late packed call in every other mode at once: without a gradient, with hooks, in eval().
    Where its bits are not those of the first one, in train() and with gradients, a row for each mode follows."""
    again = LATER if target.device.type == "cuda" else 1

    def logprobs(modes: Sequence[str], calls: int) -> Tensor:
        with contextlib.ExitStack() as stack:
            for mode in ("train", "grad", *modes):
                stack.enter_context(MODES[mode](target.model))
            return [target.logprobs() for _ in range(calls)][-1]

    first = logprobs((), 1) if target.first is None else target.first
    for modes in (TOGETHER, *((mode,) for mode in ("no_grad", *TOGETHER)), ()):
        drift = {"logprob": compare(logprobs(modes, again), first)}
        said = {"rows": target.count, "axes": [Kind.MODE if modes else Kind.BEFORE], "detail": f"call {again}"}
        yield target.about(Relation.INVARIANCE, ", ".join(modes) or "a later call", drift, **said)
        if modes == TOGETHER and not drift["logprob"].mismatches:
            return


def _gradients(drifts: dict[str, Drift]) -> dict[str, Drift]:
    return {name: drift for name, drift in drifts.items() if name != "logprob"}


def _cached_rows(target: ModelTarget, first: dict[str, Tensor], layout: str, chunk: int, prefilled: list[int]):
    found = target.run_cached(chunk, prefilled)
    later = torch.cat([torch.arange(n) >= begun for n, begun in zip(target.lengths, prefilled)]).to(target.device)
    for name, computed in (("prefill of a cache", ~later), (layout, later)):
        if computed.any():
            drifts = target.drifts[name] = {"logprob": compare(found[computed], first["logprob"][computed])}
            yield target.about(Relation.PARITY, name, drifts, rows=drifts["logprob"].elements)
    trained = {name: compare(t, first[name]) for name, t in target.run("packed", generated=found).items()}
    target.drifts[layout] |= _gradients(trained)
    said = {"rows": target.count, "detail": "old logprobs of the rollout"}
    yield target.about(Relation.GRADIENT, f"{layout}, then trained packed", _gradients(trained), **said)


def policy_drift(generated: Tensor, rescored: Tensor) -> dict:
    """Returns what rescored logprobs mean to a policy gradient: KL by its unbiased estimate of e^d − 1 − d (Schulman,
    2020), and the share of tokens whose ratio is clipped. Both are (tokens,)."""
    drift, d = compare(rescored, generated), rescored.double() - generated.double()
    return {
        "tokens": drift.elements,
        "logprobs that differ": drift.mismatches,
        "max |Δ logprob|": drift.max_abs,
        "KL": float((d.exp() - 1 - d).mean()),
        "clipped": float(((d.exp() - 1).abs() > CONTRACT["chain"]["clip"]).double().mean()),
    }


def rescored_row(
    target: ModelTarget, layout: str, drift: Drift, logprobs: tuple[Tensor, Tensor], detail: str = "", **more
) -> tuple[Row, dict]:
    """Returns the row of what was generated and then rescored, and its `policy_drift`; logprobs: of both, in turn."""
    found = policy_drift(*logprobs)
    worst = max(found["max |Δ logprob|"], abs(found["KL"]), found["clipped"])
    verdict = PASS if not drift.mismatches and worst <= CONTRACT["chain"]["parity"] else NEEDS_FIX
    said = {"rows": found["tokens"], "verdict": verdict, "detail": f"{detail}KL {found['KL']:.3g}"}
    return target.row(Relation.PARITY, layout, drift, **said | more), found


class Control(NamedTuple):
    """A model that is broken on purpose: the relation that must flag it, and a function that yields its rows."""

    name: str
    relation: str
    rows: Callable[[object], Iterable[Row]]  # of a session


def hashes(tensors: Iterable[Tensor]) -> list[bytes]:
    """Returns the SHA-256 of each tensor's bytes, which threads compute."""
    data = lambda t: t.detach().contiguous().cpu().view(torch.uint8).numpy()
    with ThreadPoolExecutor(THREADS) as threads:
        return [*threads.map(lambda t: hashlib.sha256(data(t)).digest(), tensors)]


def sha256(tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 of the names of tensors and of the SHA-256 of each."""
    parts = zip(tensors, hashes(tensors.values()))
    return hashlib.sha256(b"".join(name.encode() + digest for name, digest in parts)).hexdigest()
