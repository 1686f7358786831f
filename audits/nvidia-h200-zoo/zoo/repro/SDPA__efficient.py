# SDPA, efficient: the gradient dq of 8 samples in one call and in 1, along dimension 0.
import torch
from bi_kernels.audit import zoo

fn = zoo.function('SDPA, efficient', 'cuda')
from torch.utils._pytree import tree_leaves

torch.manual_seed(0)
arguments = {
    'q': torch.randn((8, 16, 256, 128)).to(torch.bfloat16).to("cuda:0"),
    'k': torch.randn((8, 16, 256, 128)).to(torch.bfloat16).to("cuda:0"),
    'v': torch.randn((8, 16, 256, 128)).to(torch.bfloat16).to("cuda:0"),
}
batched, calls = ['k', 'q', 'v'], {'a': [list(range(0, 8))], 'b': [[0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1]]}


def call(samples, leaves=arguments):
    at = torch.tensor(samples, device="cuda:0")
    taken = dict(leaves)
    for k in batched:
        taken[k] = leaves[k].index_select(0, at.clamp(min=0))
        fill = 7.0 if taken[k].is_floating_point() else 0
        taken[k] = taken[k].index_fill(0, (at < 0).nonzero().flatten(), fill)
    y = fn(taken['q'], taken['k'], taken['v'])
    return [y for y in tree_leaves(y) if isinstance(y, torch.Tensor)]


def gradient(calls):
    leaf = arguments['q'].detach().clone().requires_grad_()
    for samples in calls:
        outputs, upstream = [], []
        for y, d in zip(call(samples, arguments | {'q': leaf}), [0]):
            if d is None or not y.requires_grad:
                continue
            outputs.append(y.unflatten(d, (len(samples), -1)).movedim(d, 0))
            dy = torch.randn(8, *outputs[-1].shape[1:], generator=torch.Generator().manual_seed(1))
            dy = dy[samples].to(y)
            dy[[i < 0 for i in samples]] = 0
            upstream.append(dy)
        torch.autograd.backward(outputs, upstream)
    found = leaf.grad if leaf.grad is not None else leaf.main_grad
    return found.clone()


a, b = gradient(calls['a']), gradient(calls['b'])
bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
differ = a.view(bits) != b.view(bits)
most = (a.double() - b.double()).abs().max().item()
print(f"{int(differ.sum())} of {a.numel()} elements differ; max abs {most:.3g}")
raise SystemExit(bool(differ.any()))
