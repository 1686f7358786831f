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
        asked = _Asked(session, target, dtype)
        for ask in (_as_called, _caches, _forwards, _dtypes, _reports):
            yield from ask(asked)
        model = _built(session, name, dtype, attention_dropout=0.1)
        yield _answer(target, model.train(), False, "dropout")
        x = torch.ones(5, 32, dtype=DTYPES[dtype], device=session.device)
        alone = model.model.layers[0].mlp(x)  # allowed, where no gradient is promised
        yield target.row(Relation.CONTRACTED, "a part alone", Drift(int(not alone.requires_grad), 1), "a gradient")


def _as_called(ask: "_Asked") -> Iterator[Row]:
    """Yields the rows of a model called otherwise than the audit's: by continuous batching, beyond a window, under
    autocast, for a few logits in a tuple, through a forward that was set on it; of a part called alone; and of what
    `restore` leaves."""
    from bi_kernels.integrations.transformers import apply, restore  # noqa: PLC0415 (an optional package)
    from helpers.transformers_generation import batched  # noqa: PLC0415 (likewise)

    session, dtype, device, ids, row = ask.session, ask.dtype, ask.device, ask.ids, ask.row
    adapter = session.adapter()
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


class _Asked:
    """What the questions below ask with: small models by family, ids (3, 21), and rows."""

    def __init__(self, session, target: ModelTarget, dtype: str):
        self.session, self.target, self.dtype, self.device = session, target, dtype, session.device
        drawn = torch.randint(1, 64, (3, 21), generator=generator("cpu", 2, "mutants", "ids"))
        self.ids = drawn.to(self.device)
        self.mask = torch.ones_like(self.ids)
        self.mask[1, :9] = self.mask[2, :2] = 0  # left-padded

    def build(self, family: str = "qwen3", prepare: Callable[[nn.Module], object] = id, **changed) -> nn.Module:
        """Returns a model after `apply`. prepare: changes it before."""
        from bi_kernels.integrations.transformers import apply  # noqa: PLC0415 (an optional package)

        model = _built(self.session, family, self.dtype, **changed)
        prepare(model)
        apply(model)
        return model.eval()

    def real(self, model: nn.Module) -> Tensor:
        """Returns the logits (tokens, vocab) of the padded ids, without padding."""
        return model(self.ids, attention_mask=self.mask, use_cache=False).logits[self.mask.bool()]

    def alone(self, model: nn.Module) -> Tensor:
        """Returns the same of each row alone, without padding."""
        rows = [row[m.bool()][None] for row, m in zip(self.ids, self.mask)]
        return torch.cat([model(row, use_cache=False).logits[0] for row in rows])

    def row(self, relation: str, layout: str, drift: Drift, against: str = "each row alone") -> Row:
        return self.target.row(relation, layout, drift, against, rows=len(self.ids))

    def says(self, layout: str, holds: bool, what: str) -> Row:
        return self.row(Relation.CONTRACTED, layout, Drift(int(not holds), 1), what)

    def padded(self, layout: str, model: nn.Module) -> Row:
        """Returns the row of padded logits against each row's alone."""
        with torch.no_grad():
            return self.row(Relation.INVARIANCE, layout, compare(self.real(model), self.alone(model)))


def _caches(ask: _Asked) -> Iterator[Row]:
    """Yields the rows of caches: a new one that knows no layer, one whose tokens lie before its heads, one of a server
    that shares prefixes, and chunks of attention beyond what a cache keeps."""
    from transformers import DynamicCache  # noqa: PLC0415 (an optional package)

    from bi_kernels.integrations.transformers.layout import read  # noqa: PLC0415 (likewise)

    class TokensFirst(DynamicCache):
        def update(self, *args, **kwargs):
            return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in super().update(*args, **kwargs))

    model = ask.build()
    with torch.no_grad():
        whole = model(ask.ids, use_cache=False).logits
        for name, cache in (("a new cache", DynamicCache()), ("a cache by tokens", TokensFirst())):
            first = model(ask.ids[:, :12], past_key_values=cache, use_cache=True).logits
            later = model(ask.ids[:, 12:], past_key_values=cache, use_cache=True).logits
            yield ask.row(Relation.PARITY, name, compare(torch.cat([first, later], 1), whole), "rescored")
    kept = [torch.ones(2, 3) for _ in range(2)]
    blocks = types.SimpleNamespace(_hash_to_id={1: 0})
    shared = types.SimpleNamespace(key_cache=kept[:1], value_cache=kept[1:], _block_manager=blocks, max_tokens_read=8)
    read(ask.ids, cache=shared)
    yield ask.says("a shared prefix", all(bool(t.all()) for t in kept), "what a cache holds already")
    chunked = ask.build("llama4_text", attention_chunk_size=8, interleave_moe_layer_step=2, no_rope_layers=[1])
    yield ask.padded("chunks", chunked)
    with torch.no_grad():
        unmasked = compare(chunked(ask.ids, use_cache=False).logits[:1], chunked(ask.ids[:1], use_cache=False).logits)
    yield ask.row(Relation.INVARIANCE, "chunks without a mask", unmasked)


def _forwards(ask: _Asked) -> Iterator[Row]:
    """Yields the rows of forwards as users write them: a class of its own that hands on what it gets, or that names a
    few arguments; of which loss a model takes; and of batches whose tokens and heads are told apart by the call
    alone, against packed ones."""
    from bi_kernels.integrations.transformers import scoring  # noqa: PLC0415 (an optional package)

    def of_a_class(forward: Callable[[type], Callable]) -> nn.Module:
        def prepare(model: nn.Module) -> None:
            kind = type(model)
            model.__class__ = type("Own", (kind,), {"forward": forward(kind)})

        return ask.build(prepare=prepare)

    yield ask.padded("a forward that hands on", of_a_class(lambda kind: lambda *a, **more: kind.forward(*a, **more)))

    def naming(kind: type) -> Callable:
        return lambda self, input_ids, attention_mask=None, **more: kind.forward(
            self, input_ids, attention_mask, **more
        )

    yield ask.padded("a forward that names a few arguments", of_a_class(naming))
    loss = ask.build().loss_function
    yield ask.says("a loss", loss is scoring.causal_lm_loss, "over our logprobs")
    few = {"one head of keys": ask.build(num_key_value_heads=1), "as many tokens as heads": ask.build("gemma3_text")}
    for (name, model), ids in zip(few.items(), (ask.ids, ask.ids[:2, :4])):
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids))[None]
        steps = []
        for given in ({"input_ids": ids}, {"input_ids": ids.reshape(1, -1), "position_ids": positions}):
            model.zero_grad()
            model(**given, use_cache=False).logits.float().sin().sum().backward()
            steps.append([p.grad.clone() for p in model.parameters()])
        for (parameter, _), *grads in zip(model.named_parameters(), *steps):
            yield ask.row(Relation.GRADIENT, f"{name}: {parameter}", compare(*grads), "packed")


def _dtypes(ask: _Asked) -> Iterator[Row]:
    """Yields the rows of dtypes that meet in a model: autocast of attention, and norms that are left in fp32."""
    seen, model = [], ask.build()

    def norms(model: nn.Module) -> None:
        model.bfloat16()
        for name, part in model.named_modules():
            if name.endswith("norm"):
                part.float()

    mixed, note = ask.build(prepare=norms), lambda *given: seen.append(given[-1].dtype)
    with torch.no_grad(), torch.autocast(torch.device(ask.device).type, torch.bfloat16):
        model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, given: note(*given))
        ask.real(model)
        yield ask.says("autocast", seen.pop() == torch.bfloat16, "attention computes in bf16")
        mixed.model.layers[0].self_attn.q_norm.register_forward_hook(note)
        yield ask.padded("norms in fp32", mixed)
        yield ask.says("norms in fp32", {*seen} == {torch.float32}, "theirs is the result's dtype")


class _Counted(nn.Module):
    """An activation that counts its calls in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return F.silu(x)


def _reports(ask: _Asked) -> Iterator[Row]:
    """Yields the rows of what `apply` says and leaves: of a tied table, a head with a bias, a model that classifies
    sequences, and a buffer that training changes."""
    from transformers import AutoModelForSequenceClassification  # noqa: PLC0415 (an optional package)

    from bi_kernels.integrations.transformers import apply, logprobs  # noqa: PLC0415 (likewise)

    tied = apply(_built(ask.session, "qwen3", ask.dtype, tie_word_embeddings=True))
    yield ask.says("apply", "tied" in tied.folded.values(), "tied, of a tied table")

    def with_bias(model: nn.Module) -> None:
        head = model.lm_head
        model.lm_head = nn.Linear(head.in_features, head.out_features, device=head.weight.device).to(head.weight.dtype)

    try:
        logprobs(ask.build(prepare=with_bias), ask.ids)
        refused = False
    except ValueError as error:
        refused = "without bias" in str(error)
    yield ask.says("logprobs", refused, "a head with a bias is refused")
    config = _built(ask.session, "qwen3", ask.dtype).config
    with torch.device(ask.device):
        model = AutoModelForSequenceClassification.from_config(config, dtype=DTYPES[ask.dtype])
    model.model.layers[0].mlp.act_fn = _Counted()
    yield ask.says("apply", apply(model).batch_invariant, "so, of a model of sequences")

    def counting(model: nn.Module) -> None:
        model.model.layers[0].mlp.act_fn = _Counted()
        model.train()

    model = ask.build(prepare=counting)
    counted = model.model.layers[0].mlp.act_fn.calls
    yield ask.says("apply", not counted.any(), "a buffer that training changes is as it was")


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
