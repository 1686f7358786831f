"""Parallel strategies that other trainers use, or with one thing exchanged: the audit must flag each."""

import torch
import torch.distributed as dist
from torch import Tensor

import bi_kernels as bi
from bi_kernels.audit.targets.distributed.step import ParallelConfig, ParallelStrategy
from bi_kernels.audit.targets.model import Relation
from bi_kernels.grads import MainGrads
from bi_kernels.ops.logprob import checked_targets
from bi_kernels.parallel.exchange import all_gather_columns, all_gather_rows, exchange, reshard
from bi_kernels.parallel.experts import SharedGroups
from bi_kernels.parallel.sequence import LocalShard
from bi_kernels.parallel.tensor import ExpertParallel, TensorParallel
from bi_kernels.parallel.vocabulary import Head

HERE = __name__


class Summed(torch.autograd.Function):
    """The identity, whose gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx, x: Tensor, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        dist.all_reduce(dy := dy.contiguous(), group=ctx.group)
        return dy, None


class ReducedBackward(TensorParallel):
    """All-reduces the gradient of the input of column-parallel products, as Megatron-LM does."""

    def enter(self, x: Tensor) -> Tensor:
        return Summed.apply(x, self.group) if torch.is_grad_enabled() else x

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return bi.linear(x, weight, bias) if x.shape[-1] == weight.shape[1] else super().linear(x, weight, bias)


class FoldedApart(TensorParallel):
    """Each rank folds a norm's gradient over its own tokens, and an all-reduce adds the folds."""

    def rms_norm(self, x, weight: Tensor, eps: float):
        if not isinstance(x, LocalShard):
            return bi.rms_norm(x, weight, eps)
        count = len(x.mine)
        with bi.TokenLayout([0], [count], count):
            return x._replace(mine=bi.rms_norm(x.mine, Summed.apply(weight, self.group), eps))


class Reduced(TensorParallel):
    """All-reduces the products of columns that the ranks share, as Megatron-LM does."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[-1] == weight.shape[1]:
            return bi.linear(x, weight, bias)
        y = bi.linear(x, exchange(self.group, reshard(weight, self.group)).flatten(0, 1))
        dist.all_reduce(y, group=self.group)
        return y


class Exchanged(TensorParallel):
    """Gathers the ranks' parts in another order."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[-1] == weight.shape[1]:
            return bi.linear(x, weight, bias)
        parts = exchange(self.group, all_gather_rows(x.flatten(0, -2), self.group)).flip(0)
        y = bi.linear(torch.cat([*parts], -1), weight, bias)
        y = exchange(self.group, all_gather_columns(y, self.group), kept=True)
        return y.view(*x.shape[:-1], -1)


class Arriving(TensorParallel):
    """Each rank merges its own blocks of the vocabulary first."""

    def lm_head_logprob(self, hidden, weight, targets, temperature=1.0, ignore_index=-100, keep_bytes=0):
        lead, vocab = targets.shape, weight.cut.rows
        inverse = checked_targets("lm_head_logprob", targets, lead, vocab, temperature, ignore_index, False)
        head = Head(self.group, weight, inverse, ignore_index)
        stats = head.statistics(hidden.flatten(0, -2), targets.reshape(-1))
        before = -(-self.rank * stats.blocks // self.ranks)
        stats.parts = [part.roll(-before, 0).contiguous() for part in stats.parts]
        return tuple(t.view(lead) for t in stats.merge().results(ignore_index))


class ReducedExperts(ExpertParallel):
    """Each rank adds the rows of its own experts, and an all-reduce adds the sums, as expert parallelism often does."""

    def combine(self, y: Tensor, weights: Tensor, groups: SharedGroups) -> Tensor:
        out = bi.combine(y, weights, groups.mine)
        dist.all_reduce(out, group=self.group)
        return out


class ReducedTokens(ExpertParallel):
    """All-reduces the gradients of tokens, each rank's over its own experts."""

    def dispatch(self, x: Tensor, groups: SharedGroups) -> Tensor:
        return bi.dispatch(Summed.apply(x, self.group), groups.mine)


class Mean(MainGrads):
    """Each rank folds its own groups, and an all-reduce takes their mean, as DDP does."""

    def __init__(self, parameters, tied, groups: int, world: dist.ProcessGroup):
        super().__init__(parameters, tied)
        self.world, self.rank, self.ranks = world, dist.get_rank(world), dist.get_world_size(world)
        self.groups = groups

    @property
    def mine(self) -> range:
        return range(self.rank * self.groups // self.ranks, (self.rank + 1) * self.groups // self.ranks)

    def close(self, group: int) -> None:
        pass

    @torch.no_grad()
    def join(self) -> None:
        super().join()
        for p in self.parameters:
            dist.all_reduce(p.main_grad, group=self.world)


class Following(MainGrads):
    """The tree's groups are as many as the ranks."""

    def __init__(self, parameters, tied, groups: int, world: dist.ProcessGroup):
        super().__init__(parameters, tied, groups=dist.get_world_size(world), world=world)
        self.all = groups

    @property
    def mine(self) -> range:
        ranks = self.tree.ranks
        return range(self.tree.rank * self.all // ranks, (self.tree.rank + 1) * self.all // ranks)

    def close(self, group: int) -> None:
        if group == self.mine.stop - 1:
            super().close(self.tree.rank)


OURS, QUICK = ParallelStrategy(), ParallelStrategy(steps=1)
EXPERTS, COMBINED, DISPATCHED = (
    ParallelStrategy(lambda group, tokens, kind=kind: kind(group), forward=forward, steps=steps)
    for kind, forward, steps in ((ExpertParallel, False, None), (ReducedExperts, True, None), (ReducedTokens, False, 1))
)
REDUCED, EXCHANGED, ARRIVING = (ParallelStrategy(ops, forward=True) for ops in (Reduced, Exchanged, Arriving))
MEAN, FOLLOWING = (ParallelStrategy(grads=grads, steps=1) for grads in (Mean, Following))
BACKWARD, APART = (ParallelStrategy(ops, steps=1) for ops in (ReducedBackward, FoldedApart))

TP2, DP2, EP2 = ParallelConfig(2, 1), ParallelConfig(1, 2), ParallelConfig(2, mixture=True, ep=True)
CONTROLS = {  # by name: the strategy, its configuration, and the relation that must flag it
    "tensor parallelism by all-reduce": (f"{HERE}:REDUCED", TP2, Relation.INVARIANCE),
    "a gather with two ranks exchanged": (f"{HERE}:EXCHANGED", TP2, Relation.INVARIANCE),
    "a softmax merged in order of arrival": (f"{HERE}:ARRIVING", TP2, Relation.INVARIANCE),
    "a gradient by all-reduce": (f"{HERE}:BACKWARD", TP2, Relation.GRADIENT),
    "norms folded by each rank": (f"{HERE}:APART", ParallelConfig(2, 1, tokens=True), Relation.GRADIENT),
    "DDP's mean over ranks": (f"{HERE}:MEAN", DP2, Relation.GRADIENT),
    "a tree of the world's size": (f"{HERE}:FOLLOWING", DP2, Relation.GRADIENT),
    "experts' rows added by each rank": (f"{HERE}:COMBINED", EP2, Relation.INVARIANCE),
    "tokens' gradients by all-reduce": (f"{HERE}:DISPATCHED", EP2, Relation.GRADIENT),
}
