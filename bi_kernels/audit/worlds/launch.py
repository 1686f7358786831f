"""Starts ranks by torchrun, and collects what they leave: also of ranks that die, or hang."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

DIED = re.compile(r"rank\s+: (\d+).*?exitcode\s+: (-?\d+)", re.DOTALL)


def launched(folder: Path, told: dict, ranks: int, seconds: float) -> tuple[list[list[dict]], str]:
    """Returns the evidence of every job that all ranks ended, a list by rank, and one sentence where one did not.

    folder: where they leave it; told: device, shapes, dtype, seed and jobs, each {way, world}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(told), encoding="utf-8")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*run, "-m", "bi_kernels.audit.worlds.rank", str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, said = process.communicate(timeout=seconds)
        why = _why(said, process.returncode)
    except subprocess.TimeoutExpired:
        why = f"the ranks had not ended after {seconds:.0f} s"
    finally:
        if process.poll() is None:
            _end(process)
    lines = [_lines(folder / f"rank-{rank}.jsonl") for rank in range(ranks)]
    whole = min(map(len, lines))
    errors = [line["error"] for of in lines for line in of if "error" in line]
    found = [[of[job] for of in lines] for job in range(whole)]
    found = [of for of in found if not any("error" in line for line in of)]
    if why and errors:
        why = errors[0]
    elif why:
        behind = [str(rank) for rank, of in enumerate(lines) if len(of) == whole]
        why += f"; rank {', '.join(behind)} had ended {whole} of {len(told['jobs'])} jobs"
    return found, why


def _why(said: str, status: int) -> str:
    if not status:
        return ""
    died = DIED.search(said.partition("Root Cause")[2])
    return f"rank {died[1]} ended with status {died[2]}" if died else f"torchrun ended with status {status}"


def _end(process: subprocess.Popen) -> None:
    """Ends torchrun and the ranks, which are in a session of their own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _lines(file: Path) -> list[dict]:
    """Returns the lines of a rank; one that was cut is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
