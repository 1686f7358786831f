"""Starts the ranks of a process group, and collects their evidence, also where a rank dies or hangs."""

import json
import socket
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path

import torch

from bi_kernels.audit.executor import Died, begin

GRACE = 5  # seconds that other ranks have once one has died: what they miss is not what went wrong


def launch(folder: Path, told: dict, ranks: int, seconds: float) -> tuple[list[list[dict]], str]:
    """Returns the evidence of every job that all ranks ended, a list by rank, and one sentence where one did not.

    folder: where the ranks leave it; told: device, shapes, dtype, seed and jobs, each {strategy, config}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(told), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    rank = lambda i: group | {"RANK": str(i), "LOCAL_RANK": str(i), "OMP_NUM_THREADS": "1"}
    processes = [begin(f"{__package__}.rank:main", folder, environment=rank(i)) for i in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        results = [pool.submit(process.result, seconds=seconds) for process in processes]
        try:
            wait(results, return_when=FIRST_EXCEPTION)
            ended, _ = wait(results, GRACE)
        finally:
            for process in processes:
                process.stop()
    died = {i: e for i, result in enumerate(results) if result in ended and (e := result.exception())}
    evidence = []
    for job in count():
        files = [folder / f"rank-{rank}-{job}.pt" for rank in range(ranks)]
        if not all(file.is_file() for file in files):
            break
        evidence.append([torch.load(file) for file in files])
    if why := _why(died, folder, seconds):
        why += f"; {len(evidence)} of {len(told['jobs'])} jobs had ended on every rank"
    return evidence, why


def _why(died: dict[int, Died], folder: Path, seconds: float) -> str:
    """Returns why ranks ended early: the one that died in silence, before those that then missed it; else the first
    that raised."""
    errors = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("rank-*.json")}
    if any(died[rank].late for rank in died):
        return f"the ranks had not ended after {seconds:.0f} s"
    silent = [rank for rank in died if f"rank-{rank}" not in errors]
    if silent:
        return f"rank {silent[0]} ended with status {died[silent[0]].status}"
    return min(errors.values(), key=lambda raised: raised["time"])["error"] if errors else ""
