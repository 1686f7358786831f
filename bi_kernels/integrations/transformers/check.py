"""Runs an applied model on a small batch and compares raw bits: alone, padded, packed, in parts, in two splits."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bi_kernels.integrations.transformers.gradients import BUFFERS, forget, tensors

LENGTHS = (5, 40, 12)  # tokens of each sequence
NEW = 3  # tokens that are decoded one by one
CHUNKS = (17, 33)  # where a left-padded batch is cut for a prefill in chunks
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Check:
    """One comparison in raw bits. name: what was compared; gradient: of gradients, not of a forward; differ: how many
    of `elements`; where: the first parameter that differs; error: what the model raised, where it did."""

    name: str
    gradient: bool
    differ: int = 0
    elements: int = 0
    where: str = ""
    error: str = ""

    @property
    def fails(self) -> bool:
        """Whether bits differ, or the model raised."""
        return bool(self.differ or self.error)

    def __str__(self) -> str:
        found = self.error or f"{self.differ:,} of {self.elements:,} elements differ"
        return f"{self.name}: {found}{f', first in {self.where}' if self.where else ''}"


def check(
    model: nn.Module, layouts: Iterable[str] | None = None, lengths: Iterable[int] = LENGTHS, gradients: bool = True
) -> list[Check]:
    """Compares a model's results and gradients over layouts and splits; leaves the model as it was.

    layouts: names of LAYOUTS, all by default. lengths: tokens of each sequence, the longest more than 36. gradients:
    whether to compare these too. The model is in eval mode meanwhile. Its `.grad` and its modes are put back. Raises
    ValueError where it has no embedding of token ids.
    """
    embedding = token_embedding(model)
    device, g = embedding.weight.device, torch.Generator().manual_seed(0)
    ids = [torch.randint(1, embedding.num_embeddings, (n,), generator=g, device="cpu").to(device) for n in lengths]
    with as_it_was(model):
        names = [*LAYOUTS] if layouts is None else [*layouts]
        found = _forward(model, ids, names)
        return found + (_gradients(model, ids, "padded left" in names) if gradients else [])


def _inner(model: nn.Module) -> PreTrainedModel | None:
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def token_embedding(model: nn.Module) -> nn.Embedding:
    """Returns the embedding of a model's token ids. Raises ValueError where it has none."""
    inner = _inner(model)
    embedding = inner.get_input_embeddings() if inner is not None else None
    if not isinstance(embedding, nn.Embedding):
        raise ValueError(f"apply: check is True for a {type(model).__name__}, expected a model that embeds token ids")
    return embedding


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts a model in eval mode, and back with its gradients afterwards."""
    modes, grads = {m: m.training for m in model.modules()}, {p: p.grad for p in model.parameters()}
    model.eval()
    try:
        yield
    finally:
        for m, training in modes.items():
            m.training = training
        for p, grad in grads.items():
            forget(p)
            p.grad = grad


def padded(ids: list[Tensor], left: bool) -> tuple[dict[str, Tensor], list[slice]]:
    """Returns the arguments of a padded batch, and where in its row each sequence lies."""
    width = max(map(len, ids))
    at = [slice(width - len(s), width) if left else slice(0, len(s)) for s in ids]
    rows = torch.zeros(len(ids), width, dtype=torch.long, device=ids[0].device)
    mask, positions = torch.zeros_like(rows), torch.zeros_like(rows)
    for i, (s, where) in enumerate(zip(ids, at)):
        rows[i, where], mask[i, where], positions[i, where] = s, 1, torch.arange(len(s), device=s.device)
    return {"input_ids": rows, "attention_mask": mask, "position_ids": positions}, at


def _takes(model: nn.Module, name: str) -> bool:
    known = inspect.signature(model.forward).parameters
    return name in known or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())


def results(model: nn.Module, **given) -> tuple[Tensor, object]:
    """Returns (a result a token or a sequence, the cache) of a call, of whose arguments the model takes some."""
    given["return_dict"] = True
    out = model(**{k: v for k, v in given.items() if _takes(model, k)})
    result = next((t for t in (out.get("logits"), out.get("last_hidden_state")) if t is not None), None)
    return next(tensors(out)) if result is None else result, out.get("past_key_values")


def by_sequence(model: nn.Module, ids: list[Tensor], left: bool) -> list[Tensor]:
    given, at = padded(ids, left)
    y, _ = results(model, **given, use_cache=False)
    return [row[where] if y.dim() == 3 else row for row, where in zip(y, at)]


def _packed(model: nn.Module, ids: list[Tensor]) -> list[Tensor]:
    """Returns the results of the sequences in one row, whose positions restart; none where it takes none."""
    if "position_ids" not in inspect.signature(_inner(model).forward).parameters:
        return []
    positions = torch.cat([torch.arange(len(s), device=s.device) for s in ids])
    y, _ = results(model, input_ids=torch.cat(ids)[None], position_ids=positions[None], use_cache=False)
    return list(y[0].split([len(s) for s in ids]))


def _in_parts(model: nn.Module, ids: list[Tensor], cuts: tuple[int, ...]) -> list[Tensor]:
    """Returns the results of a left-padded batch, which a cache is given in parts that end at `cuts`; none without a
    cache."""
    given, at = padded(ids, left=True)
    cache, parts = None, []
    for first, last in zip((0, *cuts), (*cuts, max(map(len, ids)))):
        part = {k: v[:, first:last] for k, v in given.items()} | {"attention_mask": given["attention_mask"][:, :last]}
        y, cache = results(model, **part, past_key_values=cache, use_cache=True)
        if cache is None:
            return []
        parts.append(y)
    return [row[where] for row, where in zip(torch.cat(parts, 1), at)]


LAYOUTS: dict[str, Callable[[nn.Module, list[Tensor]], list[Tensor]]] = {  # each against every sequence alone
    "padded right": lambda model, ids: by_sequence(model, ids, left=False),
    "padded left": lambda model, ids: by_sequence(model, ids, left=True),
    "packed": _packed,
    "in chunks": lambda model, ids: _in_parts(model, ids, CHUNKS),
    "decoded": lambda model, ids: _in_parts(model, ids, tuple(range(max(map(len, ids)) - NEW, max(map(len, ids))))),
}


@torch.no_grad()
def _forward(model: nn.Module, ids: list[Tensor], layouts: Iterable[str]) -> list[Check]:
    try:
        alone = [by_sequence(model, [s], left=False)[0] for s in ids]
    except Exception as error:
        return [Check("alone", False, error=sentence(error))]
    found = []
    for name in layouts:
        if alone[0].dim() == 1 and not name.startswith("padded"):  # a result a sequence
            continue
        try:
            if computed := LAYOUTS[name](model, ids):
                found.append(compare(f"{name} against alone", dict(enumerate(computed)), dict(enumerate(alone))))
        except Exception as error:
            found.append(Check(name, False, error=sentence(error)))
    return found


def _step(model: nn.Module, calls: list[list[int]], ids: list[Tensor], left: bool) -> dict[str, Tensor]:
    """Returns every gradient of a step of several micro-batches, on the CPU: a fold's in fp32, any other as it is."""
    for p in model.parameters():
        forget(p)
        p.grad = None
    g = torch.Generator().manual_seed(1)
    weights: list[Tensor] = []  # of each sequence's results, the same in every micro-batch
    for call in calls:
        with torch.enable_grad():
            results = by_sequence(model, [ids[i] for i in call], left)
            while len(weights) <= max(call):
                weights.append(torch.randn(results[call.index(len(weights))].shape, generator=g, device="cpu"))
            sum((y.float() * weights[i].to(y.device)).sum() for i, y in zip(call, results)).backward()
    found = {}
    for name, p in model.named_parameters():
        folds = [b for b in BUFFERS if hasattr(p, b)]
        for buffer in folds or ["grad"] * (p.grad is not None):
            found[f"{name}.{buffer}"] = getattr(p, buffer).detach().cpu().clone()
    return found


def _gradients(model: nn.Module, ids: list[Tensor], left: bool) -> list[Check]:
    if not any(p.requires_grad for p in model.parameters()):
        return []
    name, every = "one micro-batch against one a sequence", range(len(ids))
    try:
        whole = _step(model, [list(every)], ids, left)
        return [compare(name, _step(model, [[i] for i in every], ids, left), whole, gradient=True)]
    except Exception as error:
        return [Check(name, True, error=sentence(error))]


def compare(name: str, found: dict, expected: dict, gradient: bool = False) -> Check:
    differ = {k: _differing(t, found[k]) if k in found else t.numel() for k, t in expected.items()}
    where = next((k.rpartition(".")[0] for k, n in differ.items() if n), "") if gradient else ""
    return Check(name, gradient, sum(differ.values()), sum(t.numel() for t in expected.values()), where)


def _differing(a: Tensor, b: Tensor) -> int:
    a, b = (t.contiguous().view(BITS[t.element_size()]) for t in (a, b))
    return int((a != b).sum())


def sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"raised {type(error).__name__}: {lines[0]}"[:200]
