"""Small models that judge what no op of the registry reaches: experts, `batch_invariant_mode`, Transformers' adapter.

Each is a step in several layouts, as the audits of whole models judge it, and is held to PyTorch's own results in fp64.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bi_kernels
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.layouts import VIEWS, Call, step_layouts
from bi_kernels.audit.parameters import choose, device_name
from bi_kernels.audit.targets.fresh_memory import poisoned_memory
from bi_kernels.audit.targets.model import ModelTarget, Relation, gathered, layout_rows
from bi_kernels.contract import CONTRACT, DTYPES, EPS, rounding
from bi_kernels.tokens import TokenLayout
from mutation.functions import WIDTH, Tensors, functions

LENGTHS = 5, 1, 17, 33, 9
EXPERTS, CHOICES = 7, 3
HEADS, VOCABULARY, LONGEST = 2, 40, 33


def layout_of(call: Call) -> TokenLayout:
    """Returns where the sequences of a call lie; their first tokens say in which order they are."""
    if call.cu_seqlens is not None:
        return TokenLayout.packed(call.cu_seqlens, [int(call.index[at]) for at in call.cu_seqlens[:-1]])
    real = call.index >= 0
    return TokenLayout.padded(real.sum(1).tolist(), call.index.shape[1], bool((~real[:, 0]).any()))


class StepTarget(ModelTarget):
    """A step of function(tokens, call), whose first results (…, features) are judged, and the gradients of its tokens
    and parameters. reference: likewise, by PyTorch's ops, of the tokens of one sequence (1, length, …)."""

    cached = {}

    def __init__(self, name: str, dtype: str, device: str, seed: int, tokens: Tensors, parameters: Tensors):
        self.device, self.dtype, self.drifts, self.lengths = choose(device), DTYPES[dtype], {}, LENGTHS
        self.whose = "mutants", name, "", "bi_kernels", dtype, device_name(self.device)
        self.layouts, self.tokens, self.parameters = step_layouts(LENGTHS, seed), tokens, parameters
        self.dy = None

    def function(self, given: Tensors, call: Call) -> Tensor:
        raise NotImplementedError

    def reference(self, given: Tensors, parameters: Tensors) -> Tensor:
        raise NotImplementedError

    def _leaves(self, some: Tensor) -> Tensors:
        found = {k: t[some] for k, t in self.tokens.items()}
        return {k: t.requires_grad_() if t.is_floating_point() else t for k, t in found.items()}

    def run(self, layout: str, generated: Tensor | None = None) -> Tensors:
        for p in self.parameters.values():
            p.grad, p.main_grad = None, torch.zeros_like(p, dtype=torch.float32)
        grads = {f"d{k}": torch.zeros_like(t) for k, t in self.tokens.items() if t.is_floating_point()}

        def compute(call: Call, at: Tensor, real: Tensor) -> Tensor:
            given = self._leaves(at)
            with layout_of(call):
                y = self.function(given, call)
            if self.dy is None:
                g = generator(self.device, 0, "mutants", "upstream")
                self.dy = torch.randn(self.count, y.shape[-1], generator=g, device=self.device).to(y.dtype)
            y.backward(self.dy[at] * real[..., None])
            for k, into in grads.items():
                into[at[real]] = given[k[1:]].grad[real]
            return y.detach().movedim(-1, 0)

        found = gathered(self.layouts[layout], self.count, self.device, compute)
        left = {k: p.main_grad if p.grad is None else p.grad for k, p in self.parameters.items()}
        return {"logprob": found} | grads | {k: t.clone() for k, t in left.items()}

    def rows(self) -> Iterator[Row]:
        """Yields the row of the results and of each gradient against fp64, and those of every layout."""
        found = self.run(next(iter(self.layouts)))
        yield from accuracy(self, "rows", found, *(self._by_torch(dtype) for dtype in (self.dtype, torch.float64)))
        yield from layout_rows(self)

    def _by_torch(self, dtype: torch.dtype) -> Tensors:
        change = lambda t: t.detach().to(dtype) if t.is_floating_point() else t
        parameters = {k: change(p).requires_grad_() for k, p in self.parameters.items()}
        parts, grads = [], {f"d{k}": [] for k, t in self.tokens.items() if t.is_floating_point()}
        for some in torch.arange(self.count, device=self.device).split(list(self.lengths)):
            given = {k: change(t)[None] for k, t in self._leaves(some).items()}
            for k in grads:
                given[k[1:]].requires_grad_()
            y = self.reference(given, parameters)
            y.backward(self.dy[some][None].to(dtype))
            parts.append(y.detach()[0].T)
            for k, mine in grads.items():
                mine.append(given[k[1:]].grad[0])
        whole = {"logprob": torch.cat(parts, 1)} | {k: torch.cat(mine) for k, mine in grads.items()}
        return whole | {k: p.grad for k, p in parameters.items()}


def accuracy(
    target: ModelTarget, layout: str, found: Tensors, theirs: Tensors, exact: Tensors, of: str = "", times: int = 1
) -> Iterator[Row]:
    """Yields the row of each tensor, of which the first is a result and the others gradients: how many elements are
    further from fp64 than the contract's [any] has it, relative to the tensor's largest; times: of a few numbers, whose
    largest error is small by luck."""
    top = {k: float(t.abs().max()) for k, t in exact.items()}
    gap = lambda k, t: (t.double() - exact[k]).abs() / max(top[k], torch.finfo(torch.float64).tiny)
    most = max(float(gap(k, t).max()) for k, t in theirs.items())
    limit = times * (CONTRACT["any"]["accuracy"] * most + rounding(DTYPES[target.whose[4]])[0])
    for number, (k, t) in enumerate(found.items()):
        if t.numel() == 1:  # a sum of everything, of which nearly nothing may be left
            continue
        beyond = Drift(int((~(gap(k, t) <= limit)).sum()), t.numel())
        relation = "gradient accuracy" if number else Relation.ACCURACY
        yield target.row(relation, layout, beyond, "fp64", rows=len(t), tensor=f"{of}{k}")


class Experts(StepTarget):
    """Tokens that choose experts by scores of which many are equal, a layer of two products, and their sum."""

    def __init__(self, dtype: str, device: str, seed: int):
        where = choose(device)
        g = generator(where, seed, "mutants", "experts")
        draw = lambda *shape: torch.randn(shape, generator=g, device=where).to(DTYPES[dtype])
        count = sum(LENGTHS)
        tokens = {"x": draw(count, 24), "scores": (2 * draw(count, EXPERTS)).round() / 4}
        parameters = {"up": draw(EXPERTS, 40, 24) / 4, "bias": draw(EXPERTS, 40), "down": draw(EXPERTS, 40, 16) / 4}
        parameters = {k: p.requires_grad_() for k, p in parameters.items()}
        super().__init__("experts", dtype, device, seed, tokens, parameters)

    def function(self, given: Tensors, call: Call) -> Tensor:
        layout, lead, (x, scores) = layout_of(call), call.index.shape, (given["x"], given["scores"])
        weights, ids = bi_kernels.top_k(scores.flatten(0, -2), CHOICES)
        groups = bi_kernels.group_by_expert(ids, EXPERTS, layout, padded=call.cu_seqlens is None)
        y = bi_kernels.dispatch(x.flatten(0, -2), groups)
        y = bi_kernels.silu(bi_kernels.grouped_linear(y, self.parameters["up"], groups, self.parameters["bias"]))
        y = bi_kernels.grouped_linear(y, self.parameters["down"], groups, transposed=True)
        return bi_kernels.combine(y, weights, groups).unflatten(0, lead)

    def reference(self, given: Tensors, parameters: Tensors) -> Tensor:
        ids = torch.sort(given["scores"], dim=-1, descending=True, stable=True).indices[..., :CHOICES]
        weights = given["scores"].gather(-1, ids)
        y = torch.einsum("...k,...jnk->...jn", given["x"], parameters["up"][ids]) + parameters["bias"][ids]
        y = torch.einsum("...jn,...jnk->...jk", F.silu(y), parameters["down"][ids])
        return (y * weights[..., None]).sum(-2)


def experts(dtype: str, device: str, seed: int) -> Iterator[Row]:
    target = Experts(dtype, device, seed)
    yield from target.rows()
    drawn, ids = (
        torch.randn(9, 4, 16, device=target.device),
        torch.arange(36, device=target.device).view(9, 4) * 5 % 7,
    )
    y, weights = drawn.to(target.dtype), drawn[..., 0].to(target.dtype)
    found = (bi_kernels.routed_sum(*(t[:, order] for t in (y, weights, ids))) for order in ([0, 1, 2, 3], [2, 0, 3, 1]))
    yield target.row(Relation.INVARIANCE, "order of choices", compare(*found), tensor="routed_sum")
    scores = torch.tensor([[0.0, -0.0, 1.0, float("nan"), 1.0, float("inf"), float("nan")]], device=target.device)
    _, order = bi_kernels.top_k(scores.to(target.dtype), 7)
    drift = compare(order, torch.tensor([[3, 5, 6, 2, 4, 0, 1]], device=target.device))
    yield target.row(Relation.CONTRACTED, "ties", drift, "a NaN is as large as infinity", tensor="top_k")
    drawn = (1 + torch.randn(9, EXPERTS, device=target.device) / 2**7).to(target.dtype)  # close to each other
    order = torch.sort(drawn, dim=-1, descending=True, stable=True).indices[:, :CHOICES]
    drift = compare(tuple(bi_kernels.top_k(drawn, CHOICES)), (drawn.gather(-1, order), order))
    yield target.row(Relation.CONTRACTED, "order", drift, "a stable sort", tensor="top_k")
    scores, given = torch.randn(2_100, EXPERTS, device=target.device).requires_grad_(), torch.ones(2_100, 1)
    (found,) = torch.autograd.grad(bi_kernels.top_k(scores, 1)[0], scores, given.to(scores))
    drift = compare(found, F.one_hot(scores.argmax(1), EXPERTS).to(found))
    yield target.row(Relation.CONTRACTED, "many rows", drift, "one of the largest score", tensor="dscores")
    groups = bi_kernels.group_by_expert(ids[:, :1], EXPERTS)
    found = (bi_kernels.combine(y[:, 0], w, groups) for w in (weights[:, :1], None))
    drift = compare(next(found), next(found) * weights[:, :1])
    yield target.row(Relation.CONTRACTED, "one choice", drift, "its product", tensor="combine")
    yield from _experts_as_given(target)


ENDS = 5, 5, 5, 22, 38, 38, 60  # of each expert's rows, without sequences; the rows that follow are no expert's


def _experts_as_given(target: Experts) -> Iterator[Row]:
    """Yields the rows of experts called as a user may: in views, compiled, by offsets alone, with choices that name no
    expert, and where fresh memory holds NaN."""
    (x, scores), (up, bias, _) = target.tokens.values(), target.parameters.values()
    g = generator(target.device, 0, "mutants", "experts as given")
    draw = lambda *shape: torch.randn(shape, generator=g, device=target.device).to(target.dtype)
    given, upstream = (x, scores, up, bias), (draw(len(x), 40), draw(len(x), CHOICES), draw(len(x), 40))
    ends = torch.tensor(ENDS, dtype=torch.int32, device=target.device)
    layout = TokenLayout.packed([0, *accumulate(LENGTHS)])

    def routed(x: Tensor, scores: Tensor, up: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        values, ids = bi_kernels.top_k(scores, CHOICES)
        groups = bi_kernels.group_by_expert(torch.where(ids == 1, EXPERTS, ids), EXPERTS, layout)
        y = bi_kernels.grouped_linear(bi_kernels.dispatch(x, groups), up, groups, bias)
        return bi_kernels.combine(y, values, groups), values

    def step(leaves: list[Tensor], dy: Tensor, dv: Tensor, call: Callable = routed) -> tuple[Tensor, ...]:
        with layout:
            out, values = call(*leaves)
        torch.autograd.backward((out, values), (dy, dv))
        return out.detach(), values.detach(), *(getattr(t, "main_grad", t.grad) for t in leaves)

    def made(view: Callable = torch.clone) -> tuple[Tensor, ...]:
        leaves, (dy, dv, du) = [view(t.detach()).requires_grad_() for t in given], map(view, upstream)
        found = step(leaves, dy, dv)
        found += torch.autograd.grad(bi_kernels.top_k(leaves[1], CHOICES)[0], leaves[1], dv)
        y = bi_kernels.grouped_linear(leaves[0], leaves[2], ends, leaves[3])
        return *found, y.detach(), *torch.autograd.grad(y, [leaves[i] for i in (0, 2, 3)], du)

    def folded(call: Callable) -> tuple[Tensor, ...]:
        leaves = [t.detach().clone().requires_grad_() for t in given]
        for p in leaves[2:]:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        return step(leaves, *upstream[:2], call)

    expected = made()
    for name, view in VIEWS.items():
        with poisoned_memory(1):
            found = made(view)
        yield target.row(Relation.INVARIANCE, name, compare(found, expected), tensor="experts")
    torch.compiler.reset()
    compiled = torch.compile(routed, backend="aot_eager", fullgraph=True)
    yield target.row(Relation.INVARIANCE, "compiled", compare(folded(compiled), folded(routed)), tensor="experts")
    yield target.row(Relation.INVARIANCE, "offsets alone", _by_linear(given, ends, upstream[2], expected), "linear")
    yield target.row(Relation.INVARIANCE, "groups without sequences", _untold(given, ends, upstream[2]), "experts")
    yield from _wide_experts(target, ends, draw)
    nothing = bias.detach().clone()
    nothing[:, 0] = -0.0
    empty = bi_kernels.grouped_linear(x[:, :0], up.detach()[..., :0], ends, nothing)
    expected = torch.zeros_like(empty)
    expected[: ENDS[-1]] += nothing.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), 0)
    told = {"against": "its bias", "tensor": "grouped_linear"}
    yield target.row(Relation.CONTRACTED, "no features", compare(empty, expected), **told)


def _wide_experts(target: Experts, ends: Tensor, draw: Callable) -> Iterator[Row]:
    """Yields the rows of experts of more columns than a program clears; of weights in columns beside those of an expert
    without rows, which hold NaN; and of a sum over wide rows that begin at any address."""
    x, w = draw(len(target.tokens["x"]), 24), draw(EXPERTS, 1100, 24)
    end = int(ends[-1])
    with poisoned_memory(1):
        y = bi_kernels.grouped_linear(x, w, ends)
    alone = torch.cat([bi_kernels.grouped_linear(x[:end], w, ends), y.new_zeros(len(x) - end, 1100)])
    yield target.row(Relation.INVARIANCE, "many columns", compare(y, alone), tensor="linear")
    beside, columns = w[:, :40].mT.contiguous(), w[:, :40].mT.clone(memory_format=torch.contiguous_format)
    beside[1] = torch.nan
    found = (bi_kernels.grouped_linear(x, t, ends, transposed=True) for t in (beside, columns))
    yield target.row(Relation.INVARIANCE, "an expert of NaN", compare(*found), tensor="linear")
    y, weights = draw(9, 4, 1040), draw(9, 4).requires_grad_()
    ids, dout = torch.arange(36, device=target.device).view(9, 4) * 5 % 7, draw(9, 1040)
    sums = (bi_kernels.routed_sum(t, weights, ids) for t in (VIEWS["unaligned view"](y), y))
    grads = [torch.autograd.grad(total, weights, dout)[0] for total in sums]
    yield target.row(Relation.INVARIANCE, "rows at any address", compare(*grads), tensor="dweights")


def _untold(given: tuple, ends: Tensor, du: Tensor) -> Drift:
    """Compares what a weight trains on groups that were told no sequences with the same, given their offsets alone."""
    end = int(ends[-1])
    chosen = torch.searchsorted(ends, torch.arange(len(du), device=ends.device), right=True)
    groups = bi_kernels.group_by_expert(chosen[:, None], EXPERTS)

    def trained(offsets: Tensor | bi_kernels.Groups) -> tuple[Tensor, ...]:
        x, _, up, bias = (t.detach().clone().requires_grad_() for t in given)
        y = bi_kernels.grouped_linear(x, up, offsets, bias)[:end]
        dx, *rest = torch.autograd.grad(y, (x, up, bias), du[:end])
        return y.detach(), dx[:end], *rest

    return compare(trained(groups), trained(ends))


def _by_linear(given: tuple, ends: Tensor, du: Tensor, found: tuple[Tensor, ...]) -> Drift:
    """Compares each expert's rows with `linear` of them as one sequence; the rest is 0."""
    x, _, up, bias = (t.detach().clone().requires_grad_() for t in given)
    parts, first = [], 0
    for e, end in enumerate(ends.tolist()):
        parts.append(bi_kernels.linear(x[first:end], up[e], bias[e]))
        first = end
    y = torch.cat([*parts, x.new_zeros(len(x) - first, up.shape[1])])
    return compare(found[-4:], (y.detach(), *torch.autograd.grad(y, (x, up, bias), du)))


class Decoder(nn.Module):
    """A decoder of one layer in functions of PyTorch, each parameter used once."""

    def __init__(self, draw: Callable[..., Tensor]):
        super().__init__()
        shapes = {"table": (VOCABULARY, WIDTH), "places": (LONGEST, WIDTH), "scale": (WIDTH,), "step": (WIDTH,)}
        shapes |= {"qkv": (3 * WIDTH, WIDTH), "bias": (3 * WIDTH,), "out": (WIDTH, WIDTH), "weight": (WIDTH,)}
        shapes |= {"shift": (WIDTH,), "up": (48, WIDTH), "down": (48, WIDTH), "by": (1,), "head": (VOCABULARY, WIDTH)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(draw(*shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits (batch, length, vocabulary)."""
        x = F.embedding(ids, self.table) + self.places[: ids.shape[1]]
        x = F.rms_norm(x, (WIDTH,), self.scale, EPS)
        q, k, v = F.linear(x * (1 + self.step), self.qkv, self.bias).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = (F.normalize(t, dim=-1) for t in (q, k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=3.0)
        x = x + y.transpose(1, 2).flatten(2) @ self.out.T
        y = F.linear(F.layer_norm(x, (WIDTH,), self.weight, self.shift), self.up)
        x = x + self.by * ((F.gelu(y) * y.softmax(-1)) @ self.down)
        x = x - x.mean(-1, keepdim=True) + x.square().sum(-1, keepdim=True) / WIDTH
        return 4 * torch.tanh(F.linear(x, self.head) / 4)


class Routed(StepTarget):
    """The decoder under `batch_invariant_mode`."""

    def __init__(self, dtype: str, device: str, seed: int):
        where = choose(device)
        g = generator(where, seed, "mutants", "mode")
        self.model = Decoder(lambda *shape: torch.randn(shape, generator=g, device=where).to(DTYPES[dtype]))
        ids = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=g, device=where)
        super().__init__("mode", dtype, device, seed, {"ids": ids}, dict(self.model.named_parameters()))
        every = step_layouts(LENGTHS, seed)  # PyTorch's attention knows no packed sequences
        self.layouts = {
            "packed": every["batch"],
            "singles": every["singles"],
            "micro_batches:2": every["micro_batches:2"],
        }

    def function(self, given: Tensors, call: Call) -> Tensor:
        with bi_kernels.batch_invariant_mode(strict=True):
            return self.model(given["ids"])

    def reference(self, given: Tensors, parameters: Tensors) -> Tensor:
        return torch.func.functional_call(self.model, parameters, (given["ids"],))


def mode(dtype: str, device: str, seed: int) -> Iterator[Row]:
    target = Routed(dtype, device, seed)
    yield from functions(target, dtype, seed, accuracy)
    yield from target.rows()
