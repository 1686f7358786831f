"""Starts the ranks of a process group, which run `main`; collects their evidence, also where a rank dies or hangs."""

import importlib
import json
import os
import socket
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cache
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bi_kernels.audit.executor import Died, begin
from bi_kernels.audit.findings import sentence
from bi_kernels.audit.parameters import choose
from bi_kernels.parallel.tree import agree

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
    processes = [begin(f"{__name__}:main", folder, environment=rank(i)) for i in range(ranks)]
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


def main(folder: Path) -> None:
    """Runs on every rank: computes the jobs of a folder, and leaves a file of evidence for each."""
    rank, left = int(os.environ["RANK"]), folder / f"rank-{os.environ['RANK']}"
    told = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    device = choose(told["device"], told["shapes"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        agree("bi-audit run world", dist.group.WORLD, {"jobs": told, "torch": torch.__version__})
        for number, job in enumerate(told["jobs"]):
            torch.save(_run(job, told, device), part := left.with_suffix(".part"))
            part.rename(f"{left}-{number}.pt")
            if device.type == "cuda":
                torch.cuda.empty_cache()
    except Exception as error:
        raised = {"error": f"rank {rank}: {sentence(error)}", "time": time.time()}
        left.with_suffix(".json").write_text(json.dumps(raised), encoding="utf-8")
        raise
    dist.barrier()
    dist.destroy_process_group()


@cache  # buffers of the exchange are kept with a group
def _mesh(device: str, dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))


def _run(job: dict, told: dict, device: torch.device) -> dict:
    """Returns the evidence of a job: of a strategy, or what a function of (told, device, tensor, data) returns."""
    from bi_kernels.audit.targets.distributed import step  # noqa: PLC0415 (imports triton: `choose` comes first)

    config = step.ParallelConfig(*job["config"])
    mesh = _mesh(device.type, config.dp, config.tp)
    groups = [mesh.get_group(name) if n > 1 else None for name, n in zip(("tp", "dp"), config)]
    module, _, name = job["strategy"].partition(":")
    strategy = getattr(importlib.import_module(module), name)
    if not isinstance(strategy, step.ParallelStrategy):
        return strategy(told, device, *groups)
    return step.DistributedStep(told, device, strategy, *groups, config).run()
