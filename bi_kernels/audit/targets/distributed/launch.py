"""Starts ranks by torchrun, and collects their evidence, also where a rank dies or hangs."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import torch

GRACE = 10  # seconds, for torchrun to end the ranks
DIED = re.compile(r"^\s+rank\s+: (\d+).*?exitcode\s+: (-?\d+)", re.DOTALL | re.MULTILINE)  # in torchrun's report


def launch(folder: Path, told: dict, ranks: int, seconds: float) -> tuple[list[list[dict]], str]:
    """Returns the evidence of every job that all ranks ended, a list by rank, and one sentence where one did not.

    folder: where the ranks leave it; told: device, shapes, dtype, seed and jobs, each {strategy, config}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(told), encoding="utf-8")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [*run, "-m", f"{__package__}.rank", str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late, report = "", ""
    try:
        _, report = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = f"the ranks had not ended after {seconds:.0f} s"
    finally:
        if process.poll() is None:
            _end(process, folder)
    evidence = []
    for job in count():
        files = [folder / f"rank-{rank}-{job}.pt" for rank in range(ranks)]
        if not all(file.is_file() for file in files):
            break
        evidence.append([torch.load(file) for file in files])
    if why := late or _why(report, process.returncode, folder):
        why += f"; {len(evidence)} of {len(told['jobs'])} jobs had ended on every rank"
    return evidence, why


def _why(report: str, status: int, folder: Path) -> str:
    """Returns why ranks ended early: the one that died in silence, by torchrun's report, before those that then missed
    it; else the first that raised."""
    if not status:
        return ""
    errors = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("rank-*.json")}
    for rank, code in DIED.findall(report):
        if int(code) != -signal.SIGTERM and f"rank-{rank}" not in errors:
            return f"rank {rank} ended with status {code}"
    if errors:
        return min(errors.values(), key=lambda raised: raised["time"])["error"]
    return f"torchrun ended with status {status}: {(report.strip().splitlines() or [''])[-1]:.200}"


def _end(process: subprocess.Popen, folder: Path) -> None:
    """Ends torchrun, which ends the ranks; kills those that are left, by the ids that they wrote."""
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
