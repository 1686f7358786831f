"""What a document must name: date, commit, device, driver, versions, parameters, command. No path, no host."""

import contextlib
import os
import platform
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import triton

from bi_kernels import contract
from bi_kernels.audit import kernels
from bi_kernels.audit.parameters import device_name


def _said(*command: str) -> str:
    """Returns what a command prints. Raises OSError or CalledProcessError."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """Returns the commit of the code, '+changes' if the tree is not clean; BI_COMMIT where there is no git."""
    if given := os.environ.get("BI_COMMIT"):
        return given
    git = lambda *arguments: _said("git", "-C", str(Path(__file__).parents[2]), *arguments)
    try:
        git("ls-files", "--error-unmatch", "contract.toml")  # installed into somebody else's repository, it is not ours
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def architecture(device: torch.device) -> str:
    """'sm_90', or 'interpreter' on a CPU."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "interpreter"


def driver() -> str:
    try:
        return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


def _peers() -> Iterator[str]:
    """Yields what is installed of those whose ops and models are judged beside ours."""
    for name in ("transformers", "liger-kernel", "flag_gems", "torchao"):
        with contextlib.suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


def provenance(device: torch.device, parameters: dict) -> dict[str, str]:
    """Field name to value, in the order in which a reader wants them."""
    arch = architecture(device)
    promised = contract.CONTRACT["architectures"]["promised"]
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit(),
        "kernels": kernels.digest(),
        "device": device_name(device),
        "architecture": arch + ("" if arch in promised else f" (bits are promised on {', '.join(promised)} only)"),
        "driver": driver() if device.type == "cuda" else "none",
        "CUDA": torch.version.cuda or "none" if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "Triton": triton.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "beside": ", ".join(_peers()) or "none",
        "contract": contract.VERSION,
        "parameters": ", ".join(f"{k}={v}" for k, v in parameters.items()),
    }
