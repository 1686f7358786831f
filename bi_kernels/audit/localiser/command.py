"""What `bi-audit locate` runs."""

from pathlib import Path

import torch
from torch import nn

from bi_kernels.audit.findings import sentence
from bi_kernels.audit.localiser.locate import against as compare_with
from bi_kernels.audit.localiser.locate import locate, record
from bi_kernels.audit.localiser.report import Report
from bi_kernels.audit.targets.candidates import load


def built(spec: str) -> tuple:
    """Returns (model, batch) or (model, batch, loss) of a candidate; ValueError for anything else."""
    function = load(spec)
    try:
        found = function()
    except Exception as error:
        raise ValueError(f"candidate {spec!r} raised {sentence(error)}") from None
    if (
        not isinstance(found, tuple)
        or len(found) not in (2, 3)
        or not (isinstance(found[0], nn.Module) or callable(found[0]))
    ):
        raise ValueError(
            f"candidate {spec!r} returned {type(found).__name__}, expected (model, batch) or (model, batch, loss)"
        )
    return found


def run(
    spec: str,
    layouts: list[str],
    modes: list[str],
    backward: bool,
    out: Path | None,
    to: Path | None,
    other: Path | None,
    seed: int,
) -> Report | str:
    """Returns the report, or a sentence on the recording."""
    torch.manual_seed(seed)
    model, batch, *loss = built(spec)
    options = {"loss": loss[0] if loss else None, "backward": backward, "seed": seed}
    if to:
        made = record(model, batch, (layouts or ["batch"])[0], to, **options)
        return f"recorded {made.tokens.count} token{'s' * (made.tokens.count != 1)} of {made.layout} in {to}"
    if other:
        return compare_with(model, batch, (layouts or ["batch"])[0], other, **options)
    return locate(model, batch, layouts, modes=modes, folder=out, **options)
