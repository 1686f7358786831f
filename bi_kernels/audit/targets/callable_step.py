"""A training step of any callable: a real backward() over the calls of a layout, or over the whole batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bi_kernels.audit import step
from bi_kernels.audit.compare import compare
from bi_kernels.audit.inputs import cancel, generator, powers
from bi_kernels.audit.reproduce.samples import in_order
from bi_kernels.audit.step import PLAIN, Context, NoBackward, Results
from bi_kernels.audit.targets.any_callable import CallableTarget, Layout, by_sample, tensors


@contextmanager
def gradients_kept(module: torch.nn.Module | None) -> Iterator[None]:
    """Restores `.grad` and `main_grad` of a module's parameters on exit."""
    before = [(p, p.grad, getattr(p, "main_grad", None)) for p in (module.parameters() if module is not None else ())]
    try:
        yield
    finally:
        for p, p.grad, p.main_grad in before:
            if p.main_grad is None:
                del p.main_grad


class Step(step.Step):
    """One training step of a callable on one kind of inputs. The whole call is the whole batch."""

    def __init__(self, t: CallableTarget, kind: str = "given"):
        super().__init__()
        self.t, self.kind = t, kind
        self.trained: list[int] = []  # numbers of the outputs that have a gradient

    @property
    def floating(self) -> list[str]:
        """Returns the inputs that get a gradient: not a state that all samples share, which a leaf cannot be."""
        t = self.t
        left = {*t.outputs, *(t.changed - t.batched)}
        return [k for k, v in tensors(t.values).items() if v.is_floating_point() and k not in left]

    @property
    def parameters(self) -> list[str]:
        return [k for k in self.floating if k not in self.t.batched]

    def inputs(self) -> dict[str, Tensor]:
        return self.t.take(self.t.every, kind=self.kind)

    def others(self) -> dict[str, Tensor]:
        return self.t.take(self.t.every[::-1], kind=self.kind)

    def taken(self, inputs: dict, call: Sequence[int] | None, how: Context) -> dict:
        if call is None:
            return inputs
        return self.t.take(call, how.filler, self.kind) | {k: inputs[k] for k in self.parameters}

    def outputs_of(self, given: dict, call: Sequence[int] | None = None, how: Context = PLAIN) -> Sequence[Tensor]:
        """Calls the callable on samples; returns what has a gradient, else all that is judged. What it works on in
        place is a copy."""
        t = self.t
        own = {k: given[k].clone() for k in self.floating if k in t.batched and given[k].requires_grad}
        with t.layout(call or t.every):
            found = t.results(given | own)
        if not torch.is_grad_enabled():
            return [found[i] for i in t.judged]
        for k, x in own.items():
            if any(y is x for y in found) and not x._version and compare(x.detach(), given[k].detach()).mismatches:
                raise NoBackward(f"it writes into {k} unseen by autograd, and returns it")
        self.trained = [i for i in t.judged if found[i].requires_grad]
        if not self.trained:
            raise NoBackward("no output requires a gradient")
        return [found[i] for i in self.trained]

    def named(self, outputs: Sequence[Tensor], call: Sequence[int] | None = None) -> Results:
        numbers, count = self.trained if len(outputs) == len(self.trained) else self.t.judged, len(call or self.t.every)
        rows = (by_sample(y, self.t.dims[i], count) for i, y in zip(numbers, outputs))
        return {self.t.output_name(i): y.detach() for i, y in zip(numbers, rows)}

    def draw(self, outputs: Sequence[Tensor], call: Sequence[int] | None = None) -> None:
        """Draws an upstream gradient for every sample, its exponents spread over the samples; or, of cancelling inputs,
        one that cancels over features and over samples."""
        t, drawn = self.t, []
        for number, (y, i) in enumerate(zip(outputs, self.trained)) if not self.dy else ():
            shape = by_sample(y, t.dims[i], len(call or t.every)).shape[1:]
            g = generator(y.device, t.seed, "upstream", number)
            dy = torch.randn(t.count, *shape, generator=g, device=y.device)
            if self.kind == "cancelling":
                cancel(dy)
                half = t.count // 2
                dy[half : 2 * half] = -dy[:half]
                dy[7::8] *= 2.0**-12
            else:
                dy *= powers((t.count, *[1] * len(shape)), -6, 7, g)
            drawn.append(dy.to(y.dtype))
        self.dy = self.dy or drawn

    def upstream(self, call: Sequence[int] | None = None) -> list[Tensor]:
        index, given = torch.tensor(call or self.t.every, device=self.t.device), []
        for i, dy in zip(self.trained, self.dy):
            own = dy[index.clamp(min=0)]
            own[index < 0] = 0
            d = self.t.dims[i]
            given.append(own.movedim(0, d).flatten(d, d + 1))
        return given

    def in_order(self, calls: Layout, parts: Sequence[Tensor | None], name: str = "") -> Tensor | None:
        found = [y.movedim(self.t.batch, 0) if name else y for y in parts if y is not None]
        return in_order(calls, found) if found else None

    @contextmanager
    def module_parameters(self, how: Context) -> Iterator[dict[str, Tensor]]:
        module = self.t.module
        named = dict(module.named_parameters()) if module is not None else {}
        frozen = [p for k, p in named.items() if p.requires_grad and not how.wants(k)]
        with gradients_kept(module), torch.enable_grad():
            try:
                for p in frozen:
                    p.requires_grad_(False)
                yield {k: p for k, p in named.items() if how.wants(k)}
            finally:
                for p in frozen:
                    p.requires_grad_()

    def made(self, given: dict | None = None, calls: Layout | None = None, main_grad: bool = True, **how) -> Results:
        """Returns the gradients over the calls of a layout, a row a sample, of the whole batch with the outputs;
        without those that are not there."""
        found, t = super().made(given, calls, main_grad=main_grad, **how), self.t
        outputs = {t.output_name(i) for i in t.judged}
        rows = lambda k, g: g.movedim(t.batch, 0) if k[1:] in t.batched and not calls else g
        nothing = lambda k, g: g is None or k[1:] not in t.batched and k[1:] not in self.in_grad and not g.any()
        gradients = {k: rows(k, g).clone() for k, g in found.items() if k not in outputs and not nothing(k, g)}
        return {k: y for k, y in found.items() if k in outputs} | gradients

    def gradients(self, layout: Layout | None = None, filler: str = "stale", **how) -> dict[str, Tensor]:
        """Returns {name: gradient} over the calls of a layout, one of the whole batch unless given.

        Batched inputs have a row a sample, shared ones and a module's parameters one for all calls; without those that
        are not there."""
        outputs = {self.t.output_name(i) for i in self.t.judged}
        return {k: g for k, g in self.made(None, layout, filler=filler, **how).items() if k not in outputs}
