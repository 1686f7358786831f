"""Writes the script that shows a recipe's largest drift, by torch alone, and runs it in a process of its own."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

from bi_kernels.audit.inputs import cancel
from bi_kernels.contract import DTYPES
from helpers.recipes.products import DIRECTIONS, STARVED, Recipe, numbers

LONGEST = 300  # seconds that it may take
LAST = """
linear = torch.nn.functional.linear
x, w, dy = numbers({largest}, {n}, {k}, {dtype}, "{device}", {seed})
alone, among = {call}(linear, x[:{m}], w, dy[:{m}]), {call}(linear, x, w, dy)[:{m}]
differ = alone.view(torch.int16) != among.view(torch.int16)  # in raw bits
print(f"{{int(differ.sum())}} of {{differ.numel()}} elements differ")
raise SystemExit(bool(differ.any()))
"""


def text(recipe: Recipe, direction: str, shape: tuple[int, int, int], told: dict) -> str:
    """Returns a script of one product, of M rows alone and among the largest call's; its exit status is 1 if they
    differ. shape: M, N, K; told: largest, device, dtype, seed."""
    m, n, k = shape
    on_gpu = told["device"] == "cuda"
    call = DIRECTIONS[direction]
    first = f"# {recipe.name}, {direction} at N = {n}, K = {k}: {m} rows in one call, and among {told['largest']}."
    lines = [first, "# Written by bi_kernels' audit of recipes; needs torch alone."]
    if recipe.environment:
        names = (f'os.environ["{name}"] = "{value}"' for name, value in recipe.environment.items())
        lines += ["import os", "", *names, ""]
    lines += ["import torch", ""]
    parts = [cancel, numbers, call, *([recipe.told] if recipe.told and on_gpu else [])]
    lines += [f"\n{inspect.getsource(part)}" for part in parts]
    lines += [f"\n{recipe.told.__name__}()"] if recipe.told and on_gpu else []
    more = {name: told[name] for name in ("largest", "device", "seed")} | {"dtype": DTYPES[told["dtype"]]}
    return "\n".join(lines) + LAST.format(m=m, n=n, k=k, call=call.__name__, **more)


def run(path: Path) -> tuple[bool, str]:
    """Runs a script in an environment without the recipes' own settings; returns whether it shows a drift, and the
    last line that it says."""
    kept = {name: v for name, v in os.environ.items() if name not in {*STARVED.environment, "TRITON_INTERPRET"}}
    try:
        done = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, env=kept, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"it took over {LONGEST} s"
    shown = done.returncode == 1 and "elements differ" in done.stdout
    lines = (done.stdout if shown else done.stdout + done.stderr).strip().splitlines()
    return shown, (lines or [f"it ended with status {done.returncode}"])[-1][:200]
