"""Folds gradients in fp32 for a user who knows only `.grad`: clipping and any optimizer work as usual.

A backward begins where the gradient reaches an output of the model, and opens each parameter that the call used. Its
fold continues if `.grad` is what the last backward left; else it restarts from `.grad`, or from zero after `zero_grad`.
When the backward ends, `.grad` gets the fold, rounded once, and what autograd itself added. A parameter that a
MainGrads holds is left to it.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bi_kernels.compat import current_backward, will_run

BUFFERS = ("main_grad", "embedding_main_grad")
STATE = "bi_kernels_fold"
LEAVES = 4  # that a plain backward() reaches, where backward(inputs=...) may reach a few


class _Fold:
    """A parameter's state between two backward passes."""

    def __init__(self):
        self.uses: set[str] = set()  # buffers into which its ops accumulate
        self.task = -1  # autograd's, in which it was opened last
        self.mark: object = None  # on the `.grad` that the last backward left, at `version`
        self.version = -1


def _fold(p: nn.Parameter) -> _Fold:
    if not hasattr(p, STATE):
        setattr(p, STATE, _Fold())
    return getattr(p, STATE)


def _fits(p: nn.Parameter, name: str) -> bool:
    buffer = getattr(p, name, None)
    return buffer is not None and buffer.shape == p.shape and buffer.device == p.device


def buffer(p: nn.Parameter, name: str = "main_grad") -> Tensor:
    """Returns a parameter's fp32 buffer, a new one if it has none or has moved."""
    if not _fits(p, name):
        setattr(p, name, torch.zeros(p.shape, dtype=torch.float32, device=p.device))
    return getattr(p, name)


def forget(p: nn.Parameter) -> None:
    """Removes the buffers and the state of a parameter; `.grad` stays."""
    if hasattr(p, STATE):
        for name in (*BUFFERS, STATE):
            if hasattr(p, name):
                delattr(p, name)


def tensors(out: object) -> Iterator[Tensor]:
    """Yields the tensors of a module's output: a tensor, containers of them, or an object that holds some."""
    if hasattr(out, "__dict__") and not isinstance(out, (Tensor, dict, tuple, list)):
        out = list(vars(out).values())
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (dict, tuple, list)):
        for part in out.values() if isinstance(out, dict) else out:
            if isinstance(part, (Tensor, dict, tuple, list)):
                yield from tensors(part)


def _state(grad: Tensor | None) -> object:
    """Returns what changes when a gradient is set or added to."""
    return None if grad is None else (id(grad), grad._version)


def _next(node: Node) -> tuple[Node, ...]:
    return tuple(n for n, _ in node.next_functions if n is not None)


def _reached(node: Node) -> bool | None:
    """Tells whether the running backward reaches a node; None for a leaf whose gradient autograd.grad returns."""
    try:
        return will_run(node)
    except RuntimeError:
        return None


def _wanted(nodes: tuple[Node, ...]) -> str:
    """Returns whether the running backward computes "all" or "some" gradients behind these nodes, by the nearest
    leaves; "none" where autograd.grad ends at an output."""
    todo, known, leaves = [nodes], set(), 0
    for nodes in todo:  # of one op; grows
        reached = [_reached(node) for node in nodes]
        if all(r is False for r in reached):
            continue  # the op itself is not computed
        for node, r in zip(nodes, reached):
            if hasattr(node, "variable"):
                if not r:
                    return "some"
                leaves += 1
            elif r and node not in known:
                known.add(node)
                todo.append(_next(node))
        if leaves >= LEAVES:
            break
    return "all" if leaves else "none"


class Folds:
    """The parameters that one forward call used, opened when its backward begins and closed when that ends."""

    def __init__(self):
        self.parameters: dict[int, nn.Parameter] = {}
        self.computed = 0  # weights that are no parameters, but have a gradient
        self.task = -1
        self.opened: list[tuple[nn.Parameter, Tensor | None]] = []  # with its `.grad` before
        self.beside: dict[str, nn.Parameter] = {}  # those of the model that no op of ours read, by name
        self._before: list[tuple[str, nn.Parameter, object]] = []  # these, and what tells whether `.grad` changes

    def use(self, p: nn.Parameter | None, embedding: bool = False) -> None:
        """Registers a parameter that an op reads. Raises ValueError for one with gradient hooks, which autograd would
        not call."""
        if p is None or not p.requires_grad or not torch.is_grad_enabled():
            return
        if not p.is_leaf:  # as an adapter makes a weight; autograd goes on to its parts
            self.computed += 1
            return
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"apply: a parameter of shape {tuple(p.shape)} has a gradient hook, which autograd would not call; "
                "expected none"
            )
        if hasattr(getattr(p, "main_grad", None), "of_step"):
            return
        fold = _fold(p)
        fold.uses.add(BUFFERS[embedding])
        for name in BUFFERS:
            if hasattr(p, name) and not _fits(p, name):  # the model was moved, or given another vocabulary
                delattr(p, name)
                fold.mark = None
        if id(p) not in self.parameters:
            self.parameters[id(p)] = p
            if self.task >= 0 and current_backward() >= 0:  # a checkpoint's, within the backward
                self._open([p])

    def cast(self, p: nn.Parameter | None, dtype: torch.dtype) -> Tensor | None:
        """Returns a parameter in a dtype; the gradient of a cast goes into the parameter's buffer."""
        self.use(p)
        if p is None or p.dtype == dtype:
            return p
        if p.requires_grad and not p.is_leaf:
            return p.to(dtype)
        cast = p.detach().to(dtype)
        if hasattr(p, "cut"):
            cast.cut = p.cut
        if torch.is_grad_enabled() and p.requires_grad:
            cast.requires_grad_()
            cast.main_grad = buffer(p)
        return cast

    def attach(self, out: object) -> None:
        """Hooks the call's outputs, where its backward begins."""
        if torch.is_grad_enabled():
            for t in tensors(out):
                if t.requires_grad and t.grad_fn is not None:
                    t.register_hook(partial(self._begin, _next(t.grad_fn)))  # its own node would keep itself alive

    def _begin(self, nodes: tuple[Node, ...], grad: Tensor) -> None:
        task, twice = current_backward(), torch.is_grad_enabled()
        if task != self.task:
            wanted = _wanted(nodes) if twice or self.parameters else "all"
            if wanted == "none":
                return
            if twice:
                raise ValueError("apply: create_graph is True, expected False: there is no gradient of a gradient")
            if wanted == "some" and self.parameters:
                raise ValueError(
                    "apply: torch.autograd.grad and backward(inputs=...) are not supported; call backward() alone, "
                    "which folds the gradient of every parameter into its .grad"
                )
            self.task, self.opened = task, []
            self._before = [(name, p, _state(p.grad)) for name, p in self.beside.items()]
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
            self._open(list(self.parameters.values()))

    @torch.no_grad()
    def _open(self, parameters: list[nn.Parameter]) -> None:
        anew = []
        for p in parameters:
            fold = _fold(p)
            if fold.task == self.task:  # by another call, in this backward
                continue
            fold.task, before = self.task, p.grad
            names = [n for n in BUFFERS if hasattr(p, n) or n == "main_grad" or len(fold.uses) > 1]
            fits = all(_fits(p, n) for n in names if n == "main_grad" or hasattr(p, n))
            buffers = [buffer(p, n) for n in names]
            left = fold.mark and getattr(before, STATE, None) is fold.mark and before._version == fold.version
            if not (fits and left):
                anew += buffers if before is None else buffers[1:]
                if before is not None:
                    p.main_grad.copy_(before)
            self.opened.append((p, before))
            p.grad = None
        if anew:
            torch._foreach_zero_(anew)

    @torch.no_grad()
    def _close(self) -> None:
        opened, self.opened = self.opened, []
        given, folded = [], []
        for p, before in opened:
            if p.grad is not None:  # from ops that are not ours
                p.main_grad.add_(p.grad)
            joined = getattr(p, "embedding_main_grad", None)  # a tied parameter has two folds: one addition, here
            folded.append(p.main_grad if joined is None else p.main_grad + joined)
            p.grad = torch.empty_like(p) if before is None else before
            given.append(p.grad)
        if given:
            torch._foreach_copy_(given, folded)
        passed_by = [name for name, p, before in self._before if _state(p.grad) != before]
        if passed_by:
            raise ValueError(
                f"apply: {passed_by[0]} got its gradient from code that is not ours, as a fused LM head, so it depends "
                "on the split; expected the model's own code, or a forward that calls PyTorch's functions"
            )
        for p, _ in opened:
            fold = _fold(p)
            fold.mark, fold.version = object(), p.grad._version
            setattr(p.grad, STATE, fold.mark)
