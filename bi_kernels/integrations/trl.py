"""TRL's trainers on an applied model: the LM head that they fuse, by this package's ops.

apply(model)
trainer = GRPOTrainer(model=model, ...)
use_folded_head(trainer)
trainer.train()
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import MethodType

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import bi_kernels as bi
from bi_kernels.integrations.transformers.gradients import Folds
from bi_kernels.integrations.transformers.layout import current
from bi_kernels.integrations.transformers.replace import apply
from bi_kernels.integrations.transformers.swap import OPS, Swapped
from bi_kernels.tokens import TokenLayout

IGNORED = -100
FUSED = "_fused_forward"  # TRL's name of the forward that it sets
CHUNK = 2**24  # logits that are held for what has no gradient
UNPAIRED = "apo_zero_unpaired"  # KTO's loss of one sequence alone
PAIRED = "DPOTrainer"  # a batch of its: what was chosen of each pair, then what was rejected
SUMMED = (PAIRED, "KTOTrainer", "RLOOTrainer")  # they sum a sequence's logprobs over the width of the batch
GRID = 2.0**-30  # a float64 holds any sum, up to 2**23, of its multiples: no order of addition rounds


def use_folded_head(trainer: Trainer) -> None:
    """Puts our LM head in the place of the one that a TRL trainer fused into its model, and its reference model.

    Call it after the trainer is made and before it trains; `trainer.model` was given to `apply`. A reference model that
    the trainer loaded itself is given to `apply(strict=True)` here. Raises ValueError where there is no such head, and
    what `apply` raises.
    """
    found, reference = list(_fused(getattr(trainer, "model", None))), getattr(trainer, "ref_model", None)
    if not any(isinstance(model, Swapped) for model, _ in found):
        raise ValueError(
            f"use_folded_head: trainer is a {type(trainer).__name__}, expected one of TRL's that fuses its LM head, "
            "made of a model that was given to apply"
        )
    references = list(_fused(reference))
    if reference is not None and not references:
        raise ValueError(
            f"use_folded_head: trainer.ref_model is a {type(reference).__name__} without a head that TRL fused, "
            "expected one that is neither compiled nor wrapped"
        )
    kinds = {kind.__name__ for kind in type(trainer).__mro__}
    loss = getattr(getattr(trainer, "args", None), "loss_type", None)
    if "KTOTrainer" in kinds and loss != UNPAIRED:
        raise ValueError(
            f"use_folded_head: loss_type is {loss!r}, expected {UNPAIRED!r}: KTO's other losses take a mean over each "
            "micro-batch"
        )
    paired, summed = PAIRED in kinds, not kinds.isdisjoint(SUMMED)
    for model, fused in references + found:
        wrapped = model.__dict__.pop("_original_forward", None) is not None  # by Accelerate, in autocast
        if not isinstance(model, Swapped):
            given = model.__dict__.pop("forward")  # no model that `apply` is given has one of its own
            try:
                apply(model, strict=True)
            finally:
                model.forward = given
        forward = _folded(fused, paired, summed)
        model.forward = MethodType(trainer.accelerator.autocast()(forward) if wrapped else forward, model)


def _fused(model: nn.Module | None) -> Iterator[tuple[nn.Module, Callable]]:
    """Yields each module within a model into which TRL fused a head, and the function that is its forward."""
    for module in () if model is None else model.modules():
        given = (module.__dict__.get(name) for name in ("_original_forward", "forward"))  # Accelerate wraps the latter
        forward = getattr(next((f for f in given if f is not None), None), "__func__", None)
        if forward is not None and forward.__code__.co_name == FUSED:
            yield module, forward


def _by_pairs(layout: TokenLayout, batch: int) -> TokenLayout:
    """Returns the layout of a padded batch in whose order each pair's two sequences follow each other."""
    width, pairs = layout.rows // batch, batch // 2
    rows = [start // width for start, _ in layout.spans]
    return TokenLayout(*zip(*layout.spans), layout.rows, [2 * (row % pairs) + row // pairs for row in rows])


class _OnGrid(torch.autograd.Function):
    """Rounds to a multiple of GRID in float64; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x.double() / GRID) * GRID

    @staticmethod
    def backward(ctx, grad):
        return grad.float()


def _folded(fused: Callable, paired: bool, summed: bool) -> Callable:
    """Returns TRL's forward with the head's logprobs by our ops, and all else as it was."""
    told = inspect.getclosurevars(fused).nonlocals
    output = fused.__globals__["FusedCausalLMOutput"]

    def forward(self, *args, fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return told["original_forward"](*args, **kwargs, **{k: v for k, v in given.items() if v is not None})
        if getattr(told["text_config"], "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        call = current()
        if paired and call is not None and call.layout is not None:
            call.layout = _by_pairs(call.layout, call.batch)  # for what checkpointing computes again too
        with nullcontext() if call is None or call.layout is None else call.layout:
            out = getattr(self, told["backbone_attr"])(*args, **kwargs | {"use_cache": False})
            hidden, length = out.last_hidden_state, None
            if shift_labels is None:
                shift_labels, length = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:], labels.shape[1] - 1
            with torch._C.DisableTorchFunction():
                fields = _scored(self, hidden, shift_labels, told)
                if summed:
                    fields["log_probs"] = _OnGrid.apply(fields["log_probs"])
        fields = {name: None if t is None else t[:, :length] for name, t in fields.items()}
        mask = (shift_labels != IGNORED)[:, :length]
        items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        with torch._C.DisableTorchFunction():  # its value alone depends on an order
            loss = -fields["log_probs"].sum() / items
        aux = None
        if kwargs.get("output_router_logits"):
            sizes = told["text_config"].num_experts, told["text_config"].num_experts_per_tok
            with torch._C.DisableTorchFunction():  # it depends on the batch by definition
                aux = load_balancing_loss_func(out.router_logits, *sizes, kwargs.get("attention_mask"))
            loss = loss + getattr(told["text_config"], "router_aux_loss_coef", 0.0) * aux
        return output(loss=loss, **fields, label_mask=mask, aux_loss=aux)

    forward.__signature__ = inspect.signature(fused)  # which `generate` asks for
    return forward


def _scored(model: nn.Module, hidden: Tensor, targets: Tensor, told: dict) -> dict[str, Tensor | None]:
    """Returns what TRL's head does of each token (batch, length), in fp32; 0 where targets are ignored."""
    head, call = model.get_output_embeddings(), current()
    folds, device = Folds() if call is None else call.folds, hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    dtype = torch.float32 if told["cast_lm_head_to_fp32"] else dtype
    hidden, weight, bias = hidden.to(dtype), folds.cast(head.weight, dtype), folds.cast(head.bias, dtype)
    ops, wanted, temperature = head.__dict__.get(OPS, bi), told["outputs"], told["temperature"]
    cap, scale = told["final_logit_softcapping"], told["logit_scale"]

    def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = getattr(ops, "logits", ops.linear)(hidden, weight, *(() if bias is None else (bias,)))
        y = y if scale == 1.0 else y * scale
        return y if cap is None else bi.soft_cap(y, cap)

    if bias is None and cap is None and scale == 1.0:
        logprob, entropy = ops.lm_head_logprob(hidden, weight, targets, temperature)
    else:
        logprob, entropy = bi.token_logprob(logits(hidden, weight, bias), targets, temperature)
    fields = {"log_probs": logprob, "entropy": entropy if "entropy" in wanted else None}
    others = {"log_sum_sq_probs": torch.float32, "mean_logits": torch.float32, "is_top1": torch.bool}
    rest = {name: dtype for name, dtype in others.items() if name in wanted}
    fields |= dict.fromkeys(others) | {name: torch.zeros_like(logprob, dtype=rest[name]) for name in rest}
    with torch.no_grad():
        rows, to = hidden.flatten(0, 1).split(max(1, CHUNK // len(weight))), targets.flatten()
        at = 0
        for part in rows if rest else ():
            z = logits(part, weight.detach(), None if bias is None else bias.detach()).float() / temperature
            chosen, where = to[at : at + len(part)], slice(at, at + len(part))
            found = {
                "mean_logits": lambda z=z: bi.row_sum(z) / z.shape[1],
                "is_top1": lambda z=z, chosen=chosen: z.argmax(-1) == chosen,
                "log_sum_sq_probs": lambda z=z: bi.row_sum((2 * bi.log_softmax(z)).exp()).log(),
            }
            for name in rest:
                fields[name].view(-1)[where] = found[name]().masked_fill(chosen == IGNORED, 0)
            at += len(part)
    return fields
