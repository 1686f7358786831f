"""Launches decode for few sequences: the scores of all blocks of keys at once, then their weights, then the chains."""

import torch
import triton
from torch import Tensor

from bi_kernels.checks import INTERPRETED, is_hopper
from bi_kernels.compat import is_recorded
from bi_kernels.launch import Launch, cached
from bi_kernels.ops.attention.decode_kernels import scores_kernel, values_kernel, weights_kernel
from bi_kernels.ops.attention.schedule import Schedule, max_tiles


def fits_apart(device: int, rows: int, count: int, heads: int, longest: int, schedule: Schedule) -> bool:
    """Returns whether steps apart are the faster on a GPU: where a program for each split would leave most of it idle.
    By shapes alone, so that a graph may change the lengths; 16-bit inputs."""
    apart, programs = schedule.apart, count * heads * triton.cdiv(longest, schedule.split)
    few = rows <= apart.rows * count and programs <= apart.programs and longest > 0
    if INTERPRETED:
        return few and rows * heads <= apart.interpreted
    return few and device >= 0 and is_hopper(torch.device("cuda", device))


@cached
def _loaded(*kind) -> set[tuple[bool, ...]]:
    """Returns which pointers were aligned where launches of a kind ran, outside of captures."""
    return set()


class SplitDecode:
    """Decode in steps, planned for a shape. In eager mode, which waits for the CPU, three launches are slower than one:
    it is for the capture of CUDA graphs."""

    def __init__(
        self,
        device: int,
        dtype: torch.dtype,
        integers: tuple[torch.dtype | None, ...],
        rows: int,
        longest: int,
        schedule: Schedule,
        told: dict,
        sinks: bool,
    ):
        """rows: of all queries of a key head; told: what `attention_kernel` is."""
        apart, count, heads, split = schedule.apart, told["sequences"], told["HEADS"], schedule.split
        self.rows, self.key_blocks = rows * heads, triton.cdiv(longest, schedule.block)
        self.room, splits = self.key_blocks * schedule.block, triton.cdiv(longest, split)
        tiles, columns = max_tiles(rows, count, apart.scores.rows), min(apart.values.columns, told["DV"])
        wide = told["width"] if told["width_v"] is None else told["width_v"]
        told = told | {"TILE": apart.scores.rows, "room": self.room, "wide": wide}

        def launch(kernel, grid: tuple[int, ...], warps: int, stages: int | None = None, **more) -> Launch:
            named = {n: told[n] for n in kernel.arg_names if n in told} | more
            named |= {} if stages is None else {"num_stages": stages}
            return Launch(kernel, device, grid, **named, num_warps=warps, enable_fp_fusion=told["enable_fp_fusion"])

        scores, values = apart.scores, apart.values
        keys = scores.columns if told["PAGE"] % scores.columns == 0 else schedule.block
        grid, more = (tiles * heads, triton.cdiv(longest, apart.run)), {"KEYS": keys, "RUN": apart.run}
        self._scores = launch(scores_kernel, grid, scores.warps, scores.stages, **more)
        blocks = max(64, triton.next_power_of_2(split // schedule.block))  # 64 rows of 4 warps lie along the rows
        self._weights = launch(weights_kernel, (rows * heads, splits), 4, BLOCKS=blocks)
        grid, more = (tiles * heads * (told["DV"] // columns), splits), {"TOGETHER": apart.together, "COLUMNS": columns}
        self._values = launch(values_kernel, grid, values.warps, values.stages, **more)
        changing = {"pages_stride", "last_page", "sequences", "rows_total", "room", "width_q", "width_k", "window"}
        kind = {n: v for n, v in told.items() if n not in changing} | {"packed": told["width_q"] is None}
        kind["padded"] = told["width_k"] is not None
        self._loaded = _loaded(device, dtype, integers, schedule, sinks, *kind.items())

    def should_use(self, *given: Tensor | None) -> bool:
        """Returns whether to compute in steps now: while a CUDA graph is captured; and once before, since a capture
        can load no kernel. No bit depends on it."""
        if INTERPRETED:
            return True
        if torch.cuda.is_current_stream_capturing():
            return _aligned(given) in self._loaded
        return is_recorded() or not self._loaded

    def __call__(self, q, k, v, out, lse, parts, first_q, length_q, first_k, length_k, pages, sinks) -> None:
        """Computes the result, or with `parts` those of each split; a tensor may be None where `attention_kernel`'s."""
        given = q, k, v, out, lse, parts, first_q, length_q, first_k, length_k, pages, sinks
        scores, weights = lse.new_empty(self.rows, self.room), q.new_empty(self.rows, self.room)
        factors, sums = (lse.new_empty(self.key_blocks, self.rows) for _ in range(2))  # each aligned
        parts = lse.new_empty(self.rows) if parts is None else parts  # the maxima
        self._scores(q, k, scores, first_q, length_q, first_k, length_k, pages)
        self._weights(scores, weights, factors, sums, parts, first_q, length_q, length_k)
        where = first_q, length_q, first_k, length_k, pages, sinks
        self._values(weights, factors, sums, v, out, lse, parts, *where)
        if not (INTERPRETED or is_recorded() or torch.cuda.is_current_stream_capturing()):
            self._loaded.add(_aligned(given))


def _aligned(given: tuple[Tensor | None, ...]) -> tuple[bool, ...]:
    """Returns by which pointers Triton may load 16 bytes at once."""
    return tuple([t is None or t.data_ptr() % 16 == 0 for t in given])
