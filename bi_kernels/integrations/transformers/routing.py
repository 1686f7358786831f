"""Modules of no known class: what their own code asks of PyTorch goes through `batch_invariant_mode`.

A trial call of the model finds which modules those are, and which call a function that has no batch-invariant form.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from bi_kernels.integrations.transformers.check import as_it_was, padded, results, token_embedding
from bi_kernels.integrations.transformers.gradients import STATE, Folds, buffer
from bi_kernels.integrations.transformers.layout import current
from bi_kernels.integrations.transformers.swap import Swapped
from bi_kernels.mode.mode import batch_invariant_mode

LENGTHS = (13, 9)  # of the trial's sequences
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
    """What each module's own code asked of PyTorch in two short calls: one that trains, one that decodes.

    functions: of each module, those that were routed; unknown: those that were left to PyTorch; folded: parameters
    whose gradient our ops fold, once a call; error: what the model raised, where it did.
    """

    in_trial = True

    def __init__(self, model: nn.Module):
        super().__init__()
        self.functions: dict[nn.Module, Counter] = defaultdict(Counter)
        self.unknown: dict[nn.Module, Counter] = defaultdict(Counter)
        self.called: set[nn.Module] = set()
        self.error = ""
        self._within: list[nn.Module] = []
        self._uses: Counter[int] = Counter()
        try:
            with as_it_was(model):
                self._run(model)
                self.folded = {id(p) for p in model.parameters() if hasattr(p, STATE) and self._uses[id(p)] < 2}
        except Exception as error:  # of the model's code, whatever it is
            self.error = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    def adopt(self, parameter: nn.Parameter, embedding: bool = False) -> None:
        """Counts the uses of a parameter in the call that trains."""
        super().adopt(parameter, embedding)
        self._uses[id(parameter)] += not embedding

    def meets_routed(self, name: str) -> None:
        """Counts a function of the module whose code runs."""
        if self._within:
            self.functions[self._within[-1]][name] += 1

    def meets_unknown(self, name: str) -> None:
        """Counts a function of the module whose code runs."""
        if self._within:
            self.unknown[self._within[-1]][name] += 1

    def _enter(self, module: nn.Module, *_) -> None:
        self._within.append(module)
        self.called.add(module)

    def _leave(self, *_) -> None:
        self._within.pop()

    def _run(self, model: nn.Module) -> None:
        embedding, g = token_embedding(model), torch.Generator().manual_seed(0)
        ids = [torch.randint(1, embedding.num_embeddings, (n,), generator=g) for n in LENGTHS]
        given, _ = padded([s.to(embedding.weight.device) for s in ids], left=True)
        width, mask = given["input_ids"].shape[1] - 1, given.pop("attention_mask")
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for register, hook in (
                (register_module_forward_pre_hook, self._enter),
                (lambda f: register_module_forward_hook(f, always_call=True), self._leave),
            ):
                stack.callback(register(hook).remove)
            stack.enter_context(self)
            with torch.enable_grad():
                results(model, **given, attention_mask=mask, use_cache=False)
            with torch.no_grad():
                first = {k: v[:, :width] for k, v in given.items()}
                _, cache = results(model, **first, attention_mask=mask[:, :width], use_cache=True)
                if cache is not None:
                    last = {k: v[:, width:] for k, v in given.items()}
                    results(model, **last, attention_mask=mask, past_key_values=cache, use_cache=True)
