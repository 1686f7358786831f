"""Kernels launched through their compiled form: it is the one that Triton would have launched."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import triton
from conftest import slow_but
from triton.backends.nvidia import driver
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels import compat
from bi_kernels.checks import once
from bi_kernels.compat import descriptor, keeping_maps
from bi_kernels.contract import CONTRACT
from bi_kernels.ops.gemm import gemm
from bi_kernels.ops.gemm import hopper_cublaslt as cublaslt
from bi_kernels.ops.gemm.cost import Tile, best_cut, way_for
from bi_kernels.ops.gemm.gemm import cheapest
from bi_kernels.ops.gemm.kernel import FP32_TILE

SCRIPT, SERVED = (Path(__file__).with_name(name) for name in ("compiled_launches.py", "served_variants.py"))


def printed(script: Path, *given: str) -> list[str]:
    """Returns the lines that a script prints without the interpreter and without a GPU."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script), *given]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()


@pytest.mark.parametrize("dtypes", slow_but(["bfloat16", "float32 bfloat16"], "bfloat16"))
def test_what_is_launched_is_what_triton_would_launch(dtypes):
    first, again = (tuple(map(int, line.split())) for line in printed(SCRIPT, *dtypes.split()))
    assert first[1] > 0, "calls of one kind share what was compiled"
    assert again[0] == first[0] and again[1] > 2 * first[1], "the same calls again ask Triton nothing"


def test_calls_of_any_size_compile_few_variants_and_one_for_each_size_is_seen():
    found, each = map(json.loads, printed(SERVED))
    most = CONTRACT["random"]["variants"]
    assert all(0 < sum(mine.values()) <= most for mine in found.values()), found
    assert found["trainer"].keys() >= {"keys_backward_kernel", "_gemm_kernel", "_rms_norm_backward_kernel"}
    assert not [name for name in found["server"] if "backward" in name]
    assert each["server"]["attention_kernel"] > 2 * found["server"]["attention_kernel"]


@pytest.mark.parametrize("version, off, taken", [(130100, False, True), (130101, False, False), (130100, True, False)])
def test_a_library_that_was_not_swept_serves_nothing(monkeypatch, version, off, taken):
    library = MagicMock()
    library.cublasLtGetVersion.return_value = version
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cublaslt, "OFF", off)
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", {"libcublasLt.so.13": library}.get)
    assert (cublaslt._library.__wrapped__() is library) == taken


def test_no_library_and_no_gpu_serve_nothing(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    assert cublaslt._library.__wrapped__() is None
    assert not cublaslt.serves(torch.device("cpu"))
    assert cublaslt.launch(torch.zeros(32, 16).bfloat16(), torch.zeros(8, 16).bfloat16()) is None
    sizes, dtypes, cpu = (32, 8, 16), (torch.bfloat16,) * 2, torch.device("cpu")
    assert cublaslt.waves(sizes, ((16, 1),) * 2, dtypes, cpu) is None
    assert isinstance(cheapest(sizes, ((16, 1),) * 2, False, dtypes, cpu)[0], Tile)
    assert cheapest(sizes, ((16, 1),) * 2, False, (torch.float32,) * 2, cpu) == (FP32_TILE, 0)


@pytest.mark.parametrize("m, n", [(4096, 1000), (1000, 4096), (4096, 4096)])
def test_a_fold_that_goes_on_is_no_product_of_the_library(monkeypatch, m, n):
    for name, answer in (("is_hopper", True), ("serves", True), ("waves", 1.0), ("memory_peak", 0)):
        monkeypatch.setattr(gemm, name, lambda *given, answer=answer, **how: answer)
    sizes, dtypes = (m, n, 320), (torch.bfloat16, torch.float32)
    chosen = lambda continues: gemm.cheapest.__wrapped__(
        sizes, ((1, m), (1, n)), continues, dtypes, torch.device("cuda", 0)
    )
    assert chosen(continues=True)[0] != cublaslt.LIBRARY
    assert chosen(continues=False)[0] == cublaslt.LIBRARY, "a first one may be"


def test_the_speed_of_a_memory_chooses_the_program_and_not_the_cut(monkeypatch):
    for name in ("is_hopper", "serves"):
        monkeypatch.setattr(gemm, name, lambda *given: True)
    dtypes = (torch.bfloat16,) * 2

    def chosen(peak: float, M: int, N: int, K: int) -> tuple:
        monkeypatch.setattr(gemm, "memory_peak", lambda device: peak)
        monkeypatch.setattr(gemm, "waves", lambda sizes, *given, **how: 2 * -(-sizes[1] // 128) / 132)
        return gemm.cheapest.__wrapped__((M, N, K), ((K, 1), (K, 1)), False, dtypes, torch.device("cuda", 0))

    few, many = (128, 8192, 2048), (200, 17408, 5120)
    assert chosen(0, *few)[0] != cublaslt.LIBRARY and chosen(4.8, *few)[0] == cublaslt.LIBRARY
    assert chosen(0, *many) == chosen(4.8, *many) == (cublaslt.LIBRARY, 0)
    us = lambda n: way_for(200, n, 5120, "rows", (False, False), True, 2 * -(-n // 128) / 132, 4.8)[0]
    assert best_cut(17408, us), "the model itself would cut there"


def flat(launcher, places, meta):
    """Returns what encodes descriptors and launches in Triton 3.6, which passes a kernel's arguments side by side."""
    tensordesc_indices, tensordesc_meta = places, meta

    def inner(*given):
        told, passed = iter(tensordesc_meta), list(given[:13])
        for i, value in enumerate(given[13:]):
            passed += make_tensordesc_arg(value, next(told)) if i in tensordesc_indices else [value]
        return launcher(*passed)

    return inner


@pytest.mark.parametrize("packed", [True, False])
def test_a_map_is_encoded_once_for_an_address(monkeypatch, packed):
    encoded, launched = [], []
    monkeypatch.setattr(compat, "_maps", {})  # an address may be that of a tensor of another test
    encode = lambda address, *told: encoded.append((address, *told)) or f"map of {address}"
    stubs = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=stubs))
    meta = [dict(swizzle=n, elem_size=2, elem_type=10, block_size=[16, 64], fp4_padded=False) for n in (3, 2)]
    kinds = dict(enumerate(("tensordesc<bf16[16, 64]>", "*bf16", "tensordesc<bf16[16, 64]>", "i32")))
    stock = driver.CudaLauncher.__new__(driver.CudaLauncher)
    vars(stock).update(dict.fromkeys(("global_scratch_size", "global_scratch_align", "profile_scratch_size"), 0))
    vars(stock).update(dict.fromkeys(("profile_scratch_align", "launch_cooperative_grid", "launch_pdl"), 0))
    stock.num_ctas, stock.arg_annotations, take = 1, [], lambda *given: launched.append(given)
    if packed:
        stock.kernel_signature, stock.launch = b"", driver.wrap_handle_tensordesc(take, kinds, meta)
        call = lambda launcher, *values: launcher(1, 2, 3, 0, 7, "metadata", None, None, None, *values)
    else:
        stock.launch, call = flat(take, {0, 2}, meta), lambda launcher, *values: launcher.launch(*range(13), *values)
    kept = keeping_maps(stock)
    assert kept is not stock
    x, w = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (64, 32))
    for t in (x, w, x[16:], x, w):
        for launcher in (stock, kept):
            blocks = descriptor(t, t.shape, t.stride(), [16, 64]), TensorDescriptor(w, [32, 64], [64, 1], [16, 64])
            call(launcher, blocks[0], 5, blocks[1], 9)
        assert launched[-2] == launched[-1], "the arguments that Triton would have passed"
    swizzles = [told[1] for told in encoded]
    assert swizzles.count(3) == 5 + 3, "by Triton each time, by ours once for x, for w, and for a part of x"
    assert swizzles.count(2) == 5 + 5, "a descriptor that is not ours is encoded each time"
    encoded.clear()
    call(kept, *[descriptor(w, [32, 64], [64, 1], [16, 64]), 5] * 2)
    assert [told[1] for told in encoded] == [2], "another layout is another map"


def test_a_check_is_asked_once_of_each_kind_and_of_all_that_it_refused():
    asked = []

    @once
    def check(name, t, number):
        asked.append((name, number))
        if number < 0:
            raise ValueError(name)
        return len(asked)

    a, b = torch.zeros(2, 3), torch.ones(3, 2).t()
    assert check("a", a, 1) == check("a", b, 1) == 1  # values and strides are not what it may look at
    kinds = [("a", a.half(), 1), ("a", a[:1], 1), ("b", a, 1), ("a", None, 1), ("a", a, True), ("a", a, 1.0)]
    assert [check(*k) for k in kinds] == [2, 3, 4, 5, 6, 7] == [check(*k) for k in kinds]
    for _ in range(2):
        with pytest.raises(ValueError, match="c"):
            check("c", a, -1)
    assert len(asked) == 9 and check("d", [1], 1) == 10 and check("d", [1], 1) == 11  # a list has no hash


def test_ops_import_torch_and_triton_and_nothing_else():
    """numpy, where it is installed, comes with torch; numba with the interpreter alone."""
    code = """if True:
        import sys, torch, triton
        packages = lambda: {name.partition(".")[0] for name in sys.modules}
        before = packages()
        import bi_kernels as bi
        [getattr(bi, name) for name in bi.__all__]
        print(*packages() - before - sys.stdlib_module_names)
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert ended.stdout.split() == ["bi_kernels"]
