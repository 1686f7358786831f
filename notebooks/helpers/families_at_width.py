"""Models of published widths with random weights, on a GPU: every layout, split and rollout, and routers under stress.

from bi_kernels.audit import start
run = start("families", device="cuda")
from helpers import families_at_width
families_at_width.real_widths(run, folder=Path("out"))  # each model's rows are written as it ends
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

import bi_kernels
from bi_kernels import MainGrads
from bi_kernels.audit.compare import Drift, compare, joined
from bi_kernels.audit.findings import (
    PRECONDITION,
    UNSUPPORTED,
    Row,
    control_row,
    grouped,
    needs_fix,
    sentence,
    write_rows,
)
from bi_kernels.audit.memory import give_back
from bi_kernels.audit.targets import tiny_families as tiny
from bi_kernels.audit.targets.model import Relation
from bi_kernels.audit.targets.transformers import STOCK, quiet
from bi_kernels.contract import DTYPES
from bi_kernels.integrations.transformers import apply, logprobs, restore
from bi_kernels.integrations.transformers import check as bits
from helpers import families_routers as routers
from helpers.families import CACHED, Family
from helpers.families_routers import SPECIAL_TOKEN

DTYPE, VOCABULARY = "bf16", 16384
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
WIDTHS: dict[str, tuple[str, dict]] = {  # (model type, published sizes, but for the layers and the vocabulary)
    "Qwen3-30B-A3B": ("qwen3_moe", {
        "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "gpt-oss-20b": ("gpt_oss", {
        "num_hidden_layers": 4, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096},
    }),
    "DeepSeek-V3": ("deepseek_v3", {  # a dense layer and one of experts
        "num_hidden_layers": 2, "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0,
                            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                            "original_max_position_embeddings": 4096},
    }),
    "Gemma-3-27B": ("gemma3_text", {  # whose full attention is every sixth layer's
        "num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "hidden_size": 5376,
        "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "query_pre_attn_scalar": 168, "sliding_window": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}},
    }),
    "GLM-4-9B": ("glm4", {
        "num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "attention_bias": False, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }),
    "Phi-4": ("phi3", {
        "num_hidden_layers": 4, "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40,
        "num_key_value_heads": 10, "sliding_window": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
    }),
    "GPT-NeoX-20B": ("gpt_neox", {
        "num_hidden_layers": 4, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64,
        "hidden_act": "gelu_fast", "use_parallel_residual": True, "attention_bias": True, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }),
}  # fmt: skip
HOWS = "right", "left", "packed"


class Sizes(NamedTuple):
    """lengths: tokens of the sequences that every layout holds; step: of those of a step; splits: of the step; rollouts:
    (prompts, new tokens) of each `generate`; graph: sequences, prompt and new tokens of a decode in a CUDA graph."""

    lengths: tuple[int, ...] = (5, 1100, 127, 64, 33, 256)  # one longer than every window
    step: tuple[int, ...] = (1, 300, 17, 1100, 64, 129, 33, 5, 256, 90, 16, 200)
    splits: int = 12
    rollouts: tuple[tuple[int, int], ...] = ((1, 64), (16, 448))
    graph: tuple[int, int, int] = (4, 64, 32)


SMALL = Sizes((5, 40, 12), (1, 19, 5, 16), 4, ((1, 2), (3, 3)), (2, 5, 2))


def config_of(name: str) -> hf.PreTrainedConfig:
    """Returns the configuration of a model at its published widths."""
    kind, sizes = WIDTHS[name]
    return tiny.CONFIG_MAPPING[kind](**sizes, **SPECIAL)


def build(name: str, device: torch.device, seed: int = 0, small: bool = False) -> hf.PreTrainedModel:
    """Returns a model with random weights in bf16; small: tiny and in fp32, to try this file out."""
    kind, _ = WIDTHS[name]
    config = tiny.tiny(kind) if small else config_of(name)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model = tiny.from_config(getattr(hf, tiny.families()[kind]), config, DTYPES["fp32" if small else DTYPE])
    _draw(model, torch.Generator(device).manual_seed(seed))
    return model.eval()


@torch.no_grad()
def _draw(model: nn.Module, g: torch.Generator) -> None:
    """Draws matrices from N(0, 1/columns), the embedding from N(0, 1), and norms and biases around their values."""
    embedding = model.get_input_embeddings().weight
    for p in model.parameters():
        for part in p if p.dim() > 2 else [p]:  # an expert at a time
            noise = torch.randn(part.shape, generator=g, device=part.device)
            scale = 1.0 if p is embedding else part.shape[-1] ** -0.5 if p.dim() > 1 else 0.125
            part.copy_(noise * scale if p.dim() > 1 else part + noise * scale)


def real_widths(
    session, names: Sequence[str] | None = None, folder: Path | None = None, small: bool = False
) -> list[Row]:
    """Judges models, one after another, and records the rows of each check as it ends; returns them.

    names: of WIDTHS, the session's by default. folder: where each model's rows are written once it ends, NAME.json.
    small: tiny models and few tokens, to try this file out on a CPU.
    """
    rows = []
    for name in session.models if names is None else names:
        mine = []
        for row in _rows(session, name, small):
            session.add([row])
            mine.append(row)
        give_back()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_rows(folder / f"{name}.json", [vars(r) for r in mine])
        rows += mine
    return rows


def _rows(session, name: str, small: bool) -> Iterator[Row]:
    with quiet():
        case = "tiny" if small else f"{WIDTHS[name][1]['num_hidden_layers']} layers"
        target = session.target(name, case, "fp32" if small else DTYPE)
        sizes = SMALL if small else Sizes()
        sizes = sizes._replace(splits=3, rollouts=sizes.rollouts[:1]) if session.quick else sizes
        made, failed = target.computed(
            PRECONDITION, "built", lambda: build(name, session.device, session.parameters["seed"], small)
        )
        yield from failed
        if made is not None:
            yield from AtWidth(target, made, sizes, session.parameters["seed"]).rows()


class AtWidth:
    """One model and its checks."""

    def __init__(self, target: Family, model: hf.PreTrainedModel, sizes: Sizes, seed: int):
        self.target, self.model, self.sizes, self.seed = target, model, sizes, seed
        self.mixture, self.grads = tiny.is_mixture(model), None

    def rows(self) -> Iterator[Row]:
        """Yields the rows of every check; what raises is a row, too."""
        yield from self._attempt(Relation.CONTRACTED, "apply", self._applied)
        yield from self._stressed("")
        yield from self._attempt(Relation.PARITY, "generate", self._rollouts)
        yield from self._attempt(Relation.PARITY, "cuda_graph", self._graph)
        for what, change in (("ties planted", self._plant_ties), ("experts of no, one or every token", self._load)):
            if self.mixture:
                yield from self._attempt(PRECONDITION, what, change)
                yield from self._stressed(what)
        yield from self._attempt(Relation.INVARIANCE, "controls", self._controls)

    def _attempt(self, relation: str, layout: str, make: Callable[[], list[Row]], **said) -> list[Row]:
        return self.target.attempt(relation, layout, make, **said)

    def _stressed(self, what: str) -> Iterator[Row]:
        """Yields the rows of every layout and of the splits of a step; what: is special about the router."""
        inputs = what or "normal"
        yield from self._attempt(Relation.INVARIANCE, "layouts", lambda: self._layouts(inputs), inputs=inputs)
        count = 3 if what else self.sizes.splits
        yield from self._attempt(Relation.GRADIENT, "splits", lambda: self._splits(count, inputs), inputs=inputs)

    def _applied(self) -> list[Row]:
        report = apply(self.model)
        yes = report.batch_invariant, report.split_invariant
        said = {"tensor": "answers that are NO", "detail": "; ".join(report.verdict)}
        return [self.target.row(Relation.CONTRACTED, "apply", Drift(2 - sum(yes), 2), **said)]

    def _draw(self, lengths: Sequence[int], salt: int = 0) -> list[Tensor]:
        """Draws token ids; the special token once, in the longest sequence."""
        g = torch.Generator().manual_seed(self.seed + salt)
        size = self.model.get_input_embeddings().num_embeddings
        ids = [torch.randint(SPECIAL_TOKEN + 1, size, (n,), generator=g) for n in lengths]
        max(ids, key=len)[2] = SPECIAL_TOKEN
        return [s.to(self.model.device) for s in ids]

    @torch.no_grad()
    def _layouts(self, inputs: str = "normal") -> list[Row]:
        ids, rows = self._draw(self.sizes.lengths), []
        alone = dict(enumerate(bits.by_sequence(self.model, [s], left=False)[0] for s in ids))
        for name, compute in bits.LAYOUTS.items():
            try:
                found = dict(enumerate(compute(self.model, ids)))
                check = bits.compare(name, found, alone)
            except Exception as error:
                check = bits.Check(name, False, error=sentence(error))
            rows.append(self.target.check_row(check, inputs=inputs, rows=sum(map(len, ids))))
        return rows

    def _splits(self, count: int, inputs: str = "normal") -> list[Row]:
        """Returns the rows of a step that is cut in `count` ways: gradients in fp32 main_grad, against one call."""
        if self.grads is None:
            weight, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
            self.grads = MainGrads(self.model.named_parameters(), tied=[weight] * (weight is head))
        ids = self._draw(self.sizes.step, 1)
        first, rows = [], []
        for cut, how in cuts(len(ids), count, self.seed):
            _step(self.model, ids, cut, how, self.seed)
            self.grads.join()
            buffers = [p.main_grad for p in self.grads.parameters]
            if not first:
                first = [b.clone() for b in buffers]
                zero = sum(not bool(b.any()) for b in buffers)
                said = {"tensor": "gradients that are zero", "inputs": inputs, "rows": sum(map(len, ids))}
                least = int(not zero < len(buffers))
                rows.append(self.target.row(PRECONDITION, "splits", Drift(least, 1), detail=f"{zero} are", **said))
            else:
                drifts = [_compared(a, b) for a, b in zip(buffers, first)]
                which = self.grads.names[joined(drifts).part]
                said = {"against": "one call", "inputs": inputs, "rows": sum(map(len, ids)), "tensor": which}
                layout = f"micro_batches: {' + '.join(str(len(part)) for part in cut)}, {how}"
                rows.append(self.target.row(Relation.GRADIENT, layout, joined(drifts), **said))
            self.grads.drop()
        return rows

    def _rollouts(self) -> list[Row]:
        """Returns the rows of what `generate` samples, its logprobs against those of one padded batch that trains."""
        rows = []
        for count, new in self.sizes.rollouts:
            g = random.Random(self.seed + count)
            prompts = self._draw([g.randint(3, max(4, new // 4)) for _ in range(count)], 2)
            sequences, recorded = sample(self.model, prompts, new, self.seed)
            again = rescore(self.model, sequences, [len(p) for p in prompts])
            said = {"against": "one padded training batch", "tensor": "logprob", "rows": count * new}
            layout = f"generate, batch {count}"
            rows.append(self.target.row(Relation.PARITY, layout, compare(again, recorded), **said))
        return rows

    @torch.no_grad()
    def _graph(self) -> list[Row]:
        """Returns the row of tokens that a CUDA graph decodes greedily, logits against those of whole sequences."""
        said = {"against": "whole sequences", "tensor": "logits"}
        refused = lambda why: self.target.row(Relation.PARITY, "cuda_graph", verdict=UNSUPPORTED, detail=why, **said)
        count, prompt, new = self.sizes.graph
        ids = torch.stack(self._draw([prompt] * count, 3))
        cache = hf.StaticCache(config=self.model.config, max_cache_len=prompt + new)
        if any(layer.is_sliding for layer in cache.layers):
            return [refused("a window's layer of the static cache counts tokens in Python; a graph would not count on")]
        try:
            replay, state = captured(self.model, ids, cache)
        except Exception as error:
            return [refused(sentence(error))]
        token, position, logits, first = state
        tokens, steps = [first], []
        for i in range(new):
            token.copy_(tokens[-1])
            position.fill_(prompt + i)
            replay()
            steps.append(logits().clone())
            tokens.append(steps[-1].argmax(-1))
        whole = bits.by_sequence(self.model, list(torch.cat([ids, *tokens[:-1]], 1)), left=False)
        drift = compare(torch.cat(steps, 1), torch.stack([y[prompt:] for y in whole]))
        return [self.target.row(Relation.PARITY, "cuda_graph", drift, rows=count * new, **said)]

    @torch.no_grad()
    def _plant_ties(self) -> list[Row]:
        """Plants ties, and returns the rows of whether the lowest ids were chosen, and whether there were ties."""
        routers.plant_ties(self.model)
        wrong, split, tokens = routers.count_ties(self.model, self._draw(self.sizes.lengths))
        said = {"tensor": "tokens whose tie a higher id won", "rows": tokens}
        return [
            self.target.row(Relation.CONTRACTED, "ties planted", Drift(wrong, tokens), **said),
            self.target.row(PRECONDITION, "ties planted", Drift(int(not split), 1), detail=f"{split} tied at the last"),
        ]

    @torch.no_grad()
    def _load(self) -> list[Row]:
        """Gives the routers a bias: an expert gets no token, one, or all; returns the row of whether it did."""
        routers.bias(self.model)
        counts = routers.loads(self.model, self._draw(self.sizes.lengths))
        wrong = sum(found != [0, 1, every] for *found, every in counts)
        said = {"tensor": "layers whose router does something else", "detail": f"tokens of each: {counts}"}
        return [self.target.row(PRECONDITION, "experts of no, one or every token", Drift(wrong, len(counts)), **said)]

    def _controls(self) -> list[Row]:
        """Returns the rows of what must drift: the stock model in every layout, and its last weight over splits."""
        if self.grads is not None:
            for p in self.grads.parameters:
                for buffer in bits.BUFFERS:
                    p.__dict__.pop(buffer, None)
            self.grads = None
            give_back()
        restore(self.model)
        control = lambda what, rows: control_row(f"{STOCK}, {what}", rows)
        return [control("layouts", self._layouts()), control("a weight over splits", self._stock_splits())]

    def _stock_splits(self) -> list[Row]:
        """Returns the rows of the last down projection's gradient, that of each micro-batch added up in fp32."""
        name, weight = [(n, p) for n, p in self.model.named_parameters() if p.dim() > 1 and _is_down(n)][-1]
        for p in self.model.parameters():
            p.requires_grad_(p is weight)
        ids, first, rows = self._draw(self.sizes.step, 1), None, []
        for cut, how in cuts(len(ids), 3, self.seed):
            if how == "packed":  # which stock attention may not know
                continue
            total = torch.zeros_like(weight, dtype=torch.float32)
            _step(self.model, ids, cut, how, self.seed, total=total, weight=weight)
            if first is None:
                first = total
                continue
            said = {"against": "one call", "tensor": name, "rows": sum(map(len, ids))}
            layout = f"micro_batches: {' + '.join(str(len(part)) for part in cut)}, {how}"
            rows.append(self.target.row(Relation.GRADIENT, layout, _compared(total, first), **said))
        return rows


def _is_down(name: str) -> bool:
    return any(part in name for part in ("down_proj", "dense_4h_to_h")) and "bias" not in name


def _compared(a: Tensor, b: Tensor) -> Drift:
    """Compares tensors of any size, an expert at a time."""
    return joined([compare(x, y) for x, y in zip(a, b)]) if a.dim() > 2 else compare(a, b)


def cuts(count: int, splits: int, seed: int) -> list[tuple[list[list[int]], str]]:
    """Returns ways to cut a step of `count` sequences into micro-batches in their order, each with how these are laid
    out: all in one, one each, then by chance."""
    rng, every = random.Random(seed), list(range(count))
    found = [([every], "right"), ([[i] for i in every], "left")]
    while len(found) < splits:
        ends = [i + 1 for i in range(count - 1) if rng.random() < 0.4]
        cut = [every[a:b] for a, b in zip([0, *ends], [*ends, count])], HOWS[len(found) % len(HOWS)]
        found += [cut] * (cut not in found)
    return found[:splits]


def _step(
    model: nn.Module,
    ids: list[Tensor],
    cut: list[list[int]],
    how: str,
    seed: int,
    total: Tensor | None = None,
    weight: Tensor | None = None,
) -> None:
    """Runs the forward and backward of every micro-batch, of a loss with an advantage a token. total: adds up the
    gradient of a stock model's weight, in fp32."""
    g = torch.Generator().manual_seed(seed)
    advantages = [torch.randn(len(s), generator=g).to(s.device) for s in ids]
    tokens = sum(map(len, ids))
    model.train()
    for part in cut:
        some = [ids[i] for i in part]
        if how == "packed":
            ends = torch.tensor([0, *map(len, some)]).cumsum(0).to(torch.int32).to(model.device)
            found, _ = logprobs(model, torch.cat(some)[None], cu_seqlens=ends)
            weighed = found[0] * torch.cat([advantages[i] for i in part])
        else:
            given, at = bits.padded(some, how == "left")
            weights = torch.zeros(given["input_ids"].shape, device=model.device)
            for row, i, where in zip(weights, part, at):
                row[where] = advantages[i]
            weighed = _logprobs(model, given, stock=total is not None) * weights
        (weighed.sum() / tokens).backward()
        if total is not None:
            total += weight.grad
            weight.grad = None
    model.eval()


def _logprobs(model: nn.Module, given: dict[str, Tensor], stock: bool) -> Tensor:
    """Returns log p(next token) of a padded batch, 0 where there is none."""
    if not stock:
        return logprobs(model, given["input_ids"], attention_mask=given["attention_mask"])[0]
    logits, mask = bits.results(model, **given, use_cache=False)[0], given["attention_mask"]
    following = nn.functional.pad(given["input_ids"][:, 1:], (0, 1))
    real = mask.bool() & nn.functional.pad(mask[:, 1:], (0, 1)).bool()
    found = logits.float().log_softmax(-1).gather(-1, following[..., None])[..., 0]
    return torch.where(real, found, 0.0)


@torch.no_grad()
def sample(model: nn.Module, prompts: list[Tensor], new: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Samples by `generate` behind left-padded prompts; returns the sequences, and the logprobs (tokens,) fp32 of the new
    tokens, as a rollout records them."""
    given, at = bits.padded(prompts, left=True)
    torch.manual_seed(seed)
    out = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    tokens = out.sequences[:, -new:]
    steps = [bi_kernels.log_softmax(y.to(model.dtype)).gather(-1, tokens[:, i, None]) for i, y in enumerate(out.logits)]
    sequences = [torch.cat([row[where], t]) for row, where, t in zip(given["input_ids"], at, tokens)]
    return sequences, torch.cat(steps, 1).float().flatten()


def rescore(model: nn.Module, sequences: list[Tensor], begun: list[int]) -> Tensor:
    """Returns the logprobs (tokens,) fp32 of what follows each prompt, in one padded batch in train mode."""
    given, _ = bits.padded(sequences, left=False)
    model.train()
    found, _ = logprobs(model, given["input_ids"], attention_mask=given["attention_mask"])
    model.eval()
    return torch.cat([row[n - 1 : len(s) - 1] for row, s, n in zip(found.detach(), sequences, begun)])


def captured(model: nn.Module, ids: Tensor, cache: hf.StaticCache) -> tuple[Callable[[], None], tuple]:
    """Captures one decode step behind ids (batch, length), which fill the cache first; on a CPU, the step itself.

    Returns what computes it again, and (its token and position, which are written to before; what returns its logits;
    the first token).
    """
    length = ids.shape[1]
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    first, position = token.clone(), torch.full((len(ids), 1), length, device=ids.device)
    counters = [layer.cumulative_length for layer in cache.layers]

    def step() -> Tensor:
        return model(token, position_ids=position, past_key_values=cache, use_cache=True).logits

    if ids.device.type == "cpu":
        out: list[Tensor] = []
        return lambda: out.append(step()), (token, position, lambda: out[-1], first)
    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for counter in counters:
        counter.fill_(length)
    return lambda kept=cache: graph.replay(), (token, position, lambda: logits, first)


def table(rows: Sequence[Row]) -> list[dict]:
    """Returns a line for each model: elements that differ, of how many, in each kind of check, and what was refused."""
    kinds = {
        "layouts": lambda r: r.relation == Relation.INVARIANCE or r.layout in CACHED,
        "splits": lambda r: r.relation == Relation.GRADIENT,
        "rescored logprobs": lambda r: r.layout.startswith("generate"),
        "decode in a CUDA graph": lambda r: r.layout == "cuda_graph",
    }
    lines = []
    for name, mine in grouped((r for r in rows if not r.control), lambda r: r.op).items():
        line = {"model": name}
        for kind, of in kinds.items():
            line[kind] = _said([r for r in mine if of(r)])
        failed = [r for r in needs_fix(mine) if not any(of(r) for of in kinds.values())]
        lines.append(line | {"else": "; ".join(f"{r.layout}: {r.detail}" for r in failed) or "as expected"})
    return lines


def _said(rows: Sequence[Row]) -> str:
    judged = [r for r in rows if r.mismatches is not None]
    raised = [r.detail for r in rows if r.mismatches is None]
    total = lambda field: sum(getattr(r, field) for r in judged)
    counts = [f"{total('mismatches'):,} of {total('elements'):,} differ"] * bool(judged)
    return "; ".join([*counts, *dict.fromkeys(raised)]) or "–"
