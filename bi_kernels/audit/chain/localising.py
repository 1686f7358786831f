"""Locates the first op that drifts in a decoder of stock ops and in ours."""

from textwrap import shorten

import torch

import bi_kernels
from bi_kernels.audit import locate
from bi_kernels.audit.chain import plain
from bi_kernels.audit.chain.relations import Whole
from bi_kernels.audit.evidence.drift import Drift
from bi_kernels.audit.evidence.verdicts import LOCALISER, Row
from bi_kernels.audit.localiser.report import Report
from bi_kernels.audit.problem.inputs import generator
from bi_kernels.audit.timing import GPU
from bi_kernels.contract import CONTRACT

SETTINGS = {  # the layouts of each, the tokens of its sequences at tiny shapes and at real ones
    "one sample a call": (("batch", "singles"), (5, 1, 17, 9), (37, 1, 300, 513, 129, 64)),
    "decode against prefill": (("singles", "decode"), (5, 9), (24, 9)),
    "micro-batches": (("batch", "micro_batches"), (5, 1, 17, 9), (37, 1, 300, 513, 129, 64)),
}


def looked_at(session) -> dict[tuple[str, str], Report]:
    """Returns what the localiser says of ours and of stock ops in every setting, by candidate and setting."""
    out, tiny = {}, session.parameters["shapes"] == "tiny"
    for candidate, ops in (("bi_kernels", bi_kernels), ("torch", plain)):
        model = session.step("bf16", layers="control_layers", ops=ops, checkpointing=False).model
        for p in model.parameters():
            del p.main_grad
        for setting, (layouts, small, large) in [*SETTINGS.items()][: 1 if session.quick else None]:
            g = generator(session.device, session.parameters["seed"], setting)
            small = small[-2:] if session.quick else small
            draw = lambda n: torch.randint(0, model.config.vocab, (n,), generator=g, device=session.device)
            batch = [draw(n) for n in (small if tiny else large)]
            # stock is expected to drift, and its scripts hold its weights: bi-audit locate writes them on request
            folder = session.out / "repro" / setting.replace(" ", "-") if session.out and ops is bi_kernels else None
            out[candidate, setting] = locate(model, batch, layouts, rounds=1, folder=folder)
    return out


def cost(session) -> dict[str, float]:
    """Returns what the localiser costs at the audit's own step, of fewer layers: a traced step over a plain one, the
    larger of packed and micro-batches; bytes of digests over those of activations."""
    step = session.step("bf16", layers="stock_layers", checkpointing=False)
    for p in step.model.parameters():
        del p.main_grad
    with GPU.alone():
        batch = [*step.ids.split(step.lengths)]
        report = locate(step.model, batch, ("packed", "micro_batches"), rounds=1, measure=True)
    return {"time": report.overhead, "digests": report.digest_share}


def rows(session, found: dict[tuple[str, str], Report]) -> list[Row]:
    """Returns the rows of ours: in no setting does the localiser name an op."""
    who, out = Whole(CONTRACT["chain"]["control_layers"], "bf16", session.device_label, session.command), []
    for (candidate, setting), report in found.items():
        if candidate == "bi_kernels":
            drift, said = Drift(len(report.causes), report.compared), {"against": " and ".join(report.layouts)}
            detail = f"it names {report.rows()[0]['op']}" if report.causes else ""
            said |= {"tensor": "tensors of its ops", "rows": report.tokens, "detail": detail}
            out.append(who.row(LOCALISER, f"localiser, {setting}", drift, **said))
    return out


def first(found: dict[tuple[str, str], Report]) -> list[dict]:
    """Returns a line a candidate and setting: the first op that is named, and how many are."""
    lines = []
    for (candidate, setting), report in found.items():
        named = report.rows()[0] if report.causes else dict.fromkeys(("module", "op", "source", "direction"), "–")
        drift = str(report.first.drift or "–") if report.causes else "–"
        lines.append(
            {"candidate": candidate, "setting": setting, "ops named": len(report.causes)}
            | {k: shorten(named[k], 90, placeholder=" …") for k in ("direction", "module", "op", "source")}
            | {"drift": drift, "tensors compared": report.compared}
        )
    return lines
