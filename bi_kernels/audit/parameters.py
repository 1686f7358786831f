"""What an audit may be told, and the device that it runs on; imports neither triton nor what imports it.

`choose` turns Triton's interpreter on, which has to happen before triton is imported.
"""

import gc
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import torch

from bi_kernels.contract import DTYPES, SHAPES

# `bi-audit run --dtype`; others: `-p NAME VALUE`
OPTIONS = ("dtype", "candidate", "shapes", "inputs", "device", "seed", "nproc")

GROUPS = ("gemm", "drawn", "gradients", "attention", "decode", "rows", "lm_head", "calls")  # of the benchmark
CHECKOUT = Path(__file__).parents[2]  # where benchmarks/ is, next to the package
MOST = 2**63 - 1  # of an integer
CHECKS = ("all", "quick")


def _integers(parameters: "Parameters", *names: str, least: int | None = None) -> None:
    for name in names:
        value = getattr(parameters, name)
        low = -MOST if least is None else least
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MOST:
            allowed = f"an integer from {low} to {MOST}"
            raise ValueError(f"{name} is {value!r}, expected {allowed}")


def _dtype_and_shapes(parameters: "Parameters") -> None:
    if parameters.dtype not in ("all", *DTYPES):
        raise ValueError(f"dtype is {parameters.dtype!r}, expected all, {', '.join(DTYPES)}")
    if parameters.checks not in CHECKS:
        raise ValueError(f"checks is {parameters.checks!r}, expected {' or '.join(CHECKS)}")
    _shapes(parameters.shapes)


def _shapes(shapes: str) -> None:
    if shapes not in list(SHAPES):
        raise ValueError(f"shapes is {shapes!r}, expected one of {', '.join(SHAPES)}")


@dataclass(frozen=True)
class RegistryParameters:
    """Parameters of an audit of the registry's ops."""

    kind: ClassVar[str] = "registry"  # of session that begins it
    dtype: str = "all"
    candidate: str = "bi_kernels"
    shapes: str = "tiny"
    device: str = "auto"
    seed: int = 0
    op: str = ""  # which op a single function stands for
    checks: str = "all"  # or quick: a few of each op

    def __post_init__(self):
        _dtype_and_shapes(self)
        _integers(self, "seed", least=0)


@dataclass(frozen=True)
class RandomParameters(RegistryParameters):
    """Parameters of the audit of cases that are drawn."""

    cases: int = 8  # of each op and dtype
    first: int = 0  # the number of the first

    def __post_init__(self):
        super().__post_init__()
        _integers(self, "cases", least=1)
        _integers(self, "first", least=0)


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of an audit of a whole model of this package's ops."""

    kind: ClassVar[str] = "model"
    dtype: str = "bf16"
    shapes: str = "tiny"
    device: str = "auto"
    seed: int = 0
    checks: str = "all"  # or quick: a few of them

    def __post_init__(self):
        _dtype_and_shapes(self)
        _integers(self, "seed", least=0)


@dataclass(frozen=True)
class WorldParameters(ModelParameters):
    """Parameters of the audit of worlds, in processes of their own."""

    kind: ClassVar[str] = "world"
    nproc: int = 4  # processes, and GPUs, at most
    least: int = 2  # processes of the smallest world, beside one process and the controls
    seconds: int = 600  # that all worlds of as many processes may take

    def __post_init__(self):
        super().__post_init__()
        _integers(self, "nproc", "least", "seconds", least=1)
        if self.least > self.nproc > 1:
            raise ValueError(f"least is {self.least}, expected at most nproc, {self.nproc}")


@dataclass(frozen=True)
class RecipesParameters(ModelParameters):
    """Parameters of the audit of recipes, which cuBLAS has for 16 bits."""

    kind: ClassVar[str] = "recipes"

    def __post_init__(self):
        super().__post_init__()
        if self.dtype not in ("bf16", "fp16"):
            raise ValueError(f"dtype is {self.dtype!r}, expected bf16 or fp16")


@dataclass(frozen=True)
class IntegrationParameters(ModelParameters):
    """Parameters of an audit of another library's models on this package's ops."""

    kind: ClassVar[str] = "integration"


@dataclass(frozen=True)
class AnyParameters:
    """Parameters of the audit `any`, of one callable in no registry."""

    kind: ClassVar[str] = "callable"
    candidate: str = ""
    inputs: str = ""
    batch: int = 0  # the dimension of the first tensor that counts samples
    shared: str = ""  # tensors that all samples share, where it is not found out
    outputs: str = ""  # arguments that it writes into, of a launcher
    reference: str = ""  # as the candidate: able to compute in fp64
    seconds: int = 120
    device: str = "auto"
    seed: int = 0

    def __post_init__(self):
        if not self.candidate:
            raise ValueError("candidate is empty, expected package.module:function or path/to/file.py:function")
        if not self.inputs:
            raise ValueError(
                "inputs is empty, expected the inputs, as in 'x:bf16[300,64] ids:int64[300]<1000 eps:1e-6', or "
                "path/to/file.py:function that returns them"
            )
        _integers(self, "seed", "batch")
        _integers(self, "seconds", least=1)


@dataclass(frozen=True)
class ZooParameters:
    """Parameters of the audit `zoo`, of a corpus of third-party ops."""

    kind: ClassVar[str] = "third-party"
    callables: str = ""  # nothing: a few; all; or some names, with ";" between
    seconds: int = 60  # of each
    device: str = "auto"
    seed: int = 0

    def __post_init__(self):
        _integers(self, "seconds", "seed")


@dataclass(frozen=True)
class BenchParameters:
    """Parameters of `bench`, which times, in a checkout."""

    kind: ClassVar[str] = "bench"
    shapes: str = "tiny"  # a few small cells; else the whole grid, which has shapes of its own
    groups: str = ""  # all; or some names, with ";" between
    device: str = "auto"
    seed: int = 0

    def __post_init__(self):
        if not all((CHECKOUT / name).exists() for name in ("pyproject.toml", "benchmarks")):
            raise ValueError("bench: benchmarks need a checkout of bi-kernels; an installed package has none")
        groups_of(self.groups)
        _shapes(self.shapes)
        _integers(self, "seed", least=0)


def groups_of(text: str) -> list[str]:
    """Returns the groups of measurements that a parameter names, all where it names none. Raises ValueError."""
    names = [name.strip() for name in str(text).split(";") if name.strip()]
    for name in names:
        if name not in GROUPS:
            raise ValueError(f"unknown group {name!r}, expected {', '.join(GROUPS)}")
    return list(dict.fromkeys(names)) or list(GROUPS)


Parameters = RegistryParameters | ModelParameters | AnyParameters | ZooParameters | BenchParameters
OTHERS = {  # every other audit is of the registry's ops, at shapes that somebody chose
    "random": RandomParameters,
    "any": AnyParameters,
    "zoo": ZooParameters,
    "chain": ModelParameters,
    "training": ModelParameters,
    "transformers": IntegrationParameters,
    "world": WorldParameters,
    "bench": BenchParameters,
    "recipes": RecipesParameters,
}


def defaults(audit: str) -> dict:
    """Returns {name: default} of the parameters that an audit has."""
    return {f.name: f.default for f in fields(OTHERS.get(audit, RegistryParameters))}


def accepted(audit: str, given: Mapping) -> dict:
    """Returns every parameter of an audit, with those of `given` that it has: a notebook's own defaults ask less."""
    known = defaults(audit)
    return known | {k: v for k, v in given.items() if k in known}


def read(audit: str, given: Mapping) -> Parameters:
    """Checks names and values. Raises ValueError: one sentence with the parameter, its value and what is allowed."""
    unknown = sorted(given.keys() - defaults(audit).keys())
    if unknown:
        raise ValueError(f"unknown parameter {unknown[0]!r}, expected one of {', '.join(defaults(audit))}")
    return OTHERS.get(audit, RegistryParameters)(**given)


def command(audit: str, parameters: Mapping) -> str:
    """Returns the command that runs an audit with these parameters."""
    changed = {k: v for k, v in parameters.items() if v != defaults(audit)[k]}
    flags = (f"{f'--{k}' if k in OPTIONS else f'-p {k}'} {shlex.quote(str(v))}" for k, v in changed.items())
    return " ".join(["bi-audit run", audit, *flags])


def choose(device: str, shapes: str = "tiny") -> torch.device:
    """Returns the device that the parameter `device` means; for a CPU, turns Triton's interpreter on.

    Raises ValueError for a device that there is not, for a CPU once triton was imported without its interpreter, and
    for shapes that it cannot run.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {device!r}, expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but no CUDA device is available; use cpu or auto")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cuda" and interpreted:
        raise ValueError("device is 'cuda', but TRITON_INTERPRET=1 is set; unset it or use cpu")
    if device != "cpu" and torch.cuda.is_available() and not interpreted:
        return torch.device("cuda")
    if "triton" in sys.modules and not interpreted:
        raise ValueError("device is a CPU, but triton was imported before TRITON_INTERPRET=1 was set")
    if shapes != "tiny":
        raise ValueError(f"shapes is {shapes!r}, which needs a CUDA device; the interpreter runs tiny")
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # the interpreter uses one, and torch's small operations are faster so
    gc.set_threshold(50_000)  # it makes and drops objects by the million: to look for circles costs a tenth of its time
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Names the GPU, or says 'interpreter'."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
