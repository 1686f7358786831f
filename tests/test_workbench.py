"""Shows that the workbench runs, compiles, audits and writes a cell's kernel, and that a debugger stops in it."""

import importlib.util
import inspect
import linecache
import os
import re
import shlex
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

import bi_kernels
from bi_kernels import workbench as wb
from bi_kernels.audit.callable_session import read_inputs
from bi_kernels.audit.checks import gradient as gradients
from bi_kernels.audit.compare import compare
from bi_kernels.audit.findings import NEEDS_FIX
from bi_kernels.audit.parameters import read
from bi_kernels.audit.static import binary
from bi_kernels.audit.static.binary import copied
from bi_kernels.audit.static.verdict import STATIC
from bi_kernels.contract import SWEEP
from bi_kernels.workbench.run import Run, launched
from bi_kernels.workbench.source import source

SCALE = tl.constexpr(3)
ROWS = 4
HELD = torch.ones(1)
ROOT = Path(__file__).parents[1]


@triton.jit
def _scaled(value):
    return value * SCALE


@triton.jit
def scaled_sum_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at).to(tl.float32)
    shifted = value * value + 1.0
    total = tl.sum(shifted, 0)
    tl.store(y + tl.program_id(0), _scaled(total))


def launch(x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(ROWS, dtype=torch.float32)
    scaled_sum_kernel[(ROWS,)](x, y, BLOCK=x.numel() // ROWS)
    return y


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return launch(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return (dy[:, None] * x.view(ROWS, -1) * (2 * SCALE.value)).view_as(x)


def scaled_sum(x):
    return _Sum.apply(x)


@triton.jit
def mean_kernel(x, y, width, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        col = first + tl.arange(0, BLOCK)
        total += tl.load(x + tl.program_id(0) * width + col, mask=col < width, other=0.0)
    tl.store(y + tl.program_id(0), tl.sum(total, 0) / width)


def row_mean_by_rows(x):
    y = x.new_empty(len(x))
    mean_kernel[(len(x),)](x.contiguous(), y, x.shape[1], BLOCK=64 if len(x) < 2 else 16)
    return y


@triton.jit
def add_parts_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y, tl.sum(tl.load(x + at), 0))


@triton.jit
def copy_kernel(x, y, stride, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(y + row * BLOCK + col, tl.load(x + row * stride + col))


def recursive(n):
    return n if n == 0 else recursive(n - 1)


def holds_a_tensor():
    return HELD


X, Y = torch.arange(64).bfloat16(), torch.zeros(ROWS)


@pytest.fixture(scope="module")
def ran() -> Run:
    return wb.run(scaled_sum_kernel, (ROWS,), X, Y, BLOCK=16, enable_fp_fusion=False)


# Import it


def imported(monkeypatch) -> str | None:
    """Runs the package's first lines as in a new process; what TRITON_INTERPRET is afterwards."""
    monkeypatch.delenv("TRITON_INTERPRET")
    spec = importlib.util.spec_from_file_location("bi_kernels.workbench.again", wb.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return os.environ.get("TRITON_INTERPRET")


@pytest.mark.parametrize("gpu, expected", [(False, "1"), (True, None)])
def test_the_import_turns_the_interpreter_on_where_there_is_no_gpu(gpu, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.delitem(sys.modules, "triton")
    assert imported(monkeypatch) == expected


def test_an_import_that_comes_too_late_is_one_sentence(monkeypatch):
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1") as error:
        imported(monkeypatch)
    assert "\n" not in str(error.value) and "TRITON_INTERPRET" not in os.environ


# Run it


def test_a_run_leaves_its_arguments_and_says_what_the_kernel_did(ran):
    expected = 3 * (X.float().square() + 1).view(ROWS, 16).sum(1)
    assert not compare(ran.tensors["y"], expected).mismatches and not Y.any()
    v = ran.compiled.variant
    assert (v.kernel, v.level, v.spills, v.findings) == ("scaled_sum_kernel", "sm_90", 0, [])
    facts = dict(re.findall(r"^\| (.+?) +\| (.+?) +\|$", ran._repr_markdown_(), re.M))
    assert facts["registers a thread"] == str(v.registers)
    assert facts["compiled for sm_90"] == "not run: no CUDA device here"


@pytest.mark.parametrize("code, ptx, sass, foreign", [
    ("value * value + 1.0", ("mul.rn.f32", "add.rn.f32"), ("FMUL", "FADD"), ("ld.global", "shfl", "LDG", "SHFL")),
    ("tl.load(x + at)", ("ld.global", ), ("LDG", ), ("mul.rn.f32", "shfl", "SHFL", "STG")),
    ("tl.sum(shifted, 0)", ("shfl.sync", "add.rn.f32"), ("SHFL", "FADD"), ("mul.rn.f32", "ld.global", "LDG", "STG")),
    ("_scaled(total)", ("mul.rn.f32", "st.global"), ("FMUL", "STG"), ("shfl", "ld.global", "SHFL", "LDG")),
])  # yapf: disable
def test_the_instructions_of_a_line_are_its_own(ran, code, ptx, sass, foreign):
    found = wb.asm(ran, code)
    for level, expected in (("PTX", ptx), ("SASS", sass)):
        for opcode in expected:
            assert any(opcode in line for line in found[level]), (opcode, found)
    for opcode in foreign:
        assert not any(opcode in line for level in found for line in found[level]), (opcode, found)


def test_a_line_that_is_not_there_and_a_kernel_that_is_none(ran):
    with pytest.raises(ValueError, match="asm: code is 'tl.dot', expected a part of a line of scaled_sum_kernel"):
        wb.asm(ran, "tl.dot")
    with pytest.raises(TypeError, match="asm: run is 'x'"):
        wb.asm("x", "tl.load")
    with pytest.raises(
        TypeError, match="run: kernel is a function, expected one that @triton.jit made under TRITON_INTERPRET=1"
    ):
        wb.run(launch, (1,), X)


MISTAKES = {  # a launch that no kernel takes: what its sentence names
    "a grid that is no tuple": ((4, X, Y), {"BLOCK": 16}, "grid is 4"),
    "a grid of nothing": (((0,), X, Y), {"BLOCK": 16}, "grid is (0,)"),
    "a list": (((4,), X.tolist(), Y), {"BLOCK": 16}, "x is of type list"),
    "an array": (((4,), X, Y.numpy()), {"BLOCK": 16}, "y is of type ndarray"),
    "nothing": (((4,), X, Y), {}, "BLOCK is missing"),
    "a misspelt constexpr": (((4,), X, Y), {"BLOKC": 16}, "BLOKC is 16"),
    "an argument twice": (((4,), X, Y, 16), {"BLOCK": 16}, "BLOCK is given twice"),
    "too much": (((4,), X, Y, 16, 16), {}, "4 arguments"),
}


@pytest.mark.parametrize("function", [wb.run, wb.step], ids=["run", "step"])
@pytest.mark.parametrize("args, options, named", MISTAKES.values(), ids=MISTAKES)
def test_a_launch_that_no_kernel_takes_is_one_sentence(function, args, options, named):
    with pytest.raises((TypeError, ValueError)) as error:
        function(scaled_sum_kernel, *args, **options)
    said = str(error.value)
    assert said.startswith(f"{function.__name__}: {named}") and "expected" in said and "\n" not in said
    assert "BLOCK" in said or "grid" in named or "type" in named, "what is allowed"


def test_a_launch_may_have_options_and_a_grid_that_is_computed():
    steps = wb.step(scaled_sum_kernel, lambda meta: (64 // meta["BLOCK"],), X, Y, BLOCK=16, num_warps=2, program=3)
    assert steps.grid == (4, 1, 1)


def test_the_first_launch_of_a_function_is_as_it_was_before_it_ran():
    def twice(x):
        y = launch(x)
        scaled_sum_kernel[(2,)](x, y, BLOCK=8, num_warps=2)

    grid, (x, y, block), options = wb.first_launch(scaled_sum_kernel, twice, X)
    assert (grid, block, options) == ((4,), 16, {}) and torch.equal(x, X) and y.shape == (4,)
    assert "run" not in vars(scaled_sum_kernel), "nothing is left behind"
    with pytest.raises(ValueError, match="first_launch: kernel is mean_kernel, expected one that twice launches"):
        wb.first_launch(mean_kernel, twice, X)


def test_programs_that_depend_on_their_order_are_seen(ran):
    assert not any(d.mismatches for d in ran.reversed.values())
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0])  # from last to first the second 1 is lost, and not the first
    found = wb.run(add_parts_kernel, (4,), parts, torch.zeros(1), BLOCK=1)
    assert found.reversed["y"].mismatches == 1 and "from last to first" in found._repr_markdown_()
    assert [f.kind for f in found.compiled.variant.findings][:1] == ["atomic"]
    line = inspect.getsourcelines(add_parts_kernel.fn)[1] + 3
    assert found.compiled.variant.findings[0].line == line, "the line of the cell, not of the file compiled"


def test_a_view_stays_a_view_in_the_copies():
    wide, y = torch.arange(24.0).view(3, 8), torch.zeros(3, 4)
    given = copied({"x": wide[:, 2:6], "whole": wide, "y": y, "stride": 8, "BLOCK": 4})
    assert given["x"].stride() == (8, 1) and given["x"].data_ptr() == given["whole"].data_ptr() + 8
    del given["whole"]
    assert torch.equal(launched(copy_kernel, (3,), given)["y"], wide[:, 2:6]) and not y.any()


# A kernel's error


@triton.jit
def _unknown(value):
    return value.unknown


@triton.jit
def by_helper_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, _unknown(tl.load(x + at)))


@triton.jit
def beyond_kernel(x, y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), 0.0)
    tl.load(x + BLOCK + tl.arange(0, BLOCK))


@triton.jit
def by_compiler_kernel(x, y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))
    for _ in {1: 2}.items():
        pass


@triton.jit
def loop_kernel(x, y, BLOCK: tl.constexpr):
    total = 0
    for _ in range(BLOCK):
        total += 1.5
    tl.store(y, total)


ERRORS = {  # kernel: the line, and what its sentence holds
    by_helper_kernel: ("return value.unknown", "no attribute 'unknown'"),
    beyond_kernel: ("tl.load(x + BLOCK + tl.arange(0, BLOCK))", "bytes beyond the end of the memory of x"),
    by_compiler_kernel: ("for _ in {1: 2}.items():", "Dict"),
    loop_kernel: ("for _ in range(BLOCK):", "Loop-carried variable total"),
}


@pytest.mark.parametrize("kernel", ERRORS, ids=lambda k: k.fn.__name__)
def test_a_kernels_error_is_one_sentence_with_its_line(kernel):
    code, words = ERRORS[kernel]
    with pytest.raises(wb.KernelError) as error:
        wb.run(kernel, (1,), X.float(), torch.zeros(64), BLOCK=64)
    assert (error.value.code, words in error.value.message) == (code, True), error.value
    assert linecache.getline(__file__, error.value.line).strip() == code
    assert "\n" not in str(error.value) and error.value.__suppress_context__ and error.value.__cause__ is None
    assert error.value._render_traceback_() == [f"KernelError: {error.value}"], "what IPython shows"


@pytest.mark.parametrize("hidden", [True, False])
def test_an_audit_of_a_kernel_that_cannot_run_is_that_sentence_unless_another_error_hides_it(hidden):
    def call(x):
        try:
            beyond_kernel[(1,)](x, torch.zeros(64), BLOCK=64)
        except triton.runtime.errors.InterpreterError:
            if hidden:
                raise OSError("no disk") from None
            raise

    with pytest.raises((ValueError, wb.KernelError), match="no disk" if hidden else "beyond_kernel, line") as error:
        wb.audit(call, torch.randn(4, 16))
    assert isinstance(error.value, wb.KernelError) != hidden
    assert hidden or error.value.__suppress_context__ and error.value.__cause__ is None


MAIN = """import torch
import triton
import triton.language as tl

# the file that is audited has no such lines
@triton.jit
def sum_kernel(x, y, width, ahead, BLOCK: tl.constexpr):
    total = 0.0
    for first in range(0, width, BLOCK):
        total += tl.sum(tl.load(x + tl.program_id(0) * width + first + ahead + tl.arange(0, BLOCK)), 0)
    tl.store(y + tl.program_id(0), total)


def sums(x, ahead=0):
    y = x.new_empty(len(x))
    sum_kernel[(len(x),)](x.contiguous(), y, x.shape[1], ahead, BLOCK=8 if len(x) < 2 else 16)
    return y


def sums_ahead(x):
    return sums(x, 4)
"""


def test_what_an_audit_says_of_a_cell_has_the_cells_lines(tmp_path, monkeypatch):
    (tmp_path / "cell.py").write_text(MAIN)
    spec = importlib.util.spec_from_file_location("__main__", tmp_path / "cell.py")
    main = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "__main__", main)
    spec.loader.exec_module(main)
    monkeypatch.setattr(binary, "_compile_elsewhere", lambda messages: ["not compiled here"] * len(messages))
    line = lambda text: 1 + next(i for i, found in enumerate(MAIN.splitlines()) if text in found)
    rows = wb.audit(main.sums, torch.randn(4, 64)).rows
    assert any(f"in sum_kernel, line {line('for first')} (AST)" in r.detail for r in rows), rows
    with pytest.raises(wb.KernelError, match="beyond the end of the memory of x") as error:
        wb.audit(main.sums_ahead, torch.randn(4, 64))
    assert (error.value.kernel, error.value.line) == ("sum_kernel", line("tl.load"))


# Write it out


WRITTEN = {  # what is written: the names that its file defines
    scaled_sum: ["ROWS", "SCALE", "_scaled", "scaled_sum_kernel", "launch", "_Sum", "scaled_sum"],
    scaled_sum_kernel: ["SCALE", "_scaled", "scaled_sum_kernel"],
    recursive: ["recursive"],
}


@pytest.mark.parametrize("subject", WRITTEN)
def test_a_file_holds_what_the_op_names_and_nothing_else(subject):
    text = source(subject)
    compile(text, "op.py", "exec")
    names = re.findall(r"^(?:(?:def|class) )?(\w+)(?: = |[(:])", text, re.M)
    constants = names.index("_scaled") if "_scaled" in names else 0
    assert [*sorted(names[:constants]), *names[constants:]] == WRITTEN[subject]
    assert "SCALE" not in names or "SCALE = tl.constexpr(3)\n" in text


def test_a_name_that_no_file_could_hold_is_one_sentence():
    with pytest.raises(ValueError, match="source: HELD is a Tensor, expected a function, a class, a module or"):
        source(holds_a_tensor)


def test_the_written_op_gives_the_bits_of_the_cells(tmp_path):
    path = wb.write_op(tmp_path / "mine.py", scaled_sum, "A sum.")
    spec = importlib.util.spec_from_file_location("mine", path)
    module = sys.modules["mine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__doc__ == "A sum." and not hasattr(module, "refused_kernel")
    leaves = [torch.linspace(-3, 3, 64, requires_grad=True) for _ in range(2)]
    results = [op(leaf) for op, leaf in zip((module.scaled_sum, scaled_sum), leaves)]
    for y in results:
        y.backward(torch.ones(ROWS))
    assert not compare(*(y.detach() for y in results)).mismatches
    assert not compare(*(leaf.grad for leaf in leaves)).mismatches


# Audit it


def drifting(x, weight, eps=1e-6):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)  # each call's gradient is summed from zero


def ours(x, weight, eps=1e-6):
    return bi_kernels.rms_norm(x, weight, eps)


@pytest.mark.parametrize("op, caught", [(drifting, True), (ours, False)])
def test_an_audit_of_the_cells_op_is_the_audit(op, caught, monkeypatch):
    monkeypatch.setattr(gradients, "LAYOUTS", ("packed", "micro_batches:ragged"))
    monkeypatch.setattr(gradients, "WITH_NEIGHBOURS", ())
    monkeypatch.setitem(SWEEP, "interpreter_gradient_runs", 2)
    rows = wb.audit(op, op="rms_norm", dtype="fp32", forward=False).rows
    flagged = {(r.relation, r.layout, r.tensor) for r in rows if r.verdict == NEEDS_FIX}
    assert ((gradients.INVARIANCE, "micro_batches:ragged", "dweight") in flagged) == caught == bool(flagged), flagged
    asked = {gradients.INVARIANCE, gradients.ACCURACY, gradients.DETERMINISM, STATIC, "invariance"}
    assert {r.relation for r in rows} == asked
    assert all(r.candidate == op.__name__ for r in rows)


def test_any_function_is_audited():
    def mean(x):
        return x.mean(1)

    def mean_by_rows(x):
        return x.mean(1) if len(x) > 1 else x.double().mean(1).float()

    for function in (mean, mean_by_rows):
        report = wb.audit(function, torch.randn(6, 40), backward=False)
        drifts = any(r.mismatches for r in report.rows)
        assert (report.name, drifts) == (function.__name__, function is mean_by_rows), report


@pytest.mark.parametrize("options, named", [
    ({"outptus": ("y",)}, "outptus is ('y',), expected one of x, batch, shared, outputs"),
    ({"op": "rms"}, "op is 'rms'"),
    ({"op": "rms_norm", "dtype": "bf61"}, "dtype is 'bf61'"),
    ({"op": "rms_norm", "dtyp": "bf16"}, "dtyp is 'bf16'"),
])  # yapf: disable
def test_an_option_that_no_audit_has_is_one_sentence(options, named):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(f'audit: {named}')}"):
        wb.audit(row_mean_by_rows, torch.randn(6, 40), **options)


def test_a_written_op_has_a_command_that_audits_it():
    words = shlex.split(wb.command("mine.py", row_mean_by_rows, torch.zeros(6, 40), seconds=20))
    assert words[:5] == ["bi-audit", "run", "any", "--candidate", "mine.py:row_mean_by_rows"]
    p = read("any", {"candidate": words[4], "inputs": words[words.index("--inputs") + 1]})
    drawn = read_inputs(p.inputs, torch.device("cpu"), 0)
    assert [(k, t.shape, t.dtype) for k, t in drawn.items()] == [("x", (6, 40), torch.float32)]


@pytest.mark.parametrize("rows, moved", [((1,), True), ((3,), False), ((1, 3), True)])
def test_the_rows_that_differ_are_those_of_smaller_calls(rows, moved):
    found = wb.drift(row_mean_by_rows, torch.randn(6, 40, generator=torch.Generator().manual_seed(0)), rows=rows)
    assert found.drifts == moved and set(found.ulp) == {*rows}
    assert all(len(far) == 6 and bool(far.any()) == (m == 1) for m, far in found.ulp.items())


@pytest.mark.parametrize("rows, named", [((0,), "holds 0"), ((40,), "holds 40"), (2, "is 2"), ((1.5,), "is (1.5,)")])
def test_a_number_of_rows_that_no_call_can_have_is_one_sentence(rows, named):
    with pytest.raises((TypeError, ValueError), match=re.escape(f"drift: rows {named}, expected")):
        wb.drift(row_mean_by_rows, torch.randn(12, 40), rows=rows)


def test_a_drift_is_narrow_and_a_small_batch_has_fewer_calls():
    found = wb.drift(row_mean_by_rows, torch.randn(3, 40))
    assert set(found.ulp) == {1, 2}
    wide = repr(wb.drift(row_mean_by_rows, torch.randn(40, 40)))
    assert max(map(len, wide.splitlines())) <= 100 and "calls of 4" in wide


# Another kernel in the notebook's one cell

RMS_NORM = """@triton.jit
def rms_norm_kernel(x, w, y, width, eps, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * width + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    out = value * scale * tl.load(w + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(0) * width + at, out.to(y.dtype.element_ty), mask=at < width)


def rms_norm(x, w):
    y = torch.empty_like(x)
    rms_norm_kernel[(len(x),)](x.contiguous(), w, y, x.shape[1], 1e-6, BLOCK=64, num_warps=2)
    return y


kernel, launcher, inputs = rms_norm_kernel, rms_norm, (torch.randn(6, 48).bfloat16(), torch.randn(48).bfloat16())
options = {"shared": ["w"]}
reference = lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)
program, line, about, fixed = 5, "tl.rsqrt", "RMSNorm.", None
sums = wb.over_k(launcher)
"""


@pytest.mark.slow
def test_the_notebook_runs_with_another_kernel_in_its_one_cell(tmp_path):
    notebook = nbformat.read(ROOT / "notebooks" / "paste_your_kernel.ipynb", as_version=4)
    heading = next(i for i, c in enumerate(notebook.cells) if c.source.startswith("## Paste here"))
    notebook.cells[heading + 1].source = RMS_NORM
    done = NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
    shown = {c.source: "".join(o.get("text", "") for o in c.outputs) for c in done.cells if c.cell_type == "code"}
    order = next(text for source, text in shown.items() if "wb.order" in source)
    assert order.startswith("No order") and order.count("\n") <= 1, "one sentence"
    assert shown[done.cells[-1].source] == "{'rms_norm': 'pass'}\n"


# A debugger stops in it

CELL = """@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at).to(tl.float32)
    total = tl.sum(value, 0)
    tl.store(y + tl.program_id(0), total)
"""


class Debugger:
    """What JupyterLab says to a kernel's debugger."""

    def __init__(self, client):
        self.client, self.number = client, 0

    def __call__(self, command: str, **arguments) -> dict:
        self.number += 1
        message = self.client.session.msg(
            "debug_request", {"type": "request", "seq": self.number, "command": command, "arguments": arguments}
        )
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                assert reply["content"]["success"], reply["content"]
                return reply["content"].get("body") or {}

    def stopped(self) -> int:
        """The thread that stopped."""
        while True:
            content = self.client.get_iopub_msg(timeout=60)["content"]
            assert "ename" not in content, content
            if content.get("event") == "stopped":
                return content["body"]["threadId"]


def test_a_breakpoint_on_a_kernels_line_stops_in_every_program():
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        imports = "import torch, triton, triton.language as tl\nfrom bi_kernels import workbench as wb"
        client.execute(imports, reply=True, timeout=60)
        debug = Debugger(client)
        debug("initialize", clientID="test", adapterID="", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
        debug("attach")
        path = debug("dumpCell", code=CELL)["sourcePath"]
        line = next(i for i, text in enumerate(CELL.splitlines(), 1) if "tl.store" in text)
        (point,) = debug("setBreakpoints", source={"path": path}, breakpoints=[{"line": line}])["breakpoints"]
        assert point["verified"]
        debug("configurationDone")
        client.execute(CELL)
        client.execute("y = torch.zeros(2); kernel[(2, )](torch.arange(8).bfloat16(), y, BLOCK=4)")
        for program in range(2):
            thread = debug.stopped()
            frame = debug("stackTrace", threadId=thread)["stackFrames"][0]
            assert (frame["name"], frame["line"]) == ("kernel", line)
            scope = debug("scopes", frameId=frame["id"])["scopes"][0]["variablesReference"]
            shown = {v["name"]: v["value"] for v in debug("variables", variablesReference=scope)["variables"]}
            tile = np.arange(4, dtype=np.float32) + 4 * program
            assert (shown["value"], shown["total"]) == (repr(tile), repr(tile.sum(keepdims=True)))
            debug("continue", threadId=thread)
        result = client.execute("assert y.tolist() == [6.0, 22.0]", reply=True, timeout=60)
        assert result["content"]["status"] == "ok", result["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
