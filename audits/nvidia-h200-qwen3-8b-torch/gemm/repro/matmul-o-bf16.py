# matmul o, bf16: one token, computed in a call of (1,) and in one of (44,); the other rows hold zeros.
import torch
from bi_kernels.audit.stock import matmul as fn
torch.manual_seed(0)
a = torch.randn(4096).to(torch.bfloat16)
b = torch.randn(4096, 4096).to(torch.bfloat16).to("cuda")
b = b.t().contiguous()


def result(lead, at):
    rows = torch.Size(lead).numel()
    torch.manual_seed(1)
    a_rows = torch.zeros(rows, 4096).to(torch.bfloat16)
    a_rows[at] = a
    y = fn(a_rows.to("cuda").reshape(*lead, 4096), b)
    return y.flatten(0, len(lead) - 1)[at]


a, b = result((1,), 0), result((44,), 0)
bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
differ = a.view(bits) != b.view(bits)
most = (a.double() - b.double()).abs().max().item()
print(f"{int(differ.sum())} of {a.numel()} elements differ; max abs {most:.3g}")
raise SystemExit(bool(differ.any()))
