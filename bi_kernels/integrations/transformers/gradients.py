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
OWNER = "bi_kernels_owner"  # of a parameter that FSDP2 gathered: what keeps its shards
LEAVES = 4  # that a plain backward() reaches, where backward(inputs=...) may reach a few


class _Fold:
    """A parameter's state between two backward passes."""

    def __init__(self):
        self.uses: set[str] = set()  # buffers into which its ops accumulate
        self.task = -1  # autograd's, in which it was opened last
        self.exchanged = -1  # likewise: in which DDP summed it over ranks
        self.mark: object = None  # on the gradient that the last backward left, at `version`
        self.version = -1

    def left(self, grad: Tensor | None) -> bool:
        """Tells whether a gradient is what the last backward left."""
        return self.mark is not None and getattr(grad, STATE, None) is self.mark and _version(grad) == self.version

    def leave(self, grad: Tensor | None) -> None:
        """Marks the gradient that a backward leaves."""
        if grad is not None:
            self.mark, self.version = object(), _version(grad)
            setattr(grad, STATE, self.mark)


def _fold(p: nn.Parameter) -> _Fold:
    if not hasattr(p, STATE):
        setattr(p, STATE, _Fold())
    return getattr(p, STATE)


def folded_in(p: nn.Parameter, task: int, exchanged: bool = False) -> Tensor | None:
    """Returns the fold of a parameter that a backward opened, None for another. exchanged: notes that ranks sum it."""
    fold = getattr(p, STATE, None)
    if fold is None or fold.task != task:
        return None
    fold.exchanged = task if exchanged else fold.exchanged
    joined = getattr(p, "embedding_main_grad", None)  # a tied parameter has two folds: one addition, here
    return p.main_grad if joined is None else p.main_grad + joined


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


def _version(grad: Tensor) -> int:
    local = getattr(grad, "_local_tensor", None)  # of a DTensor: what FSDP2 changes; an optimizer changes the DTensor
    return grad._version + (0 if local is None else local._version)


def _state(p: nn.Parameter) -> object:
    """Returns what changes when a parameter's gradient is set or added to."""
    owner = getattr(p, OWNER, None)
    places = [p.grad] if owner is None else [p.grad, owner.unsharded_accumulated_grad, owner.sharded_param.grad]
    return [None if grad is None else (id(grad), _version(grad)) for grad in places]


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


class _Cast(torch.autograd.Function):
    """A parameter in another dtype: its gradient is folded, but a wrapper such as DDP sees that it is used."""

    @staticmethod
    def forward(ctx, p, dtype):
        return p.to(dtype)

    @staticmethod
    def backward(ctx, grad):
        return None, None


class Folds:
    """The parameters that one forward call used, opened when its backward begins and closed when that ends."""

    def __init__(self):
        self.parameters: dict[int, nn.Parameter] = {}
        self.computed = 0  # weights that are no parameters, but have a gradient
        self.task = -1
        self.is_watched = False  # by a DDP that takes a parameter without a `.grad` for unused
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
        cast = _Cast.apply(p, dtype)
        if hasattr(p, "cut"):
            cast.cut = p.cut
        if cast.requires_grad:
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
            self._before = [(name, p, _state(p)) for name, p in self.beside.items()]
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
            self._open(list(self.parameters.values()))

    @torch.no_grad()
    def _open(self, parameters: list[nn.Parameter]) -> None:
        anew, summed = [], []
        for p in parameters:
            fold = _fold(p)
            if fold.task == self.task:  # by another call, in this backward
                if hasattr(p, OWNER):
                    raise ValueError(
                        "apply: one backward of two calls of a model that FSDP2 shards, expected one of each: it sums "
                        "a parameter over ranks before its second fold"
                    )
                continue
            owner, before = getattr(p, OWNER, None), p.grad
            fold.task = self.task
            names = [n for n in BUFFERS if hasattr(p, n) or n == "main_grad" or len(fold.uses) > 1]
            fits = all(_fits(p, n) for n in names if n == "main_grad" or hasattr(p, n))
            buffers = [buffer(p, n) for n in names]
            if owner is not None:
                synced = fold.left(owner.sharded_param.grad)
                if not (fits and (synced or fold.left(owner.unsharded_accumulated_grad))):
                    anew += buffers
                elif synced:
                    owner.sharded_param.grad = None  # the fold includes it
                owner.unsharded_accumulated_grad = p.main_grad  # which FSDP2 sums over ranks, `.grad` added
            elif not (fits and fold.left(before)):
                anew += buffers if before is None else buffers[1:]
                if before is not None:
                    p.main_grad.copy_(before)
                    summed += [before] * (fold.exchanged >= 0)
            self.opened.append((p, before))
            p.grad = None
            if self.is_watched and owner is None:
                p.grad = torch.empty_like(p) if before is None else before
                anew.append(p.grad)
        for kind in {t.dtype for t in anew}:
            torch._foreach_zero_([t for t in anew if t.dtype == kind])
        if summed and any(bool(grad.any()) for grad in summed):
            raise ValueError(
                "apply: a gradient that DDP summed was replaced before the next backward, as gradient_as_bucket_view "
                "does in the first step; expected no_sync() but for a step's last micro-batch, or zero_grad()"
            )

    @torch.no_grad()
    def _close(self) -> None:
        opened, self.opened, given, folded = self.opened, [], [], []
        for p, before in opened:
            owner = getattr(p, OWNER, None)
            if owner is not None:
                self._hand_on(p, owner)
                continue
            if p.grad is not None:  # from ops that are not ours
                p.main_grad.add_(p.grad)
            if _fold(p).exchanged == self.task:  # DDP leaves the sum
                p.grad = None
                continue
            folded.append(folded_in(p, self.task))
            p.grad = torch.empty_like(p) if before is None else before
            given.append(p.grad)
        if given:
            torch._foreach_copy_(given, folded)
        self._check([b for b in self._before if not hasattr(b[1], OWNER)])
        late, now = [], []
        for p, _ in opened:
            (late if hasattr(p, OWNER) or _fold(p).exchanged == self.task else now).append(p)
        _leave(now)
        if late or self._before:  # behind what DDP and FSDP2 do when a backward ends
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, late))

    def _hand_on(self, p: nn.Parameter, owner) -> None:
        """Gives FSDP2 the fold of a tied parameter, whose two folds are one sum."""
        if hasattr(p, "embedding_main_grad"):
            if owner.unsharded_accumulated_grad is not p.main_grad:
                raise ValueError(
                    f"apply: a tied weight of shape {tuple(p.shape)} was summed over ranks before its backward ended; "
                    "expected it among the parameters of the model that fully_shard is given last"
                )
            owner.unsharded_accumulated_grad = folded_in(p, self.task)

    def _end(self, parameters: list[nn.Parameter]) -> None:
        self._check([b for b in self._before if hasattr(b[1], OWNER)])
        _leave(parameters)

    def _check(self, before: list[tuple[str, nn.Parameter, object]]) -> None:
        ours = self.parameters  # those too that only what a reentrant checkpoint computed again has read
        passed_by = [name for name, p, state in before if id(p) not in ours and _state(p) != state]
        if passed_by:
            raise ValueError(
                f"apply: {passed_by[0]} got its gradient from code that is not ours, as a fused LM head, so it depends "
                "on the split; expected the model's own code, or a forward that calls PyTorch's functions"
            )


def _leave(parameters: list[nn.Parameter]) -> None:
    """Marks what a backward left of each parameter's gradient."""
    for p in parameters:
        owner = getattr(p, OWNER, None)
        if owner is None:
            _fold(p).leave(p.grad)
        else:
            summed = owner.unsharded_accumulated_grad is None
            _fold(p).leave(owner.sharded_param.grad if summed else owner.unsharded_accumulated_grad)
