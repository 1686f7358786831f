# attention gqa, bf16: out, queries for all keys population: more keys than queries against population: more keys than queries, as one packed call.
# Run in a fresh process (NVIDIA H200): 67 of 975424 elements differ, as reported; 31 more rows of the report, by the words in their commands.
import sys

import torch
from bi_kernels.audit.reproduce import replay
from bi_kernels.audit.stock import attention as fn

judged = replay.Operator('attention', 'gqa', 'bf16', 'qwen3-8b', 'cuda', 0, 32)
bits = lambda parts: torch.cat([t.contiguous().view(replay.INTEGER[t.element_size()]).flatten().long() for t in parts])
asked, found = sys.argv[1:] or ['population: more keys than queries', 'population: more keys than queries, as one packed call', 'cancelling', 'out, queries for all keys', '00'], 0
for one, other, inputs, tensor, memory in zip(*[iter(asked)] * 5):
    a = judged.result(fn, one, inputs, tensor, memory[0])  # calls fn as this layout does
    b = judged.result(fn, other, inputs, tensor, memory[1])
    differ, (x, y) = bits(a) != bits(b), (torch.cat([t.flatten().double() for t in parts]) for parts in (a, b))
    most, found = (x - y)[differ].abs().nan_to_num(torch.inf, torch.inf).max() if differ.any() else 0, found + int(differ.sum())
    print(f"{int(differ.sum())} of {differ.numel()} elements differ; max abs {float(most):.9g} ({tensor}, {one})", flush=True)
raise SystemExit(bool(found))
