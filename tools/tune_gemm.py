"""Finds the rows of `bi_kernels.gemm.TILES`: times candidate tiles against cuBLAS, one table cell after another.

    python tools/tune_gemm.py OUT.json [--cells qkv:256,o:128]

Every candidate must give the bits of every other one before it is timed; a tile that does not is an error.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
import triton.testing

from bi_kernels.gemm import Tile, launch

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
          "lm_head": (151936, 4096)}
ROWS = (1, 16, 64, 128, 256, 1024, 4096, 16384)


def candidates(rows: int) -> list[Tile]:
    if rows <= 16:
        return [Tile(16, n, k, 4, s, swap=sw) for sw in (False, True) for n, k, s in
                ((32, 128, 6), (32, 256, 4), (64, 128, 4), (64, 128, 6), (64, 256, 3), (64, 256, 4), (128, 64, 6),
                 (128, 128, 3), (128, 128, 4), (128, 128, 5))]
    if rows <= 64:
        return [Tile(64, n, k, 4, s, swap=sw) for sw in (False, True) for n, k, s in
                ((32, 128, 4), (32, 128, 6), (32, 64, 6), (64, 64, 6), (64, 128, 4), (64, 128, 5), (128, 64, 6),
                 (128, 64, 4), (128, 128, 3), (256, 64, 4))]
    if rows <= 256:
        return ([Tile(128, n, k, w, s, extra_n=e, persistent=p) for p in (False, True) for n, k, w, s, e in
                 ((32, 128, 4, 4, 0), (64, 64, 4, 4, 0), (64, 128, 4, 4, 0), (64, 64, 4, 6, 0), (128, 64, 8, 4, 0),
                  (128, 64, 4, 4, 0), (64, 64, 4, 5, 32), (64, 64, 8, 5, 32), (64, 128, 8, 3, 32), (128, 64, 8, 4, 64),
                  (256, 64, 8, 3, 0))]
                + [Tile(64, n, k, w, s, extra_n=e) for n, k, w, s, e in
                   ((64, 128, 4, 4, 0), (64, 64, 4, 6, 0), (128, 64, 4, 5, 64), (128, 64, 4, 6, 0), (128, 128, 4, 3, 0),
                    (64, 64, 4, 6, 32), (64, 128, 4, 3, 32), (256, 64, 8, 4, 0), (256, 64, 4, 4, 0))]
                + [Tile(256, n, 64, 8, s, extra_n=e, persistent=p) for p in (False, True) for n, s, e in
                   ((32, 5, 0), (64, 4, 0), (64, 4, 32), (128, 3, 0))])
    return [Tile(128, 256, 64, 8, 3, persistent=True, halves=h, group=g) for h in (False, True) for g in (4, 8, 16)] + [
        Tile(128, 256, 64, 8, 3, halves=True), Tile(128, 256, 64, 8, 4, persistent=True, halves=True),
        Tile(128, 128, 64, 8, 4, extra_n=64, persistent=True), Tile(128, 128, 64, 8, 5, extra_n=64, persistent=True),
        Tile(128, 128, 64, 8, 4, extra_n=64), Tile(128, 128, 64, 8, 4, extra_n=64, persistent=True, group=16),
        Tile(256, 128, 64, 8, 3, persistent=True), Tile(256, 128, 64, 8, 3, persistent=True, halves=True, group=4),
        Tile(256, 64, 64, 8, 4, extra_n=32, persistent=True), Tile(128, 128, 64, 8, 4, persistent=True),
        Tile(128, 128, 64, 4, 4, persistent=True), Tile(128, 128, 64, 4, 3), Tile(128, 128, 128, 8, 3, persistent=True)]


def time_ms(fn) -> float:
    return triton.testing.do_bench(fn, warmup=10, rep=40, return_mode="median")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--cells", help="shape:rows, comma-separated; all of them unless given")
    args = parser.parse_args()
    cells = [(c.split(":")[0], int(c.split(":")[1])) for c in args.cells.split(",")] if args.cells else [
        (s, m) for m in ROWS for s in SHAPES]
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
        json.dump(results, open(args.out, "w"))
        best = sorted((r for r in results if r["shape"] == shape and r["rows"] == rows and "ratio" in r and
                       r["tile"] != "cublas"), key=lambda r: -r["ratio"])[:3]
        print(f"{shape:8} M={rows:<6} cublas {cublas:.4f} ms  {time.time() - start:.0f} s ", "  ".join(
            f"{b['ratio']:.2f} {tuple(b['tile'].values())}" for b in best), flush=True)
