# attention gqa, bf16: the gradient of q, of samples of [1, 3000, 17, 513] tokens in one call and in one call each.
import torch
from bi_kernels.audit.stock import attention as fn
from bi_kernels import TokenLayout

lengths = [1, 3000, 17, 513]
tokens = sum(lengths)
torch.manual_seed(0)
q = torch.randn(tokens, 32, 128).to(torch.bfloat16)
k = torch.randn(tokens, 8, 128).to(torch.bfloat16)
v = torch.randn(tokens, 8, 128).to(torch.bfloat16)


def gradient(calls):
    leaves = {name: t.to("cuda") for name, t in dict(q=q, k=k, v=v).items()}
    for name in ['q', 'k', 'v']:
        leaves[name] = leaves[name].clone().requires_grad_()
    at = 0
    for samples in calls:
        n = sum(samples)
        with TokenLayout(*zip(*[(sum(samples[:i]), m) for i, m in enumerate(samples)]), n):
            y = fn(leaves['q'][at:at + n], leaves['k'][at:at + n], leaves['v'][at:at + n], cu_seqlens_q=torch.tensor([sum(samples[:i]) for i in range(len(samples) + 1)], device="cuda"))
        ys = y if isinstance(y, tuple) else (y,)
        g = torch.Generator().manual_seed(1)
        torch.autograd.backward(ys, [torch.randn(tokens, *t.shape[1:], generator=g)[at:at + n].to(t) for t in ys])
        at += n
    leaf = leaves['q']
    return leaf.grad if leaf.grad is not None else leaf.main_grad


whole, split = gradient([lengths]), gradient([[n] for n in lengths])
bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()]
differ = whole.view(bits) != split.view(bits)
most = (whole.double() - split.double()).abs().max().item()
print(f"{int(differ.sum())} of {whole.numel()} elements differ; max abs {most:.3g}")
raise SystemExit(bool(differ.any()))
