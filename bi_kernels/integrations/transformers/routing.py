"""Modules of no known class: what their own code asks of PyTorch goes through `batch_invariant_mode`.

A trial call of the model finds which modules those are, and which call a function that has no batch-invariant form.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from bi_kernels.integrations.transformers.check import as_it_was, padded, results, token_embedding
from bi_kernels.integrations.transformers.gradients import STATE, Folds, buffer
from bi_kernels.integrations.transformers.layout import current
from bi_kernels.integrations.transformers.swap import Swapped
from bi_kernels.mode.mode import batch_invariant_mode

LENGTHS = (13, 9, 11)  # of the trial's sequences: 13 and 39 are no dimension of a model
FAR = 0.1  # of stock's logits, by which half of the tokens may be off, bf16 and all
GRADIENT = "the gradient of "  # how the name of what only a backward adds up begins
ROUTED = "bi_kernels_routed"  # of a model whose own code is routed


class ModelMode(batch_invariant_mode):
    """The mode within a model's call, whose parameters' gradients the call folds."""

    def __init__(self, folds: Folds | None = None):
        super().__init__()
        self.folds = folds

    def adopt(self, parameter: nn.Parameter, embedding: bool = False) -> None:
        """Gives a parameter the fp32 buffer of its fold."""
        (self.folds or current().folds).use(parameter, embedding)
        if not (embedding or hasattr(getattr(parameter, "main_grad", None), "of_step")):
            buffer(parameter)

    def meets_unknown(self, name: str) -> None:
        """Raises ValueError for a function of a forward that no trial has seen."""
        super().meets_unknown(name)
        call = current()
        if call is not None and call.is_patched and call.is_promised:
            raise ValueError(
                f"apply: a forward that was set on the model calls {name}, which has no batch-invariant form; expected "
                "products, norms, softmax and what else batch_invariant_mode routes"
            )

    def rows(self, lead: torch.Size):
        """Enters the layout of the tokens of an input in the model's call."""
        call = current()
        return super().rows(lead) if call is None else call.rows(lead)

    def takes(self, x: Tensor, at: object) -> None:
        """Notes which of the call's tokens an index takes, in a forward that was set on the model."""
        call = current()
        if call is not None and call.is_patched and call.layout is not None:
            call.take(x, at)


def routed(forward: Callable) -> Callable:
    """Returns a module's forward within the mode."""

    @wraps(forward)
    def within(self, *args, **kwargs):
        call = current()
        folds = Folds() if call is None else call.folds
        with ModelMode(folds):
            out = forward(self, *args, **kwargs)
        if call is None:
            folds.attach(out)
        return out

    return within


class Routed(Swapped):
    """its functions, routed"""

    @classmethod
    def members(cls, replaces: type[nn.Module]) -> dict:
        """Returns the replaced forward within the mode."""
        return {"forward": routed(replaces.forward)}


class Trial(ModelMode):
    """What each module's own code asked of PyTorch in short calls: in training mode, with a gradient, and decoding.

    expected: stock's logits, as `stock_logits` returns them. functions: of each module, those that were routed;
    unknown: those that were left to PyTorch, or sum over tokens; folded: parameters whose gradient our ops fold, once
    a call; again: those that a call uses more than once; error: what the model raised, or what is wrong with its
    logits or its attention.
    """

    in_trial = True

    def __init__(self, model: nn.Module, expected: list[Tensor]):
        super().__init__()
        self.functions: dict[nn.Module, Counter] = defaultdict(Counter)
        self.unknown: dict[nn.Module, Counter] = defaultdict(Counter)
        self.calls: Counter[nn.Module] = Counter()
        self.error, self.attended, self.folded, self.again = "", 0, set(), set()
        self._within: list[nn.Module] = []
        self._modules = {*model.modules()}
        self._uses: Counter[tuple[int, bool]] = Counter()  # as an embedding, or otherwise
        try:
            with as_it_was(model):
                found = self._run(model)
                self.again = {id(p) for m, n in self.calls.items() if n > 1 for p in m.parameters(recurse=False)}
                for m, n in self.calls.items():  # an op of ours reads its parameters
                    if isinstance(m, Swapped):
                        self._uses.update(
                            {(id(p), isinstance(m, nn.Embedding)): n for p in m.parameters(recurse=False)}
                        )
                self.again |= {p for (p, _), n in self._uses.items() if n > 1}
                self.folded = {id(p) for p in model.parameters() if hasattr(p, STATE)} - self.again
            far = torch.cat([_distance(a, b) for a, b in zip(found, expected)]).median().item()
            if not far <= FAR:
                self.error = f"its logits are not stock's: half of the tokens are off by {far:.0%} or more"
            elif not self.attended and any(getattr(m, "whole", False) for m in model.modules()):
                self.error = "its attention does not come through Transformers' interface"
        except Exception as error:  # of the model's code, whatever it is
            self.error = f"a trial call raised {type(error).__name__}: {error}".splitlines()[0][:200]

    def adopt(self, parameter: nn.Parameter, embedding: bool = False) -> None:
        """Counts the uses of a parameter in the call that trains."""
        super().adopt(parameter, embedding)
        self._uses[id(parameter), embedding] += 1

    def meets_routed(self, name: str) -> None:
        """Counts a function of the module whose code runs."""
        if self._within:
            self.functions[self._within[-1]][name] += 1

    def meets_unknown(self, name: str) -> None:
        """Counts a function of the module whose code runs."""
        if self._within:
            self.unknown[self._within[-1]][name] += 1

    def meets_sum(self, *sizes: int) -> None:
        """Notes a sum over tokens, whose order depends on where a sequence lies."""
        if {max(LENGTHS), max(LENGTHS) * len(LENGTHS)} & {*sizes}:
            self.meets_unknown("a sum over tokens")

    def _enter(self, module: nn.Module, *_) -> None:
        known = module in self._modules or not self._within  # one that is made anew in each call is its caller's code
        self._within.append(module if known else self._within[-1])
        self.calls[module] += torch.is_grad_enabled()

    def _leave(self, *_) -> None:
        if current() is not None:
            self.attended = max(self.attended, current().attended)
            if current().folds.computed:
                current().folds.computed = 0
                self.meets_unknown(f"{GRADIENT}a computed weight")
        self._within.pop()

    def _run(self, model: nn.Module) -> list[Tensor]:
        given, at = _inputs(model)
        width, mask = given["input_ids"].shape[1] - 1, given.pop("attention_mask")
        with ExitStack() as stack:
            device = mask.device
            stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
            for register, hook in (
                (register_module_forward_pre_hook, self._enter),
                (lambda f: register_module_forward_hook(f, always_call=True), self._leave),
            ):
                stack.callback(register(hook).remove)
            stack.enter_context(self)
            with _training(model), torch.no_grad():  # what it asks only there, as noise
                results(model, **given, attention_mask=mask, use_cache=False)
            with torch.enable_grad():
                found, _ = results(model, **given, attention_mask=mask, use_cache=False)
            with torch.no_grad():
                first = {k: v[:, :width] for k, v in given.items()}
                _, cache = results(model, **first, attention_mask=mask[:, :width], use_cache=True)
                if cache is not None:
                    last = {k: v[:, width:] for k, v in given.items()}
                    results(model, **last, attention_mask=mask, past_key_values=cache, use_cache=True)
        return _tokens(found, at)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Puts a model in training mode, and back in eval mode with its buffers."""
    before = [(b, b.clone()) for b in model.buffers()]
    model.train()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a checkpoint's, of a call without gradients
            yield
    finally:
        model.eval()
        for b, kept in before:
            b.copy_(kept)


def _inputs(model: nn.Module) -> tuple[dict[str, Tensor], list[slice]]:
    embedding, g = token_embedding(model), torch.Generator().manual_seed(0)
    ids = [torch.randint(1, embedding.num_embeddings, (n,), generator=g, device="cpu") for n in LENGTHS]
    return padded([s.to(embedding.weight.device) for s in ids], left=True)


def _tokens(y: Tensor, at: list[slice]) -> list[Tensor]:
    y = y.detach()
    return [row[where] if y.dim() == 3 else row[None] for row, where in zip(y, at)]


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Returns how far each token's logits are from the others', as a share of these."""
    return (a.double() - b.double()).norm(dim=-1) / b.double().norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)


def stock_logits(model: nn.Module) -> list[Tensor]:
    """Returns what a model that nothing is put into makes of the trial's sequences; none if it raises."""
    try:
        with as_it_was(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            given, at = _inputs(model)
            return _tokens(results(model, **given, use_cache=False)[0], at)
    except Exception:  # the trial says what
        return []
