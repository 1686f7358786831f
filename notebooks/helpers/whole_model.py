"""Shows how much of a whole model's tensors differ, layout by layout."""

from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import grouped
from bi_kernels.audit.targets.decoder import DecoderTarget
from bi_kernels.audit.targets.model import layout_rows
from helpers import torch_ops

Drifts = dict[str, dict[str, Drift]]  # by layout and tensor


def stock(session) -> Drifts:
    """Returns the drifts of a decoder of stock ops in bf16, whose gradients PyTorch leaves in `.grad`, added up in fp32
    over micro-batches."""
    target = DecoderTarget(session, "bf16", "stock_layers", torch_ops)
    for _ in layout_rows(target):
        pass
    return target.drifts


def rescored(lines: list[dict]) -> str:
    """Says how many generated tokens have another logprob once they are scored again; lines: a model each, ours and
    stock's."""
    of = lambda mine: f"{sum(x['logprobs that differ'] for x in mine):,} of {sum(x['tokens'] for x in mine):,}"
    ours = [line for line in lines if line["model"].startswith("bi_kernels")]
    stock = [line for line in lines if line not in ours]
    return f"Rescoring changes the logprobs of {of(ours)} generated tokens; in stock PyTorch of {of(stock)}."


def shares(drifts: Drifts) -> dict[str, dict[str, float]]:
    """Returns {layout: {kind of tensor: share of its elements that differ}}; a kind's names end alike."""
    found = {}
    for layout, each in drifts.items():
        kinds = grouped(each, lambda name: name.rpartition(".")[2])
        found[layout] = {kind: _share([each[name] for name in names]) for kind, names in kinds.items()}
    return found


def gradient_shares(drifts: Drifts) -> dict[str, float]:
    """Returns {layout: share of the gradients' elements that differ}, of layouts that have gradients."""
    gradients = {layout: [d for name, d in each.items() if name != "logprob"] for layout, each in drifts.items()}
    return {layout: _share(each) for layout, each in gradients.items() if each}


def _share(drifts: list[Drift]) -> float:
    return sum(d.mismatches for d in drifts) / sum(d.elements for d in drifts)


def applied(reports: list[tuple]) -> list[dict]:
    """Returns a line for each model: what `apply` reported."""
    return [
        {
            "model": name,
            "modules replaced": len(report.replaced),
            "left": len(report.left),
            "containers": len(report.containers),
            "parameters folded": len(report.folded),
            "others": len(report.others),
            "why left": "; ".join(f"{n or 'the model'}: {why}" for n, why in report.left.items()) or "–",
        }
        for name, report in reports
    ]
