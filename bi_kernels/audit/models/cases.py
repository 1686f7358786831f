"""Models of Transformers with random weights, and one step of each in every layout, as their arguments say it."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config
from transformers.utils import logging

from bi_kernels.audit.chain.layouts import parts
from bi_kernels.audit.problem.call_layouts import Call, pack, pad, spans
from bi_kernels.audit.problem.inputs import generator, on
from bi_kernels.contract import CONTRACT, DTYPES
from bi_kernels.integrations.transformers import apply, logprobs

CONFIGS = {"qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}
SPECIAL = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
STOCK, OURS = "stock Transformers", "bi_kernels"
QUICK = {"steps": 1, "batched_prompts": 3, "stock_prompts": 3}  # of the quick form
CHECKPOINTING = "micro_batches:2, checkpointing", "packed, checkpointing:reentrant"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Transformers from printing progress and advice, until it is left."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def case(session) -> dict:
    """Returns what the contract's [chain.transformers] says of a session's shapes."""
    found = CONTRACT["chain"]["transformers"]["tiny" if session.parameters["shapes"] == "tiny" else "real"]
    return found | QUICK if session.quick else found


def architectures(session) -> list[str]:
    """Returns the names of the models that are judged."""
    return [*CONFIGS][: 1 if session.quick else None]


def vocabulary(session) -> int:
    """Returns how many ids there are in every model."""
    return min(case(session)[name]["vocab_size"] for name in CONFIGS)


def built(session, name: str, dtype: str, ours: bool = True, prepare: Callable[[nn.Module], object] = id) -> nn.Module:
    """Returns a model with random weights, given to `apply` if it is ours; prepare: changes it before."""
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


def stock_scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None, **where) -> Tensor:
    """Returns log p(next token) (batch, length) fp32 of a model's own logits, 0 after a sequence's last token; it knows
    packed sequences by positions that restart."""
    positions = where.get("position_ids")
    if attention_mask is not None:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    elif positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    logits = model(input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False).logits
    following = torch.zeros_like(input_ids, dtype=torch.bool)
    following[:, :-1] = positions.expand_as(input_ids).diff(dim=1) == 1
    targets = input_ids.roll(-1, 1)[..., None]
    found = logits.float().log_softmax(-1).gather(-1, targets)[..., 0]
    return torch.where(following, found, 0.0)


class Step:
    """One step of uneven sequences, and what a model leaves of it in any layout.

    The loss is policy-like, over the step's tokens; `packed` is what the others are compared with.
    """

    def __init__(self, session):
        self.lengths, self.device = case(session)["lengths"], session.device
        g, self.count = generator("cpu", session.parameters["seed"], "transformers"), sum(self.lengths)
        self.ids = torch.randint(1, vocabulary(session), (self.count,), generator=g).to(self.device)
        self.advantages = torch.randn(self.count, generator=g).to(self.device)
        s = spans(self.lengths)
        self.layouts: dict[str, list[Call]] = {
            "packed": [pack(s)],
            "packed:positions": [pack(s)],
            "singles": [Call(x[None, :]) for x in s],
            "batch": [pad(s)],
            "left_padded": [pad(s, left=True)],
            "permuted": [pack(s[::-1])],
            "micro_batches:2": [pad(part) for part in parts(s, 2)],
            "micro_batches:4": [pad(part, left=True) if i % 2 else pack(part) for i, part in enumerate(parts(s, 4))],
        }
        self.layouts |= {name: self.layouts[name.partition(",")[0]] for name in CHECKPOINTING}

    def arguments(self, layout: str, call: Call, ours: bool = True) -> dict:
        """Returns what a model is told of a call; packed sequences by cu_seqlens, or by positions as stock needs."""
        index = on(self.device, call.index)
        ids = self.ids[index.clamp(min=0)].masked_fill(index < 0, 0)
        if call.cu_seqlens is None:
            real = index >= 0
            return {"input_ids": ids} | ({} if bool(real.all()) else {"attention_mask": real.long()})
        if ours and layout != "packed:positions":
            return {
                "input_ids": ids[None],
                "cu_seqlens": torch.tensor(call.cu_seqlens, dtype=torch.int32, device=self.device),
            }
        ends = zip(call.cu_seqlens, call.cu_seqlens[1:])
        at = torch.cat([torch.arange(end - begin, device=self.device) for begin, end in ends])
        return {"input_ids": ids[None], "position_ids": at[None]}

    def run(self, model: nn.Module, layout: str, ours: bool = True, between: Callable = id) -> dict[str, Tensor]:
        """Runs forward and backward of every call of a layout; returns the logprobs and every `.grad`, by name.

        A step whose sequences come in another order is another step: of `permuted` there are the logprobs alone.
        between: called with the model after each call.
        """
        model.train()
        model.zero_grad()
        if layout in CHECKPOINTING:
            model.gradient_checkpointing_enable({"use_reentrant": layout == CHECKPOINTING[1]})
            model.enable_input_require_grads()
        found = torch.zeros(2, self.count, device=self.device)
        for call in self.layouts[layout]:
            index = on(self.device, call.index).view(-1 if call.cu_seqlens is None else 1, call.index.shape[-1])
            real, at = index >= 0, index.clamp(min=0)
            with torch.set_grad_enabled(layout != "permuted"):
                if ours:
                    logprob, entropy = logprobs(model, **self.arguments(layout, call))
                else:
                    logprob = stock_scores(model, **self.arguments(layout, call, False))
                    entropy = torch.zeros_like(logprob)
                if layout != "permuted":
                    weight = self.advantages[at].masked_fill(~real, 0)
                    ((logprob * weight).sum() / self.count + entropy.sum() / (64 * self.count)).backward()
            found[:, index[real]] = torch.stack([logprob, entropy]).detach()[:, real]
            between(model)
        if layout in CHECKPOINTING:
            model.gradient_checkpointing_disable()
            model.disable_input_require_grads()
        model.eval()
        gradients = {n: p.grad for n, p in model.named_parameters()} if layout != "permuted" else {}
        return {"logprob": found} | gradients


def versions() -> str:
    """Names what was audited beside this package."""
    return f"transformers {transformers.__version__}"


def packed_logits(model: nn.Module, rows: Sequence[Tensor], ours: bool) -> list[Tensor]:
    """Returns the logits of each sequence: of ours from one packed call, of the stock model one sequence a call."""
    if not ours:
        return [model(row[None], use_cache=False).logits[0] for row in rows]
    lengths = [len(row) for row in rows]
    ends = torch.tensor([0, *lengths], device=rows[0].device).cumsum(0).int()
    return list(model(torch.cat(list(rows))[None], cu_seq_lens_q=ends, use_cache=False).logits[0].split(lengths))
