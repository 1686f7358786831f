"""A training step of any callable: a real backward() over the calls of a layout, or over the whole batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bi_kernels.audit import step
from bi_kernels.audit.compare import compare
from bi_kernels.audit.inputs import cancel, generator, powers
from bi_kernels.audit.reproduce.samples import in_order
from bi_kernels.audit.step import Context, NoBackward, Results
from bi_kernels.audit.targets.any_callable import CallableTarget, Layout, by_sample, tensors


@contextmanager
def gradients_kept(module: torch.nn.Module | None) -> Iterator[None]:
    """Restores `.grad` and `main_grad` of a module's parameters on exit."""
    before = [(p, p.grad, getattr(p, "main_grad", None)) for p in (module.parameters() if module else ())]
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
        self.folded_names: set[str] = set()  # gradients that the last backward left in main_grad

    @property
    def floating(self) -> list[str]:
        t = self.t
        return [k for k, v in tensors(t.values).items() if v.is_floating_point() and k not in t.outputs]

    @property
    def parameters(self) -> list[str]:
        return [k for k in self.floating if k not in self.t.batched]

    def inputs(self) -> dict[str, Tensor]:
        return self.t.take(self.t.every, kind=self.kind)

    def others(self) -> dict[str, Tensor]:
        return self.t.take(self.t.every[::-1], kind=self.kind)

    def outputs_of(self, given: dict, function: Callable | None = None, call: Sequence[int] = ()) -> Sequence[Tensor]:
        """Calls the callable on samples, all of them unless given; returns what has a gradient, else all that is
        judged. What it works on in place is a copy."""
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

    def named(self, outputs: Sequence[Tensor]) -> Results:
        numbers = self.trained if len(outputs) == len(self.trained) else self.t.judged
        rows = (by_sample(y, self.t.dims[i], self.t.count) for i, y in zip(numbers, outputs))
        return {self.t.output_name(i): y.detach() for i, y in zip(numbers, rows)}

    def draw(self, outputs: Sequence[Tensor], count: int = 0) -> None:
        """Draws an upstream gradient for every sample, its exponents spread over the samples; or, of cancelling inputs,
        one that cancels over features and over samples. The outputs are of `count` samples, all unless given."""
        t, drawn = self.t, []
        for number, (y, i) in enumerate(zip(outputs, self.trained)) if not self.dy else ():
            shape = by_sample(y, t.dims[i], count or t.count).shape[1:]
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

    def laid_out(self, call: Sequence[int]) -> list[Tensor]:
        """Returns the upstream gradients of a call's samples, as its outputs lie; places without a sample have none."""
        index, given = torch.tensor(call, device=self.t.device), []
        for i, dy in zip(self.trained, self.dy):
            own = dy[index.clamp(min=0)]
            own[index < 0] = 0
            d = self.t.dims[i]
            given.append(own.movedim(0, d).flatten(d, d + 1))
        return given

    def upstream(self) -> list[Tensor]:
        return self.laid_out(self.t.every)

    @contextmanager
    def module_parameters(self, how: Context) -> Iterator[dict[str, Tensor]]:
        module = self.t.module
        named = dict(module.named_parameters()) if module else {}
        frozen = [p for k, p in named.items() if p.requires_grad and not how.wants(k)]
        with gradients_kept(module):
            try:
                for p in frozen:
                    p.requires_grad_(False)
                yield {k: p for k, p in named.items() if how.wants(k)}
            finally:
                for p in frozen:
                    p.requires_grad_()

    def made(self, given: dict | None = None, main_grad: bool = True, **how) -> Results:
        """Returns the outputs and gradients of the whole batch, a row a sample; without those that are not there."""
        with torch.enable_grad():
            found = super().made(given, main_grad=main_grad, **how)
        t, outputs = self.t, {self.t.output_name(i) for i in self.t.judged}
        rows = lambda k, g: g.movedim(t.batch, 0) if k[1:] in t.batched else g
        nothing = lambda k, g: g is None or k[1:] not in t.batched and k[1:] not in self.in_grad and not g.any()
        gradients = {k: rows(k, g).clone() for k, g in found.items() if k not in outputs and not nothing(k, g)}
        self.folded_names = {k for k in gradients if k[1:] not in t.batched and k[1:] not in self.in_grad}
        return {k: y for k, y in found.items() if k in outputs} | gradients

    def gradients(self, layout: Layout | None = None, filler: str = "stale", **how) -> dict[str, Tensor]:
        """Returns {name: gradient} over the calls of a layout, one of the whole batch unless given.

        Batched inputs have a row a sample, shared ones and a module's parameters one for all calls; without those that
        are not there."""
        t = self.t
        if layout is None:
            outputs = {t.output_name(i) for i in t.judged}
            return {k: g for k, g in self.made(**how).items() if k not in outputs}
        given, context = t.given(self.kind), Context(**{"main_grad": True} | how)
        shared = {k: given[k].detach().clone().requires_grad_() for k in self.parameters}
        parts: dict[str, list[Tensor]] = {k: [] for k in self.floating if k in t.batched}
        with self.module_parameters(context) as module:
            trained = shared | module
            step.prepare(trained.values(), context.main_grad)
            for call in layout:
                arguments = t.take(call, filler, self.kind) | shared
                leaves = {k: arguments[k].requires_grad_() for k in parts}
                with torch.enable_grad():
                    outputs = self.outputs_of(arguments, None, call)
                self.draw(outputs, len(call))
                self.backward(outputs, self.laid_out(call), (), context)
                for k, leaf in leaves.items():
                    if leaf.grad is not None:
                        parts[k].append(leaf.grad.movedim(t.batch, 0))
            found = {f"d{k}": in_order(layout, part) for k, part in parts.items() if part}
            for k, p in trained.items():
                if p.grad is not None or context.main_grad and p.main_grad.any():
                    found[f"d{k}"] = step.left(p).clone()
        return found
