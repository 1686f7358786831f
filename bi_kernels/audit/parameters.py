"""The parameters of audits, which are options of the command line too, and the device that an audit runs on.

Imports neither torch, which takes seconds, nor triton: `choose` turns Triton's interpreter on before that is imported.
"""

import gc
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

GROUPS = ("gemm", "drawn", "gradients", "attention", "decode", "rows", "lm_head", "calls")  # of the benchmark
CHECKOUT = Path(__file__).parents[2]  # where benchmarks/ is, next to the package
NOTEBOOKS = Path(__file__).parents[1] / "notebooks", CHECKOUT / "notebooks"  # of an installed package, of a checkout
MOST = 2**63 - 1  # of an integer
CHECKS = ("all", "quick")


def option(default=None, help: str = "", **how):
    """Returns a dataclass's field that is an option of the command line. how: what argparse is told besides."""
    return field(default=default, metadata=how | {"help": help})


def integer(default: int, least: int = -MOST, help: str = ""):
    return option(default, help, least=least)


@dataclass(frozen=True)
class Parameters:
    """What every audit takes; checks the dtype, the shapes and all integers."""

    kind: ClassVar[str]  # of session that begins it
    dtypes: ClassVar[tuple[str, ...]] = ()  # all, and those of the contract
    device: str = option("auto", "auto (default), cpu or cuda.")
    seed: int = integer(0, 0, "Seed of the inputs. Default: 0.")

    def __post_init__(self):
        from bi_kernels.contract import DTYPES, SHAPES  # noqa: PLC0415 (imports torch)

        dtypes = self.dtypes or ("all", *DTYPES)
        for name, allowed in (("dtype", dtypes), ("shapes", SHAPES), ("checks", CHECKS)):
            value = getattr(self, name, None)
            if value is not None and value not in list(allowed):
                expected = " or ".join(allowed) if self.dtypes else ", ".join(allowed)
                raise ValueError(f"{name} is {value!r}, expected {'one of ' * (name == 'shapes')}{expected}")
        for f in fields(self):
            value = getattr(self, f.name)
            if "least" in f.metadata and not (type(value) is int and f.metadata["least"] <= value <= MOST):
                allowed = f"an integer from {f.metadata['least']} to {MOST}"
                raise ValueError(f"{f.name} is {value!r}, expected {allowed}")


@dataclass(frozen=True)
class RegistryParameters(Parameters):
    """Parameters of an audit of the registry's ops."""

    kind: ClassVar[str] = "registry"
    candidate: str = option(
        "bi_kernels", "What to audit: bi_kernels (default), torch, package.module:function or path/to/file.py:function."
    )
    dtype: str = option("all", "bf16, fp16 or fp32. Default: all three for ops, bf16 for whole models.")
    shapes: str = option("tiny", "tiny (default), qwen3-8b or llama3-8b. The CPU interpreter runs tiny only.")
    op: str = ""  # which op a single function stands for
    checks: str = "all"  # or quick: a few of each op


@dataclass(frozen=True)
class RandomParameters(RegistryParameters):
    """Parameters of the audit of cases that are drawn."""

    cases: int = integer(0, least=0)  # of each op and dtype; 0: as the contract says of the device
    first: int = integer(0, least=0)  # the number of the first
    total: int = integer(0, least=0)  # at least so many of all ops and dtypes together, in place of `cases`


@dataclass(frozen=True)
class ModelParameters(Parameters):
    """Parameters of an audit of a whole model of this package's ops."""

    kind: ClassVar[str] = "model"
    dtype: str = "bf16"
    shapes: str = "tiny"
    checks: str = "all"  # or quick: a few of them


@dataclass(frozen=True)
class ChainParameters(ModelParameters):
    """Parameters of the audit of the decoder."""

    model: str = ""  # of bi_kernels.model's, in every layout; else the shape set's, and a mixture in a few layouts

    def __post_init__(self):
        from bi_kernels.contract import CONTRACT  # noqa: PLC0415 (imports torch)

        super().__post_init__()
        if self.model and self.model not in CONTRACT["models"]:
            raise ValueError(f"model is {self.model!r}, expected one of {', '.join(CONTRACT['models'])}")

    def check(self, device) -> None:
        """Raises ValueError for a model that is too large for a device."""
        if device.type == "cpu" and self.model and not self.model.startswith("tiny"):
            raise ValueError(
                f"model is {self.model!r}, which needs a CUDA device; the interpreter runs tiny and tiny-experts"
            )


@dataclass(frozen=True)
class WorldParameters(ModelParameters):
    """Parameters of the audit of parallelism, in processes of their own."""

    kind: ClassVar[str] = "world"
    nproc: int = integer(4, 1, "For the audit world: number of processes, with a GPU each if there are. Default: 4.")
    least: int = integer(2, least=1)  # processes of the smallest world, beside one process and the controls
    seconds: int = integer(600, least=1)  # that all worlds of as many processes may take

    def __post_init__(self):
        super().__post_init__()
        if self.least > self.nproc > 1:
            raise ValueError(f"least is {self.least}, expected at most nproc, {self.nproc}")


@dataclass(frozen=True)
class RecipesParameters(ModelParameters):
    """Parameters of the audit of cuBLAS settings, which exist for 16 bits."""

    kind: ClassVar[str] = "recipes"
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp16")


@dataclass(frozen=True)
class FamiliesParameters(Parameters):
    """Parameters of the audit of decoder families. dtype: of tiny models; at real widths it is bf16."""

    kind: ClassVar[str] = "families"
    dtype: str = "fp32"  # in which no rounding hides the last bits of a sum
    models: str = ""  # at real widths, on a GPU: all; none; or some names, with ";" between
    checks: str = "all"  # or quick: few families and models


@dataclass(frozen=True)
class AnyParameters(Parameters):
    """Parameters of the audit `any`, of one callable in no registry."""

    kind: ClassVar[str] = "callable"
    candidate: str = ""
    inputs: str = option("", "For the audit any: 'x:bf16[300,64] ids:int64[300]<1000 eps:1e-6', or file.py:function.")
    batch: int = integer(0)  # the dimension of the first tensor that counts samples
    shared: str = ""  # tensors that all samples share, where it is not found out
    outputs: str = ""  # arguments that it writes into, of a launcher
    reference: str = ""  # as the candidate: able to compute in fp64
    seconds: int = integer(120, least=1)

    def __post_init__(self):
        if not self.candidate:
            raise ValueError("candidate is empty, expected package.module:function or path/to/file.py:function")
        if not self.inputs:
            raise ValueError(
                "inputs is empty, expected the inputs, as in 'x:bf16[300,64] ids:int64[300]<1000 eps:1e-6', or "
                "path/to/file.py:function that returns them"
            )
        super().__post_init__()


@dataclass(frozen=True)
class ZooParameters(Parameters):
    """Parameters of the audit `zoo`, of a corpus of third-party ops."""

    kind: ClassVar[str] = "third-party"
    callables: str = ""  # nothing: a few; all; or some names, with ";" between
    seconds: int = integer(60)  # of each


@dataclass(frozen=True)
class BenchParameters(Parameters):
    """Parameters of `bench`, which times, in a checkout."""

    kind: ClassVar[str] = "bench"
    shapes: str = "tiny"  # a few small cells; else the whole grid, which has shapes of its own
    groups: str = ""  # all; or some names, with ";" between

    def __post_init__(self):
        in_checkout("bench", "benchmarks")
        groups_of(self.groups)
        super().__post_init__()


def notebooks() -> Path | None:
    """Returns the folder of the notebooks, None where it is missing."""
    return next((place for place in NOTEBOOKS if place.is_dir()), None)


def find_helpers() -> None:
    """Puts the notebooks' folder on sys.path, so that `helpers` is found from any folder and in any process, and the
    checkout, for `benchmarks`."""
    if found := notebooks():
        sys.path[:0] = [path for path in (str(found), str(found.parent)) if path not in sys.path]


def in_checkout(command: str, folder: str) -> Path:
    """Returns the checkout that holds a folder next to the package. Raises ValueError where there is none."""
    if not all((CHECKOUT / name).exists() for name in ("pyproject.toml", folder)):
        raise ValueError(f"{command}: {folder} needs a checkout of bi-kernels; an installed package has none")
    return CHECKOUT


def groups_of(text: str) -> list[str]:
    """Returns the groups of measurements that a parameter names, all where it names none. Raises ValueError."""
    names = [name.strip() for name in str(text).split(";") if name.strip()]
    for name in names:
        if name not in GROUPS:
            raise ValueError(f"unknown group {name!r}, expected {', '.join(GROUPS)}")
    return list(dict.fromkeys(names)) or list(GROUPS)


OTHERS = {  # every other audit is of the registry's ops, at shapes that somebody chose
    "random": RandomParameters,
    "any": AnyParameters,
    "zoo": ZooParameters,
    "chain": ChainParameters,
    "training": ModelParameters,
    "transformers": ModelParameters,
    "world": WorldParameters,
    "bench": BenchParameters,
    "recipes": RecipesParameters,
    "families": FamiliesParameters,
}


OPTIONS = {  # `bi-audit run --dtype`; other parameters: `-p NAME VALUE`
    f.name: f.metadata["help"]
    for kind in (RegistryParameters, AnyParameters, WorldParameters)
    for f in fields(kind)
    if f.metadata.get("help")
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


def choose(device: str, shapes: str = "tiny") -> "torch.device":  # noqa: F821
    """Returns the device that the parameter `device` means; for a CPU, turns Triton's interpreter on.

    Raises ValueError for a device that there is not, for a CPU once triton was imported without its interpreter, and
    for shapes that it cannot run.
    """
    import torch  # noqa: PLC0415 (help is shown without it)

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


def device_name(device: "torch.device") -> str:  # noqa: F821
    """Names the GPU, or says 'interpreter'."""
    import torch  # noqa: PLC0415 (likewise)

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
