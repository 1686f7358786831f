"""Tensor and expert parallelism that gather where others reduce: each element's sum is one fold, on one rank.

Every weight is cut along its output rows, so a rank computes whole sums of some columns (products.py), and a mixture
between its experts (experts.py). Attention, RoPE and QK-norm work on the rank's heads; norms, residuals and routers are
the same on every rank, or norms and residuals of its tokens (sequence.py). Expert parallelism cuts mixtures alone.

    mesh = torch.distributed.init_device_mesh("cuda", (8,))
    model = Decoder(config, device="cuda", ops=TensorParallel(mesh.get_group()))
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor, nn

from bi_kernels.checks import check_plain
from bi_kernels.contract import EPS, VERSION, check_dtype
from bi_kernels.ops import activations, embedding, lm_head, logprob, norm, rope
from bi_kernels.ops.attention.attention import attention
from bi_kernels.ops.gemm.gemm import linear
from bi_kernels.ops.grouped import rows as grouped
from bi_kernels.ops.grouped.grouped_linear import grouped_linear
from bi_kernels.ops.grouped.groups import Groups, group_by_expert
from bi_kernels.ops.grouped.top_k import top_k
from bi_kernels.ops.rows import softmax
from bi_kernels.parallel import vocabulary
from bi_kernels.parallel.exchange import gather_columns, merge, own, shard_columns, shard_tokens, shards
from bi_kernels.parallel.experts import Combine, Dispatch, SharedGroups, shared_groups
from bi_kernels.parallel.products import ColumnParallelLinear, GatheredLinear, HeadNorm, linear_of_parts
from bi_kernels.parallel.sequence import LocalShard, all_tokens, local_shard, normed, plan_of
from bi_kernels.parallel.tree import agree
from bi_kernels.scalars import check_flag, integer_of, truncated_repr
from bi_kernels.tokens import SLAB, TokenLayout, layout_for


class ShardSpec(NamedTuple):
    """The rows of a whole weight that a rank holds: first … end of `rows`."""

    first: int
    end: int
    rows: int


class ShardedParameter(nn.Parameter):
    """This rank's rows of a weight; a copy keeps `cut`."""

    cut: ShardSpec

    def __deepcopy__(self, memo):
        found = super().__deepcopy__(memo)
        found.__class__, found.cut = ShardedParameter, self.cut
        return found


class ParallelInput(NamedTuple):
    """The input x of several products: whole, and this rank's tokens of it, whose gradients are added before they are
    gathered."""

    whole: Tensor
    part: Tensor
    cuts: list[slice]  # the tokens of each rank


class ExpertParallel:
    """The ops of bi_kernels for mixtures whose experts are shared over the ranks of a group: the `ops` of a Decoder.

    Every rank passes the same tokens, wants gradients of the same weights, and gets the results and bits of one GPU.
    All weights but experts are whole on every rank. Raises ValueError for a group that this rank is not in, and where
    ranks differ in versions.
    """

    name, sequence = "ExpertParallel", False
    add_rms_norm, rms_norm, qk_norm = map(staticmethod, (norm.add_rms_norm, norm.rms_norm, norm.qk_norm))
    attention, linear, rope = map(staticmethod, (attention, linear, rope.rope))
    embedding, lm_head_logprob = staticmethod(embedding.embedding), staticmethod(lm_head.lm_head_logprob)
    gated, swiglu = staticmethod(activations.gated), staticmethod(activations.swiglu)
    softmax, token_logprob, top_k = map(staticmethod, (softmax, logprob.token_logprob, top_k))

    def __init__(self, group: dist.ProcessGroup):
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError(
                f"{self.name}: group is {truncated_repr(group)}, expected a process group that this rank is in, as "
                "mesh.get_group() or torch.distributed.group.WORLD"
            )
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.agree({"torch": torch.__version__, "Triton": triton.__version__, "contract": VERSION})

    def __deepcopy__(self, memo) -> "ExpertParallel":
        return self  # a copied model has the same ranks

    def agree(self, said: dict[str, object]) -> None:
        """Raises ValueError, on every rank, where a rank's values differ from rank 0's."""
        agree(self.name, self.group, said)

    def cut(self, shape: tuple[int, ...], together: int | None = 1, keys: bool = False) -> ShardSpec | None:
        """Returns this rank's experts of weights (experts, …), None for a weight that is whole on every rank. Raises
        ValueError where the ranks cannot share them."""
        if len(shape) < 3:
            return None
        return self._rows(shape[0], f"{shape[0]} experts")

    def _rows(self, rows: int, what: str) -> ShardSpec:
        if rows % self.ranks:
            raise ValueError(f"{self.name}: {what}, expected a multiple of {self.ranks} ranks")
        mine = own(rows // self.ranks, self.group)
        return ShardSpec(mine.start, mine.stop, rows)

    def share(self, weight: Tensor, together: int | None = 1, keys: bool = False) -> nn.Parameter:
        """Returns this rank's rows of a weight or a bias, all of one that is not cut; see `cut`."""
        if check_plain(self.name, "weight", weight) or not weight.dim():
            raise ValueError(
                f"{self.name}: weight is {truncated_repr(weight)} of {weight.dim()} dimensions, expected rows"
            )
        check_dtype(self.name, "weight", weight)
        if (cut := self.cut(weight.shape, together, keys)) is None:
            return nn.Parameter(weight.detach().clone())
        shared = ShardedParameter(weight[cut.first : cut.end].detach().clone())
        shared.cut = cut
        return shared

    @torch.no_grad()
    def whole(self, weight: Tensor, mine: Tensor | None = None) -> Tensor:
        """Returns a shared weight whole on every rank, any other as it is. mine: a tensor of the weight's rows to
        gather instead, such as its gradient."""
        cut, mine = getattr(weight, "cut", None), weight.detach() if mine is None else mine
        if cut is None:
            return mine
        found = mine.new_zeros(cut.rows, *mine.shape[1:])
        found[cut.first : cut.end] = mine
        return merge(found, self.group)

    def _part(self, x: Tensor) -> tuple[Tensor, list[slice]]:
        flat = x.reshape(-1, x.shape[-1])
        cuts = shards(len(flat), self.group)
        return shard_tokens(flat, cuts, self.group), cuts

    def _split(self) -> bool:
        """Tells whether norms get a rank's own tokens now."""
        return self.sequence and self.ranks > 1 and torch.is_grad_enabled()

    def group_by_expert(
        self, expert_ids: Tensor, experts: int, layout: TokenLayout | None = None, *, padded: bool = False
    ) -> Groups | SharedGroups:
        """Returns the rows of this rank's experts: see `group_by_expert`."""
        if self.ranks == 1:
            return group_by_expert(expert_ids, experts, layout, padded=padded)
        self._rows(experts, f"{experts} experts")
        return shared_groups(self.group, expert_ids, experts, layout, padded)

    def dispatch(self, x: Tensor | ParallelInput, groups: Groups | SharedGroups) -> Tensor:
        """Returns the rows of the inputs of this rank's experts, of x (…, features)."""
        part, cuts, x = (x.part, x.cuts, x.whole) if isinstance(x, ParallelInput) else (None, None, x)
        if not isinstance(groups, SharedGroups):
            return grouped.dispatch(x, groups)
        if grouped.check_dispatch(x, groups.mine) and groups.places.shape[1] > 1:
            raise ValueError(f"dispatch: x has shape {tuple(x.shape)}, expected a row for each token")
        if part is None and torch.is_grad_enabled() and x.requires_grad:
            part, cuts = self._part(x)
        return Dispatch.apply(self.group, groups, cuts, part, x.detach().reshape(-1, x.shape[-1]))

    @staticmethod
    def grouped_linear(x: Tensor, weight: Tensor, groups: Groups | SharedGroups, bias: Tensor | None = None) -> Tensor:
        """Returns grouped_linear of this rank's experts."""
        return grouped_linear(x, weight, groups.mine if isinstance(groups, SharedGroups) else groups, bias)

    def combine(self, y: Tensor, weights: Tensor, groups: Groups | SharedGroups) -> Tensor | LocalShard:
        """Returns the weighted sum of each token's rows of all ranks, weights (…, k)."""
        if not isinstance(groups, SharedGroups):
            return grouped.combine(y, weights, groups)
        if weights is None:
            raise ValueError("combine: weights is None, expected (..., k) where ranks share experts")
        grouped.check_combine(y, weights, groups.mine)
        lead, (tokens, k) = weights.shape[:-1], groups.places.shape
        plan = plan_of(layout_for("sequence parallelism", lead), self.group, y.device) if self._split() else None
        cuts = plan.tokens if plan else shards(tokens, self.group) if tokens > SLAB else None
        out = Combine.apply(self.group, groups, cuts, plan is None, y, weights.reshape(tokens, k))
        return LocalShard(out, lead, plan) if plan else out.view(*lead, y.shape[1])


class TensorParallel(ExpertParallel):
    """The ops of bi_kernels for all weights cut over the ranks of a group, experts too: the `ops` of a Decoder.

    Every rank passes the same tokens, wants gradients of the same weights, and gets the results and bits of one GPU. A
    weight that was not shared is whole on every rank. sequence=True computes norms and residuals of a rank's own tokens
    alone where gradients are wanted, which saves memory and changes no bit. Raises ValueError for a group that this
    rank is not in, and where ranks differ in versions or in `sequence`.
    """

    name = "TensorParallel"

    def __init__(self, group: dist.ProcessGroup, sequence: bool = False):
        super().__init__(group)
        self.sequence = check_flag("TensorParallel", "sequence", sequence)
        self.agree({"sequence": sequence})

    def cut(self, shape: tuple[int, ...], together: int | None = 1, keys: bool = False) -> ShardSpec:
        """Returns this rank's rows of a weight or a bias of a shape, its experts of (experts, …).

        together: rows that stay together, as those of a head; None cuts a vocabulary between its blocks, maybe
        unevenly. keys: the heads may be fewer than the ranks. Raises ValueError where the ranks cannot share it.
        """
        if together is not None and integer_of("TensorParallel", "together", together) < 1:
            raise ValueError(f"TensorParallel: together is {truncated_repr(together)}, expected at least 1, or None")
        check_flag("TensorParallel", "keys", keys)
        if len(shape) > 2:
            return super().cut(shape)
        rows, sums = shape[0], shape[1] if len(shape) > 1 else 0
        heads, ranks = rows // (together or 1), self.ranks
        for name, size in (("columns", sums), ("rows", rows if together else 0)):
            if size % ranks:
                raise ValueError(
                    f"TensorParallel: a weight of shape {tuple(shape)} has {size} {name}, expected a multiple "
                    f"of {ranks} ranks"
                )
        if together is None:
            return ShardSpec(*vocabulary.share(rows, self.rank, ranks), rows)
        if heads % ranks and not (keys and ranks % heads == 0):
            allowed = "a multiple or a divisor" if keys else "a multiple"
            raise ValueError(f"TensorParallel: {heads} {'key ' * keys}heads, expected {allowed} of {ranks} ranks")
        return self._rows(rows, f"{rows} rows")

    def keys(self, heads: int) -> "TensorParallel | _WholeKeys":
        """Returns the ops of keys, values and attention of so many key heads."""
        return self if heads >= self.ranks else _WholeKeys(self)

    def rms_norm(self, x: Tensor | LocalShard, weight: Tensor, eps: float = EPS) -> Tensor | LocalShard:
        """Returns rms_norm, of this rank's tokens alone for a LocalShard."""
        if not isinstance(x, LocalShard):
            return norm.rms_norm(x, weight, eps)
        return normed("rms_norm", self.group, x, None, weight, eps)

    def add_rms_norm(
        self, x: Tensor | LocalShard, residual: Tensor | LocalShard, weight: Tensor, eps: float = EPS
    ) -> tuple:
        """Returns add_rms_norm, of this rank's tokens alone for a LocalShard."""
        if not isinstance(x, LocalShard):
            return norm.add_rms_norm(x, residual, weight, eps)
        return normed("add_rms_norm", self.group, x, residual, weight, eps)

    def enter(self, x: Tensor | LocalShard) -> Tensor | ParallelInput:
        """Returns x for several products and nothing else: their gradients are added as on one rank, and gathered
        once."""
        if isinstance(x, LocalShard):
            whole = all_tokens(x, self.group)
            return ParallelInput(whole, x.mine, x.plan.tokens) if x.mine.requires_grad else whole
        if self.ranks == 1 or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return ParallelInput(x, *self._part(x))

    def leave(self, x: Tensor | LocalShard) -> Tensor:
        """Returns x whole, as it leaves the layers."""
        return all_tokens(x, self.group) if isinstance(x, LocalShard) else x

    def key_heads(self, heads: int) -> int:
        """Returns a rank's number of key heads: its share, or all of fewer than ranks."""
        return heads // self.ranks if heads >= self.ranks else heads

    def linear(self, x: Tensor | ParallelInput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns this rank's columns of y for x (…, K), and y whole for this rank's columns of x; as on one rank for a
        weight that was not shared."""
        part, cuts, x = (x.part, x.cuts, x.whole) if isinstance(x, ParallelInput) else (None, None, x)
        if self.ranks == 1 or not hasattr(weight, "cut"):
            return linear(x, weight, bias)
        (rows, K), lead, given = weight.shape, x.shape[:-1], x.shape[-1]
        of_weight = any(t is not None and t.requires_grad for t in (weight, bias))
        trains = torch.is_grad_enabled() and (of_weight or x.requires_grad or part is not None)
        if given == K and not trains or given not in (K, K // self.ranks):
            return linear(x, weight, bias)
        if not trains and not self._split():
            return linear_of_parts(self.group, x.reshape(-1, given), weight, bias).view(*lead, rows * self.ranks)
        flat, layout = x.reshape(-1, given), layout_for("linear", lead, of_weight)
        if given == K:
            part, cuts = self._part(x) if part is None else (part, cuts)
            y = ColumnParallelLinear.apply(self.group, layout, cuts, part, flat.detach(), weight, bias)
            return y.view(*lead, rows)
        plan = None
        if self._split():
            plan = plan_of(layout_for("sequence parallelism", lead), self.group, x.device)
        y = GatheredLinear.apply(self.group, layout, plan and plan.tokens, flat, weight, bias)
        return LocalShard(y, lead, plan) if plan else y.view(*lead, rows * self.ranks)

    def qk_norm(self, x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
        """Returns qk_norm of this rank's heads (…, heads, head_dim); dweight sums over all ranks' heads."""
        if self.ranks == 1 or not (torch.is_grad_enabled() and weight.requires_grad):
            return norm.qk_norm(x, weight, eps)
        return HeadNorm.apply(self.group, layout_for("qk_norm", x.shape[:-2]), x.shape[-2], x, weight, eps)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **given) -> tuple[Tensor, Tensor]:
        """Returns attention of this rank's heads."""
        return attention(q, k, v, **given)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable) -> tuple[Tensor, Tensor | None]:
        """Returns attention of this rank's heads by another function of q, k and v."""
        return attend(q, k, v)

    def of_one_key_head(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable) -> tuple[Tensor, Tensor | None]:
        """Returns attention of this rank's heads, which share a key head with other ranks' heads.

        With gradients, all heads that share it are computed, since a key's gradient is one sum over them. attend(q, k,
        v) returns the output, and the LSE or None.
        """
        together, heads = self.ranks // k.shape[-2], q.shape[-2]  # ranks that share a head
        first = self.rank // together * together
        key = slice(self.rank // together, self.rank // together + 1)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))):
            return attend(q, k[..., key, :], v[..., key, :])
        width = q.shape[-1]
        cut = lambda t, columns, kept: shard_columns(t.flatten(-2).flatten(0, -2), columns, self.group, kept)
        columns = lambda s: slice(s.start * width, s.stop * width)
        k, v = (cut(t, columns(key), slice(None, None, together)).view(*t.shape[:-2], 1, width) for t in (k, v))
        every = gather_columns(q.flatten(-2).flatten(0, -2), self.group).view(*q.shape[:-2], -1, width)
        out, lse = attend(every[..., first * heads : (first + together) * heads, :], k, v)
        at, ranks = (self.rank - first) * heads, slice(first, first + together)
        mine, own_heads = cut(out, columns(slice(at, at + heads)), ranks), slice(at, at + heads)
        if lse is not None:
            lse = shard_columns(lse.flatten(0, -2), own_heads, self.group, ranks).view(q.shape[:-1])
        return mine.view(q.shape), lse

    def embedding(self, ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor | LocalShard:
        """Returns the embedding of a weight that is cut between blocks of the vocabulary."""
        found = vocabulary.embedding(self.group, ids, weight, padding_id)
        return local_shard(found, self.group) if self._split() else found

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Returns all logits of an LM head that is cut between blocks of the vocabulary."""
        return vocabulary.logits(self.group, hidden, weight)

    def lm_head_logprob(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        keep_bytes: float = 0,
    ) -> tuple[Tensor, Tensor]:
        """Returns lm_head_logprob of a weight that is cut between blocks of the vocabulary; no logits are kept."""
        return vocabulary.lm_head_logprob(self.group, hidden, weight, targets, temperature, ignore_index, keep_bytes)


class _WholeKeys:
    """The ops of keys and values of fewer heads than ranks: weights are cut within a head, results are whole."""

    qk_norm = staticmethod(norm.qk_norm)

    def __init__(self, parallel: TensorParallel):
        self.parallel = parallel

    def linear(self, x: Tensor | ParallelInput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.parallel.linear(x, weight, bias)
        return gather_columns(y.flatten(0, -2), self.parallel.group).view(*y.shape[:-1], -1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **given) -> tuple[Tensor, Tensor]:
        return self.attend(q, k, v, lambda *qkv: attention(*qkv, **given))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable) -> tuple[Tensor, Tensor | None]:
        return self.parallel.of_one_key_head(q, k, v, attend)
