"""Tensor parallelism that gathers where others reduce: each element's sum is one fold, on one rank.

Every weight is cut along its output rows, so a rank has some columns of a product, whole. What the next product sums
over is gathered first. Backward, the same: dX = dY W sums over the columns of all ranks, so dY is gathered, the weight
is exchanged for all rows of the rank's share of columns, and each rank folds its share of dX; dW and dbias are the
rank's own, and are computed while the others are on their way. Attention, RoPE and QK-norm work on the rank's heads;
norms and residuals are the same on every rank.

    mesh = torch.distributed.init_device_mesh("cuda", (8,))
    model = Decoder(config, device="cuda", ops=TensorParallel(mesh.get_group()))
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bi_kernels.checks import aligned
from bi_kernels.contract import EPS, VERSION
from bi_kernels.ops import elementwise, logprob, norm, rope
from bi_kernels.ops.attention.attention import attention
from bi_kernels.ops.gemm.gemm import fold_bias, fold_weight, linear, product
from bi_kernels.parallel import vocabulary
from bi_kernels.parallel.exchange import Part, Whole, beside, gathering, merge, own, recutting
from bi_kernels.parallel.tree import agree
from bi_kernels.tokens import layout_for, main_grad

PIECE, PIECES = 1024, 4  # tokens that a product is cut at, the least and into how many: the next is on its way


class Cut(NamedTuple):
    """Which rows of a whole weight a rank holds: first … end of `rows`."""

    first: int
    end: int
    rows: int


class TensorParallel:
    """The ops of bi_kernels for weights that are cut over the ranks of a group, to be given to a Decoder as its `ops`.

    group: the default one, or a mesh's. Every rank gives the same tokens, and gets the same results, with the bits that
    one GPU has. Raises ValueError where the ranks' versions differ.
    """

    rms_norm, add_rms_norm = staticmethod(norm.rms_norm), staticmethod(norm.add_rms_norm)
    swiglu, token_logprob = staticmethod(elementwise.swiglu), staticmethod(logprob.token_logprob)
    rope = staticmethod(rope.rope)

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.keys: TensorParallel | _WholeKeys = self  # the ops of keys and values
        self._last: tuple[Tensor | None, Tensor | None] = None, None
        self.agree({"torch": torch.__version__, "Triton": triton.__version__, "contract": VERSION})

    def agree(self, said: dict[str, object]) -> None:
        """Raises ValueError, on every rank, where a rank says something else than rank 0."""
        agree("TensorParallel", self.group, said)

    def cut(self, shape: tuple[int, ...], together: int | None = 1) -> Cut:
        """Returns which rows of a weight or a bias of a shape this rank has. together: rows that belong together, as
        those of a head; None: of a vocabulary, which is cut between its blocks, of which the ranks may have different
        numbers. Raises ValueError where the ranks cannot share it."""
        rows, sums = shape[0], shape[1] if len(shape) > 1 else 0
        heads = rows // (together or 1)
        if sums % self.ranks or together and rows % self.ranks:
            raise ValueError(
                f"TensorParallel: a weight has shape {tuple(shape)}, expected multiples of {self.ranks} ranks"
            )
        if together is None:
            return Cut(*vocabulary.share(rows, self.rank, self.ranks), rows)
        if heads % self.ranks and self.ranks % heads:
            raise ValueError(f"TensorParallel: {heads} heads, expected a multiple or a divisor of {self.ranks} ranks")
        mine = own(rows // self.ranks, self.group)
        return Cut(mine.start, mine.stop, rows)

    def share(self, weight: Tensor, together: int | None = 1) -> nn.Parameter:
        """Returns this rank's rows of a weight or a bias; see `cut`."""
        cut = self.cut(weight.shape, together)
        if together and cut.rows // together < self.ranks:
            self.keys = _WholeKeys(self)
        shared = nn.Parameter(weight[cut.first : cut.end].detach().clone())
        shared.cut = cut
        return shared

    @torch.no_grad()
    def whole(self, weight: Tensor, mine: Tensor | None = None) -> Tensor:
        """Returns a shared weight as it was before it was cut, on every rank, another one as it is; mine: what has the
        weight's rows, as its gradient, itself unless given."""
        cut, mine = getattr(weight, "cut", None), weight.detach() if mine is None else mine
        if cut is None:
            return mine
        found = mine.new_zeros(cut.rows, *mine.shape[1:])
        found[cut.first : cut.end] = mine
        return merge(found, self.group)

    def key_heads(self, heads: int) -> int:
        """Returns how many of so many key heads a rank has: its share, or all of fewer than ranks."""
        return heads // self.ranks if heads >= self.ranks else heads

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns this rank's columns of y where every rank has x (…, K) whole, and y whole where x has this rank's
        columns."""
        (rows, K), lead, given = weight.shape, x.shape[:-1], x.shape[-1]
        trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
        if self.ranks == 1 or given == K and not trains or given not in (K, K // self.ranks):
            return linear(x, weight, bias)
        flat = x.reshape(-1, given)
        if not trains:
            return _of_parts(self.group, flat, weight, bias)[1].view(*lead, rows * self.ranks)
        layout = layout_for("linear", lead, True)
        if given == K:
            return _OfWhole.apply(self.group, layout, self._part(x, flat), flat.detach(), weight, bias).view(
                *lead, rows
            )
        return _OfParts.apply(self.group, layout, flat, weight, bias).view(*lead, rows * self.ranks)

    def _part(self, x: Tensor, flat: Tensor) -> Tensor:
        """Returns this rank's columns of x, the same tensor for all products of x: their gradients are added before
        they are gathered."""
        if self._last[0] is not x:
            columns = own(flat.shape[1] // self.ranks, self.group)
            self._last = x, Part.apply(flat, columns, self.group)
        return self._last[1]

    def qk_norm(self, x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
        """qk_norm of this rank's heads (…, heads, head_dim); the weight's gradient is of the heads of all ranks."""
        if self.ranks == 1 or not (torch.is_grad_enabled() and weight.requires_grad):
            return norm.qk_norm(x, weight, eps)
        return _HeadNorm.apply(self.group, layout_for("qk_norm", x.shape[:-2]), x, weight, eps)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **given) -> tuple[Tensor, Tensor]:
        """attention of this rank's heads; of fewer key heads than ranks, all of them are given."""
        if self.keys is self:
            return attention(q, k, v, **given)
        return self._of_one_key_head(q, k, v, given)

    def _of_one_key_head(self, q: Tensor, k: Tensor, v: Tensor, given: dict) -> tuple[Tensor, Tensor]:
        """Computes the heads of this rank, which share a key head with other ranks'; where gradients are wanted, all
        that share it, since the gradient of a key is one sum over them."""
        together, heads = self.ranks // k.shape[-2], q.shape[-2]  # ranks that share a head
        first = self.rank // together * together
        key = slice(self.rank // together, self.rank // together + 1)
        if not torch.is_grad_enabled():
            return attention(q, k[..., key, :], v[..., key, :], **given)
        width = q.shape[-1]
        cut = lambda t, columns, kept: Part.apply(t.flatten(-2).flatten(0, -2), columns, self.group, kept)
        columns = lambda s: slice(s.start * width, s.stop * width)
        k, v = (cut(t, columns(key), slice(None, None, together)).view(*t.shape[:-2], 1, width) for t in (k, v))
        every = Whole.apply(q.flatten(-2).flatten(0, -2), self.group).view(*q.shape[:-2], -1, width)
        out, lse = attention(every[..., first * heads : (first + together) * heads, :], k, v, **given)
        at = (self.rank - first) * heads
        mine = cut(out, columns(slice(at, at + heads)), slice(first, first + together))
        return mine.view(q.shape), lse[..., at : at + heads]

    def embedding(self, ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
        """embedding of a weight of which each rank has some blocks of the vocabulary."""
        return vocabulary.embedding(self.group, ids, weight, padding_id)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """linear of an LM head of which each rank has some blocks of the vocabulary: all logits."""
        return vocabulary.logits(self.group, hidden, weight)

    def lm_head_logprob(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, keep_bytes: float = 0
    ) -> tuple[Tensor, Tensor]:
        """lm_head_logprob of a weight of which each rank has some blocks of the vocabulary; no logits are kept."""
        return vocabulary.lm_head_logprob(self.group, hidden, weight, targets, temperature)


class _WholeKeys:
    """The ops of keys and values that every rank has whole, of fewer heads than ranks: cut along the rows of a head."""

    qk_norm, rope = staticmethod(norm.qk_norm), staticmethod(rope.rope)

    def __init__(self, parallel: TensorParallel):
        self.parallel = parallel

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.parallel.linear(x, weight, bias)
        return Whole.apply(y.flatten(0, -2), self.parallel.group).view(*y.shape[:-1], -1)


class _OfWhole(torch.autograd.Function):
    """This rank's columns of a product of x, whole; `part` is the rank's columns of x, whose gradient it is."""

    @staticmethod
    def forward(ctx, group, layout, part, x, weight, bias):
        _check_buffers(weight, bias)
        ctx.group, ctx.layout, ctx.parameters = group, layout, (weight, bias)
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, _, *needed = ctx.needs_input_grad[2:]
        if needs_x:
            dy_of_all, own_columns = gathering(dy, ctx.group), recutting(weight, ctx.group)
        grads = _folds(ctx, dy, x, needed)
        dx = product(beside(dy_of_all()), own_columns().t()) if needs_x else None
        return None, None, dx, None, *grads


class _OfParts(torch.autograd.Function):
    """A product, whole, of x of which the ranks have some columns each."""

    @staticmethod
    def forward(ctx, group, layout, part, weight, bias):
        _check_buffers(weight, bias)
        ctx.group, ctx.layout, ctx.parameters = group, layout, (weight, bias)
        x, y = _of_parts(group, part, weight, bias)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad[2:]
        if needs_x:
            own_columns = recutting(weight, ctx.group)
        grads = _folds(ctx, dy[:, own(len(weight), ctx.group)], x, needed)
        return None, None, product(dy, own_columns().t()) if needs_x else None, *grads


def _check_buffers(weight: Tensor, bias: Tensor | None) -> None:
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.requires_grad:
            main_grad("linear", parameter, name)


def _folds(ctx, dy: Tensor, x: Tensor, needed: list[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Returns dW and dbias of this rank's rows, None where they went into main_grad."""
    (weight, bias), layout = ctx.parameters, ctx.layout
    dw = fold_weight("linear", dy, x, weight, layout) if needed[0] else None
    return dw, fold_bias("linear", dy, bias, layout) if needed[1] else None


def _of_parts(group: dist.ProcessGroup, part: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns x and y, whole. Tokens are cut in pieces, so that one is exchanged while another is computed."""
    rows, ranks = len(part), dist.get_world_size(group)
    x, y = part.new_empty(rows, weight.shape[1]), part.new_empty(rows, len(weight) * ranks)
    cuts = [slice(c[0], c[-1] + 1) for c in torch.arange(rows).tensor_split(max(1, min(PIECES, rows // PIECE)))]
    come = [gathering(part[cut], group) for cut in cuts]
    leave = []
    for cut, arrived in zip(cuts, come):
        leave.append(gathering(linear(beside(arrived(), x[cut]), weight, bias), group))
    for cut, arrived in zip(cuts, leave):
        beside(arrived(), y[cut])
    return x, y


class _HeadNorm(torch.autograd.Function):
    """QK-norm of this rank's heads."""

    @staticmethod
    def forward(ctx, group, layout, x, weight, eps):
        main_grad("qk_norm", weight)
        x = aligned(x)
        y, rstd = norm.norm_forward(x, None, weight, eps, trains=True)
        ctx.group, ctx.layout, ctx.eps, ctx.parameter = group, layout, eps, weight
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[2:4]
        heads, width = x.shape[-2:]
        tokens = x.numel() // (heads * width)
        if needs_weight:
            came = [gathering(t.reshape(tokens, -1), ctx.group) for t in (x, dy)]
        dx, dw = norm.norm_backward("qk_norm", x, weight, rstd, dy, None, ctx.layout, heads, needs_x, False)
        if needs_weight:
            x, dy = (beside(arrived()).view(-1, width) for arrived in came)
            _, rstd = norm.norm_forward(x, None, weight, ctx.eps, trains=True)
            every = heads * dist.get_world_size(ctx.group)
            given = "qk_norm", x, weight, rstd, dy, None, ctx.layout, every
            _, dw = norm.norm_backward(*given, False, True, ctx.parameter)
        return None, None, dx, dw, None
