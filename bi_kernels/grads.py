"""fp32 gradient buffers on parameters (`main_grad`), and the masters that an optimizer steps."""

from collections.abc import Iterable
from functools import cached_property

import torch


class MainGrads:
    """Attaches a zeroed fp32 `main_grad` to every parameter; the backward of this package's ops accumulates into it.

    tied: parameters used both as an embedding and as an LM head. They get a second buffer, `embedding_main_grad`, so
    that neither fold is cut by the other; `join` adds the two once, at the end of the step. What another op leaves in
    a parameter's `.grad`, as of a view of it, joins as well; `collect` after each micro-batch adds that up in fp32.

        grads = MainGrads(model.parameters(), tied=[model.lm_head.weight])
        optimizer = torch.optim.AdamW(grads.masters)
        for every step:
            for every micro-batch, in logical order: loss.backward()
            grads.join(); optimizer.step(); grads.finish()

    Raises ValueError for a tied parameter that is not among the parameters.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], tied: Iterable[torch.nn.Parameter] = ()):
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self.tied = list(tied)
        if any(all(t is not p for p in self.parameters) for t in self.tied):
            raise ValueError("MainGrads: tied holds a parameter that is not among the parameters given")
        for p in self.parameters:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32, memory_format=torch.contiguous_format)
        self.mark()
        for p in self.tied:
            p.embedding_main_grad = torch.zeros_like(p.main_grad)

    @cached_property
    def masters(self) -> list[torch.nn.Parameter]:
        """Holds an fp32 copy of each parameter, made when it is first asked for, whose `.grad` is the parameter's
        `main_grad`."""
        masters = [torch.nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in self.parameters]
        for p, master in zip(self.parameters, masters):
            master.grad = p.main_grad
        return masters

    @torch.no_grad()
    def join(self) -> None:
        """The one addition of a tied parameter's two folds: main_grad += embedding_main_grad, which is zeroed; and of
        what still stands in `.grad`."""
        for p in self.tied:
            p.main_grad.add_(p.embedding_main_grad)
            p.embedding_main_grad.zero_()
        self.collect()
        for p, master in zip(self.parameters, self._made):
            master.grad = p.main_grad  # an optimizer's zero_grad may have dropped it

    @torch.no_grad()
    def collect(self) -> None:
        """main_grad += what stands in `.grad`, which is dropped."""
        for p in self.parameters:
            if p.grad is not None:
                p.main_grad.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """After the optimizer's step: the masters rounded into the parameters, the buffers zeroed."""
        for p, master in zip(self.parameters, self._made):
            p.copy_(master)
        for p in self.parameters:
            p.main_grad.zero_()
        self.mark()

    def mark(self) -> None:
        """Says that the buffers are zero as they stand: a step's first fold need not read them (see tokens.begins)."""
        for p in self.parameters:
            p.main_grad.zeros_at = id(p.main_grad), p.main_grad._version

    @property
    def _made(self) -> list[torch.nn.Parameter]:
        return self.__dict__.get("masters", [])
