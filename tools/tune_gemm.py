"""Finds the rows of `bi_kernels.ops.gemm_kernel.TILES`: times candidate tiles against cuBLAS, one table cell after
another.

    python tools/tune_gemm.py OUT.json [--cells qkv:256,o:128]

Every candidate must give the bits of every other one before it is timed; a tile that does not is an error.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import triton.testing

from bi_kernels.ops.gemm_kernel import Tile, launch

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}
ROWS = (1, 16, 64, 128, 256, 1024, 4096, 16384)


def candidates(rows: int) -> list[Tile]:
    """What was tried for a row count; the first number of a tuple is BLOCK_N."""
    if rows <= 64:
        m = 16 if rows <= 16 else 64
        return [
            Tile(m, n, k, 4, s, swap=swap)
            for swap in (False, True)
            for n, k, s in (
                (32, 128, 4),
                (32, 128, 6),
                (32, 256, 3),
                (32, 256, 4),
                (64, 128, 3),
                (64, 128, 4),
                (64, 128, 5),
                (64, 128, 6),
                (64, 256, 3),
                (64, 256, 4),
                (128, 64, 6),
                (128, 128, 3),
                (128, 128, 4),
                (128, 128, 5),
                (256, 64, 4),
            )
        ]
    wide = [
        Tile(128, 256, 64, 8, s, persistent=p, halves=h, group=g)
        for s, p, h in ((3, 0, False), (3, 1, False), (3, 1, True), (4, 1, True))
        for g in (2, 8, 16)
    ]
    wide += [
        Tile(256, 128, 64, 8, s, persistent=1, halves=h, group=g) for s, h in ((3, False), (4, True)) for g in (1, 4, 8)
    ]
    square = [
        Tile(128, 128, k, w, s, extra_n=e, persistent=p, group=g)
        for k, w, s, e, p in (
            (64, 8, 4, 64, 0),
            (64, 8, 5, 64, 0),
            (64, 8, 4, 64, 1),
            (64, 8, 4, 0, 0),
            (64, 8, 4, 0, 1),
            (64, 8, 5, 0, 1),
            (64, 8, 6, 0, 1),
            (64, 4, 3, 0, 0),
            (64, 4, 3, 0, 2),
            (64, 4, 4, 0, 1),
            (128, 8, 3, 0, 0),
            (128, 8, 3, 0, 1),
        )
        for g in (2, 8)
    ]
    if rows > 256:
        return wide + square
    narrow = [
        Tile(128, n, k, w, s, extra_n=e, swap=swap)
        for n, k, w, s, e, swap in (
            (32, 128, 4, 4, 0, False),
            (32, 256, 4, 2, 0, False),
            (64, 64, 4, 4, 0, False),
            (64, 64, 4, 6, 0, False),
            (64, 64, 4, 8, 0, False),
            (64, 128, 4, 3, 0, False),
            (64, 128, 4, 4, 0, False),
            (64, 128, 8, 4, 0, False),
            (64, 64, 4, 5, 32, False),
            (64, 64, 8, 5, 32, False),
            (64, 128, 4, 3, 32, False),
            (64, 128, 8, 3, 32, False),
            (64, 64, 4, 6, 0, True),
            (64, 64, 4, 8, 0, True),
            (64, 128, 4, 3, 0, True),
            (64, 128, 4, 4, 0, True),
        )
    ]
    narrow += [
        Tile(64, n, k, w, s, extra_n=e, swap=swap)
        for n, k, w, s, e, swap in (
            (64, 128, 4, 3, 0, False),
            (64, 128, 4, 4, 0, False),
            (64, 128, 4, 5, 0, False),
            (64, 256, 4, 3, 0, False),
            (64, 64, 4, 6, 0, False),
            (64, 128, 4, 4, 0, True),
            (64, 128, 4, 5, 0, True),
            (128, 64, 4, 5, 64, False),
            (128, 64, 4, 6, 64, False),
            (128, 64, 4, 6, 0, False),
            (128, 64, 4, 8, 0, False),
            (128, 128, 4, 3, 0, False),
            (128, 128, 4, 4, 0, False),
            (64, 64, 4, 6, 32, False),
            (64, 128, 4, 3, 32, False),
            (64, 128, 4, 4, 32, False),
            (256, 64, 8, 4, 0, False),
            (256, 64, 4, 4, 0, False),
        )
    ]
    narrow += [
        Tile(256, n, k, 8, s, persistent=p)
        for n, k, s, p in (
            (32, 64, 5, 0),
            (64, 64, 4, 0),
            (64, 64, 5, 0),
            (64, 128, 2, 0),
            (64, 64, 5, 1),
            (128, 64, 4, 0),
            (128, 64, 4, 1),
        )
    ]
    return narrow + square + (wide if rows == 256 else wide[1::3])


def time_ms(fn) -> float:
    return triton.testing.do_bench(fn, warmup=10, rep=40, return_mode="median")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--cells", help="shape:rows, comma-separated; all of them unless given")
    args = parser.parse_args()
    cells = (
        [(c.split(":")[0], int(c.split(":")[1])) for c in args.cells.split(",")]
        if args.cells
        else [(s, m) for m in ROWS for s in SHAPES]
    )
    results = []
    for shape, rows in cells:
        start = time.time()
        n, k = SHAPES[shape]
        torch.manual_seed(0)
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        expected = launch(x, w, None, Tile(128, 128, 64, 8, 3))
        cublas = time_ms(lambda: F.linear(x, w))
        for tile in candidates(rows):
            row = dict(shape=shape, rows=rows, tile=tile._asdict())
            try:
                same = torch.equal(launch(x, w, None, tile).view(torch.int16), expected.view(torch.int16))
            except Exception as error:
                results.append(row | dict(error=repr(error)[:200]))
                continue
            assert same, f"{shape} M={rows} {tile}: other bits"
            results.append(row | dict(ratio=cublas / time_ms(lambda: launch(x, w, None, tile)), cublas_ms=cublas))
        results.append(dict(shape=shape, rows=rows, tile="cublas", ratio=cublas / time_ms(lambda: F.linear(x, w))))
        Path(args.out).write_text(json.dumps(results))
        best = sorted(
            (
                r
                for r in results
                if r["shape"] == shape and r["rows"] == rows and "ratio" in r and r["tile"] != "cublas"
            ),
            key=lambda r: -r["ratio"],
        )[:3]
        print(
            f"{shape:8} M={rows:<6} cublas {cublas:.4f} ms  {time.time() - start:.0f} s ",
            "  ".join(f"{b['ratio']:.2f} {tuple(b['tile'].values())}" for b in best),
            flush=True,
        )
