"""fp32 gradient buffers on parameters (`main_grad`), and the masters that an optimizer steps."""

import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import count

import torch
import torch.distributed as dist
import triton

from bi_kernels.checks import check_numbers
from bi_kernels.compat import overlaps_itself
from bi_kernels.contract import DTYPES, VERSION
from bi_kernels.ops.square_sum import BLOCK, block_sums, total
from bi_kernels.parallel.tree import GroupTree, agree
from bi_kernels.scalars import check_flag, check_integer, check_number, one_line, truncated_repr
from bi_kernels.tokens import LIVE_MAIN_GRADS

_ids = count(1)


class MainGrads:
    """Attaches a zeroed fp32 `main_grad` to every parameter that trains; this package's ops accumulate into it.

    tied: parameters used both as an embedding and as an LM head. They get a second buffer, `embedding_main_grad`, so
    that neither fold is cut by the other; `join` adds the two once, at the end of the step. What another op leaves in
    a parameter's `.grad`, as of a view of it, joins as well; `collect` after each micro-batch adds that up in fp32.

        grads = MainGrads(model.parameters(), tied=[model.lm_head.weight])
        optimizer = torch.optim.AdamW(grads.masters)
        for every step:
            for every micro-batch, in logical order: loss.backward()
            grads.join(); optimizer.step(); grads.finish()  # or grads.drop(), for a step that is not taken

    groups: of sequences, which a step is divided into whatever the number of GPUs; each is a fold of its own, and one
    fixed tree joins them (parallel/tree.py). world: the data-parallel ranks that share the groups; `mine` are this
    rank's, in whose order it computes them:

        grads = MainGrads(model.parameters(), groups=8, world=torch.distributed.group.WORLD)
        for every step:
            for group in grads.mine:
                for every micro-batch of the group, in logical order: loss.backward()
                grads.close(group)
            grads.join(); optimizer.step(); grads.finish()

    A Transformers model is given to `apply` first. A run is saved between two steps, and goes on bit for bit:

        torch.save({"grads": grads.state_dict(), "optimizer": optimizer.state_dict()}, file)

    sharded: the masters are this rank's shares of all parameters, flat, for an optimizer that treats each number alone,
    as AdamW does; main_grad is not gathered then, and `finish` gathers the weights.

    parameters: as model.parameters() or model.named_parameters() yield them. Weights that are loaded later are the
    masters' too, from the next `join` on.

    Raises TypeError for what are no parameters, or of a dtype other than fp32, fp16 and bf16; ValueError for a tied
    parameter that is not among those that train, for one that another MainGrads has, for groups that are not positive,
    and where the ranks of a world differ in groups, parameters or versions.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
        tied: Iterable[torch.nn.Parameter] = (),
        groups: int = 1,
        world: dist.ProcessGroup | None = None,
        sharded: bool = False,
    ):
        self.names, self.parameters = _trained(parameters)
        self.tied = _tied_among(self.parameters, tied)
        self.sharded = check_flag("MainGrads", "sharded", sharded)
        self.tree = self._tree(groups, world)
        if sharded and self.tree is None:
            raise ValueError("MainGrads: sharded is True, expected a world to share the parameters among")
        LIVE_MAIN_GRADS[number := next(_ids)] = self
        for p, buffer in zip(self.parameters, self._buffers()):
            p.main_grad = buffer
            buffer.of_step = number  # and no integration's, which would hand it on to `.grad`
        self.mark()
        for p in self.tied:
            p.embedding_main_grad = torch.zeros_like(p.main_grad)
        self._joined: list[int] = []  # versions of the masters after a join that nobody has finished

    def _tree(self, groups: int, world: dist.ProcessGroup | None) -> GroupTree | None:
        if isinstance(groups, bool) or not isinstance(groups, int) or not 0 < groups < 2**31:
            raise ValueError(f"MainGrads: groups is {truncated_repr(groups)}, expected a positive integer")
        if world is not None:
            if not isinstance(world, dist.ProcessGroup):
                raise TypeError(f"MainGrads: world is {truncated_repr(world)}, expected a process group, or None")
            shapes = [(tuple(p.shape), str(p.dtype), any(p is t for t in self.tied)) for p in self.parameters]
            versions = {"torch": torch.__version__, "Triton": triton.__version__, "contract": VERSION}
            agree("MainGrads", world, {"groups": groups, "parameters": shapes} | versions)
        if groups == 1 and world is None:
            return None
        if not self.parameters or len({p.device for p in self.parameters}) > 1:
            raise ValueError(
                f"MainGrads: with groups {groups}, the parameters are on {len({p.device for p in self.parameters})} "
                "devices, expected one"
            )
        return GroupTree(sum(_room(p) for p in self.parameters), groups, world, self.parameters[0].device)

    def _buffers(self) -> list[torch.Tensor]:
        if self.tree is None:
            zeros = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
            return [torch.zeros_like(p, **zeros) for p in self.parameters]
        return self._of(self.tree.flat)

    def _of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns what a flat buffer holds of each parameter."""
        parts = flat[: sum(map(_room, self.parameters))].split([_room(p) for p in self.parameters])
        return [part[: p.numel()].view(p.shape) for part, p in zip(parts, self.parameters)]

    @property
    def mine(self) -> range:
        """Returns the groups that this rank computes."""
        return range(1) if self.tree is None else self.tree.mine

    @torch.no_grad()
    def close(self, group: int) -> None:
        """Ends a group's fold, after its last backward: it takes its place in the tree, and the next begins at zero.
        Raises ValueError for another group than the next of `mine`."""
        check_integer("MainGrads", "group", group)
        if self.tree is None:  # a single group ends with the step
            if group != 0:
                raise ValueError(
                    f"MainGrads: close was called for group {truncated_repr(group)}, expected 0, the only one"
                )
            return
        self._join_tied()
        self.collect()
        if self.tree.close(group):
            self.mark()

    @cached_property
    def masters(self) -> list[torch.nn.Parameter]:
        """Holds an fp32 copy of each parameter, made when it is first asked for, whose `.grad` is the parameter's
        `main_grad`."""
        self._note()
        if self.sharded:
            return [torch.nn.Parameter(self._weights(self.tree.share(part))) for part in self.tree.parts()]
        masters = [torch.nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in self.parameters]
        for p, master in zip(self.parameters, masters):
            master.grad = p.main_grad
        return masters

    def _regions(self, share: slice) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yields what a share of the flat buffer has of each parameter, flat, and where in the share."""
        first = 0
        for p in self.parameters:
            low, high = max(first, share.start), min(first + p.numel(), share.stop)
            if low < high:
                yield (p.detach().reshape(-1)[low - first : high - first], slice(low - share.start, high - share.start))
            first += _room(p)

    def _weights(self, share: slice) -> torch.Tensor:
        """Returns the parameters' values where the flat buffer has a share, fp32; 0 between them."""
        found = torch.zeros(share.stop - share.start, device=self.tree.flat.device)
        for values, at in self._regions(share):
            found[at] = values
        return found

    @torch.no_grad()
    def _follow(self) -> None:
        """Takes over into the masters the weights that somebody else has changed, as by loading them."""
        if not self._made or self._seen == [p._version for p in self.parameters]:
            return
        pairs = zip(self.parameters, self.masters)
        if self.sharded:
            shares = [(master, self.tree.share(part)) for master, part in zip(self.masters, self.tree.parts())]
            pairs = ((values, master[at]) for master, share in shares for values, at in self._regions(share))
        for values, master in pairs:
            master.copy_(torch.where(values == master.to(values.dtype), master, values.to(master.dtype)))
        self._note()

    def _note(self) -> None:
        self._seen = [p._version for p in self.parameters]

    @torch.no_grad()
    def join(self) -> None:
        """The one addition of a tied parameter's two folds: main_grad += embedding_main_grad, which is zeroed; and of
        what still stands in `.grad`. With groups, each had that when it was closed, and their sum is left in main_grad
        of every rank, or in the masters' `.grad` where they are sharded. Raises ValueError where an optimizer has
        changed the masters since the last join, and `finish` was not called."""
        if self._joined and self._joined != self._versions():
            raise ValueError(
                "MainGrads: join was called where the masters of the step before are not in the parameters yet, "
                "expected finish after the optimizer's step"
            )
        self._gather()
        self._joined = self._versions()

    def _versions(self) -> list[int]:
        return [master._version for master in self._made]

    def _gather(self) -> None:
        self._follow()
        if self.tree is None:
            self._join_tied()
            self.collect()
        elif self.sharded:
            for master, share in zip(self.masters, self.tree.join()):
                master.grad = share
            return
        else:
            self.tree.gather(self.tree.join())
        for p, master in zip(self.parameters, self._made):
            master.grad = p.main_grad  # an optimizer's zero_grad may have dropped it

    def _join_tied(self) -> None:
        for p in self.tied:
            p.main_grad.add_(p.embedding_main_grad)
            p.embedding_main_grad.zero_()

    @torch.no_grad()
    def collect(self) -> None:
        """main_grad += what stands in `.grad`, which is dropped."""
        for p in self.parameters:
            if p.grad is not None:
                p.main_grad.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """After the optimizer's step: the masters rounded into the parameters, the buffers zeroed. Warns where nobody
        has asked for masters, so that no optimizer has trained any."""
        if not self._made and self.parameters:
            warnings.warn(
                "MainGrads: finish was called, and no optimizer has the masters; expected torch.optim.AdamW("
                "grads.masters) or the like, or `drop` for a step that is not taken",
                stacklevel=3,
            )
        self._joined = []
        self._round()
        self._zero()

    @torch.no_grad()
    def drop(self) -> None:
        """Ends a step that is not taken, begun or joined: the buffers zeroed, the parameters as they are."""
        self._joined = []
        self._join_tied()
        self.collect()
        self._zero()
        if self.tree:
            self.tree.begin()

    def _round(self) -> None:
        """Rounds the masters into the parameters, on every rank."""
        found = self._made
        if self.sharded:  # rounded first, where all are of one dtype, so that less is gathered
            kinds = {p.dtype for p in self.parameters}
            kind = kinds.pop() if len(kinds) == 1 else torch.float32
            found = self._of(self.tree.gather([master.detach().to(kind) for master in self.masters]))
        for p, master in zip(self.parameters, found):
            p.copy_(master)
        self._note()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales the joined gradients so that their norm is `max_norm` at most, between `join` and the optimizer's
        step; returns the norm, fp32, before that. Its sum is one tree over all numbers, the same however the step is
        cut or shared. Raises ValueError for a norm that is not above 0, for weights that are cut over ranks, and for a
        norm that is not finite if asked to."""
        check_flag("MainGrads", "error_if_nonfinite", error_if_nonfinite)
        if not (limit := check_number("MainGrads", "max_norm", max_norm)) > 0:
            raise ValueError(f"MainGrads: max_norm is {truncated_repr(max_norm)}, expected a number above 0")
        if cut := [name for name, p in zip(self.names, self.parameters) if hasattr(p, "cut")]:
            raise ValueError(f"MainGrads: {cut[0]} is cut over ranks, expected whole weights where they are clipped")
        if self.tree and self.tree.begun:
            raise ValueError("MainGrads: clip_grad_norm_ was called before join, expected after it")
        if self.sharded:
            shares = [master.grad for master in self.masters if master.grad is not None]
            sums = [self.tree.gathered(block_sums(share, squared=True)) for share in shares]
        else:
            shares = [p.main_grad for p in self.parameters]
            sums = [block_sums(share, squared=True).to(shares[0].device) for share in shares]
        used = sum(map(_room, self.parameters)) // BLOCK
        norm = total(torch.cat(sums)[:used]).sqrt() if sums else torch.zeros(())
        if error_if_nonfinite and not norm.isfinite():
            raise ValueError(f"MainGrads: the gradients' norm is {norm.item()}, expected a finite one")
        scale = torch.where(norm <= limit, 1.0, limit / norm)
        for share in shares:
            share.mul_(scale.to(share.device))
        return norm

    def state_dict(self) -> dict:
        """Returns the masters between two steps, this rank's where they are sharded. Raises ValueError within one."""
        buffers = [p.main_grad for p in self.parameters] + [p.embedding_main_grad for p in self.tied]
        if any(buffer.any() for buffer in buffers) or self.tree and self.tree.begun:
            raise ValueError("MainGrads: state_dict was called within a step, expected after finish")
        self._follow()
        return self._said() | {"masters": [master.detach() for master in self.masters]}

    def _said(self) -> dict:
        shapes = [tuple(p.shape) for p in self.parameters]
        rank = (self.tree.rank, self.tree.ranks) if self.sharded else None
        return {"contract": VERSION, "names": self.names, "shapes": shapes, "shared": rank}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Takes over the masters of a `state_dict`, and rounds them into the parameters; a step that was begun is
        dropped. Raises ValueError, before anything is changed, for those of other parameters, of another version of the
        contract, or of another rank."""
        for master, theirs in zip(self.masters, _masters_of(state, self._said(), self.masters)):
            master.copy_(theirs)
        self._round()
        self.drop()

    def release(self) -> None:
        """Takes the buffers off the parameters, which another MainGrads may have then."""
        for p in self.parameters:
            del p.main_grad
        for p in self.tied:
            del p.embedding_main_grad

    def _zero(self) -> None:
        for buffer in [p.main_grad for p in self.parameters] if self.tree is None else [self.tree.flat]:
            buffer.zero_()  # also between the parameters, where gathered weights may stand
        self.mark()

    def mark(self) -> None:
        """Says that the buffers are zero as they stand: a step's first fold need not read them (see tokens.begins)."""
        for p in self.parameters:
            p.main_grad.zeros_at = id(p.main_grad), p.main_grad._version

    @property
    def _made(self) -> list[torch.nn.Parameter]:
        return self.__dict__.get("masters", [])


def _room(p: torch.Tensor) -> int:
    """Returns how many numbers a parameter has in the flat buffer: whole blocks of a norm's sum."""
    return -(-p.numel() // BLOCK) * BLOCK


def _trained(
    parameters: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Returns the names and the parameters that require a gradient, each once. Raises TypeError for what MainGrads
    cannot hold, ValueError for a parameter that another one has."""
    if isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable):
        kind = type(parameters).__name__
        raise TypeError(f"MainGrads: parameters is of type {kind}, expected what model.parameters() returns")
    if torch.is_inference_mode_enabled():
        raise ValueError("MainGrads: parameters were given in inference_mode, expected a call outside of it")
    found: dict[torch.nn.Parameter, str] = {}
    for number, entry in enumerate(parameters):
        named = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        name, p = entry if named else (f"parameter {number}", entry)
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"MainGrads: {name} is of type {type(p).__name__}, expected a parameter")
        if not p.requires_grad or p in found:
            continue
        if p.dtype not in DTYPES.values() or p.is_meta:
            kind = "on the meta device" if p.is_meta else f"of dtype {p.dtype}"
            raise TypeError(f"MainGrads: {name} is {kind}, expected fp32, fp16 or bf16 on a device")
        check_numbers("MainGrads", name, p)
        if not p.is_leaf or p.is_inference() or overlaps_itself(p):
            raise ValueError(f"MainGrads: {name} cannot be written to in place, expected a module's parameter")
        if getattr(getattr(p, "main_grad", None), "of_step", None) in LIVE_MAIN_GRADS:
            raise ValueError(f"MainGrads: {name} has another MainGrads' main_grad, expected one that was released")
        found[p] = name
    return list(found.values()), list(found)


def _tied_among(parameters: list[torch.nn.Parameter], tied: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Returns what is tied, each once. Raises TypeError for what are no parameters, ValueError for one that is not
    trained."""
    if isinstance(tied, torch.Tensor) or not isinstance(tied, Iterable):
        raise TypeError(f"MainGrads: tied is {truncated_repr(tied)}, expected a list of parameters")
    found: dict[torch.nn.Parameter, None] = {}
    for t in tied:
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"MainGrads: tied holds {truncated_repr(t)}, expected a parameter")
        if not t.requires_grad:
            raise ValueError("MainGrads: tied holds a parameter that requires no gradient, expected one that does")
        if all(t is not p for p in parameters):
            raise ValueError("MainGrads: tied holds a parameter that is not among the parameters given")
        found[t] = None
    return list(found)


def _masters_of(state: dict, expected: dict, masters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the masters that a saved state holds. Raises ValueError for a state of another run than `expected`
    says."""
    state = state if isinstance(state, dict) else {}
    for name, mine in expected.items():
        theirs = state.get(name)
        if one_line(theirs) != one_line(mine):
            raise ValueError(
                f"MainGrads: the state's {name} is {truncated_repr(theirs)}, expected {truncated_repr(mine)}"
            )
    theirs, shapes = state.get("masters"), [m.shape for m in masters]
    whole = isinstance(theirs, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in theirs)
    if not whole or [t.shape for t in theirs] != shapes or any(t.dtype != torch.float32 for t in theirs):
        expected = [tuple(s) for s in shapes]
        raise ValueError(
            f"MainGrads: the state's masters are {truncated_repr(theirs)}, expected fp32 tensors of {expected}"
        )
    for t in theirs:
        check_numbers("MainGrads", "a master of the state", t)
    return theirs
