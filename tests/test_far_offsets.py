"""Tensors of which little is used and far apart: what lies 2**31 elements behind the first is read where it lies."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bi_kernels

HEADS_FIRST = """
import sys, torch, bi_kernels
q, k, v = torch.randn(3, 40, 5, 16).bfloat16()
room = lambda apart: torch.empty(4 * apart + 40 * 16, dtype=torch.bfloat16)
lie = lambda t, apart: room(apart).as_strided(t.shape, (16, apart, 1)).copy_(t)[None]
def asked(k, v, queries):
    given = [t.requires_grad_(queries > 1) for t in (q[None, -queries:], k, v)]
    out = bi_kernels.attention(*given)[0]
    return out, *(torch.autograd.grad(out.float().square().sum(), given) if queries > 1 else ())
near = [asked(k[None], v[None], n) for n in (40, 1)]
for apart in map(int, sys.argv[1:]):
    far = [asked(lie(k, apart), lie(v, apart), n) for n in (40, 1)]
    assert all(torch.equal(a, b) for pair in zip(far, near) for a, b in zip(*pair))
    print(apart, flush=True)
"""

FAR_POSITION = """
import sys, torch, bi_kernels
x, angles = torch.randn(1, 2, 32), torch.rand(1, 16)
asked = lambda table, i: bi_kernels.rope(x, bi_kernels.RopeTable(table, table), torch.tensor([i], dtype=torch.int32))
for position in map(int, sys.argv[1:]):
    table = torch.empty(position + 1, 16)
    table[-1] = angles
    assert torch.equal(asked(table, position), asked(angles, 0))
    print(position, flush=True)
"""

FAR = {HEADS_FIRST: [2**28, 2**29], FAR_POSITION: [2**27 - 1, 2**27]}  # of each, the second is 2**31 elements away


def right(script: str, folder: Path | None = None) -> list[int]:
    """Returns how far the first lie that a process reads right, of the package that lies in a folder."""
    command = [sys.executable, "-c", script, *map(str, FAR[script])]
    said = subprocess.run(command, capture_output=True, check=False, cwd=folder).stdout
    return [int(line) for line in said.split()]


@pytest.mark.parametrize("script", FAR, ids=["heads", "positions"])
def test_what_lies_far_apart_is_read_where_it_lies(script):
    assert right(script) == FAR[script]


@pytest.mark.parametrize(
    "script, file, kept",
    [
        *((HEADS_FIRST, f"attention/{name}_kernels.py", " * head_") for name in ("forward",)),
        *(
            pytest.param(HEADS_FIRST, f"attention/{name}_kernels.py", " * head_", marks=pytest.mark.slow)
            for name in ("decode", "backward")
        ),
        (FAR_POSITION, "rope.py", "\n    # a position outside"),
    ],
    ids=["forward", "decode", "backward", "rope"],
)
def test_an_offset_in_32_bits_is_found(script, file, kept, tmp_path):
    shutil.copytree(Path(bi_kernels.__file__).parent, tmp_path / "bi_kernels")
    path = tmp_path / "bi_kernels" / "ops" / file
    source = path.read_text()
    assert f".to(tl.int64){kept}" in source
    path.write_text(source.replace(f".to(tl.int64){kept}", kept))
    assert right(script, tmp_path) == FAR[script][:1]
