"""Caches of attention as servers and Transformers have them: heads first, in pages of any size, far longer than what
they hold, shared by any number of query heads, and decoded for any number of sequences at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bi_kernels.audit.checks.edge_cases import begun
from bi_kernels.audit.checks.placement import INTEGERS
from bi_kernels.audit.checks.requests import Variant
from bi_kernels.audit.compare import Tensors
from bi_kernels.audit.layouts import Call, spans
from bi_kernels.audit.step import Results
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_step import Step

PAGES = 1, 2, 16, 64, 256  # keys of a page
SEQUENCES = 1, 3, 5, 17, 33, 127, 128  # decoded in one call; the last is what the others are compared with
GROUPS = 1, 3, 5, 6, 7, 16  # query heads to a key head
PAGE, STALE = 16, 7.0  # keys of a page of any other check; what lies behind a sequence
FEW = 5, 1, 17  # tokens of sequences of a group
CAPACITY = {"cpu": 1000, "cuda": 2**15}  # keys that a cache has room for
HEADS_FIRST, FAR = "a cache with heads first", "a cache far longer than its sequences"


def last_of(lengths: Sequence[int]) -> Call:
    """Returns the call that decodes the last token of each sequence."""
    return Call(np.array([s[-1:] for s in spans(lengths)]))


def heads_first(t: Tensor) -> Tensor:
    """Returns (batch, length, heads, D) as a view of (batch, heads, length, D)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def op_caches(u: Step) -> dict[str, Variant]:
    """Returns what attention is asked of its cache; nothing of another op."""
    if not u.subject.problem.op.cache:
        return {}
    s = replace(u.subject, own_lengths=u.lengths, memo={})
    longer = lambda t: pad(t, (0, 0, 0, 0, 0, CAPACITY[t.device.type] - t.shape[1]), value=STALE)
    first = lambda q, k, v, **told: (tuple(map(heads_first, (q, k, v))), told)
    far = lambda q, k, v, **told: ((q, longer(k), longer(v)), told)
    found: dict[str, Variant] = {HEADS_FIRST: partial(_decoded, s, first), FAR: partial(_decoded, s, far)}
    for way, view in INTEGERS.items():
        where = lambda *given, view=view, **told: (
            given,
            {k: view(t) if isinstance(t, Tensor) else t for k, t in told.items()},
        )
        found[f"block table and lengths {way}"] = partial(_decoded, s, where, PAGE)
    found |= {f"pages of {n}": partial(_decoded, s, page=n) for n in PAGES}
    found |= {f"{n} sequences decoded": partial(_sequences, s, n) for n in SEQUENCES[:-1]}
    return found | {f"{n} query heads a key head": partial(_group, s, n) for n in GROUPS}


def _decoded(s: OpUnderTest, change: Callable | None = None, page: int = 0) -> tuple[Results, Results]:
    """Compares the last token of each sequence with the same decoded against a cache in one piece; change: of what the
    candidate is given, its tensors and its arguments; page: of a cache in pages."""

    def changed(q, k, v, *sinks, **told):
        (q, k, v), told = change(q, k, v, **told)
        return s.function(q, k, v, *sinks, **told)

    call, other = [last_of(s.lengths)], replace(s, function=changed, memo={}) if change else s
    near = s.once("decoded", lambda: s.compute(call))
    return _named(s, other.compute(call, page=page)), _named(s, near)


def _named(s: OpUnderTest, made: Tensors) -> Results:
    return s.named(made if isinstance(made, tuple) else (made,))


def _sequences(s: OpUnderTest, count: int) -> tuple[Results, Results]:
    """Compares so many sequences decoded in one call with the same among the most."""
    lengths = tuple(1 + i % 7 for i in range(max(SEQUENCES)))
    sizes = s.problem.sizes | {"heads": 2, "kv_heads": 1}  # each sequence is a program for each key head
    of = replace(s, problem=replace(s.problem, sizes=sizes), own_lengths=lengths, memo={})
    index = last_of(lengths).index
    whole = s.once("most decoded", lambda: of.compute([Call(index)]))
    rows = torch.tensor(index[:count].reshape(-1), device=s.problem.device)
    found = of.compute([Call(index[:count])])
    return tuple({k: t[rows] for k, t in _named(s, made).items()} for made in (found, whole))


def _group(s: OpUnderTest, heads: int) -> tuple[Results, Results]:
    """Compares the last token of each sequence, decoded, with the same in a call of all tokens, and gradients of that
    call with those of a call a sequence."""
    p = s.problem
    other = replace(s, problem=replace(p, sizes=p.sizes | {"heads": heads, "kv_heads": 1}), own_lengths=FEW, memo={})
    step, decode = begun(other, FEW), last_of(FEW)
    rows = torch.tensor(decode.index.reshape(-1), device=p.device)
    last = lambda made: {k: t[rows] for k, t in made.items()}
    named = lambda made: {f"d{k}": t for k, t in made.items()}
    found = last(_named(s, other.compute([decode]))) | named(step.gradients("micro_batches:each"))
    return found, last(step.results) | named(step.gradients())
