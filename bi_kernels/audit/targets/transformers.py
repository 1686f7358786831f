"""Adapts models of Hugging Face Transformers after `apply`: a step in any layout, `generate`, the accuracy of logits,
and `restore`."""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config
from transformers.utils import logging

from bi_kernels.audit.compare import Drift, compare, joined
from bi_kernels.audit.findings import Row
from bi_kernels.audit.inputs import generator, on
from bi_kernels.audit.layouts import Call, step_layouts
from bi_kernels.audit.targets.model import ModelTarget, Relation, gathered, layout_rows, mode_rows
from bi_kernels.contract import CONTRACT, DTYPES, evaluate, rounding
from bi_kernels.integrations.transformers import apply, logprobs, restore
from bi_kernels.integrations.transformers.report import Report

CONFIGS = {"qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}
SPECIAL = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
STOCK, OURS = "stock Transformers", "bi_kernels"
LAYOUTS = "packed", "singles", "batch", "left_padded", "permuted", "micro_batches:2", "micro_batches:4"
QUICK = {"steps": 1, "batched_prompts": 3, "stock_prompts": 3}  # of the quick form
QUICK_LAYOUTS = "packed", "micro_batches:4"
CHECKPOINTING = "micro_batches:2, checkpointing", "packed, checkpointing:reentrant"
CACHES = {"dynamic": None, "static": "static"}
Rescored = tuple[Drift, tuple[Tensor, Tensor]]  # drift of the logits or logprobs; logprobs generated, and rescored


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Transformers from printing progress and advice."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def case(session) -> dict:
    """Returns the contract's [chain.transformers] at a session's shapes."""
    found = CONTRACT["chain"]["transformers"]["tiny" if session.parameters["shapes"] == "tiny" else "real"]
    return found | QUICK if session.quick else found


def architectures(session) -> list[str]:
    """Returns the names of the models that are judged."""
    return [*CONFIGS][: 1 if session.quick else None]


def draw_ids(session, shape: Sequence[int], g: torch.Generator) -> Tensor:
    """Draws ids that every model has, padding's excepted."""
    vocab = min(case(session)[name]["vocab_size"] for name in CONFIGS)
    return torch.randint(1, vocab, tuple(shape), generator=g).to(session.device)


def build(session, name: str, dtype: str, ours: bool = True, prepare: Callable[[nn.Module], object] = id) -> nn.Module:
    """Returns a model with random weights, after `apply` if it is ours; prepare: changes it before."""
    c = case(session)
    config = CONFIGS[name](**c["every"], **c[name], **SPECIAL)
    with torch.device(session.device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    g = generator(session.device, session.parameters["seed"], "transformers", name)
    with torch.no_grad():
        for p in model.parameters():
            w = torch.randn(p.shape, generator=g, device=p.device)
            p.copy_(w * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + w / 8)
    prepare(model)
    if ours:
        apply(model)
    return model.eval()


def _stock_logprobs(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None, **where) -> Tensor:
    """Returns log p(next token) (batch, length) fp32 of a model's own logits, 0 after a sequence's last token; packed
    sequences begin where positions restart."""
    positions = where.get("position_ids")
    if attention_mask is not None:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    elif positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    logits = model(input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False).logits
    following = torch.zeros_like(input_ids, dtype=torch.bool)
    following[:, :-1] = positions.expand_as(input_ids).diff(dim=1) == 1
    found = logits.float().log_softmax(-1).gather(-1, input_ids.roll(-1, 1)[..., None])[..., 0]
    return torch.where(following, found, 0.0)


class TransformersTarget(ModelTarget):
    """A model of Transformers, and a step whose loss is policy-like, over the tokens of the step.

    ours: whether `apply` was called on the model; between: is called with the model after each of the step's calls.
    """

    cached = {}

    def __init__(self, session, name: str, dtype: str, model: nn.Module, ours: bool = True, between: Callable = id):
        self.model, self.ours, self.between, self.name, self.dtype = model, ours, between, name, dtype
        self.case, self.command, self.device, self.drifts = case(session), session.command, session.device, {}
        layers = f"{self.case['every']['num_hidden_layers']} layers"
        self.whose = session.audit, name, layers, OURS, dtype, session.device_label
        self.lengths = self.case["lengths"]
        g = generator("cpu", session.parameters["seed"], "transformers")
        self.ids = draw_ids(session, [self.count], g)
        self.advantages = torch.randn(self.count, generator=g).to(self.device)
        every = step_layouts(self.lengths, session.parameters["seed"])
        self.layouts = {layout: every[layout] for layout in LAYOUTS} | {"packed:positions": every["packed"]}
        self.layouts |= {layout: every[layout.partition(",")[0]] for layout in CHECKPOINTING}

    def arguments(self, layout: str, call: Call) -> dict:
        """Returns the arguments of a call; packed sequences are told by cu_seqlens, or by positions as stock needs."""
        index = on(self.device, call.index)
        ids, real = self.ids[index.clamp(min=0)].masked_fill(index < 0, 0), index >= 0
        if call.cu_seqlens is None:
            return {"input_ids": ids} | ({} if bool(real.all()) else {"attention_mask": real.long()})
        ends = torch.tensor(call.cu_seqlens, dtype=torch.int32, device=self.device)
        if self.ours and layout != "packed:positions":
            return {"input_ids": ids[None], "cu_seqlens": ends}
        at = torch.cat([torch.arange(n, device=self.device) for n in ends.diff().tolist()])
        return {"input_ids": ids[None], "position_ids": at[None]}

    def run(self, layout: str, generated: Tensor | None = None) -> dict[str, Tensor]:
        """Returns `logprob`, logprobs and entropies (2, tokens) fp32, and every `.grad`; of `permuted`, which as a step
        is another step, no gradient."""
        model, trains = self.model, layout != "permuted"
        model.train()
        model.zero_grad()
        if layout in CHECKPOINTING:
            model.gradient_checkpointing_enable({"use_reentrant": layout == CHECKPOINTING[1]})
            model.enable_input_require_grads()

        def compute(call: Call, at: Tensor, real: Tensor) -> Tensor:
            with torch.set_grad_enabled(trains):
                logprob, entropy = self.forward(layout, call)
                if trains:
                    weight = self.advantages[at].masked_fill(~real, 0)
                    loss = (logprob * weight).sum() / self.count + entropy.sum() / (64 * self.count)
                    loss.backward()
            self.between(model)
            return torch.stack([logprob, entropy]).detach().view(2, *at.shape)

        found = gathered(self.layouts[layout], self.count, self.device, compute)
        if layout in CHECKPOINTING:
            model.gradient_checkpointing_disable()
            model.disable_input_require_grads()
        model.eval()
        return {"logprob": found} | ({n: p.grad for n, p in model.named_parameters()} if trains else {})

    def forward(self, layout: str, call: Call) -> tuple[Tensor, Tensor]:
        """Returns logprobs and entropies of a call."""
        told = self.arguments(layout, call)
        if self.ours:
            return logprobs(self.model, **told)
        logprob = _stock_logprobs(self.model, **told)
        return logprob, torch.zeros_like(logprob)

    def logprobs(self) -> Tensor:
        compute = lambda call, at, real: torch.stack(self.forward("packed", call)).detach().view(2, *at.shape)
        return gathered(self.layouts["packed"], self.count, self.device, compute)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Returns the logits of the step's tokens, right-padded in one batch."""
        given = self.arguments("batch", self.layouts["batch"][0])
        return self.model(**given, use_cache=False).logits[given["attention_mask"].bool()]

    def state(self) -> dict[str, Tensor]:
        """Returns copies of the logits and of every weight."""
        return {"logits": self.logits()} | {name: t.detach().clone() for name, t in self.model.state_dict().items()}

    def restored_row(self, before: dict[str, Tensor]) -> Row:
        """Returns the row of the model after `restore`: its weights and logits are those of before `apply`."""
        drifts = {name: compare(t, before[name]) for name, t in self.state().items()}
        return self.about(Relation.DETERMINISM, "restored", drifts, "before apply")

    def apply_row(self, report: Report) -> Row:
        """Returns the row of `apply`'s report: it names every module and every parameter once."""
        modules = [*report.replaced, *report.left, *report.containers]
        parameters = [*report.folded, *report.others]
        names = [[n for n, _ in found] for found in (self.model.named_modules(), self.model.named_parameters())]
        wrong = sum(found.count(n) != 1 for found, every in zip((modules, parameters), names) for n in every)
        drift = Drift(wrong, sum(map(len, names)))
        return self.row(Relation.CONTRACTED, "apply", drift, tensor="modules unaccounted for")

    def accuracy_row(self, ours: Tensor, stock: Tensor) -> tuple[Row, dict]:
        """Returns the row of the logits against those of the model before `apply`, whose mismatches are those beyond
        the contract's bound, and its line of a table."""
        every, c = self.case["every"], CONTRACT["chain"]["logits"]
        rms = lambda t: float(t.double().square().mean().sqrt())
        u, n = rounding(DTYPES[self.dtype])[0], max(every["hidden_size"], every["intermediate_size"])
        sigma = evaluate(c["sigma"][self.dtype], layers=every["num_hidden_layers"], u=u, n=n, rms=rms(stock))
        bound, drift = evaluate(c["bound"], sigma=sigma), compare(ours, stock)
        gap = (ours.double() - stock.double()).abs()
        beyond = int((gap > bound).sum() + gap.isnan().sum())
        line = {"model": self.name, "dtype": self.dtype, "logits": drift.elements, "rms": rms(stock)}
        line |= {"rms Δ / σ": rms(gap) / sigma, "max |Δ|": drift.max_abs, "bound": bound}
        line |= {"max |Δ| / bound": drift.max_abs / bound, "equal bits": 1 - drift.mismatches / drift.elements}
        said = {"threshold_share": drift.max_abs / bound, "rows": len(stock), "tensor": "logits"}
        return self.row(Relation.ACCURACY, "batch", replace(drift, mismatches=beyond), "before apply", **said), line


def rows(session, dtype: str) -> Iterator[Row]:
    """Yields the rows of every model."""
    for name in architectures(session):
        yield from _model_rows(session, name, dtype)


def _model_rows(session, name: str, dtype: str) -> Iterator[Row]:
    """Yields the rows of a model: before `apply`, applied, saved and loaded, restored; fills the session's tables."""
    target = TransformersTarget(session, name, dtype, build(session, name, dtype, ours=False), ours=False)
    session.drifts[f"{name}, {dtype}, stock"] = target.drifts
    only = QUICK_LAYOUTS * session.quick
    for _ in layout_rows(target, only):
        pass
    target.model.zero_grad()
    before = target.state()
    report = apply(target.model)
    session.reports.append((name, report))
    yield target.apply_row(report)
    target.ours, applied = True, target.logits()
    row, line = target.accuracy_row(applied, before["logits"])
    session.errors.append(line)
    yield row
    target.drifts = session.drifts[f"{name}, {dtype}, ours"] = {}
    yield from layout_rows(target, only)
    if (name, dtype) == (architectures(session)[0], session.dtypes[0]) and not session.quick:
        yield from mode_rows(target)
    with tempfile.TemporaryDirectory() as folder:
        target.model.save_pretrained(folder)
        loaded = type(target.model).from_pretrained(folder, dtype=DTYPES[dtype]).to(session.device).eval()
    apply(loaded)
    drift = compare(TransformersTarget(session, name, dtype, loaded).logits(), applied)
    yield target.row(Relation.DETERMINISM, "saved, loaded and applied", drift, "applied", tensor="logits")
    del loaded
    target.model.zero_grad()
    restore(target.model)
    yield target.restored_row(before)


def chosen(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns the logprobs of ids (tokens,) under logits (tokens, vocabulary) fp32, as continuous batching has them."""
    return logits.softmax(-1).gather(1, ids[:, None])[:, 0].log()


def packed_logits(model: nn.Module, sequences: Sequence[Tensor], ours: bool) -> list[Tensor]:
    """Returns the logits of each sequence: of ours from one packed call, of the stock model one sequence a call."""
    if not ours:
        return [model(ids[None], use_cache=False).logits[0] for ids in sequences]
    lengths = [len(ids) for ids in sequences]
    ends = torch.tensor([0, *lengths], device=sequences[0].device).cumsum(0).int()
    return list(model(torch.cat(list(sequences))[None], cu_seq_lens_q=ends, use_cache=False).logits[0].split(lengths))


@torch.no_grad()
def generated(session, model: nn.Module, cache: str, ours: bool = True, told: bool = True) -> Rescored:
    """Samples behind left-padded prompts and compares every step's logits with those of the same tokens rescored.

    told: the padding is masked; else it counts as tokens.
    """
    c, device = case(session), session.device
    lengths = c["lengths"][: c["prompts"]]
    width = max(lengths)
    ids = draw_ids(session, [len(lengths), width], generator("cpu", session.parameters["seed"], "generate"))
    real = torch.arange(width, device=device) >= width - torch.tensor(lengths, device=device)[:, None]
    torch.manual_seed(session.parameters["seed"])
    out = model.generate(
        input_ids=ids.masked_fill(~real, 0),
        attention_mask=(real if told else torch.ones_like(real)).long(),
        max_new_tokens=c["new"],
        do_sample=True,
        output_logits=True,
        return_dict_in_generate=True,
        cache_implementation=CACHES[cache],
    )
    sequences = [row[width - n :] for row, n in zip(out.sequences, lengths)]
    drifts, rolled, found = [], [], []
    for i, (row, n, logits) in enumerate(zip(sequences, lengths, packed_logits(model, sequences, ours))):
        then, now = torch.stack([step[i] for step in out.logits]).float(), logits[n - 1 : -1].float()
        drifts.append(compare(now, then))
        rolled.append(chosen(then, row[n:]))
        found.append(chosen(now, row[n:]))
    return joined(drifts), (torch.cat(rolled), torch.cat(found))
