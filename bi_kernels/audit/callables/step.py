"""A training step of any callable: a real backward() over the calls of a layout."""

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch

from bi_kernels.audit.callables.target import Layout, Target, by_sample, tensors
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.problem.inputs import cancel, generator, powers
from bi_kernels.audit.reproduce.samples import in_order


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


@contextlib.contextmanager
def _frozen(module: torch.nn.Module | None, wanted: Collection[str] | None) -> Iterator[None]:
    """Freezes a module's parameters, all but those `wanted`; None freezes none."""
    parameters = module.named_parameters() if module and wanted is not None else ()
    frozen = [p for k, p in parameters if p.requires_grad and k not in wanted]
    try:
        for p in frozen:
            p.requires_grad_(False)
        yield
    finally:
        for p in frozen:
            p.requires_grad_()


Pair = Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[list[torch.Tensor], list[torch.Tensor]]]


class Step:
    """One training step of a target: a real backward() over the calls of a layout.

    wanted: the inputs and parameters that want a gradient; None: all. buffered: whether parameters have a main_grad.
    pair: makes other (outputs, upstream gradients) of those of a call. backward: called with (step, leaves, shared
    inputs, outputs, upstream gradients) in place of autograd's.
    """

    def __init__(
        self,
        t: Target,
        kind: str = "given",
        *,
        wanted: Collection[str] | None = None,
        buffered: bool = True,
        pair: Pair | None = None,
        backward: Callable | None = None,
    ):
        self.t, self.kind, self.upstream = t, kind, []
        self.wanted, self.buffered, self.pair, self.backward = wanted, buffered, pair, backward
        self.trained: list[int] = []  # numbers of the outputs that have a gradient
        self.folded: set[str] = set()  # gradients that stood in main_grad
        self.floating = [k for k, v in tensors(t.values).items() if v.is_floating_point() and k not in t.outputs]

    def wants(self, name: str) -> bool:
        """Tells whether a gradient of an input, or of a module's parameter, is wanted."""
        return self.wanted is None or name in self.wanted

    def gradients(self, layout: Layout, filler: str = "stale") -> dict[str, torch.Tensor]:
        """Returns {name: gradient}: of batched inputs by sample, of shared ones and a module's parameters once for all
        calls."""
        t = self.t
        given, names = t.given(self.kind), [k for k in self.floating if k not in t.batched and self.wants(k)]
        shared = {k: given[k].detach().clone().requires_grad_() for k in names}
        trained = shared | (dict(t.module.named_parameters()) if t.module else {})
        with gradients_kept(t.module), _frozen(t.module, self.wanted):
            for p in trained.values():
                p.grad = None
                vars(p).pop("main_grad", None)
                if self.buffered:
                    p.main_grad = torch.zeros_like(p, dtype=torch.float32, memory_format=torch.contiguous_format)
            parts = self._backward(layout, filler, shared)
            found = {f"d{k}": in_order(layout, part) for k, part in parts.items() if part}
            for k, p in trained.items():
                if p.grad is not None or self.buffered and p.main_grad.any():
                    found[f"d{k}"] = p.main_grad if p.grad is None else p.grad.clone()
                    self.folded |= {f"d{k}"} if p.grad is None else set()
        return found

    def _backward(self, layout: Layout, filler: str, shared: dict) -> dict[str, list[torch.Tensor]]:
        """Returns the gradients of batched inputs, by call, a row a sample."""
        t = self.t
        parts = {k: [] for k in self.floating if k in t.batched}
        for call in layout:
            leaves, outputs = self.forward(call, filler, shared)
            pairs = self.paired(outputs, call)
            if self.backward:
                self.backward(self, leaves, shared, *pairs)
            else:
                torch.autograd.backward(*pairs)
            for k, leaf in leaves.items():
                if leaf.grad is not None:
                    parts[k].append(leaf.grad.movedim(t.batch, 0))
        return parts

    def forward(self, call: list[int], filler: str, shared: dict) -> tuple[dict, list]:
        """Returns what of one call's inputs wants a gradient, and its outputs that have one, each with the dimension
        that counts samples."""
        t = self.t
        arguments = t.take(call, filler, self.kind) | shared
        leaves = {k: arguments[k].detach() for k in self.floating if k in t.batched and self.wants(k)}
        with torch.enable_grad(), t.layout(call):
            own = {k: leaf.requires_grad_().clone() for k, leaf in leaves.items()}  # so that it may work in place
            found = t.results(arguments | own)
        for k, x in own.items():
            if any(y is x for y in found) and not x._version and compare(x.detach(), leaves[k].detach()).mismatches:
                raise NoBackward(f"it writes into {k} unseen by autograd, and returns it")
        self.trained = [i for i in t.judged if found[i].requires_grad]
        if not self.trained:
            raise NoBackward("no output requires a gradient")
        outputs = [(found[i], t.dims[i]) for i in self.trained]
        return leaves, outputs

    def paired(self, outputs: list, call: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns outputs and their upstream gradients."""
        if not self.upstream:
            self._draw(outputs, len(call))
        index = torch.tensor(call, device=self.t.device)
        given = []
        for (_, d), dy in zip(outputs, self.upstream):
            own = dy[index.clamp(min=0)]
            own[index < 0] = 0
            given.append(own.movedim(0, d).flatten(d, d + 1))
        ys = [y for y, _ in outputs]
        return self.pair(ys, given) if self.pair else (ys, given)

    def _draw(self, outputs: list, count: int) -> None:
        """An upstream gradient for every sample, the same in every layout, its exponents spread over the samples; or,
        of cancelling inputs, one that cancels over features and over samples."""
        for number, (y, d) in enumerate(outputs):
            shape = by_sample(y, d, count).shape[1:]
            g = generator(y.device, self.t.seed, "upstream", number)
            dy = torch.randn(self.t.count, *shape, generator=g, device=y.device)
            if self.kind == "cancelling":
                cancel(dy)
                half = self.t.count // 2
                dy[half : 2 * half] = -dy[:half]
                dy[7::8] *= 2.0**-12
            else:
                dy *= powers((self.t.count, *[1] * len(shape)), -6, 7, g)
            self.upstream.append(dy.to(y.dtype))
