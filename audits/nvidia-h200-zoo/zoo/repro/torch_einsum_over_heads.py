# torch.einsum over heads: the gradient dw of 8 samples in one call and in 8, along dimension 0.
import torch
from bi_kernels.audit import zoo

fn = zoo.function('torch.einsum over heads', 'cuda')
from torch.utils._pytree import tree_leaves

torch.manual_seed(0)
arguments = {
    'x': torch.randn((8, 256, 16, 128)).to(torch.bfloat16).to("cuda:0"),
    'w': torch.randn((16, 128, 128)).to(torch.bfloat16).to("cuda:0"),
}
batched, calls = ['x'], {'a': [list(range(0, 8))], 'b': [[i] for i in range(8)]}


def call(samples, leaves=arguments):
    at = torch.tensor(samples, device="cuda:0")
    taken = dict(leaves)
    for k in batched:
        taken[k] = leaves[k].index_select(0, at.clamp(min=0))
    y = fn(taken['x'], taken['w'])
    return [y for y in tree_leaves(y) if isinstance(y, torch.Tensor)]


def gradient(calls):
    leaf = arguments['w'].detach().clone().requires_grad_()
    leaf.main_grad = torch.zeros_like(leaf, dtype=torch.float32)  # for ops that use it
    for samples in calls:
        outputs, upstream = [], []
        for y, d in zip(call(samples, arguments | {'w': leaf}), [0]):
            if d is None or not y.requires_grad:
                continue
            outputs.append(y.unflatten(d, (len(samples), -1)).movedim(d, 0))
            dy = torch.randn(8, *outputs[-1].shape[1:], generator=torch.Generator().manual_seed(1))
            dy = dy[samples].to(y)
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
