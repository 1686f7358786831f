"""A loss whose weight of a token does not depend on the micro-batch that holds it."""

import torch
from torch import Tensor


def policy_loss(
    logprob: Tensor, old: Tensor, advantages: Tensor, active: Tensor, denominator: int, clip: float = 0.2
) -> Tensor:
    """Returns GRPO's clipped loss of the tokens of one micro-batch; Shao et al., arXiv 2402.03300, without its KL term.

    logprob, old, advantages: (…) fp32 of each token, under the policy and under that which sampled it; active: (…)
    bool, the tokens that count; denominator: how many of them the whole step has, so that no split changes a weight.
    """
    ratio = (logprob - old).exp()
    gained = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -gained.masked_fill(~active, 0).sum() / denominator
