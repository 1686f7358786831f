"""A training step of any callable: a real backward() over the calls of a layout."""

import contextlib
from collections.abc import Iterator

import torch

from bi_kernels.audit.callables.target import Layout, Target, by_sample, in_order, tensors
from bi_kernels.audit.problem.inputs import generator, powers


class NoBackward(ValueError):
    """Raised where nothing that the callable returns has a gradient."""


@contextlib.contextmanager
def gradients_kept(module: torch.nn.Module | None) -> Iterator[None]:
    """Yields what its user's parameters have in .grad and main_grad is there again afterwards."""
    before = [(p, p.grad, getattr(p, "main_grad", None)) for p in (module.parameters() if module else ())]
    try:
        yield
    finally:
        for p, p.grad, p.main_grad in before:
            if p.main_grad is None:
                del p.main_grad


class Step:
    """One training step of a target: a real backward() over the calls of a layout."""

    def __init__(self, t: Target):
        self.t, self.upstream = t, []
        self.floating = [k for k, v in tensors(t.values).items() if v.is_floating_point() and k not in t.outputs]

    def gradients(self, layout: Layout, filler: str = "stale") -> dict[str, torch.Tensor]:
        """Returns {name: gradient}: of batched inputs by sample, of shared ones and a module's parameters once for all
        calls."""
        t = self.t
        shared = {k: t.values[k].detach().clone().requires_grad_() for k in self.floating if k not in t.batched}
        trained = shared | (dict(t.module.named_parameters()) if t.module else {})
        with gradients_kept(t.module):
            for p in trained.values():
                p.grad = None
                p.main_grad = torch.zeros_like(p, dtype=torch.float32, memory_format=torch.contiguous_format)
            parts = self._backward(layout, filler, shared)
            found = {f"d{k}": in_order(layout, part) for k, part in parts.items() if part}
            for k, p in trained.items():
                if p.grad is not None or p.main_grad.any():
                    found[f"d{k}"] = p.main_grad if p.grad is None else p.grad.clone()
        return found

    def _backward(self, layout: Layout, filler: str, shared: dict) -> dict[str, list[torch.Tensor]]:
        """Returns the gradients of batched inputs, by call, a row a sample."""
        t = self.t
        parts = {k: [] for k in self.floating if k in t.batched}
        for call in layout:
            arguments = t.take(call, filler) | shared
            leaves = {k: arguments[k].detach().requires_grad_() for k in parts}
            with torch.enable_grad(), t.layout(call):
                own = {k: leaf.clone() for k, leaf in leaves.items()}  # so that it may work in place
                found = t.results(arguments | own)
            outputs = [(y, d) for y, d in zip(found, t.dims) if d is not None and y.requires_grad]
            if not outputs:
                raise NoBackward("no output requires a gradient")
            if not self.upstream:
                self._draw(outputs, len(call))
            index = torch.tensor(call, device=t.device)
            given = []
            for (_, d), dy in zip(outputs, self.upstream):
                own = dy[index.clamp(min=0)]
                own[index < 0] = 0
                given.append(own.movedim(0, d).flatten(d, d + 1))
            torch.autograd.backward([y for y, _ in outputs], given)
            for k, leaf in leaves.items():
                if leaf.grad is not None:
                    parts[k].append(leaf.grad.movedim(t.batch, 0))
        return parts

    def _draw(self, outputs: list, count: int) -> None:
        """An upstream gradient for every sample, the same in every layout, its exponents spread over the samples."""
        for number, (y, d) in enumerate(outputs):
            shape = by_sample(y, d, count).shape[1:]
            g = generator(y.device, self.t.seed, "upstream", number)
            dy = torch.randn(self.t.count, *shape, generator=g, device=y.device)
            dy *= powers((self.t.count, *[1] * len(shape)), -6, 7, g)
            self.upstream.append(dy.to(y.dtype))
