"""What `apply` promises of a model, judged: every module named, the same bits in every layout, the accuracy of its
logits, and the model as it was after `restore`."""

import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from bi_kernels.audit.chain.layouts import sha256
from bi_kernels.audit.evidence.drift import Drift, compare, joined
from bi_kernels.audit.evidence.kinds import Side
from bi_kernels.audit.evidence.verdicts import PRECONDITION, Row
from bi_kernels.audit.models.cases import OURS, Step, architectures, built, case, quiet
from bi_kernels.audit.problem.call_layouts import shapes_launched
from bi_kernels.audit.problem.subject import Labelled
from bi_kernels.contract import CONTRACT, DTYPES, evaluate, rounding
from bi_kernels.integrations.transformers import apply, restore
from bi_kernels.integrations.transformers.report import Report

QUICK = "packed", "micro_batches:4"  # the layouts of the quick form
INVARIANCE, GRADIENT, PARITY = "invariance", "gradient invariance", "parity"
DETERMINISM, ACCURACY, CONTRACTED = "determinism", "accuracy", "contract"


class Model(Labelled):
    """A model of an architecture, whose rows are about its logprobs, its logits or its gradients."""

    def __init__(self, session, name: str, dtype: str):
        self.command = session.command
        layers = case(session)["every"]["num_hidden_layers"]
        self.whose = session.audit, name, f"{layers} layers", OURS, dtype, session.device_label

    def about(self, relation: str, layout: str, drift: Drift, parts: Collection[str], against: str, **more) -> Row:
        self.parts = list(parts)
        return self.row(relation, layout, drift, against, **more)


def unaccounted(model: nn.Module, report: Report) -> Drift:
    """Returns how many modules and parameters of a model its report names otherwise than once."""
    modules = [*report.replaced, *report.left, *report.containers]
    parameters = [*report.folded, *report.others]
    wanted = [[n for n, _ in model.named_modules()], [n for n, _ in model.named_parameters()]]
    wrong = sum(found.count(n) != 1 for found, names in zip((modules, parameters), wanted) for n in names)
    return Drift(wrong, sum(map(len, wanted)))


def summary(name: str, report: Report) -> dict:
    """Returns a report's line of a table."""
    reasons = "; ".join(f"{n or 'the model'}: {why}" for n, why in report.left.items())
    return {
        "model": name,
        "modules replaced": len(report.replaced),
        "left": len(report.left),
        "containers": len(report.containers),
        "parameters folded": len(report.folded),
        "others": len(report.others),
        "why left": reasons or "–",
    }


def layouts(
    session, who: Model, step: Step, model: nn.Module, only: Collection[str] = (), shares: dict | None = None, **how
) -> Iterator[Row]:
    """Yields the rows of every layout, or of those named, against one packed call: of the logprobs, and of every
    parameter's `.grad`.

    shares: gets {layout: share of the gradients' elements that differ}; how: what Step.run is told besides.
    """
    first = {name: t.clone() for name, t in step.run(model, "packed", **how).items()}
    unmoved = [name for name, t in first.items() if not t.any()]
    detail = f"SHA-256 {sha256(first)}"
    missing = Drift(len(unmoved), len(first))
    yield who.about(PRECONDITION, "packed", missing, ["tensors that are zero"], "", rows=step.count, detail=detail)
    for layout, calls in step.layouts.items():
        if only and layout not in only:
            continue
        found = step.run(model, layout, **how)
        again = layout == "packed"
        told = {"rows": step.count, "detail": shapes_launched(calls)}
        forward = compare(found.pop("logprob"), first["logprob"])
        yield who.about(DETERMINISM if again else INVARIANCE, layout, forward, ["logprob"], "packed", **told)
        if found:
            drift = joined([compare(t, first[name]) for name, t in found.items()])
            if shares is not None:
                shares[layout] = drift.mismatches / drift.elements
            whose = {"side": Side.GRADIENT}
            yield who.about(DETERMINISM if again else GRADIENT, layout, drift, found, "packed", **told | whose)


def accuracy(session, who: Model, ours: Tensor, stock: Tensor) -> tuple[Row, dict]:
    """Returns the row of the logits against those of the model before `apply`, whose mismatches are those beyond the
    bound, and its line of a table."""
    dtype, every, c = who.whose[4], case(session)["every"], CONTRACT["chain"]["logits"]
    rms = lambda t: float(t.double().square().mean().sqrt())
    u, n = rounding(DTYPES[dtype])[0], max(every["hidden_size"], every["intermediate_size"])
    sigma = evaluate(c["sigma"][dtype], layers=every["num_hidden_layers"], u=u, n=n, rms=rms(stock))
    bound, drift = evaluate(c["bound"], sigma=sigma), compare(ours, stock)
    gap = (ours.double() - stock.double()).abs()
    beyond = int((gap > bound).sum() + gap.isnan().sum())
    share = drift.max_abs / bound
    line = {"model": who.whose[1], "dtype": dtype, "logits": drift.elements, "rms": rms(stock)}
    line |= {"rms Δ / σ": rms(gap) / sigma, "max |Δ|": drift.max_abs, "bound": bound}
    line |= {"max |Δ| / bound": share, "equal bits": 1 - drift.mismatches / drift.elements}
    said = {"threshold_share": share, "rows": len(stock)}
    return who.about(ACCURACY, "batch", replace(drift, mismatches=beyond), ["logits"], "before apply", **said), line


@torch.no_grad()
def logits(step: Step, model: nn.Module) -> Tensor:
    """Returns the logits of the step's tokens, right-padded in one batch."""
    given = step.arguments("batch", step.layouts["batch"][0])
    return model(**given, use_cache=False).logits[given["attention_mask"].bool()]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def back(who: Model, before: tuple[dict, Tensor], model: nn.Module, after: Tensor) -> Row:
    """Returns the row of a model that was given to `restore`: its weights and logits are those of before."""
    weights, expected = before
    found = {"logits": after} | state(model)
    drift = joined([compare(t, ({"logits": expected} | weights)[name]) for name, t in found.items()])
    return who.about(DETERMINISM, "restored", drift, found, "before apply")


def judge(session, name: str, dtype: str) -> Iterator[Row]:
    """Yields the rows of a model: before `apply`, applied, saved and loaded, restored; fills the session's tables."""
    who, step = Model(session, name, dtype), Step(session)
    model = built(session, name, dtype, ours=False)
    session.shares[f"{name}, {dtype}, stock"] = shares = {}
    only = QUICK * session.quick
    for _ in layouts(session, who, step, model, only, shares, ours=False):
        pass
    model.zero_grad()
    before = state(model), logits(step, model)
    report = apply(model)
    session.reports.append(summary(name, report))
    yield who.about(CONTRACTED, "apply", unaccounted(model, report), ["modules unaccounted for"], "")
    applied = logits(step, model)
    row, line = accuracy(session, who, applied, before[1])
    session.errors.append(line)
    yield row
    session.shares[f"{name}, {dtype}, ours"] = shares = {}
    yield from layouts(session, who, step, model, only, shares)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, dtype=DTYPES[dtype]).to(session.device).eval()
    apply(loaded)
    yield who.about(
        DETERMINISM, "saved, loaded and applied", compare(logits(step, loaded), applied), ["logits"], "applied"
    )
    del loaded
    model.zero_grad()
    restore(model)
    yield back(who, before, model, logits(step, model))


def run(session) -> list[Row]:
    """Judges every model in every dtype; returns the rows, which are recorded as they come."""
    found = []
    for dtype in session.dtypes:
        for name in architectures(session):
            with quiet():
                for row in judge(session, name, dtype):
                    session.add([row])
                    found.append(row)
    return found
