"""Golden digests: SHA-256 of our ops' output bits, recorded on a GPU, which another device or version must reproduce.

    python -m bi_kernels.audit.digests.golden FILE      records this machine's digests (on a GPU)

Inputs come from integers by exact arithmetic alone, so every machine draws the same bits.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import triton

import bi_kernels
from bi_kernels.audit.evidence.drift import raw
from bi_kernels.contract import DTYPES

FILE = Path(__file__).with_name("golden_sm_90.json")
KS = (16, 48, 64, 72, 96, 256)


@dataclass(frozen=True)
class Case:
    op: str
    dtype: str
    inputs: str
    k: int = 0

    def __str__(self) -> str:
        return "/".join(filter(None, (self.op, self.dtype, self.inputs, f"K={self.k}" if self.k else "")))


def cases() -> Iterator[Case]:
    """linear and matmul over several K, and the IEEE-only ops; every dtype, several families of inputs."""
    for dtype in DTYPES:
        for k in KS:
            for inputs in ("normal", "wide"):
                yield Case("linear", dtype, inputs, k)
        yield Case("linear", dtype, "special", 64)
        yield Case("matmul", dtype, "normal", 80)
        for op in ("rope", "rope_interleaved", "add", "scale", "bias_add", "mask_fill", "cast"):
            for inputs in ("normal", "wide", "special"):
                yield Case(op, dtype, inputs)


def draw_exact(rng: np.random.Generator, shape: tuple[int, ...], inputs: str, dtype: torch.dtype) -> torch.Tensor:
    """Bits that no version of torch or numpy's floating point can change.

    normal: a sum of four uniform integers; wide: times a power of two; special: raw bits of the dtype, NaN too.
    """
    if inputs == "special":
        bits = rng.integers(0, 2 ** (8 * dtype.itemsize), shape, dtype=np.uint32 if dtype.itemsize == 4 else np.uint16)
        return torch.from_numpy(bits.view(np.int32 if dtype.itemsize == 4 else np.int16)).view(dtype)
    x = rng.integers(-(2**15), 2**15, (4, *shape)).sum(0) / 2.0**15
    if inputs == "wide":
        x = x * 2.0 ** rng.integers(-8, 5 if dtype == torch.float16 else 9, shape)
    return torch.from_numpy(x).to(dtype)


def digest(case: Case, device: torch.device | str) -> str:
    """SHA-256 of the output's bits, in row-major order."""
    dtype = DTYPES[case.dtype]
    rng = np.random.Generator(np.random.PCG64([*str(case).encode()]))
    draw = lambda *shape, of=dtype: draw_exact(rng, shape, case.inputs, of).to(device)
    if case.op == "linear":
        y = bi_kernels.linear(draw(37, case.k), draw(56, case.k), draw(56))
    elif case.op == "matmul":
        y = bi_kernels.matmul(draw(37, case.k), draw(case.k, 56))
    elif case.op.startswith("rope"):
        positions = torch.from_numpy(rng.integers(0, 4096, 40)).to(device)
        y = bi_kernels.rope(
            draw(40, 4, 16),
            bi_kernels.rope_table(4096, 16, device=device),
            positions,
            interleaved=case.op == "rope_interleaved",
        )
    elif case.op == "add":
        y = bi_kernels.add(draw(40, 64), draw(40, 64))
    elif case.op == "bias_add":
        y = bi_kernels.bias_add(draw(40, 64), draw(64))
    elif case.op == "scale":
        y = bi_kernels.scale(draw(40, 64), 0.3)
    elif case.op == "mask_fill":
        y = bi_kernels.mask_fill(draw(40, 64), torch.from_numpy(rng.integers(0, 2, (40, 64)) > 0).to(device), -1e4)
    else:
        y = bi_kernels.cast(draw(40, 64, of=torch.bfloat16 if dtype == torch.float32 else torch.float32), dtype)
    return hashlib.sha256(raw(y).cpu().numpy().tobytes()).hexdigest()


def recorded() -> dict:
    """Returns the committed digests: {"torch": …, "Triton": …, "digests": {case: SHA-256}}."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def check(device: torch.device | str) -> dict[str, bool]:
    """For every case, whether `device` gives the recorded digest; empty on an architecture without records."""
    if torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        return {}
    expected = recorded()["digests"]
    return {str(case): digest(case, device) == expected.get(str(case)) for case in cases()}


if __name__ == "__main__":
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "Triton": triton.__version__,
        "digests": {str(case): digest(case, "cuda") for case in cases()},
    }
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
