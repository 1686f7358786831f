"""Shows that what the workbench runs, compiles, writes and audits is a cell's kernel, and a debugger stops in it."""

import importlib.util
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from jupyter_client.manager import start_new_kernel

import bi_kernels
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX
from bi_kernels.audit.relations import gradient as gradients
from bi_kernels.audit.static.verdict import STATIC
from bi_kernels.audit.workbench import kernel as workbench
from bi_kernels.contract import SWEEP

SCALE = tl.constexpr(3)
ROWS = 4
HELD = torch.ones(1)


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


@triton.jit
def refused_kernel(x, y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) + [1.0, 2.0][0])
    for _ in {1: 2}.items():
        pass


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


def recursive(n):
    return n if n == 0 else recursive(n - 1)


def holds_a_tensor():
    return HELD


X, Y = torch.arange(64).bfloat16(), torch.zeros(ROWS)


@pytest.fixture(scope="module")
def ran() -> workbench.Run:
    return workbench.run(scaled_sum_kernel, (ROWS,), X, Y, BLOCK=16, enable_fp_fusion=False)


# Run it


def test_a_run_leaves_its_arguments_and_says_what_the_kernel_did(ran):
    expected = 3 * (X.float().square() + 1).view(ROWS, 16).sum(1)
    assert not compare(ran.tensors["y"], expected).mismatches and not Y.any()
    v = ran.compiled.variant
    assert (v.kernel, v.level, v.spills, v.findings) == ("scaled_sum_kernel", "sm_90", 0, [])
    text = ran._repr_markdown_()
    assert (
        f"registers a thread | {v.registers} |" in text and "compiled for sm_90 | not run: no CUDA device here" in text
    )


@pytest.mark.parametrize("code, ptx, sass, foreign", [
    ("value * value + 1.0", ("mul.rn.f32", "add.rn.f32"), ("FMUL", "FADD"), ("ld.global", "shfl", "LDG", "SHFL")),
    ("tl.load(x + at)", ("ld.global", ), ("LDG", ), ("mul.rn.f32", "shfl", "SHFL", "STG")),
    ("tl.sum(shifted, 0)", ("shfl.sync", "add.rn.f32"), ("SHFL", "FADD"), ("mul.rn.f32", "ld.global", "LDG", "STG")),
    ("_scaled(total)", ("mul.rn.f32", "st.global"), ("FMUL", "STG"), ("shfl", "ld.global", "SHFL", "LDG")),
])  # yapf: disable
def test_the_instructions_of_a_line_are_its_own(ran, code, ptx, sass, foreign):
    found = workbench.lines(ran, code)
    for level, expected in (("PTX", ptx), ("SASS", sass)):
        for opcode in expected:
            assert any(opcode in line for line in found[level]), (opcode, found)
    for opcode in foreign:
        assert not any(opcode in line for level in found for line in found[level]), (opcode, found)


def test_a_line_that_is_not_there_and_a_kernel_that_is_none(ran):
    with pytest.raises(ValueError, match="lines: code is 'tl.dot', expected a part of a line of scaled_sum_kernel"):
        workbench.lines(ran, "tl.dot")
    with pytest.raises(
        TypeError, match="run: kernel is a function, expected one that @triton.jit made under TRITON_INTERPRET=1"
    ):
        workbench.run(launch, (1,), X)


def test_what_the_compiler_refuses_is_still_run_and_says_why():
    refused = workbench.run(refused_kernel, (1,), X.float(), torch.zeros(64), BLOCK=64)
    assert torch.equal(refused.tensors["y"], X.float() + 1)
    assert (
        refused.compiled is None and "not compiled" in refused.refusal and refused.refusal in refused._repr_markdown_()
    )


# Write it out


def definitions(text: str) -> list[str]:
    return [
        line.split("(")[0].split(":")[0].removeprefix("class ").removeprefix("def ")
        for line in text.splitlines()
        if line.startswith(("def ", "class "))
    ]


@pytest.mark.parametrize(
    "subject, names, constants",
    [
        (
            scaled_sum,
            ["_scaled", "scaled_sum_kernel", "launch", "_Sum", "scaled_sum"],
            ["ROWS = 4", "SCALE = tl.constexpr(3)"],
        ),
        (scaled_sum_kernel, ["_scaled", "scaled_sum_kernel"], ["SCALE = tl.constexpr(3)"]),
        (recursive, ["recursive"], []),
    ],
    ids=["op", "kernel", "recursive"],
)
def test_a_file_holds_what_the_op_names_and_nothing_else(subject, names, constants):
    text = workbench.source(subject)
    assert definitions(text) == names
    assert sorted(line for line in text.splitlines() if line[:1].isupper()) == constants
    compile(text, "op.py", "exec")


def test_a_name_that_no_file_could_hold_is_one_sentence():
    with pytest.raises(
        ValueError, match="source: HELD is a Tensor, expected a function, a class, a module or a constant"
    ):
        workbench.source(holds_a_tensor)


def test_the_written_op_gives_the_bits_of_the_cells(tmp_path):
    path = workbench.write_op(tmp_path / "mine.py", scaled_sum, "A sum.")
    spec = importlib.util.spec_from_file_location("mine", path)
    module = sys.modules["mine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__doc__ == "A sum." and not hasattr(module, "refused_kernel")
    leaves = [torch.linspace(-3, 3, 64, requires_grad=True) for _ in range(2)]
    results = [op(leaf) for op, leaf in zip((module.scaled_sum, scaled_sum), leaves)]
    for y in results:
        y.backward(torch.ones(ROWS))
    assert (
        not compare(*(y.detach() for y in results)).mismatches
        and not compare(*(leaf.grad for leaf in leaves)).mismatches
    )


# Audit it


def drifting(x, weight, eps=1e-6):
    return torch.nn.functional.rms_norm(
        x, weight.shape, weight, eps
    )  # autograd adds up what each call summed from zero


def ours(x, weight, eps=1e-6):
    return bi_kernels.rms_norm(x, weight, eps)


@pytest.mark.parametrize("op, caught", [(drifting, True), (ours, False)])
def test_an_audit_of_the_cells_op_is_the_audit(op, caught, monkeypatch):
    monkeypatch.setattr(gradients, "LAYOUTS", ("packed", "micro_batches:ragged"))
    monkeypatch.setattr(gradients, "BESIDE", ())
    monkeypatch.setitem(SWEEP, "interpreter_gradient_runs", 2)
    rows = workbench.audit(op, "rms_norm", dtype="fp32", forward=False)
    flagged = {(r.relation, r.layout, r.tensor) for r in rows if r.verdict == NEEDS_FIX}
    assert ((gradients.INVARIANCE, "micro_batches:ragged", "dweight") in flagged) == caught == bool(flagged), flagged
    assert {r.relation for r in rows} == {
        gradients.INVARIANCE,
        gradients.ACCURACY,
        gradients.DETERMINISM,
        STATIC,
        "invariance",
    }
    assert all(r.candidate == op.__name__ for r in rows)


# Step into it

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
        client.execute(
            "import torch, triton, triton.language as tl\nfrom bi_kernels.audit.workbench import kernel as workbench",
            reply=True,
            timeout=60,
        )
        debug = Debugger(client)
        debug("initialize", clientID="test", adapterID="", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
        debug("attach")
        path = debug("dumpCell", code=CELL)["sourcePath"]
        line = next(i for i, text in enumerate(CELL.splitlines(), 1) if "tl.store" in text)
        assert debug("setBreakpoints", source={"path": path}, breakpoints=[{"line": line}])["breakpoints"][0][
            "verified"
        ]
        debug("configurationDone")
        client.execute(CELL)
        client.execute("ran = workbench.run(kernel, (2, ), torch.arange(8).bfloat16(), torch.zeros(2), BLOCK=4)")
        for program in range(2):
            thread = debug.stopped()
            frame = debug("stackTrace", threadId=thread)["stackFrames"][0]
            assert (frame["name"], frame["line"]) == ("kernel", line)
            scope = debug("scopes", frameId=frame["id"])["scopes"][0]["variablesReference"]
            shown = {v["name"]: v["value"] for v in debug("variables", variablesReference=scope)["variables"]}
            tile = np.arange(4, dtype=np.float32) + 4 * program
            assert (shown["value"], shown["total"]) == (repr(tile), repr(tile.sum(keepdims=True))), (
                "tiles are shown as arrays"
            )
            debug("continue", threadId=thread)
        result = client.execute(
            "assert ran.tensors['y'].tolist() == [6.0, 22.0] and ran.compiled", reply=True, timeout=60
        )
        assert result["content"]["status"] == "ok", result["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
