"""Judges one family: what `apply` says of a tiny model, and what the bits say."""

import time
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bi_kernels.audit.targets import tiny_families as tiny
from bi_kernels.contract import DTYPES
from bi_kernels.integrations.transformers import apply, restore
from bi_kernels.integrations.transformers import check as bits

SAME = 2.0**-10  # of the largest logit: in fp32, a layout that means the same differs by less
NEW = 3  # tokens that are generated


def _ids(device: str, lengths: tuple[int, ...] = bits.LENGTHS) -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    return [torch.randint(1, tiny.VOCABULARY, (n,), generator=g).to(device) for n in lengths]


@torch.no_grad()
def meant(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Returns (the layouts in which a stock model in fp32 computes what it computes for a sequence alone, why each of
    the others is not asked)."""
    ids = _ids(str(model.device))
    alone = [bits.by_sequence(model, [s], left=False)[0] for s in ids]
    most = max(float(y.abs().max()) for y in alone)
    asked, why = [], {}
    for layout, compute in bits.LAYOUTS.items():
        try:
            found = compute(model, ids)
        except Exception as error:
            why[layout] = bits.sentence(error)
            continue
        off = max((float((a - b).abs().nan_to_num(1e9).max()) for a, b in zip(found, alone)), default=None)
        if off is None:
            why[layout] = "not there"
        elif off > SAME * most:
            why[layout] = f"stock, in fp32, differs by {off / most:.1g} of the largest logit"
        else:
            asked.append(layout)
    return asked, why


@torch.no_grad()
def _generated(model: nn.Module, ids: list[Tensor]) -> list[Tensor]:
    """Returns the tokens and the logits that a batch generates greedily, a row a sequence."""
    given, _ = bits.padded(ids, left=True)
    given = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(**given, **how, output_logits=True, pad_token_id=0)
    logits = torch.stack(out.logits, 1).float()
    return [torch.cat([s[-NEW:, None].float(), y], 1) for s, y in zip(out.sequences, logits)]


def generates(model: nn.Module, ids: list[Tensor]) -> bits.Check:
    """Compares what a left-padded batch generates with each sequence alone, tokens and logits."""
    name = "generated in a batch against alone"
    try:
        alone = [_generated(model, [s])[0] for s in ids]
        return bits.compare(name, dict(enumerate(_generated(model, ids))), dict(enumerate(alone)))
    except Exception as error:
        return bits.Check(name, False, error=bits.sentence(error))


def _remembered(model: nn.Module, ids: list[Tensor]) -> dict[str, Tensor]:
    """Returns every result and gradient of a right-padded step."""
    for p in model.parameters():
        p.grad = None
    y = torch.cat([t.flatten() for t in bits.by_sequence(model, ids, left=False)])
    y.float().square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return found | {"": y.detach()}


def judge(
    name: str, device: str = "cpu", dtypes: Sequence[str] = ("fp32", "bf16"), generating: Sequence[str] = ("bf16",)
) -> dict:
    """Returns a row of the table: a family, what `apply` says, what the bits say, and why.

    In fp32 no rounding hides the last bits of a sum. generating: dtypes in which the model also generates.
    """
    began, row = time.monotonic(), {"family": name, "model": tiny.families()[name], "checks": [], "restored": True}
    for said, dtype in ((said, DTYPES[said]) for said in dtypes):
        try:
            if "not asked" not in row:
                asked, row["not asked"] = meant(tiny.built(name, dtype=torch.float32).to(device))
            model = tiny.built(name, dtype=dtype).to(device)
            before = _remembered(model, _ids(device))
        except Exception as error:
            return row | {"why": f"stock Transformers {bits.sentence(error)}"}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = apply(model)
            found = bits.check(model, asked)
            if said in generating and {"padded left", "decoded"} <= {*asked}:
                found.append(generates(model, _ids(device, (5, 12))))
            restore(model)
        except Exception as error:
            return row | {"why": f"apply {bits.sentence(error)}"}
        row["checks"] += [vars(c) | {"dtype": str(dtype).removeprefix("torch.")} for c in found]
        row["restored"] &= not bits.compare("", _remembered(model, _ids(device)), before).differ
    fails = [c for c in row["checks"] if c["differ"] or c["error"]]
    row |= {"report": str(report), "says": [report.batch_invariant, report.split_invariant]}
    row |= {"mixture": tiny.is_mixture(model), "bits": [all(c["gradient"] for c in fails), not fails]}
    return row | {"seconds": round(time.monotonic() - began, 1)}


def agree(row: dict) -> bool:
    """Tells whether what `apply` says of a family is what the bits say: a yes keeps them, a NO does not."""
    holds = all(keeps or not says for says, keeps in zip(row["says"], row["bits"]))
    return holds and all(row["says"]) == all(row["bits"]) and row["restored"]
