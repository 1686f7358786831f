"""What several experiments share: the model's sizes, numbers whose values do not matter, and calls in a CUDA graph."""

from collections.abc import Callable, Iterable

import torch

from bi_kernels.audit.compare import Tensors
from bi_kernels.audit.findings import Row
from bi_kernels.contract import SHAPES

Counts = dict[str, dict[str, float]]  # lines of a heat map, and their columns
Found = tuple[list[Row], list[dict]]  # rows, and the lines of a table


def size(session) -> dict:
    """Returns the sizes of the session's shapes, by name."""
    return SHAPES[session.parameters["shapes"]]


def differing(row: Row) -> float:
    """Returns how many elements of a row differ; NaN where it raised."""
    return float("nan") if row.mismatches is None else row.mismatches


def is_ours(session) -> bool:
    """Tells whether the candidate is this package."""
    return session.candidate.spec == "bi_kernels"


def sixteen_bits(session) -> str:
    """Names the session's dtype of 16 bits, bf16 if it has that; its only one where it has none."""
    return "bf16" if "bf16" in session.dtypes else session.dtypes[0]


def normal(session, *shape: int) -> torch.Tensor:
    """Draws numbers in bf16 whose values do not matter, as of what is timed."""
    return torch.randn(shape, device=session.device, dtype=torch.bfloat16)


def replayed(call: Callable[[], Tensors], given: Iterable[tuple]) -> Tensors:
    """Returns what a CUDA graph of a call leaves; given: its tensors, each with what it is filled with after capture,
    for the graph must read what is there when it runs."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for tensor, value in given:
        tensor[:] = value
    graph.replay()
    torch.cuda.synchronize()  # the graph ends here
    return out
