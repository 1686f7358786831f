"""Starts the ranks of a process group, and collects what they leave: also of ranks that die, or hang."""

import json
import socket
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from bi_kernels.audit.executor import Died, begin

GRACE = 5  # seconds that other ranks have once one has died: what they miss is not what went wrong


def launched(folder: Path, told: dict, ranks: int, seconds: float) -> tuple[list[list[dict]], str]:
    """Returns the evidence of every job that all ranks ended, a list by rank, and one sentence where one did not.

    folder: where they leave it; told: device, shapes, dtype, seed and jobs, each {way, world}; timing: the way that
    measures, if one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(told), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    rank = lambda i: group | {"RANK": str(i), "LOCAL_RANK": str(i), "OMP_NUM_THREADS": "1"}
    processes = [begin("bi_kernels.audit.worlds.rank:main", folder, environment=rank(i)) for i in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        results = [pool.submit(process.result, seconds=seconds) for process in processes]
        try:
            wait(results, return_when=FIRST_EXCEPTION)
            ended, _ = wait(results, GRACE)
        finally:
            for process in processes:
                process.stop()
    died = {i: e for i, result in enumerate(results) if result in ended and (e := result.exception())}
    lines = [_lines(folder / f"rank-{i}.jsonl") for i in range(ranks)]
    errors = {i: of.pop() for i, of in enumerate(lines) if of and "error" in of[-1]}
    whole = min(map(len, lines))
    why = _why(died, errors, seconds)
    if why:
        why += f"; {whole} of {len(told['jobs'])} jobs had ended on every rank"
    return [[of[job] for of in lines] for job in range(whole)], why


def _why(died: dict[int, Died], errors: dict[int, dict], seconds: float) -> str:
    """Returns who ended first: one that died without a word, before those that then missed it; else the first that
    raised."""
    if any(died[rank].late for rank in died):
        return f"the ranks had not ended after {seconds:.0f} s"
    silent = [rank for rank in died if rank not in errors]
    if silent:
        return f"rank {silent[0]} ended with status {died[silent[0]].status}"
    return min(errors.values(), key=lambda line: line["time"])["error"] if errors else ""


def _lines(file: Path) -> list[dict]:
    """Returns the lines of a rank; one that was cut is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
