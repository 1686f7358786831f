"""The same values lying otherwise in memory: a kernel compiled for those may add otherwise, or read beside them."""

from collections.abc import Callable, Iterator

import torch

from bi_kernels.audit.evidence.drift import Drift, Tensors, compare
from bi_kernels.audit.evidence.kinds import Kind
from bi_kernels.audit.evidence.verdicts import Row, sentence
from bi_kernels.audit.problem.call_layouts import VIEWS, unaligned
from bi_kernels.audit.problem.problem import joined
from bi_kernels.audit.problem.subject import CANCELLING, OpUnderTest

VIEWED_ROWS, VIEWED_QUERIES = 65, 2049  # tokens given as views; attention chooses its schedule by their number
ALIGNED, ADDRESSES = "aligned", "every address"
OFFSETS, FEW = range(1, 17), 5  # elements between an aligned address and a tensor; tokens of a call at each
VIEWED = (*VIEWS, ADDRESSES)


def by_view(subject: OpUnderTest, kind: str = CANCELLING) -> Iterator[Row]:
    """Compares the same values in views that lie otherwise in memory."""
    m = min(VIEWED_QUERIES, subject.largest) if subject.problem.op.cache else VIEWED_ROWS
    for name in VIEWED:
        said = {"against": ALIGNED, "inputs": kind, "rows": FEW if name == ADDRESSES else m, "axes": [Kind.MEMORY]}

        def asked() -> Drift | Row:
            if why := layout_refusal(subject, lambda: run_on_view(subject, name, kind)):
                return subject.row("invariance", name, Drift(0, 0), detail=why, **said)
            return compare(run_on_view(subject, name, kind), run_contiguous(subject, name, kind))

        yield from subject.attempt("invariance", name, asked, **said)


def _given(subject: OpUnderTest, name: str, kind: str) -> tuple[dict, dict, tuple, torch.Tensor]:
    m = min(VIEWED_QUERIES, subject.largest) if subject.problem.op.cache else VIEWED_ROWS
    tokens, shared = subject.inputs(kind, m)
    m = FEW if name == ADDRESSES else m
    return {k: t[:m] for k, t in tokens.items()}, shared, (m,), torch.arange(m, device=subject.problem.device)


def run_on_view(subject: OpUnderTest, name: str, kind: str) -> Tensors:
    """Returns what is made of the tensors in a view; of every address a tuple, one each."""
    tokens, shared, *rest = _given(subject, name, kind)

    def made(view: Callable) -> Tensors:
        moved = ({k: view(t) for k, t in given.items()} for given in (tokens, shared))
        return joined(subject.forward(*moved, *rest))

    return tuple(made(lambda t: unaligned(t, n)) for n in OFFSETS) if name == ADDRESSES else made(VIEWS[name])


def run_contiguous(subject: OpUnderTest, name: str, kind: str) -> Tensors:
    """Returns what a view is compared with."""
    out = subject.call(*_given(subject, name, kind))
    return (out,) * len(OFFSETS) if name == ADDRESSES else out


def layout_refusal(subject: OpUnderTest, ask: Callable) -> str:
    """Returns in which words a candidate refuses how its inputs lie in memory, '' where it does not."""
    try:
        if subject.candidate != "bi_kernels":
            ask()
    except Exception as error:
        clear = isinstance(error, (TypeError, ValueError, NotImplementedError))
        if clear and any(word in str(error) for word in ("contiguous", "stride", "aligned")):
            return f"refused: {sentence(error)}"
    return ""
