# nn.BatchNorm1d, training: sample 0 in calls of 2 and 3, along dimension 0.
import torch
from bi_kernels.audit import zoo

fn = zoo.function('nn.BatchNorm1d, training', 'cuda')
from torch.utils._pytree import tree_leaves

torch.manual_seed(0)
arguments = {
    'input': torch.randn((300, 4096)).to(torch.bfloat16).to("cuda:0"),
}
batched, calls = ['input'], {'a': [[0, 1]], 'b': [list(range(0, 3))]}


def call(samples, leaves=arguments):
    at = torch.tensor(samples, device="cuda:0")
    taken = dict(leaves)
    for k in batched:
        taken[k] = leaves[k].index_select(0, at.clamp(min=0))
    y = fn(taken['input'])
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
