# attention_window, bf16: query 0 of one sequence, computed in a call of queries 0 to 0 of 1 sequence, packed and in one of queries 0 to 1 of 1 sequence, packed.
import torch
from bi_kernels.audit.stock import attention as fn
torch.manual_seed(0)
q, k, v = (torch.randn(2, *shape).to(torch.bfloat16) for shape in [(32, 128), (8, 128), (8, 128)])


def result(sequences, first, last, room, packed):  # room: rows of padding, of which the candidate is told
    torch.manual_seed(1)
    Q, K, V = (torch.cat((t[None, :last], torch.randn(sequences - 1, last, *t.shape[1:]).to(t))) for t in (q, k, v))
    Q, K, V = (torch.cat((t, torch.randn(sequences, room, *t.shape[2:]).to(t)), 1).to("cuda") for t in (Q[:, first:], K, V))
    lengths = {name: torch.full((sequences,), n, device=Q.device) for name, n in (("lengths_q", last - first), ("lengths_k", last))}
    told = lengths if room else {}
    if packed:
        told = {"cu_seqlens_q": torch.arange(sequences + 1, device=Q.device) * last}
        Q, K, V = (t.flatten(0, 1) for t in (Q, K, V))
    out, lse = fn(Q, K, V, window=33, **told)
    out, lse = (out, lse) if packed else (out[0], lse[0])
    return torch.cat((out[0 - first].double(), lse[0 - first, :, None].double()), -1)


a, b = result(1, 0, 1, 0, True), result(1, 0, 2, 0, True)
bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
differ = a.view(bits) != b.view(bits)
most = (a.double() - b.double()).abs().max().item()
print(f"{int(differ.sum())} of {a.numel()} elements differ; max abs {most:.3g}")
raise SystemExit(bool(differ.any()))
