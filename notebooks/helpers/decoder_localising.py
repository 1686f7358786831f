"""Locates the first op that drifts in a decoder of stock ops and in ours."""

from textwrap import shorten

import torch

import bi_kernels
from bi_kernels.audit import locate
from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import LOCALISER
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.localiser.report import Report
from bi_kernels.audit.targets.decoder import DecoderTarget
from bi_kernels.audit.timing import GPU
from helpers import torch_ops

SETTINGS = {  # the layouts of each, the tokens of its sequences at tiny shapes and at real ones
    "one sample a call": (("batch", "singles"), (5, 1, 17, 9), (37, 1, 300, 513, 129, 64)),
    "decode against prefill": (("singles", "decode"), (5, 9), (24, 9)),
    "micro-batches": (("batch", "micro_batches"), (5, 1, 17, 9), (37, 1, 300, 513, 129, 64)),
}


def located(session) -> dict[tuple[str, str], Report]:
    """Returns the localiser's reports on ours and on stock ops in every setting, by candidate and setting; records that
    it names no op of ours."""
    out, tiny = {}, session.parameters["shapes"] == "tiny"
    for candidate, ops in (("bi_kernels", bi_kernels), ("torch", torch_ops)):
        target = DecoderTarget(session, "bf16", "control_layers", ops, checkpointing=False).without_main_grad()
        for setting, (layouts, small, large) in [*SETTINGS.items()][: 1 if session.quick else None]:
            small = small[-2:] if session.quick else small
            g = generator(session.device, session.parameters["seed"], setting)
            draw = lambda n: torch.randint(0, target.model.config.vocab, (n,), generator=g, device=session.device)
            batch = [draw(n) for n in (small if tiny else large)]
            # stock is expected to drift, and its scripts hold its weights: bi-audit locate writes them on request
            folder = session.out / "repro" / setting.replace(" ", "-") if session.out and ops is bi_kernels else None
            report = out[candidate, setting] = locate(target.model, batch, layouts, rounds=1, folder=folder)
            if ops is bi_kernels:
                said = {"against": " and ".join(report.layouts), "tensor": "tensors of its ops", "rows": report.tokens}
                said |= {"detail": f"it names {report.rows()[0]['op']}" if report.causes else ""}
                drift = Drift(len(report.causes), report.compared)
                session.add([target.row(LOCALISER, f"localiser, {setting}", drift, **said)])
    return out


def cost(session) -> dict[str, float]:
    """Returns the localiser's cost at the audit's own step, of fewer layers: a traced step over a plain one, the
    larger of packed and micro-batches; bytes of digests over those of activations."""
    target = DecoderTarget(session, "bf16", "stock_layers", checkpointing=False).without_main_grad()
    with GPU.alone():
        batch = [*target.ids.split(target.lengths)]
        report = locate(target.model, batch, ("packed", "micro_batches"), rounds=1, measure=True)
    return {"time": report.overhead, "digests": report.digest_share}


def table(found: dict[tuple[str, str], Report]) -> list[dict]:
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
