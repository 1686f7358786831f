"""Golden digests: SHA-256 of our ops' output bits on sm_90, which every device and version must reproduce.

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
from bi_kernels.audit.compare import raw
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
    """Yields linear and matmul over several K, and ops without a tensor core, in every dtype and family of inputs."""
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
    """Draws bits that no version of torch or of numpy's floating point can change.

    normal: a sum of four uniform integers; wide: times a power of two; special: raw bits of the dtype, NaN too.
    """
    if inputs == "special":
        bits = 8 * dtype.itemsize
        return torch.from_numpy(rng.integers(0, 2**bits, shape, dtype=f"uint{bits}")).view(dtype)
    x = rng.integers(-(2**15), 2**15, (4, *shape)).sum(0) / 2.0**15
    if inputs == "wide":
        x = x * 2.0 ** rng.integers(-8, 5 if dtype == torch.float16 else 9, shape)
    return torch.from_numpy(x).to(dtype)


def rng(*names: object) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([*"/".join(map(str, names)).encode()]))


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(raw(t.detach()).cpu().numpy().tobytes() for t in tensors)).hexdigest()


def digest(case: Case, device: torch.device | str) -> str:
    """Returns the SHA-256 of a case's output bits, in row-major order."""
    g, dtype = rng(case), DTYPES[case.dtype]
    draw = lambda *shape, of=dtype: draw_exact(g, shape, case.inputs, of).to(device)
    integers = lambda top, *shape: torch.from_numpy(g.integers(0, top, shape)).to(device)
    arguments = {
        "linear": lambda: (draw(37, case.k), draw(56, case.k), draw(56)),
        "matmul": lambda: (draw(37, case.k), draw(case.k, 56)),
        "add": lambda: (draw(40, 64), draw(40, 64)),
        "scale": lambda: (draw(40, 64), 0.3),
        "bias_add": lambda: (draw(40, 64), draw(64)),
        "mask_fill": lambda: (draw(40, 64), integers(2, 40, 64) > 0, -1e4),
        "cast": lambda: (draw(40, 64, of=torch.bfloat16 if dtype == torch.float32 else torch.float32), dtype),
    }
    if case.op in arguments:
        return sha(getattr(bi_kernels, case.op)(*arguments[case.op]()))
    positions, table = integers(4096, 40), bi_kernels.rope_table(4096, 16, device=device)
    return sha(bi_kernels.rope(draw(40, 4, 16), table, positions, interleaved=case.op == "rope_interleaved"))


def recorded() -> dict:
    """Returns the committed digests: {"torch": …, "Triton": …, "digests": {case: SHA-256}}."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def check(device: torch.device | str) -> dict[str, bool]:
    """Returns {case: whether `device` gives the recorded digest}; {} for a GPU that is not sm_90."""
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
