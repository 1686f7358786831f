"""Runs on every rank: computes the jobs of a folder, and leaves a line of evidence for each."""

import importlib
import json
import os
import time
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bi_kernels.audit.evidence.verdicts import sentence
from bi_kernels.audit.parameters import choose
from bi_kernels.parallel.tree import agree


def main(folder: Path) -> None:
    told = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    device, rank = choose(told["device"], told["shapes"]), int(os.environ["RANK"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with (folder / f"rank-{rank}.jsonl").open("w", encoding="utf-8") as file:
        say = lambda said: print(json.dumps(said), file=file, flush=True)
        try:
            agree("bi-audit run world", dist.group.WORLD, {"jobs": told, "torch": torch.__version__})
            for job in told["jobs"]:
                say(_one(job, told, device))
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        except Exception as error:
            say({"error": f"rank {rank}: {sentence(error)}", "time": time.time()})
            raise
    dist.barrier()
    dist.destroy_process_group()


@cache  # what ranks exchange by is kept with a group
def _mesh(device: str, dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))


def _one(job: dict, told: dict, device: torch.device) -> dict:
    from bi_kernels.audit.worlds.world import World, WorldStep  # noqa: PLC0415 (imports triton: `choose` comes first)

    world = World(*job["world"])
    mesh = _mesh(device.type, world.dp, world.tp)
    tensor, data = (mesh.get_group(name) if n > 1 else None for name, n in zip(("tp", "dp"), world))
    module, _, name = job["way"].partition(":")
    way = getattr(importlib.import_module(module), name)
    if job["way"] == told.get("timing"):
        return way(told, device, tensor, data)
    return WorldStep(told["shapes"], told["dtype"], device, told["seed"], way, tensor, data, world.tokens).run()
