"""Routers of a mixture under stress: planted ties, experts of no, one or every token; and what must drift: other ways to
sort, to combine and to break ties."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import bi_kernels
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import Row, control_row
from bi_kernels.audit.targets.model import Relation
from bi_kernels.contract import DTYPES
from bi_kernels.integrations.transformers import check as bits
from bi_kernels.ops.grouped.groups import Groups
from bi_kernels.tokens import TokenLayout

SPECIAL_TOKEN, NEVER, ONCE, ALWAYS = 7, 0, 1, 2  # a token that stands in a batch once, and three experts
TIED = 3  # experts of a router that are made equal
WIDTH = {"experts": 128, "k": 8, "hidden": 2048, "features": 1536, "lengths": (5, 300, 17, 129, 64)}  # Qwen3-30B-A3B
SMALL = {"experts": 8, "k": 4, "hidden": 32, "features": 24, "lengths": (5, 20, 17)}


def routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yields each router, and the number of its experts."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name.rpartition(".")[2] in ("gate", "router") and isinstance(weight, Tensor) and weight.dim() == 2:
            yield module, len(weight)


@torch.no_grad()
def bias(model: nn.Module) -> None:
    """Sets weights so that expert NEVER gets no token, ONCE the special token alone, and ALWAYS every token.

    Feature 0 of the residual stream is 1 for every token and feature 1 for the special one, since nothing else writes
    to them; a router reads them as a bias.
    """
    embedding = model.get_input_embeddings().weight
    embedding[:, :2] = torch.tensor([1.0, 0.0], device=embedding.device)
    embedding[SPECIAL_TOKEN, 1] = 1
    transposed = any(getattr(m, "is_transposed", False) for m in model.modules())  # experts: (experts, in, out)
    for name, p in model.named_parameters():
        last = name.split(".")[-2] if name.endswith((".weight", ".bias")) else name.rpartition(".")[2]
        if last in ("o_proj", "down_proj", "down_proj_bias"):
            written = p.movedim(-1 if last == "down_proj_bias" or p.dim() == 3 and transposed else p.dim() // 3, 0)
            written[:2] = 0
        elif last == "post_attention_layernorm":
            p[:2] = 1
    for router, _ in routers(model):
        router.weight[:, :2] = 0
        router.weight[[NEVER, ONCE, ALWAYS], 0] = torch.tensor([-12.0, -12.0, 12.0], device=router.weight.device).to(
            router.weight.dtype
        )
        router.weight[ONCE, 1] = 36
        correction = getattr(router, "e_score_correction_bias", None)
        if correction is not None:
            correction[[NEVER, ALWAYS]] = torch.tensor([-4.0, 4.0], device=correction.device, dtype=correction.dtype)


def _block(model: nn.Module, experts: int) -> int:
    """Returns how many experts are compared with each other: all, or those of a group."""
    return experts // (getattr(model.config, "n_group", None) or 1)


@torch.no_grad()
def plant_ties(model: nn.Module) -> None:
    """Makes each TIED experts of every router equal, one after another in their group."""
    for router, count in routers(model):
        each = torch.arange(count, device=router.weight.device)
        for p in router.parameters(recurse=False):
            p.copy_(p[each - each % _block(model, count) % TIED])


@torch.no_grad()
def chosen(model: nn.Module, ids: list[Tensor]) -> list[tuple[Tensor, int]]:
    """Returns what each router chooses (tokens, k) for sequences in a padded batch, and the number of its experts."""
    found = []

    def note(module, args, kwargs):
        choices = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and not t.is_floating_point())
        found.append((choices[real], module.num_experts))

    given, _ = bits.padded(ids, left=False)
    real = given["attention_mask"].flatten().bool()
    hooks = [
        m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules() if "Experts" in type(m).__name__
    ]
    try:
        bits.results(model, **given, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def count_ties(model: nn.Module, ids: list[Tensor]) -> tuple[int, int, int]:
    """Returns, over all layers, the tokens whose choice skips a lower id of equal experts, those for which a tie
    decided, and all."""
    wrong, split, tokens = 0, 0, 0
    for choices, count in chosen(model, ids):
        block = _block(model, count)
        picked = nn.functional.one_hot(choices, count).sum(1).view(len(choices), -1, block)
        picked = nn.functional.pad(picked, (0, -block % TIED)).view(len(choices), -1, TIED)
        wrong += int((picked.diff(dim=2) > 0).any(2).any(1).sum())
        split += int((picked.sum(2) % TIED > 0).any(1).sum())
        tokens += len(choices)
    return wrong, split, tokens


def loads(model: nn.Module, ids: list[Tensor]) -> list[list[int]]:
    """Returns, for each layer, the tokens of the experts NEVER, ONCE and ALWAYS, and all tokens."""
    found = chosen(model, ids)
    return [[int((choices == e).sum()) for e in (NEVER, ONCE, ALWAYS)] + [len(choices)] for choices, _ in found]


def judge(session, small: bool = False) -> list[Row]:
    """Judges an expert's dW over splits, the combination and the choice of tied experts, ours and broken ones, at the
    width of Qwen3-30B-A3B; records the rows and returns them."""
    size, device = SMALL if small else WIDTH, session.device
    g = torch.Generator(device).manual_seed(session.parameters["seed"])
    dtype = DTYPES["fp32" if small else "bf16"]
    lengths, k, experts = list(size["lengths"]), size["k"], size["experts"]
    tokens = sum(lengths)
    draw = lambda *shape: torch.randn(shape, generator=g, device=device)
    x, dy = draw(tokens, size["hidden"]).to(dtype), draw(tokens * k, size["features"]).to(dtype)
    scores = draw(tokens, experts).to(dtype)
    scores = scores[:, torch.arange(experts, device=device) // TIED]  # ties
    values, ids = bi_kernels.top_k(scores, k)
    target = session.target("router", "tiny" if small else "Qwen3-30B-A3B", "fp32" if small else "bf16")
    row = lambda relation, layout, drift, tensor, **said: target.row(
        relation, layout, drift, tensor=tensor, rows=tokens, **said
    )

    whole, parts = [lengths], [[n] for n in lengths]
    dw = lambda cut, order=None: _gradient(x, dy, ids, experts, cut, order)
    first = dw(whole)
    split = lambda order=None: compare(dw(parts, order), dw(whole, order) if order else first)
    found = [row(Relation.GRADIENT, "micro_batches:each", split(), "dW of every expert", against="one call")]
    broken = row(Relation.GRADIENT, "packed", compare(dw(whole, _reversed), first), "dW of every expert")
    found.append(control_row("an unstable sort: an expert's rows in another order", [broken]))

    groups = bi_kernels.group_by_expert(ids, experts)
    y, weights = draw(len(groups.source), size["hidden"]).to(dtype), values.float().softmax(-1).to(dtype)
    ours = bi_kernels.combine(y, weights, groups)
    alone = bi_kernels.group_by_expert(ids[-1:], experts)
    rows = y[groups.rows[-1][alone.source.long()].long()]
    drift = compare(bi_kernels.combine(rows, weights[-1:], alone), ours[-1:])
    found.append(row(Relation.INVARIANCE, "singles", drift, "combination", against="one call"))
    broken = row(Relation.INVARIANCE, "packed", compare(_added(y, weights, groups), ours), "combination")
    found.append(control_row("index_add in descending expert id", [broken]))

    shifted = Drift(*_differing(bi_kernels.top_k(scores[1:], k)[1], ids[1:]))
    found.append(row(Relation.INVARIANCE, "without the first row", shifted, "choices of tied experts"))
    moved = Drift(*_differing(_by_position(scores[1:], k), _by_position(scores, k)[1:]))
    broken = row(Relation.INVARIANCE, "without the first row", moved, "choices of tied experts")
    found.append(control_row("a tie that the position breaks", [broken]))
    session.add(found)
    return found


def _differing(a: Tensor, b: Tensor) -> tuple[int, int]:
    return int((a != b).sum()), a.numel()


def _gradient(x: Tensor, dy: Tensor, ids: Tensor, experts: int, cut: list[list[int]], order=None) -> Tensor:
    """Returns main_grad of every expert's weight after a step; order: changes the groups of a call."""
    weight = nn.Parameter(x.new_zeros(experts, dy.shape[1], x.shape[1]))
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    first, k = 0, ids.shape[1]
    for lengths in cut:
        layout = TokenLayout.packed([0, *torch.tensor(lengths).cumsum(0).tolist()])
        at = slice(first, first + sum(lengths))
        groups = bi_kernels.group_by_expert(ids[at], experts, layout)
        groups = groups if order is None else order(groups)
        given = dy[at.start * k : at.stop * k].view(-1, k, dy.shape[1])
        y = bi_kernels.grouped_linear(bi_kernels.dispatch(x[at], groups), weight, groups)
        y.backward(bi_kernels.dispatch(given, groups))
        first = at.stop
    return weight.main_grad


def _reversed(groups: Groups) -> Groups:
    """Turns the places of each expert's fold round."""
    ends = [0, *groups.slot_offsets.tolist()]
    parts = [groups.slots[a:b].flip(0) for a, b in zip(ends, ends[1:])]
    return groups._replace(slots=torch.cat([*parts, groups.slots[ends[-1] :]]))


def _added(y: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Adds the rows of each token by index_add, the highest expert first."""
    tokens, k = weights.shape
    choices = groups.source.flip(0).long()
    terms = y.flip(0).float() * weights.flatten()[choices, None].float()
    return torch.zeros(tokens, y.shape[1], device=y.device).index_add_(0, choices // k, terms).to(y.dtype)


def _by_position(scores: Tensor, k: int) -> Tensor:
    """Chooses as top_k does, but the highest id first in every other row."""
    ids, turned = bi_kernels.top_k(scores, k)[1], scores.shape[1] - 1 - bi_kernels.top_k(scores.flip(-1), k)[1]
    odd = torch.arange(len(scores), device=scores.device)[:, None] % 2 == 1
    return torch.where(odd, turned, ids)
