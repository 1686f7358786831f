"""The static audit: every way of adding in no fixed order is flagged, its harmless twin is not, our kernels pass."""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import bad_kernels as bad
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import bi_kernels
from bi_kernels.audit.static import binary as static
from bi_kernels.audit.static import function
from bi_kernels.audit.static.finding import CHOOSERS
from bi_kernels.audit.static.launches import Variant, recorded
from bi_kernels.audit.static.source import source
from bi_kernels.audit.targets import candidates
from bi_kernels.ops.gemm import kernel as gemm

MODULES = [
    m.name.removeprefix("bi_kernels.")
    for m in pkgutil.walk_packages(bi_kernels.__path__, "bi_kernels.")
    if not m.ispkg and not m.name.startswith(("bi_kernels.audit.", "bi_kernels.workbench."))
]

SOURCES = {
    bad.atomic: "atomic", bad.aliased: "atomic", bad.another_module: "atomic", bad.in_a_helper: "atomic",
    bad.inline_red: "atomic", bad.inline_shared: "atomic", bad.descriptor: "atomic",
    bad.published: None, bad.in_registers: None, bad.atomic_in_name_alone: None,
    bad.autotuned: "run-time choice", bad.heuristic: "run-time choice", bad.launch_autotuned: "run-time choice",
    bad.tunes_when_called: "run-time choice",
    bad.grid_stride: "grid-stride reduction", bad.grid_stride_in_a_helper: "grid-stride reduction",
    bad.grid_stride_while: "grid-stride reduction", bad.grid_stride_counted: "grid-stride reduction",
    bad.grid_stride_sometimes_reset: "grid-stride reduction",
    bad.fixed_slabs: None, bad.persistent: None,
    bad.dweight_by_multiprocessors: "reduction cut by multiprocessors", bad.dweight_by_rows: "reduction cut by rows",
    bad.dweight_by_some_multiprocessors: "reduction cut by multiprocessors",
    bad.dweight_by_slabs: None,
    bad.split_k_by_rows: "reduction cut by rows", bad.split_k_by_a_table: "reduction cut by rows",
    bad.split_k_by_multiprocessors: "reduction cut by multiprocessors", bad.split_k_fixed: None,
    bad.row_sum_by_rows: "reduction cut by rows", bad.row_sum_by_vocabulary: "reduction cut by rows",
    bad.row_maximum_by_rows: None, bad.row_sum_by_width: None, bad.no_dot_by_rows: "reduction cut by rows",
    bad.index_add: "unordered scatter", bad.scatter_add: "unordered scatter", bad.index_put: "unordered scatter",
    bad.put: "unordered scatter", bad.weighted_bincount: "unordered scatter", bad.scatter_reduce: "unordered scatter",
    bad.scatter_by_another_name: "unordered scatter", bad.scatter_by_string: "unordered scatter", bad.writes: None,
}  # yapf: disable


def name_of(subject) -> str:
    return function.unwrap(subject).__name__ if callable(subject) or hasattr(subject, "fn") else str(subject)


@pytest.mark.parametrize("subject, kind", SOURCES.items(), ids=name_of)
def test_source(subject, kind):
    found = source(subject)
    assert {f.kind for f in found} == ({kind} if kind else set()), found


# fmt: off
IN_A_DICT = {
    "scatters": lambda out, ids, x:
        out.index_add_(0, ids, x), "nothing": None,
    "adds": lambda out, x:
        out + x, "as well": 1,
}
# fmt: on


def test_a_lambda_inside_an_expression_is_read():
    assert [(f.kind, f.code) for f in source(IN_A_DICT["scatters"])] == [
        ("unordered scatter", 'out.index_add_(0, ids, x), "nothing": None,')
    ]
    assert not source(IN_A_DICT["adds"])


# fmt: off
class Unreadable:
    def scatters(self, out, ids, x):
        """Text that
begins at the margin."""
        return out.index_add_(0, ids, x)
# fmt: on


def test_what_cannot_be_read_is_not_clean():
    assert [f.kind for f in source(Unreadable.scatters)] == ["source not readable"]


def test_the_size_of_a_parameter_is_no_row_count():
    assert not source(bad.row_sum_by_vocabulary, parameters=("weight",))
    assert source(bad.row_sum_by_rows, parameters=("weight",))


def test_our_sources_pass():
    """All at once: what one module calls of another is followed with what every caller gives it."""
    modules = [importlib.import_module(f"bi_kernels.{name}") for name in MODULES]
    assert not source(*modules, parameters=("weight",))
    read = {f.fn.__module__ for f in function.reachable((*modules,))[0]}
    unread = {m.__name__ for m in modules if hasattr(m, "triton")} - read
    assert unread <= {"bi_kernels.interpreter"}, "of which nothing was read"


def test_a_finding_says_where():
    (atomic,) = source(bad.in_a_helper)
    lines = Path(bad.__file__).read_text().splitlines()
    assert (atomic.function, atomic.level, atomic.code) == ("_finish", "AST", "plus(y, total)")
    assert lines[atomic.line - 1].strip() == atomic.code
    assert str(atomic) == f"atomic in _finish, line {atomic.line} (AST): plus(y, total)"


X, Y, BLOCK = torch.zeros(128), torch.zeros(256), 128
PLAIN = [bad.atomic, bad.aliased, bad.in_a_helper, bad.inline_red, bad.inline_shared, bad.histogram]
PLAIN += [bad.in_registers, bad.atomic_in_name_alone]
OPCODES = {  # kernel: (in its PTX, in its SASS)
    "atomic": ("atom.global", "ATOMG"), "aliased": ("atom.global", "ATOMG"), "in_a_helper": ("atom.global", "ATOMG"),
    "inline_red": ("red.global.add.f32", "RED"), "inline_shared": ("atom.shared", "ATOMS"),
    "histogram": ("atom.shared", "ATOMS"), "descriptor": ("cp.reduce.async.bulk", "UTMAREDG"),
    "published": None, "autotuned": None, "in_registers": None, "atomic_in_name_alone": None,
}  # yapf: disable


@pytest.fixture(scope="module")
def variants() -> dict[str, list[Variant]]:
    """By kernel: the bad ones and ours, as launched for real or without running, compiled in one go."""

    @triton.jit
    def not_importable(x, y, BLOCK: tl.constexpr):
        tl.atomic_add(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))

    with recorded(run=False) as launches:
        for kernel in (*PLAIN, not_importable):
            kernel[(1,)](X, Y, BLOCK=BLOCK)
        bad.descriptor[(1,)](X, Y, BLOCK=64)
        bad.published[(1,)](X, Y, BLOCK=64)
        bad.autotuned.fn[(1,)](X, Y, 64, BLOCK=64)
        bad.grid_stride[(3,)](X, Y, 100, N=16, num_warps=2)
        bad.histogram[(1,)](X[1:], Y, BLOCK=64)
        bad.atomic[(7,)](X[16:], Y, BLOCK)  # of another grid and pointer, but the same variant
        x = torch.empty(300, 4096, dtype=torch.bfloat16)
        for m, tile in ((16, 0), (300, -1)):
            gemm.launch(x[:m], x, None, gemm.tiles(torch.bfloat16)[tile])
    assert len(launches.variants) == len(PLAIN) + 8
    with recorded() as ours:
        x, w = torch.randn(10, 48).bfloat16(), torch.randn(24, 48)
        bi_kernels.linear(x.float(), w, w[:, 0])
        bi_kernels.add(x, x)
        bi_kernels.rope(x.reshape(10, 3, 16), bi_kernels.rope_table(512, 16), torch.arange(10))
    assert len(ours.variants) == 3
    launches.variants |= ours.variants
    out = {}
    for v in static.distinct(static.examined(launches).values()):
        out.setdefault(v.kernel.rpartition(".")[2], []).append(v)
    return out


@pytest.mark.parametrize("name", OPCODES)
def test_binaries(name, variants):
    for v in variants[name]:
        assert v.level == "sm_90", v.detail
        found = {level: [f.code for f in v.findings if f.level == level] for level in ("PTX", "SASS")}
        if OPCODES[name] is None:
            assert not any(found.values()), found
        else:
            for level, opcode in zip(found, OPCODES[name]):
                assert found[level] and all(code.startswith(opcode) for code in found[level]), found


def test_a_finding_in_ptx_has_its_line(variants):
    (v,) = variants["atomic"]
    lines = {f.level: f.line for f in v.findings}
    assert lines["AST"] == lines["PTX"] > 0 == lines["SASS"], v.findings


def test_our_kernels_pass_with_what_they_use(variants):
    gemms = variants["_gemm_kernel"]
    assert len(gemms) == 3 and ["FLATTEN=True" in v.configuration for v in gemms].count(True) == 1, gemms
    for v in (*gemms, *variants["_elementwise_kernel"], *variants["_rope_kernel"]):
        assert v.level == "sm_90" and not v.findings and v.registers and None not in (v.shared, v.spills), v
    assert max(v.shared for v in gemms) > 48 * 1024 and any(v.spills for v in gemms), gemms  # fp32 spills


def test_ast_findings_reach_the_variant(variants):
    (v,) = variants["grid_stride"]
    assert [f.kind for f in v.findings] == ["grid-stride reduction"] and v.level == "sm_90", v
    assert "N=16" in v.configuration and "num_warps=2" in v.configuration, v


def test_alignment_makes_a_variant(variants):
    configurations = {v.configuration for v in variants["histogram"]}
    assert len(configurations) == 2 and sum("x=*fp32 % 16" in c for c in configurations) == 1, configurations


def test_what_cannot_be_imported_says_so(variants):
    (v,) = variants["not_importable"]
    assert (v.level, v.detail) == ("AST only", "not importable: AST only"), v
    assert [(f.kind, f.level) for f in v.findings] == [("atomic", "AST")] and "x=torch.float32" in v.configuration, v


def test_a_candidate_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("""import triton
import triton.language as tl


@triton.jit
def kernel(x, y):
    tl.atomic_add(y, tl.load(x))


@triton.jit
def wrong(x, y):
    tl.store(y, nothing)


def silu(x):
    y = x.new_zeros(1)
    kernel[(1, )](x, y)
    return y
""")
    silu = candidates.load(f"{path}:silu")
    assert {f.kind for f in source(silu)} == {"atomic"}
    with recorded() as launches:
        assert silu(torch.ones(1)) == 1, "it was run, too"
        with pytest.raises(Exception):
            silu.__globals__["wrong"][(1,)](X, Y)
    fine, wrong = static.distinct(static.examined(launches).values())
    assert {f.level for f in fine.findings} == {"AST", "PTX", "SASS"}, fine
    assert (wrong.level, wrong.detail) == ("AST only", "not compiled, AST only: NameError('nothing is not defined')")
    assert str(tmp_path) not in f"{fine}{wrong}", "no paths of this machine"


DISPATCHED = dict.fromkeys(
    (bad.index_add, bad.scatter_add, bad.scatter_spelled_apart, bad.index_put, bad.put, bad.weighted_bincount,
     bad.scatter_reduce, bad.gather_backward), True
) | dict.fromkeys((bad.writes, bad.permutes, bad.logprob_backward, bad.last_backward), False)  # fmt: skip


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("function, caught", DISPATCHED.items(), ids=name_of)
def test_what_torch_dispatches(function, caught):
    with recorded() as launches:
        function(torch.zeros(4), torch.tensor([1, 1, 2, 0]), torch.ones(4))
    assert {(f.kind, f.level) for f in launches.findings} == ({("unordered scatter", "torch")} if caught else set())


def test_a_choice_at_run_time_is_seen_when_it_is_made():
    with recorded(run=False) as launches:
        bad.heuristic[(1,)](X, Y, 100)
    assert [(f.kind, f.function) for f in launches.findings] == [("run-time choice", "heuristic")]
    assert len(launches.variants) == 1


def test_everything_is_put_back():
    places = (JITFunction, InterpretedFunction, *CHOOSERS)
    before = [place.run for place in places]
    with pytest.raises(KeyError), recorded():
        assert [place.run for place in places] != before
        raise KeyError
    assert [place.run for place in places] == before


def run_without_interpreter(script: str) -> list[str]:
    """Runs a script that compiles for sm_90 without a GPU; returns the lines that it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    prelude = """
import torch, bad_kernels as bad
from bi_kernels.audit.static import binary as static
static.without_gpu()
x = torch.zeros(128)
"""
    command = [sys.executable, "-c", prelude + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_compiled_launches():
    """On a GPU, Triton's own launches are recorded; here a stand-in for its driver lets them compile."""
    lines = run_without_interpreter("""
from bi_kernels.audit.static.launches import recorded

with recorded(run=False) as launches:
    for n in (64, 128, 128):
        bad.in_a_helper[(n, )](x, x, BLOCK=n)
    bad.atomic_in_name_alone[(1, )](x, x, BLOCK=64)
for v in static.distinct(static.examined(launches).values()):
    print(v.kernel, v.level, *sorted({f.level for f in v.findings}), v.registers > 0, v.configuration)
""")
    assert [line.partition(" x=")[0] for line in lines] == ["in_a_helper sm_90 AST PTX SASS True"] * 2 + [
        "atomic_in_name_alone sm_90 True"
    ]
    assert "x=*fp32 % 16, y=*fp32 % 16, BLOCK=64, num_warps=4" in lines[0]


def test_a_whole_run_sees_what_was_compiled_of_this_package_and_nothing_else():
    """Whoever launched it, in whichever process; an atomic among it needs a fix."""
    lines = run_without_interpreter("""
import sys, types
from bi_kernels.audit.static import verdict
from bi_kernels.ops.elementwise import _elementwise_kernel as kernel

session = types.SimpleNamespace(on_gpu=True, candidate=types.SimpleNamespace(spec="bi_kernels"), launched={}, audit="x",
                                dtypes=["bf16"], device_name="sm_90", command="bi-audit run x")

def show(when=""):
    (row,) = verdict.judge_whole_run(session)
    print(row.verdict, row.mismatches, row.elements, row.first_failing_op, when)

show("before")
for n in (64, 128):
    kernel.run(x, x, x, 0.5, n, 1, OP="add", BLOCK=n, grid=(1,), warmup=True, enable_fp_fusion=False)
    bad.in_a_helper.run(x, x, BLOCK=n, grid=(1,), warmup=True)  # nobody's of this package
show()
part = dict(verdict.compiled_variants([*session.launched][:1]))
print(len(part), sorted(part) == sorted([*session.launched][1:]))
sys.modules["bi_kernels.audit.planted"] = types.SimpleNamespace(kernel=bad.in_a_helper)
show("the auditor's own")
sys.modules["bi_kernels.planted"] = types.SimpleNamespace(kernel=bad.in_a_helper)
show()
""")
    assert lines == [
        "needs-fix 0 0 None before",
        "pass 0 2 None ",
        "1 True",
        "pass 0 2 None the auditor's own",
        "needs-fix 2 4 in_a_helper ",
    ]
