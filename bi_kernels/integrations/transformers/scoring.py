"""The logprobs of tokens, for scoring and for a policy's loss, and the loss that the model itself returns."""

import torch
from torch import Tensor, nn

import bi_kernels as bi
from bi_kernels.checks import can_wait
from bi_kernels.integrations.transformers.data_parallel import adopt, check_reached, own
from bi_kernels.integrations.transformers.layout import read
from bi_kernels.integrations.transformers.swap import OPS, causal_lm, check_parts

IGNORED = -100


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """Returns −Σ log p(next token) over num_items_in_batch, the step's, or over the tokens that are not ignored.

    logits (batch, length, vocab), labels (batch, length) as Transformers has them, or shift_labels, shifted already.
    """
    for name, given in (("labels", labels), ("shift_labels", shift_labels)):
        if given is not None and given.shape != logits.shape[:-1]:
            expected = f"{tuple(logits.shape[:-1])}, that of the logits"
            raise ValueError(f"loss: {name} has shape {tuple(given.shape)}, expected {expected}")
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(logits.device).reshape(logits.shape[:-1])
    count = (targets != ignore_index).sum()
    if not bool(count):
        return (logits * 0).sum(dtype=torch.float32)
    logprob, _ = bi.token_logprob(logits, targets, ignore_index=ignore_index)
    items = count if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=count.device)
    return -logprob.sum() / items


def _restarts(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> bool:
    """Tells whether positions begin anew within the tokens of a row's mask, where that can be waited for."""
    if mask is None or positions is None or not mask.shape == positions.shape == ids.shape or not can_wait(ids):
        return False
    seen = mask.bool()
    return bool(((positions[:, 1:] <= positions[:, :-1]) & seen[:, 1:] & seen[:, :-1]).any())


def logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns (log p(next token), entropy), (batch, length) fp32, of an applied model; no logits are held.

    input_ids (batch, length); padded by attention_mask (batch, length), or packed in one row by cu_seqlens
    (sequences + 1,), or by position_ids that restart. Both are 0 after a sequence's last token, and for padding. They
    have a gradient where one is wanted. Raises ValueError for a model that was not given to `apply`.
    """
    owner, head = causal_lm(model)
    if owner is not None:
        check_parts("logprobs", owner)
    if head is None:
        raise ValueError(
            f"logprobs: model is a {type(model).__name__}, expected a causal language model that apply(model) "
            "replaced whole, with a head without bias"
        )
    if hasattr(head.weight, "placements"):
        raise ValueError(
            "logprobs: model's weights are DTensors, expected whole ones: give fully_shard, last, a module whose "
            "forward calls logprobs"
        )
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"logprobs: input_ids is a {type(input_ids).__name__}, expected a torch.Tensor (batch, length)")
    if input_ids.dim() != 2:
        raise ValueError(f"logprobs: input_ids has shape {tuple(input_ids.shape)}, expected (batch, length)")
    if input_ids.is_floating_point():
        raise TypeError(f"logprobs: input_ids has dtype {input_ids.dtype}, expected integers")
    if not input_ids.numel():
        raise ValueError(f"logprobs: input_ids has shape {tuple(input_ids.shape)}, expected a token or more")
    if _restarts(input_ids, attention_mask, position_ids):
        raise ValueError(
            "logprobs: position_ids restart among the tokens of attention_mask, which would be one sequence; expected "
            "no attention_mask for a packed row, or cu_seqlens in its place"
        )
    call = read(input_ids, attention_mask, position_ids, cu_seqlens=cu_seqlens)
    sharded, ddp = adopt(owner) if torch.is_grad_enabled() and not torch.compiler.is_compiling() else ([], None)
    call.folds.is_watched = ddp is not None and ddp.find_unused_parameters
    targets = call.next_tokens(input_ids, IGNORED)
    positions = call.positions() if position_ids is None else position_ids
    with call:
        base = owner.base_model
        hidden = base(input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False)[0]
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        if not bool((targets != IGNORED).any()):
            none = (hidden * 0).sum(-1, dtype=torch.float32)
            scores = none, none.clone()
        else:
            weight = call.folds.cast(head.weight, hidden.dtype)
            scores = head.__dict__.get(OPS, bi).lm_head_logprob(hidden, weight, targets, temperature)
    own(sharded)
    if ddp is not None:
        check_reached(ddp, call.folds.parameters.values(), scores)
    call.folds.attach(scores)
    return scores
