"""What the adapter of Transformers is asked: small models in the quick form of its audit, of which the questions that
follow are as a user, a trainer or a server calls them."""

import copy
import types
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bi_kernels.audit import load
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.layouts import unaligned
from bi_kernels.audit.targets.model import ModelTarget, Relation, layout_rows, mode_rows
from bi_kernels.contract import DTYPES
from mutation.functions import Tensors
from mutation.models import Experts, accuracy

FAMILIES = "qwen3_moe", "gpt_oss", "gemma3_text"  # beside the one that the audit of Transformers judges


def transformers(dtype: str, device: str, seed: int) -> Iterator[Row]:
    """Yields the quick rows of the audit of Transformers, those of a mixture, and of what `apply` says."""
    given = {"dtype": dtype, "device": device, "seed": seed, "checks": "quick"}
    session = load("transformers", given)
    adapter = session.adapter()
    with session.quiet():
        yield from _classified(Experts(dtype, device, seed))
        yield from adapter.rows(session, dtype)
        name = next(iter(adapter.CONFIGS))
        model = adapter.build(session, name, dtype)
        target = adapter.TransformersTarget(session, name, dtype, model)
        drift, _ = adapter.generated(session, model, "dynamic")
        yield target.row(Relation.PARITY, "generated", drift, "rescored packed")
        yield from layout_rows(target, (*adapter.CHECKPOINTING, "left_padded", "packed:positions"))
        yield from mode_rows(target)
        for family in FAMILIES:
            yield from _family_rows(session, target, family, dtype)
        yield from _as_called(session, target, dtype)
        model = _built(session, name, dtype, attention_dropout=0.1)
        yield _answer(target, model.train(), False, "dropout")
        x = torch.ones(5, 32, dtype=DTYPES[dtype], device=session.device)
        alone = model.model.layers[0].mlp(x)  # allowed, where no gradient is promised
        yield target.row(Relation.CONTRACTED, "a part alone", Drift(int(not alone.requires_grad), 1), "a gradient")


def _as_called(session, target: ModelTarget, dtype: str) -> Iterator[Row]:
    """Yields the rows of a model called otherwise than the audit's: by continuous batching, beyond a window, under
    autocast, for a few logits in a tuple, through a forward that was set on it; of a part called alone; and of what
    `restore` leaves."""
    from bi_kernels.integrations.transformers import apply, restore  # noqa: PLC0415 (an optional package)
    from helpers.transformers_generation import batched  # noqa: PLC0415 (likewise)

    adapter, device = session.adapter(), session.device
    ids = torch.randint(1, 64, (3, 21), generator=generator("cpu", 1, "mutants", "ids")).to(device)

    def row(relation: str, layout: str, drift: Drift, against: str = "each row alone") -> Row:
        return target.row(relation, layout, drift, against, rows=len(ids))

    (drift, _), _ = batched(session, adapter.build(session, "qwen3", dtype), True, 3)
    yield row(Relation.PARITY, "generate_batch", drift, "rescored packed")
    windowed = adapter.build(session, "mistral", dtype)
    drift, _ = adapter.generated(session, windowed, "dynamic")
    yield row(Relation.PARITY, "generated beyond a window", drift, "rescored packed")
    (drift, _), _ = batched(session, windowed, True, 3)
    yield row(Relation.PARITY, "generate_batch beyond a window", drift, "rescored packed")

    model = _built(session, "qwen3", dtype)
    before = [sorted(vars(p)) for p in model.parameters()]
    report = apply(model)
    kept = "a rope table" not in report.replaced.get("model.rotary_emb", "")
    yield row(Relation.CONTRACTED, "apply", Drift(int(kept), 1), "its rope table is ours")
    logits = lambda ids, **told: model(ids, use_cache=False, **told)

    def gradients(call: Callable[[Tensor], Tensor]) -> Tensors:
        """Returns the logits and gradients of a step in micro-batches of 2 and 1."""
        model.zero_grad()
        found = []
        for some in ids.split(2):
            y = call(some)
            y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).sin().to(y.dtype))
            found.append(y.detach())
        return {"logits": torch.cat(found)} | {name: p.grad.clone() for name, p in model.named_parameters()}

    whole = gradients(lambda some: logits(some).logits)
    last = gradients(lambda some: logits(some, logits_to_keep=3, return_dict=False)[0])
    yield row(Relation.PARITY, "a few logits", compare(last["logits"], whole["logits"][:, -3:]), "all of them")
    with_cache = model(ids, logits_to_keep=3, return_dict=False, use_cache=True)
    yield row(Relation.CONTRACTED, "a few logits", Drift(int(len(with_cache) != 2), 1), "logits and a cache")
    labelled = logits(ids, labels=ids, logits_to_keep=ids.shape[1], return_dict=False)[1]
    yield row(Relation.PARITY, "with labels", compare(labelled.detach(), whole["logits"]), "without")
    with torch.no_grad():
        cache = model(ids[:, :12], use_cache=True).past_key_values
        cache.crop(8 - 12)
        later = model(ids[:, 8:], past_key_values=cache, use_cache=True).logits
    yield row(Relation.PARITY, "a cropped cache", compare(later, whole["logits"][:, 8:]), "packed")
    with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16):
        together, alone = logits(ids).logits, torch.cat([logits(some).logits for some in ids.split(1)])
    yield row(Relation.INVARIANCE, "autocast", compare(together, alone))

    def of_its_parts(self, input_ids: Tensor, **told) -> types.SimpleNamespace:
        keep = told.pop("logits_to_keep", 0)
        hidden = self.model(input_ids=input_ids, **told).last_hidden_state[:, :-1]
        return types.SimpleNamespace(logits=F.linear(hidden, self.lm_head.weight)[:, -keep:])

    shorter = gradients(lambda some: logits(some).logits[:, :-1])
    model.forward = types.MethodType(of_its_parts, model)
    patched = gradients(lambda some: logits(some, logits_to_keep=20).logits)
    del model.forward
    for name, t in shorter.items():
        yield row(Relation.PARITY, f"a forward that was set: {name}", compare(patched[name], t), "its own")
    alike = [type(error) for error in (_error(model), _error(_built(session, "qwen3", dtype)))]
    yield row(Relation.CONTRACTED, "no input", Drift(int(alike[0] is not alike[1]), 1), "the model's own error")
    restore(model)
    left = sum(sorted(vars(p)) != names for p, names in zip(model.parameters(), before))
    yield row(Relation.CONTRACTED, "restored", Drift(left, len(before)), "no buffer is left on a parameter")

    mlp = _built(session, "qwen3", dtype).model.layers[0].mlp
    apply(mlp)
    x = torch.randn(5, 32, generator=generator("cpu", 1, "mutants", "x")).to(device, DTYPES[dtype])
    y = mlp(x)
    y.sum().backward()
    alone, moved = torch.cat([mlp(some) for some in x.split(1)]), mlp(unaligned(x))
    yield row(Relation.INVARIANCE, "a part alone", compare(alone.detach(), y.detach()))
    yield row(Relation.INVARIANCE, "a part alone, unaligned", compare(moved.detach(), y.detach()), "aligned")
    missing = sum(p.grad is None or not p.grad.any() for p in mlp.parameters())
    yield row(Relation.CONTRACTED, "a part alone", Drift(missing, 3), "its gradients")


def _error(model: nn.Module) -> Exception | None:
    try:
        model()
    except Exception as error:
        return error


def _classified(target: ModelTarget) -> Iterator[Row]:
    from bi_kernels.integrations.transformers.classify import classify  # noqa: PLC0415 (an optional package)
    from mutation.classified import MODULES  # noqa: PLC0415 (likewise)

    for name, (make, expected, says) in MODULES.items():
        kind, why = classify(make())
        said = says in why if isinstance(says, str) else bool(why) == says
        wrong = ((kind.__name__ if kind else "") != expected) + (not said)
        yield target.row(Relation.CONTRACTED, "classify", Drift(int(wrong), 2), tensor=name, detail=why[:200])


def _built(session, family: str, dtype: str, **changed) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 (an optional package)

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "max_position_embeddings": 128}
    sizes |= {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None, "sliding_window": 16}
    config = AutoConfig.for_model(family, **sizes | changed)
    config._experts_implementation = "eager"  # the others know no fp64
    g = generator(session.device, session.parameters["seed"], "mutants", family)
    with torch.device(session.device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=g, device=p.device)
            p.copy_(drawn * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + drawn / 8)
    return model


def _answer(target: ModelTarget, model: nn.Module, expected: bool, tensor: str, **how) -> Row:
    """Returns the row of whether `apply` says what is so."""
    from bi_kernels.integrations.transformers import apply  # noqa: PLC0415 (an optional package)

    report = apply(model, **how)
    wrong = (report.batch_invariant != expected) + (report.split_invariant != expected)
    return target.row(Relation.CONTRACTED, "apply", Drift(int(wrong), 2), tensor=tensor, detail=str(report)[:200])


def _family_rows(session, target: ModelTarget, family: str, dtype: str) -> Iterator[Row]:
    model = _built(session, family, dtype)
    exact, theirs = copy.deepcopy(model).double(), copy.deepcopy(model)
    ids = torch.randint(1, 64, (2, 21), generator=generator("cpu", 0, "mutants", "ids")).to(session.device)
    yield _answer(target, model, True, family, check=True)

    def step(model: nn.Module) -> Tensors:
        for _ in range(2):
            y = model(ids, use_cache=False).logits
            dy = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).view(y.shape).sin()
            y.backward(dy.to(y.dtype))
            for p in model.parameters():  # as somebody leaves it who clips it
                p.grad = None if p.grad is None else p.grad.clone()
        return {"logits": y.detach()} | {name: p.grad for name, p in model.named_parameters()}

    following = ids[:, 1:, None]
    with torch.no_grad():
        scores = [
            m(ids, use_cache=False).logits.log_softmax(-1)[:, :-1].gather(-1, following)[..., 0]
            for m in (theirs, exact)
        ]
        found = session.adapter().logprobs(model, ids)[0][:, :-1]
    yield from accuracy(target, "logprobs", *({"": t} for t in (found, *scores)), of=f"{family}, logprobs")
    results = map(step, (model.eval(), theirs.eval(), exact.eval()))
    yield from accuracy(target, "before apply", *results, of=f"{family}, ")
