"""Times parallelism on GPUs next to the usual ways, in one run and in turns: tensor parallelism that all-reduces, a
reduce-scatter of gradients, FSDP2."""

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import bi_kernels as bi
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.targets.distributed.controls import Summed
from bi_kernels.audit.targets.distributed.step import case
from bi_kernels.contract import DTYPES
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Cache, Decoder, packed
from bi_kernels.model.decoder import Layer
from bi_kernels.parallel.exchange import exchange, reshard
from bi_kernels.parallel.tensor import TensorParallel

ROUNDS, WARM = 15, 4  # calls: what is exchanged is planned for each of three slots, and a hiccup lasts longer than one


class _Sum(torch.autograd.Function):
    """The sum of the ranks' x, whose gradient every rank has."""

    @staticmethod
    def forward(ctx, x: Tensor, group):
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


class AllReduce(TensorParallel):
    """Tensor parallelism as Megatron-LM has it (Shoeybi et al., arXiv 1909.08053), of the same kernels: o and down are
    cut along their columns, and what their parts add up to is all-reduced."""

    def enter(self, x: Tensor) -> Tensor:
        return Summed.apply(x, self.group) if torch.is_grad_enabled() else x

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = bi.linear(x, weight, bias)
        return y if hasattr(weight, "cut") else _Sum.apply(y, self.group)

    def qk_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return bi.qk_norm(x, weight, eps)


def measured(told: dict, device: torch.device, tensor, data) -> dict:
    """Returns {"costs": a record of each measurement}, the medians of this rank; none without GPUs."""
    if device.type != "cuda":
        return {"costs": []}
    found = []
    if tensor is not None:
        found += _layers(told, device, tensor)
    if data is not None:
        found += [_joined(told, device, data), _stepped(told, device, data)]
    return {"costs": found}


def _stack(told: dict, device: torch.device, ops) -> nn.ModuleList:
    config, dtype = CONFIGS[case(told["shapes"])["model"]], DTYPES[told["dtype"]]
    g = torch.Generator(device).manual_seed(told["seed"])

    def make(*shape: int, cut: int | None = 0, keys: bool = False) -> nn.Parameter:
        w = (torch.randn(shape, generator=g, device=device) * shape[-1] ** -0.5).to(dtype)
        return nn.Parameter(w) if cut == 0 else ops.share(w, cut, keys)

    layers = nn.ModuleList(Layer(config, make, ops) for _ in range(case(told["shapes"])["timed"]["layers"]))
    if isinstance(ops, AllReduce):
        for layer in layers:
            layer.o, layer.down = (
                nn.Parameter(exchange(ops.group, reshard(w.detach(), ops.group), kept=True).flatten(0, 1))
                for w in (layer.o, layer.down)
            )
    for p in layers.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    return layers


def _layers(told: dict, device: torch.device, group) -> list[dict]:
    """Times layers over tokens of prompts, forward and with a backward, and of a token a sequence in a CUDA graph."""
    settings = case(told["shapes"])["timed"]
    config, dtype = CONFIGS[case(told["shapes"])["model"]], DTYPES[told["dtype"]]
    kinds = {"ours": TensorParallel(group), "all-reduce": AllReduce(group)}
    stacks = {name: _stack(told, device, ops) for name, ops in kinds.items()}
    table = bi.rope_table(settings["length"] + 8, config.head_dim, config.theta, device)

    def forward(layers, x, rows, cache=None):
        step, residual = None, x
        for number, layer in enumerate(layers):
            step, residual = layer(step, residual, table, rows, cache, number)
        return step + residual

    def step(layers, x, rows):
        x.grad = None
        with rows.layout:
            y = forward(layers, x, rows)
        y.backward(torch.ones_like(y))
        return y.detach(), x.grad

    found, draw = [], generator(device, told["seed"], "world", "timed")
    for sequences in settings["sequences"]:
        lengths = [settings["length"]] * sequences
        x = torch.randn(sum(lengths), config.hidden, generator=draw, device=device).to(dtype).requires_grad_()
        rows = packed(lengths, device)
        for what, call in (("forward", torch.no_grad()(forward)), ("forward and backward", step)):
            calls = {
                name: (lambda layers=layers, call=call, x=x, rows=rows: call(layers, x, rows))
                for name, layers in stacks.items()
            }
            case_ = f"{len(stacks['ours'])} layers, {len(x)} tokens"
            said = {"what": f"tensor parallel, {what}", "case": case_, "tokens": len(x)}
            found.append(said | {"ms": _turns(calls, group)})
        _repeats(stacks["ours"], lambda x=x, rows=rows: step(stacks["ours"], x, rows))
    decodes = {}
    for name, layers in stacks.items():
        cache = Cache(
            config, settings["decoded"], settings["length"] + 8, x.detach(), kinds[name].key_heads(config.kv_heads)
        )
        cache.lengths += settings["length"]
        token = torch.randn(settings["decoded"], 1, config.hidden, generator=draw, device=device).to(dtype)
        decodes[name] = _captured(lambda layers=layers, cache=cache, t=token: forward(layers, t, cache.rows(1), cache))
    ms = _turns(decodes, group)
    case_ = f"{len(stacks['ours'])} layers, {settings['decoded']} sequences, {settings['length']} keys"
    return [*found, {"what": "tensor parallel, decode in a CUDA graph", "case": case_, "ms": ms}]


@torch.no_grad()
def _captured(call: Callable) -> Callable:
    """Returns a call that replays this one; it keeps what the graph reads."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay(held=call) -> Tensor:
        graph.replay()
        return kept

    return replay


def _joined(told: dict, device: torch.device, group) -> dict:
    """Times the join of a step's groups into shares, beside a reduce-scatter of as many numbers."""
    settings = case(told["shapes"])["timed"]
    count, ranks = settings["numbers"], dist.get_world_size(group)
    weight = nn.Parameter(torch.zeros(count, device=device, dtype=torch.bfloat16))
    grads = MainGrads([weight], groups=ranks, world=group, sharded=True)
    share = torch.empty(count // ranks, device=device)
    grads.tree.flat.normal_(generator=generator(device, told["seed"], "world", "join"))

    def ours():
        for one in grads.mine:
            grads.tree.next, grads.tree.waiting = one + 1, [((one, one + 1), grads.tree.flat)]
        return tuple(grads.tree.join())

    calls = {
        "ours": ours,
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(share, grads.tree.flat[:count], group=group),
    }
    return {"what": "data parallel, join", "case": f"{count:.3g} fp32 numbers", "ms": _turns(calls, group)}


def _stepped(told: dict, device: torch.device, group) -> dict:
    """Times a step of a decoder, a group of sequences a rank, beside the same ops under FSDP2; AdamW's state is sharded
    in both, the weights in FSDP2 alone."""
    settings = case(told["shapes"])["timed"]
    config = replace(CONFIGS[case(told["shapes"])["model"]], layers=settings["layers"])
    lengths = [settings["length"]] * settings["sequences"][0]
    rows = packed(lengths, device)
    ids, targets = torch.randint(0, config.vocab, (2, sum(lengths)), device=device)
    dtype, rate = DTYPES[told["dtype"]], case(told["shapes"])["learning_rate"]
    model = Decoder(config, device, dtype, told["seed"])
    grads = MainGrads(model.parameters(), model.tied, groups=dist.get_world_size(group), world=group, sharded=True)
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=rate, fused=device.type == "cuda")
    optimizer = adam(grads.masters)

    def ours():
        for one in grads.mine:
            model.logprobs(ids, targets, rows)[0].mean().backward()
            grads.close(one)
        grads.join()
        optimizer.step()
        grads.finish()

    theirs = Decoder(config, device, torch.float32, told["seed"])
    mesh = DeviceMesh.from_group(group, device.type)
    given = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)}
    for part in (*theirs.layers, theirs):
        fully_shard(part, **given, reshard_after_forward=False)  # whole weights, as ours
    register_fsdp_forward_method(theirs, "logprobs")
    sharded = adam(theirs.parameters())

    def fsdp():
        theirs.logprobs(ids, targets, rows)[0].mean().backward()
        sharded.step()
        sharded.zero_grad()

    case_ = f"{config.layers} layers, embedding and LM head, {sum(lengths)} tokens a rank"
    return {"what": "data parallel, a step", "case": case_, "ms": _turns({"ours": ours, "FSDP2": fsdp}, group)}


def _turns(calls: dict[str, Callable], group) -> dict[str, float]:
    """Returns the median milliseconds of each call, which take turns on all ranks. Raises RuntimeError where a call
    returns other bits than the first time."""
    first = {}
    for name, call in calls.items():
        for _ in range(WARM):
            first.setdefault(name, _kept(call()))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            dist.barrier(group)
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            came = call()
            ended.record()
            ended.synchronize()
            times[name].append(begun.elapsed_time(ended))
            if not _same(first[name], _kept(came)):
                raise RuntimeError(f"{name}: round {len(times[name])} gave other bits than the first call")
    return {name: statistics.median(found) for name, found in times.items()}


def _repeats(layers: nn.ModuleList, call: Callable) -> None:
    """Raises RuntimeError where a step, called again at once, leaves other bits in any gradient of a weight."""
    found = []
    for _ in range(2):
        for p in layers.parameters():
            p.main_grad.zero_()
        call()
        found.append([p.main_grad.clone() for p in layers.parameters()])
    if not _same(*found):
        raise RuntimeError("a step that was called again gave other bits in a weight's gradient")


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def _kept(came) -> list[Tensor]:
    """Returns copies of the tensors that a call returned, if it did."""
    tensors = [came] if isinstance(came, Tensor) else came if isinstance(came, tuple) else []
    return [t.clone() for t in tensors]
