"""DDP and FSDP2 of an applied model: each rank's folds are one group of parallel/tree.py, whose tree joins them.

A fold is opened when a backward begins, and goes on from micro-batch to micro-batch in the rank's fp32 `main_grad`,
whether or not the ranks exchange gradients in between. Whenever they do, the sum of all ranks' folds so far takes the
place of what an exchange before it left.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler
from transformers import TrainingArguments

from bi_kernels.compat import current_backward, fsdp_groups, fsdp_states, was_interrupted
from bi_kernels.integrations.transformers.gradients import OWNER, folded_in
from bi_kernels.integrations.transformers.swap import check_whole
from bi_kernels.parallel.exchange import all_gather
from bi_kernels.parallel.tree import added

JOINED = "bi_kernels_joined"  # of a DistributedDataParallel: the tree joins its gradients


def _share(flat: Tensor, group: dist.ProcessGroup, divisor: int) -> Tensor:
    """Returns this rank's share of the sum of all ranks' flat, in fp32, divided: (numbers / ranks,)."""
    ranks, came = dist.get_world_size(group), torch.empty_like(flat)
    dist.all_to_all_single(came, flat, group=group)
    return added({(r, r + 1): part.float() for r, part in enumerate(came.chunk(ranks))}, (0, ranks)) / divisor


class TreeReduceScatter:
    """The reduce-scatter of FSDP2, by the tree."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer that FSDP2 fills."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False) -> None:
        """Puts this rank's share of the ranks' sum, or mean, into output_tensor."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError("apply: set_gradient_divide_factor was called, expected FSDP2's mean or sum over ranks")
        divisor = dist.get_world_size(group) if op == dist.ReduceOp.AVG else 1
        output_tensor.copy_(_share(input_tensor, group, divisor))


def adopt_fsdp(model: nn.Module) -> list:
    """Lets the tree join the gradients of what `fully_shard` was given; returns its parameters. Raises ValueError for a
    mesh of more than one dimension, and after a backward that an exception ended."""
    found, ids = [], {id(p) for p in model.parameters()}
    for state in fsdp_states():  # of modules around the model too
        for group in fsdp_groups(state):
            held = [p for f in group.fsdp_params for p in (f.sharded_param, getattr(f, "_unsharded_param", None))]
            if not any(id(p) in ids for p in held):
                continue
            if group.mesh_info.mesh.ndim > 1:
                raise ValueError(
                    f"apply: the model is sharded over a mesh of {group.mesh_info.mesh.ndim} dimensions, "
                    "expected one: replicas of shards would be summed in NCCL's order"
                )
            if was_interrupted(state):
                raise ValueError(
                    "apply: an exception ended a backward of what fully_shard was given last, expected its "
                    "reset_iter_state() before another forward: FSDP2 would sum no gradient"
                )
            if not isinstance(group._reduce_scatter_comm, TreeReduceScatter):
                group._reduce_scatter_comm = TreeReduceScatter()
            found += group.fsdp_params
    return found


def own(parameters: list) -> dict[int, nn.Parameter]:
    """Notes on each whole parameter whose shards FSDP2 keeps; returns the whole ones by the shards' ids."""
    whole = {id(f.sharded_param): f._unsharded_param for f in parameters if hasattr(f, "_unsharded_param")}
    for f in parameters:
        if id(f.sharded_param) in whole:
            setattr(f._unsharded_param, OWNER, f)
    return whole


def adopt_ddp(ddp: DistributedDataParallel) -> None:
    """Lets the tree join the gradients of a DistributedDataParallel. Raises ValueError if it has another hook,
    or a static graph."""
    if JOINED in ddp.__dict__:
        return
    if ddp.static_graph:
        raise ValueError("apply: the DistributedDataParallel has static_graph=True, expected False: it sums no fold")
    ddp.__dict__[JOINED] = set()
    try:
        ddp.register_comm_hook(ddp.process_group, _join_bucket)
    except RuntimeError as error:
        raise ValueError(
            "apply: the DistributedDataParallel has a communication hook, expected none: ours joins the gradients"
        ) from error


def adopt(model: nn.Module) -> tuple[list, DistributedDataParallel | None]:
    """Lets the tree join the gradients of a model's next call; returns FSDP2's parameters and the
    DistributedDataParallel. Raises ValueError for other shards."""
    sharded, ddp = adopt_fsdp(model), getattr(DistributedDataParallel, "_active_ddp_module", None)
    check_whole(model, {id(f.sharded_param) for f in sharded})
    if ddp is not None:
        if any(hasattr(getattr(p, "main_grad", None), "of_step") for p in model.parameters()):
            raise ValueError(
                "apply: a MainGrads holds parameters that a DistributedDataParallel sums, expected one of the two: "
                "MainGrads(..., world=group), or no MainGrads"
            )
        adopt_ddp(ddp)
    return sharded, ddp


def check_reached(ddp: DistributedDataParallel, parameters: Iterable[nn.Parameter], out: Iterable[Tensor]) -> None:
    """Raises ValueError for a parameter that autograd does not reach, which DDP would sum before its fold is complete.

    A graph is looked at once for each kind of call: with and without autocast, training or not.
    """
    seen = ddp.__dict__[JOINED]
    if (kind := (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"), ddp.training)) in seen:
        return
    todo = [t.grad_fn for t in out if t.grad_fn is not None]
    known, reached = {*todo}, set()
    for node in todo:  # grows
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        for n, _ in node.next_functions:
            if n is not None and n not in known:
                known.add(n)
                todo.append(n)
    if missed := [p for p in parameters if id(p) not in reached]:
        raise ValueError(
            f"apply: in a DistributedDataParallel, a parameter of shape {tuple(missed[0].shape)} is cast or viewed by "
            "code that apply routes, where autograd does not see it; expected weights of autocast's dtype, or FSDP2"
        )
    seen.add(kind)


@torch.no_grad()
def _join_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Puts the mean over ranks of a bucket's gradients, folds included, into its buffer."""
    ranks, task, grads = dist.get_world_size(group), current_backward(), bucket.gradients()
    sizes = [g.numel() for g in grads]
    flat = torch.zeros(-(-sum(sizes) // ranks) * ranks, device=bucket.buffer().device)
    parts_of = lambda t: [part.view(g.shape) for part, g in zip(t[: sum(sizes)].split(sizes), grads)]
    for part, p, g in zip(parts_of(flat), bucket.parameters(), grads):
        part.copy_(g)
        if (fold := folded_in(p, task, exchanged=True)) is not None:
            part.add_(fold)
    total = torch.empty_like(flat)
    all_gather(total, _share(flat, group, ranks), group=group)
    for part, g in zip(parts_of(total), grads):
        g.copy_(part)
    done = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
    done.set_result(bucket.buffer())
    return done


class StepSampler(Sampler):
    """A sampler's indices, so ordered that a rank has the same sequences of a step for every batch size.

    Accelerate deals batches out to ranks in turn. In a step of 8 sequences, rank 0 of 2 has 0, 1, 2, 3 in one batch,
    but 0, 1, 4, 5 in two; behind this sampler, 0, 1, 2, 3 in both. An epoch's last step, if smaller, is left as it is.

        class MyTrainer(Trainer):
            def _get_train_sampler(self, *given):
                return StepSampler(super()._get_train_sampler(*given), self.args)

    args: which tell the batch size, the accumulation and, unless given, the number of ranks.
    """

    def __init__(self, sampler: Iterable[int], args: TrainingArguments, ranks: int | None = None):
        self.sampler, self.batch = sampler, args.train_batch_size
        self.accumulated, self.ranks = args.gradient_accumulation_steps, args.world_size if ranks is None else ranks

    @property
    def generator(self) -> torch.Generator | None:
        """Returns the sampler's generator, which Accelerate sets alike on all ranks."""
        return getattr(self.sampler, "generator", None)

    @generator.setter
    def generator(self, value: torch.Generator | None) -> None:
        self.sampler.generator = value

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        indices, of_rank = iter(self.sampler), self.batch * self.accumulated
        while step := [*islice(indices, of_rank * self.ranks)]:
            if len(step) < of_rank * self.ranks:
                yield from step
                return
            for at in range(0, of_rank, self.batch):
                for first in range(at, len(step), of_rank):
                    yield from step[first : first + self.batch]
