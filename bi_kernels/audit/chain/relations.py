"""The relations of a whole model, and decoders broken on purpose, each of which one of them must flag."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

import bi_kernels
from bi_kernels.audit.broken.attention import changed, padding_keys_seen
from bi_kernels.audit.broken.forward import rope_by_row, row_count
from bi_kernels.audit.broken.gradient import dw_separate
from bi_kernels.audit.chain.layouts import Step, sha256
from bi_kernels.audit.evidence.drift import Drift, compare, joined
from bi_kernels.audit.evidence.kinds import Side
from bi_kernels.audit.evidence.verdicts import PRECONDITION, Row, grouped
from bi_kernels.audit.problem.call_layouts import shapes_launched
from bi_kernels.audit.problem.subject import Labelled
from bi_kernels.contract import CONTRACT

INVARIANCE, GRADIENT, PARITY, DETERMINISM = "invariance", "gradient invariance", "parity", "determinism"


class Whole(Labelled):
    """A decoder whose rows are about its logprobs, and about its gradients, a part a parameter."""

    def __init__(self, layers: int, dtype: str, device: str, command: str):
        self.command, self.parts = command, ["logprob"]
        self.whose = "chain", "decoder", f"{layers} layers", "bi_kernels", dtype, device

    def about(self, relation: str, layout: str, drift: Drift, parts: Collection[str] = ("logprob",), **more) -> Row:
        self.parts = list(parts)
        return self.row(relation, layout, drift, "packed", **more)


def invariance(
    step: Step, device: str, command: str, only: Collection[str] = (), shares: dict | None = None
) -> Iterator[Row]:
    """Yields the rows of a decoder: of every layout the logprobs and the gradients of all parameters, against those of
    one packed call; of chunked prefill and decode the logprobs, and the gradients of a packed step whose old logprobs
    they are; and that every parameter got a gradient.

    only: these layouts; shares: gets {layout: {kind of tensor: share of its elements that differ}}, with the gradients
    of that step beside chunked prefill and decode.
    """
    shares = {} if shares is None else shares
    who = Whole(step.model.config.layers, step.dtype, device, command)
    about = partial(who.about, rows=step.count)
    logprob = step.run("packed")
    names, whole = list(step.gradients), tuple(g.clone() for g in step.gradients.values())
    unmoved = [name for name, g in zip(names, whole) if not g.any()]
    detail = f"SHA-256 {sha256({'logprob': logprob} | dict(zip(names, whole)))}"
    without = Drift(len(unmoved), len(names))
    yield about(PRECONDITION, "packed", without, ["parameters without a gradient"], detail=detail)
    runs = CONTRACT["sweep"]["runs" if step.device.type == "cuda" else "interpreter_gradient_runs"]
    layouts = {"packed": step.layouts["packed"]} | {k: v for k, v in step.layouts.items() if k != "packed"}
    for layout, calls in layouts.items():
        if only and layout not in only:
            continue
        again = layout == "packed"
        for _ in range(runs - 1 if again else 1):
            found = step.run(layout)
            drifts = {"logprob": compare(found, logprob)} | _each(step.gradients, whole)
            if any(d.mismatches for d in drifts.values()):
                break
        shares[layout] = _by_kind(drifts)
        forward, drift = drifts.pop("logprob"), joined([*drifts.values()])
        detail = f"{runs} runs" if again else shapes_launched(calls)
        if layout == [*layouts][-1]:
            detail += f"; SHA-256 {sha256({'logprob': found} | step.gradients)}"
        yield about(DETERMINISM if again else INVARIANCE, layout, forward, detail=detail)
        yield about(DETERMINISM if again else GRADIENT, layout, drift, names, detail=detail, gradient=Side.GRADIENT)
    torch.cuda.empty_cache()
    if not only or {layout.partition(":")[0] for layout in only} & {"chunked", "decode"}:
        for layout, found, computed in step.in_chunks():
            drift = compare(found[computed], logprob[computed])
            shares[layout] = _by_kind({"logprob": drift})
            yield about(PARITY, layout, drift, rows=drift.elements)
            if layout == "prefill of a cache":  # its tokens and the decoded ones are one rollout
                continue
            step.run("packed", rolled=found)
            drifts = _each(step.gradients, whole)
            shares[layout] |= _by_kind(drifts)
            drift = joined([*drifts.values()])
            yield about(GRADIENT, f"{layout}, then trained packed", drift, names, detail="old logprobs of the rollout")


def _each(gradients: dict[str, Tensor], whole: Sequence[Tensor]) -> dict[str, Drift]:
    """Returns the drift of each gradient from that of the packed step, by name."""
    return {name: compare(g, w) for (name, g), w in zip(gradients.items(), whole)}


def _by_kind(drifts: dict[str, Drift]) -> dict[str, float]:
    """Returns the share of elements that differ, of all tensors whose names end alike."""
    found = grouped(drifts, lambda name: name.rpartition(".")[2])
    total = lambda names, field: sum(getattr(drifts[name], field) for name in names)
    return {kind: total(names, "mismatches") / total(names, "elements") for kind, names in found.items()}


def with_ops(**changed) -> SimpleNamespace:
    """Returns this package's ops, some of which are others."""
    return SimpleNamespace(**{name: getattr(bi_kernels, name) for name in bi_kernels.__all__} | changed)


def _recomputed_otherwise(gate, up):
    """Gives activation checkpointing, which calls it inside the backward, another result than the forward had."""
    y = bi_kernels.swiglu(gate, up)
    return y if torch._C._current_graph_task_id() == -1 else bi_kernels.scale(y, 1.5)


def _halves_for_few_rows(x, weight, bias=None, few=64):
    if row_count(x) > few:
        return bi_kernels.linear(x, weight, bias)
    first, second = map(bi_kernels.linear, x.chunk(2, -1), weight.chunk(2, -1))
    return bi_kernels.add(first, second)


def _block_by_batch(q, k, v, **told):
    count = len(told["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in told else len(q)
    return (changed(block=32, hopper=False) if count < 3 else bi_kernels.attention)(q, k, v, **told)


GENERATING = (  # decoders whose generation is judged: name, the relation that must flag it, its ops
    ("decode that sees a cache's padding, rescored", PARITY, with_ops(attention=padding_keys_seen)),
    (
        "linear that adds two halves of K for 2 rows or fewer, generated again",
        INVARIANCE,
        with_ops(linear=partial(_halves_for_few_rows, few=2)),
    ),
)
CONTROLS = (  # name, the relation that must flag it, the layouts in which it shows, what is broken
    (
        "linear that adds two halves of K for 64 rows or fewer",
        INVARIANCE,
        ("singles",),
        {"ops": with_ops(linear=_halves_for_few_rows)},
    ),
    ("RoPE by row", INVARIANCE, ("singles",), {"ops": with_ops(rope=rope_by_row)}),
    ("attention whose blocks follow the batch", INVARIANCE, ("singles",), {"ops": with_ops(attention=_block_by_batch)}),
    ("decode that sees a cache's padding", PARITY, ("decode",), {"ops": with_ops(attention=padding_keys_seen)}),
    (
        "dW as the sum of separately accumulated partials",
        GRADIENT,
        ("micro_batches:each",),
        {"ops": with_ops(linear=lambda x, weight, bias=None: dw_separate(x, weight))},
    ),
    (
        "a step on old logprobs that saw a cache's padding",
        GRADIENT,
        ("decode",),
        {"ops": with_ops(attention=padding_keys_seen)},
    ),
    ("gradients that were not told the layout", GRADIENT, ("left_padded",), {"forgets": True}),
    ("each micro-batch divided by its own tokens", GRADIENT, ("micro_batches:2",), {"own": True}),
    (
        "a layer recomputed otherwise than it was computed",
        GRADIENT,
        ("checkpointing off",),
        {"ops": with_ops(swiglu=_recomputed_otherwise)},
    ),
)
