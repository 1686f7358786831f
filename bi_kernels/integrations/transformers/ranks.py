"""Shares each weight of an applied model over ranks: how weights are cut, and the ops that compute with them."""

from torch import Tensor, nn

from bi_kernels.integrations.transformers import modules
from bi_kernels.integrations.transformers.swap import OPS, causal_lm
from bi_kernels.parallel.tensor import ShardedParameter, ShardSpec, TensorParallel


class _Head:
    """The ops of an LM head, whose vocabulary is cut."""

    def __init__(self, parallel: TensorParallel):
        self.lm_head_logprob, self._logits = parallel.lm_head_logprob, parallel.logits

    def linear(self, x: Tensor, weight: Tensor, bias: None) -> Tensor:
        return self._logits(x, weight)


def _cuts(model: nn.Module, parallel: TensorParallel) -> tuple[dict[nn.Module, object], dict[nn.Parameter, ShardSpec]]:
    """Returns {module: its ops} and {parameter: its cut}. Raises ValueError."""
    owner, head = causal_lm(model)
    if head is None:
        raise ValueError(
            f"apply: group is given for a {type(model).__name__}, expected a causal language model that is replaced "
            "whole, with a head without bias"
        )
    ops: dict[nn.Module, object] = {owner.get_input_embeddings(): parallel, head: _Head(parallel)}
    together: dict[nn.Module, int | None] = {owner.get_input_embeddings(): None, head: None}
    fewer: set[nn.Parameter] = set()  # of keys and values, whose heads may be fewer than the ranks
    for module in model.modules():
        if isinstance(module, modules.Attention):
            together |= dict.fromkeys((module.q_proj, module.k_proj, module.v_proj), module.head_dim)
            together[module.o_proj] = 1
            keys = parallel.keys(module.config.num_key_value_heads)
            named = {"q_norm": parallel, "k_norm": keys, "k_proj": keys, "v_proj": keys}
            ops |= {getattr(module, n): its for n, its in named.items() if hasattr(module, n)} | {module: keys}
            fewer |= {p for part in (module.k_proj, module.v_proj) for p in part.parameters()}
        elif isinstance(module, modules.MLP):
            together |= dict.fromkeys((module.gate_proj, module.up_proj, module.down_proj), 1)
    rows_of = {p: rows for module, rows in together.items() for p in module.parameters(recurse=False)}
    cuts = {weight: parallel.cut(weight.shape, rows, keys=weight in fewer) for weight, rows in rows_of.items()}
    return dict.fromkeys(together, parallel) | ops, cuts


def share(model: nn.Module, parallel: TensorParallel) -> None:
    """Cuts every weight to this rank's rows, in place. Raises ValueError, before any is cut, where the ranks cannot
    share one, or have different models."""
    shapes = {name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()}
    parallel.agree({"model": type(model).__name__, "parameters": shapes})
    ops, cuts = _cuts(model, parallel)
    for module, its in ops.items():
        module.__dict__[OPS] = its
    for p, cut in cuts.items():
        p.data, p.__class__, p.cut = p.data[cut.first : cut.end].clone(), ShardedParameter, cut
    model.__dict__[OPS] = parallel


def gather(model: nn.Module) -> None:
    """Makes weights and their `.grad` whole again, in place, and gives modules back the ops of one rank."""
    parallel = model.__dict__.get(OPS)
    for p in model.parameters() if parallel is not None else ():
        if hasattr(p, "cut"):
            grad, p.grad = p.grad, None
            whole = parallel.whole(p, grad) if grad is not None else None
            p.data = parallel.whole(p)
            del p.cut
            p.__class__, p.grad = nn.Parameter, whole
    for module in model.modules():
        module.__dict__.pop(OPS, None)
