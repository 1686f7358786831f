"""Starts ranks by torchrun, and collects what they leave: also of ranks that die, or hang."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

GRACE = 10  # seconds, for torchrun to end the ranks
DIED = re.compile(r"^\s+rank\s+: (\d+).*?exitcode\s+: (-?\d+)", re.DOTALL | re.MULTILINE)  # in torchrun's report


def launched(folder: Path, told: dict, ranks: int, seconds: float) -> tuple[list[list[dict]], str]:
    """Returns the evidence of every job that all ranks ended, a list by rank, and one sentence where one did not.

    folder: where they leave it; told: device, shapes, dtype, seed and jobs, each {way, world}; timing: the way that
    measures, if one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(told), encoding="utf-8")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [*run, "-m", "bi_kernels.audit.worlds.rank", str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late, said = "", ""
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = f"the ranks had not ended after {seconds:.0f} s"
    finally:
        if process.poll() is None:
            _end(process, folder)
    lines = [_lines(folder / f"rank-{rank}.jsonl") for rank in range(ranks)]
    errors = {rank: of.pop() for rank, of in enumerate(lines) if of and "error" in of[-1]}
    whole = min(map(len, lines))
    why = late or _why(said, process.returncode, errors)
    if why:
        why += f"; {whole} of {len(told['jobs'])} jobs had ended on every rank"
    return [[of[job] for of in lines] for job in range(whole)], why


def _why(said: str, status: int, errors: dict[int, dict]) -> str:
    """Returns who ended first, by what torchrun says and what the ranks do: one that died without a word, before those
    that then missed it; else the first that raised."""
    if not status:
        return ""
    died = {int(rank): int(code) for rank, code in DIED.findall(said) if int(code) != -signal.SIGTERM}
    for rank, code in died.items():
        if rank not in errors:
            return f"rank {rank} ended with status {code}"
    if errors:
        return min(errors.values(), key=lambda line: line["time"])["error"]
    return f"torchrun ended with status {status}: {(said.strip().splitlines() or [''])[-1]:.200}"


def _end(process: subprocess.Popen, folder: Path) -> None:
    """Ends torchrun, which ends the ranks; those that it does not are killed, by the numbers that they left."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            process.send_signal(how)
            process.wait(GRACE)
            break
        except subprocess.TimeoutExpired:
            continue
    for file in folder.glob("rank-*.pid"):
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except (ProcessLookupError, ValueError):
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
