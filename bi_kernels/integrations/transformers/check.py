"""Runs an applied model on a small batch and compares raw bits: alone, padded, decoded, and a step cut two ways."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bi_kernels.integrations.transformers.gradients import BUFFERS, forget, tensors

LENGTHS = (5, 40, 12)  # tokens of each sequence
NEW = 3  # tokens that are decoded one by one
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


def check(model: nn.Module) -> list[Check]:
    """Compares an applied model's results and gradients over layouts and splits; leaves the model as it was.

    The model is in eval mode meanwhile. Its `.grad` and its modes are put back. Raises ValueError where it has no
    embedding of token ids.
    """
    embedding = token_embedding(model)
    device, g = embedding.weight.device, torch.Generator().manual_seed(0)
    ids = [torch.randint(1, embedding.num_embeddings, (n,), generator=g).to(device) for n in LENGTHS]
    with as_it_was(model):
        return [*_forward(model, ids), *_gradients(model, ids)]


def token_embedding(model: nn.Module) -> nn.Embedding:
    """Returns the embedding of a model's token ids. Raises ValueError where it has none."""
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
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


def results(model: nn.Module, **given) -> tuple[Tensor, object]:
    """Returns (a result a token or a sequence, the cache) of a call, of whose arguments the model takes some."""
    given["return_dict"] = True
    known = inspect.signature(model.forward).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    out = model(**{k: v for k, v in given.items() if anything or k in known})
    result = next((t for t in (out.get("logits"), out.get("last_hidden_state")) if t is not None), None)
    return next(tensors(out)) if result is None else result, out.get("past_key_values")


def _by_sequence(model: nn.Module, ids: list[Tensor], left: bool) -> list[Tensor]:
    given, at = padded(ids, left)
    y, _ = results(model, **given, use_cache=False)
    return [row[where] if y.dim() == 3 else row for row, where in zip(y, at)]


def _decoded(model: nn.Module, ids: list[Tensor]) -> list[Tensor]:
    """Returns the results of the sequences' last tokens, decoded one by one in a left-padded batch; none without a
    cache."""
    given, _ = padded(ids, left=True)
    width, cache = given["input_ids"].shape[1], None
    parts = []
    for first, last in [(0, width - NEW), *((i, i + 1) for i in range(width - NEW, width))]:
        part = {k: v[:, first:last] for k, v in given.items()} | {"attention_mask": given["attention_mask"][:, :last]}
        y, cache = results(model, **part, past_key_values=cache, use_cache=True)
        if cache is None:
            return []
        parts.append(y)
    return list(torch.cat(parts[1:], 1))


@torch.no_grad()
def _forward(model: nn.Module, ids: list[Tensor]) -> list[Check]:
    made: dict[str, Callable] = {
        "padded right": lambda: _by_sequence(model, ids, left=False),
        "padded left": lambda: _by_sequence(model, ids, left=True),
        "decoded": lambda: _decoded(model, ids),
    }
    try:
        alone = [_by_sequence(model, [s], left=False)[0] for s in ids]
    except Exception as error:
        return [Check("alone", False, error=_sentence(error))]
    if alone[0].dim() == 1:  # a result a sequence
        del made["decoded"]
    found = []
    for name, make in made.items():
        expected = [y[-NEW:] for y in alone] if name == "decoded" else alone
        try:
            if results := make():
                found.append(_compare(f"{name} against alone", dict(enumerate(results)), dict(enumerate(expected))))
        except Exception as error:
            found.append(Check(name, False, error=_sentence(error)))
    return found


def _step(model: nn.Module, calls: list[list[int]], ids: list[Tensor]) -> dict[str, Tensor]:
    """Returns every gradient of a step of several micro-batches, on the CPU: a fold's in fp32, any other as it is."""
    for p in model.parameters():
        forget(p)
        p.grad = None
    g = torch.Generator().manual_seed(1)
    weights: list[Tensor] = []  # of each sequence's results, the same in every micro-batch
    for call in calls:
        with torch.enable_grad():
            results = _by_sequence(model, [ids[i] for i in call], left=True)
            while len(weights) <= max(call):
                weights.append(torch.randn(results[call.index(len(weights))].shape, generator=g))
            sum((y.float() * weights[i].to(y.device)).sum() for i, y in zip(call, results)).backward()
    found = {}
    for name, p in model.named_parameters():
        folds = [b for b in BUFFERS if hasattr(p, b)]
        for buffer in folds or ["grad"] * (p.grad is not None):
            found[f"{name}.{buffer}"] = getattr(p, buffer).detach().cpu().clone()
    return found


def _gradients(model: nn.Module, ids: list[Tensor]) -> list[Check]:
    if not any(p.requires_grad for p in model.parameters()):
        return []
    name, every = "one micro-batch against one a sequence", range(len(ids))
    try:
        whole = _step(model, [list(every)], ids)
        return [_compare(name, _step(model, [[i] for i in every], ids), whole, gradient=True)]
    except Exception as error:
        return [Check(name, True, error=_sentence(error))]


def _compare(name: str, found: dict, expected: dict, gradient: bool = False) -> Check:
    differ = {k: _differing(t, found[k]) if k in found else t.numel() for k, t in expected.items()}
    where = next((k.rpartition(".")[0] for k, n in differ.items() if n), "") if gradient else ""
    return Check(name, gradient, sum(differ.values()), sum(t.numel() for t in expected.values()), where)


def _differing(a: Tensor, b: Tensor) -> int:
    a, b = (t.contiguous().view(BITS[t.element_size()]) for t in (a, b))
    return int((a != b).sum())


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"raised {type(error).__name__}: {lines[0]}"[:200]
