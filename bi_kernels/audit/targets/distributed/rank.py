"""Runs on every rank: computes the jobs of a folder, and leaves a file of evidence for each."""

import importlib
import json
import os
import time
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bi_kernels.audit.findings import sentence
from bi_kernels.audit.parameters import choose
from bi_kernels.parallel.tree import agree


def main(folder: Path) -> None:
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
    return step.DistributedStep(told, device, strategy, *groups, config.tokens).run()
