# bias_add, fp32: dbias packed against singles.
# Run in a fresh process (NVIDIA H200): 3290 of 4096 elements differ, as reported; 20 more rows of the report, by the words in their commands.
import sys

import torch
from bi_kernels.audit.reproduce import replay
from bi_kernels.audit.stock import bias_add as fn

judged = replay.Operator('bias_add', '', 'fp32', 'qwen3-8b', 'cuda', 0, 32)
bits = lambda parts: torch.cat([t.contiguous().view(replay.INTEGER[t.element_size()]).flatten().long() for t in parts])
asked, found = sys.argv[1:] or ['packed', 'singles', 'cancelling', 'dbias', '00'], 0
for one, other, inputs, tensor, memory in zip(*[iter(asked)] * 5):
    a = judged.result(fn, one, inputs, tensor, memory[0])  # calls fn as this layout does
    b = judged.result(fn, other, inputs, tensor, memory[1])
    differ, (x, y) = bits(a) != bits(b), (torch.cat([t.flatten().double() for t in parts]) for parts in (a, b))
    most, found = (x - y)[differ].abs().nan_to_num(torch.inf, torch.inf).max() if differ.any() else 0, found + int(differ.sum())
    print(f"{int(differ.sum())} of {differ.numel()} elements differ; max abs {float(most):.9g} ({tensor}, {one})", flush=True)
raise SystemExit(bool(found))
