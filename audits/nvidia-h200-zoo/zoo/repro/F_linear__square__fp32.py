# F.linear, square, fp32: sample 0 in calls of 1 and 2, along dimension 0.
import torch
from torch._C._nn import linear as fn
from torch.utils._pytree import tree_leaves

torch.manual_seed(0)
arguments = {
    'input0': torch.randn((300, 4096)).to(torch.float32).to("cuda:0"),
    'input1': torch.randn((4096, 4096)).to(torch.float32).to("cuda:0"),
}
batched, calls = ['input0'], {'a': [[0]], 'b': [[0, 1]]}


def call(samples, leaves=arguments):
    at = torch.tensor(samples, device="cuda:0")
    taken = dict(leaves)
    for k in batched:
        taken[k] = leaves[k].index_select(0, at.clamp(min=0))
    y = fn(taken['input0'], taken['input1'])
    return [y for y in tree_leaves(y) if isinstance(y, torch.Tensor)]


def result(calls):
    samples = next(c for c in calls if 0 in c)
    y = call(samples)[0]
    return y.unflatten(0, (len(samples), -1)).movedim(0, 0)[samples.index(0)]


a, b = result(calls['a']), result(calls['b'])
bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
differ = a.view(bits) != b.view(bits)
most = (a.double() - b.double()).abs().max().item()
print(f"{int(differ.sum())} of {a.numel()} elements differ; max abs {most:.3g}")
raise SystemExit(bool(differ.any()))
