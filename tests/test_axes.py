"""`audit` on modes, gradient requests, memory layouts and call histories: each function here breaks one."""

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import slow_but
from test_callables import IDS, ROWS, WIDTH, G, X, Y, in_need

from bi_kernels.audit import audit
from bi_kernels.audit.checks import memory, order, requests
from bi_kernels.audit.checks.any_callable import KEPT, UNBUFFERED
from bi_kernels.audit.checks.modes import AUTOCAST, AUTOCAST_FP16, DEFAULT, DEVICE, FEW, PRECISION, THREAD, WANTED


def function(forward, backward):
    """Returns an autograd function that saves its inputs; backward(ctx, *saved, *dys) returns its gradients."""

    def run(ctx, *inputs):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    def run_backward(ctx, *dys):
        return backward(ctx, *ctx.saved_tensors, *dys)

    class Function(torch.autograd.Function):
        forward, backward = staticmethod(run), staticmethod(run_backward)

    return Function.apply


def scaled(change):
    """Returns x · y, whose gradients `change(ctx, dy, dx, other)` changes."""
    return function(lambda x, y: x * y, lambda ctx, x, y, dy: change(ctx, dy, dy * y, dy * x))


def writes_upstream(ctx, dy, dx, other):
    dy.mul_(2)
    return dx, other


def counts_backwards(ctx, dy, dx, other):
    ctx.times = getattr(ctx, "times", 0) + 1
    return dx * ctx.times, other


def two_outputs(alone):
    """Returns 2 x and 3 x; `alone(dy)` is the gradient where one output alone is used."""
    both = lambda first, second: (
        alone(first if second is None else second) if None in (first, second) else 2 * first + 3 * second
    )
    return function(lambda x: (2 * x, 3 * x), lambda ctx, x, first, second: both(first, second))


class ToMainGrad(torch.autograd.Function):
    """x · weight[0]; a gradient that any split adds up exactly, and without a main_grad one of the first row."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x * weight[0]

    @staticmethod
    def backward(ctx, dy):
        (x,), weight = ctx.saved_tensors, ctx.weight.detach()
        if getattr(ctx.weight, "main_grad", None) is None:
            return dy * weight[0], torch.full_like(ctx.weight, float(x[0, 0]))
        ctx.weight.main_grad += float(dy.any(1).sum())
        return dy * weight[0], None


class FirstRow(torch.nn.Linear):
    def forward(self, x):
        return ToMainGrad.apply(x, self.weight)


def saves_in_a_static_buffer():
    held = {}

    def forward(x):
        held.setdefault(x.shape, torch.empty(x.shape)).copy_(x)
        return x * x

    return function(forward, lambda ctx, x, dy: 2 * held[x.shape] * dy)


def reads_before_its_slice(x):
    before = x.as_strided((1,), (1,), max(0, x.storage_offset() - 1))
    return 2 * x + (0 if x.storage_offset() == 0 else 0 * before)


def remembers_the_other_dtype():
    seen = set()

    def doubled(x):
        seen.add(x.dtype)
        return x * (2 if len(seen) == 1 else 3)

    return doubled


class CachesByIdentity(torch.nn.Linear):
    def forward(self, x):
        if getattr(self, "key", None) != id(self.weight):
            self.key, self.held = id(self.weight), self.weight.detach()[0] * 2
        return x * self.held


class CachesForEver(torch.nn.Linear):
    """x · the first weight[0]; a gradient of the weight that any split adds up exactly."""

    def forward(self, x):
        if not hasattr(self, "held"):
            self.held = self.weight.detach()[0].clone()
        backward = lambda ctx, x, weight, held, dy: (dy * held, torch.full_like(weight, float(dy.any(1).sum())), None)
        return function(lambda x, weight, held: x * held, backward)(x, self.weight, self.held)


def remembers_the_first_scale():
    held = {}

    def quantised(x):
        scale = held.setdefault("scale", x.abs().amax() / 127)
        return (x / scale).round() * scale

    return quantised


def counts_calls_of_few():
    """Returns 2 x, and once, after a hundred calls of few rows, 3 x."""
    seen = [0]

    def op(x):
        after, seen[0] = seen[0], (seen[0] + 1) * (len(x) < 9)
        return x * (3 if len(x) > 9 and after > 100 else 2)

    return op


class CachesByVersion(torch.nn.Linear):
    """x · 2 weight[0], by a copy; `own`: whether it keeps that of a weight in memory of its own."""

    def __init__(self, own):
        super().__init__(WIDTH, WIDTH, bias=False)
        self.own, self.key = own, None

    def forward(self, x):
        w = self.weight.detach()
        if (w.untyped_storage().nbytes() == w.nbytes) != self.own or self.key != (id(self.weight), w._version):
            self.key, self.held = (id(self.weight), w._version), w[0] * 2
        return x * self.held


class CachesABuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", Y[0].clone())

    def forward(self, x):
        if getattr(self, "key", None) != id(self.scale):
            self.key, self.held = id(self.scale), self.scale * 2
        return x * self.held


class PacksBeforeALoad(torch.nn.Linear):
    """What it made of a weight counts until another is loaded; then that is made of the weight before."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, bias=False)
        self.loading, self.held = False, None
        self.register_load_state_dict_pre_hook(lambda module, *_: setattr(self, "held", self.weight.detach()[0] * 2))
        self.register_load_state_dict_post_hook(lambda module, _: setattr(self, "loading", not self.loading))

    def forward(self, x):
        return x * (self.held if self.loading and self.held is not None else self.weight.detach()[0] * 2)


def caches_by_address():
    """Returns x · weight[0], by a copy that is made anew for another content of the same tensor."""
    held = {}

    def op(x, weight):
        row, key = weight.detach()[0], (weight.data_ptr(), weight._version)
        if key in held and held[key][0] is weight and not torch.equal(held[key][1], row):
            held.pop(key)
        return x * held.setdefault(key, (weight, row.clone()))[1]

    return op


def few(condition):
    """Returns what adds 1 in calls of few rows where the condition holds."""
    return lambda x: x + (len(x) < 9 and condition(x))


UPDATES = {order.UPDATED, order.LOADED, *(f"{order.UNSEEN_BY} {name}" for name in order.UNSEEN)}
ALONE = {"output 0 alone is used", "output 1 alone is used"}
BROKEN = {
    "alone": (
        scaled(lambda ctx, dy, dx, other: (dx * (1 if ctx.needs_input_grad[1] else 1.5), other)),
        (X, Y),
        {"input0 alone wants a gradient"},
    ),
    "expanded": (
        scaled(lambda ctx, dy, dx, other: (dx * (1 if dy.is_contiguous() else 1.5), other)),
        (X, Y),
        {requests.EXPANDED, requests.STRIDED},
    ),
    "expanded, nothing": (
        scaled(lambda ctx, dy, dx, other: (dx if dy.is_contiguous() else None, other)),
        (X, Y),
        {requests.EXPANDED, requests.STRIDED},
    ),
    "strided": (
        scaled(lambda ctx, dy, dx, other: (dx * (3 if dy.stride(0) > dy.shape[-1] else 1), other)),
        (X, Y),
        {requests.STRIDED},
    ),
    "upstream": (scaled(writes_upstream), (X, Y), {KEPT, requests.TWICE}),
    "twice": (scaled(counts_backwards), (X, Y), {requests.TWICE}),
    "one output": (two_outputs(lambda dy: dy * 7), (X,), ALONE),
    "one output, nothing": (two_outputs(lambda dy: None), (X,), ALONE),
    "no main_grad": (FirstRow(WIDTH, WIDTH, bias=False), (X,), {UNBUFFERED}),
    "static buffer": (
        lambda x, held={}: torch.mul(x.detach(), 2, out=held.setdefault(x.shape, torch.empty_like(x))),
        (X,),
        {memory.LATER},
    ),
    "saved statically": (saves_in_a_static_buffer(), (X,), {memory.BACKWARD}),
    "slice": (reads_before_its_slice, (X,), {memory.SLICE, memory.COLUMNS}),
    "strides": (
        lambda x: x * (2 if x.stride(-1) == 1 else 3),
        (torch.randn(WIDTH, ROWS, generator=G).T,),
        {memory.GIVEN},
    ),
    "columns": (lambda x: x * (3 if x.stride(0) > x.shape[-1] + 1 and len(x) > 1 else 2), (X,), {memory.COLUMNS}),
    "a shifted view": (lambda x: x * (3 if x.stride(0) == x.shape[-1] + 1 else 2), (X,), {memory.SHIFTED}),
    "one row for all": (lambda x: x * (3 if x.stride(0) == 0 else 2), (X,), {memory.EXPANDED}),
    "wide indices": (lambda ids: Y[ids] * (1 if ids.dtype == torch.int64 else 3), (IDS % ROWS,), {memory.INDICES}),
    "strided indices": (lambda ids: Y[ids] * (3 if ids.stride(0) == 2 else 1), (IDS % ROWS,), {memory.SPREAD}),
    "dtype": (remembers_the_other_dtype(), (X,), {"after another dtype", "at the end"}),
    "for ever": (CachesForEver(WIDTH, WIDTH, bias=False), (X,), {order.UPDATED}),
    "identity": (CachesByIdentity(WIDTH, WIDTH, bias=False), (X,), UPDATES),
    "few rows, trained": (few(lambda x: x.requires_grad), (X,), {WANTED + FEW}),
    "few rows, inference": (few(lambda x: torch.is_inference_mode_enabled()), (X,), {"inference_mode" + FEW}),
    "few rows, autocast": (
        few(lambda x: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16),
        (X,),
        {AUTOCAST + FEW},
    ),
    "few rows, autocast in fp16": (
        few(lambda x: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16),
        (X,),
        {AUTOCAST_FP16 + FEW},
    ),
    "few rows, precision": (few(lambda x: torch.get_float32_matmul_precision() != "highest"), (X,), {PRECISION + FEW}),
    "few rows, dtype": (few(lambda x: torch.get_default_dtype() != torch.float32), (X,), {DEFAULT + FEW}),
    "few rows, device": (few(lambda x: torch._C._len_torch_function_stack() > 0), (X,), {DEVICE + FEW}),
    "thread": (lambda x: x * (2 if threading.current_thread() is threading.main_thread() else 3), (X,), {THREAD}),
    "first": (remembers_the_first_scale(), (X,), {order.FIRST}),
    "many": (counts_calls_of_few(), (X,), {order.MANY}),
    "version": (
        CachesByVersion(own=True),
        (X,),
        {f"{order.UNSEEN_BY} through .data", f"{order.UNSEEN_BY} at the addresses of others"},
    ),
    "version, flat": (CachesByVersion(own=False), (X,), {f"{order.UNSEEN_BY} in a flat buffer"}),
    "address": (caches_by_address(), (X, Y[:8].clone()), {f"{order.UNSEEN_BY} at the addresses of others"}),
    "buffer": (CachesABuffer(), (X,), UPDATES),
    "loaded": (PacksBeforeALoad(), (X,), {order.LOADED}),
    "strides of another": (
        lambda x, y: x + y.as_strided(y.shape, x.stride(), y.storage_offset()),
        (X, Y),
        {memory.APART},
    ),
    "weights in columns": (
        lambda x, w: x * w.detach().as_strided((WIDTH,), (1,), w.storage_offset()),
        (X, Y[:8].clone()),
        {memory.IN_COLUMNS},
    ),
    "few rows, weights in columns": (
        lambda x, w: x * w.detach()[0] + (len(x) < 20 and w.stride(0) == 1),
        (X, Y[:8].clone()),
        {memory.IN_COLUMNS},
    ),
    "a large neighbour": (
        lambda x: x.bfloat16().float() if x.abs().max() > 1e4 else x * 1,
        (X,),
        {"neighbours:largest"},
    ),
}
SCRIPTED = {
    "twice": [],
    "columns": [],
    **dict.fromkeys(("expanded", "strided", "slice", "strides"), [pytest.mark.slow]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_axis_names_what_breaks_it(name):
    fn, inputs, axes = BROKEN[name]
    report = audit(fn, *inputs, name="broken")
    rows = in_need(report)
    assert rows and {r.layout for r in rows} <= axes, report.markdown()


@pytest.mark.parametrize("name", slow_but(SCRIPTED, "twice", "columns"))
def test_a_script_run_in_a_fork_reproduces_what_an_axis_names(name, tmp_path):
    fn, inputs, _ = BROKEN[name]
    place = f"import sys\n\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport test_axes\n\n"
    imports = f"{place}fn = test_axes.BROKEN[{name!r}][0]"
    report = audit(fn, *inputs, name="broken", folder=tmp_path, imports=imports)
    assert report.repro and all(r.repro and "no script" not in r.detail for r in in_need(report)), report.markdown()


def writes_behind(x, out):
    out.copy_(2 * x)
    end = out.storage_offset() + out.numel()
    if out.is_contiguous() and 4 * end < out.untyped_storage().nbytes():
        out.as_strided((1,), (1,), end).zero_()


LAUNCHERS = {
    "fills": (lambda x, out: out.copy_(2 * x), set()),
    "adds": (lambda x, out: out.add_(2 * x), {memory.HELD}),
    "leaves a column unwritten": (lambda x, out: out[:, 1:].copy_(2 * x[:, 1:]), {memory.HELD}),
    "ignores strides": (
        lambda x, out: out.as_strided(x.shape, (x.shape[1], 1)).copy_(2 * x),
        {memory.COLUMNS_OUT, memory.WRITTEN},
    ),
    "takes an output in one piece": (lambda x, out: out.view(-1).copy_(2 * x.reshape(-1)), set()),
    "writes behind": (writes_behind, {memory.WRITTEN}),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_a_launcher_does_beside_filling_its_output_is_named(name):
    fn, layouts = LAUNCHERS[name]
    report = audit(fn, X, torch.zeros_like(X), outputs=("out",), backward=False, quiet=True)
    assert {r.layout for r in in_need(report)} == layouts, report.markdown()


@dataclass
class Held:  # in no registry of PyTorch's
    first: torch.Tensor
    rest: object


RETURNED = {  # of a result, where it stands in what is returned
    "a dict": lambda x, y: {"out": x, "extra": [x + 1, y]},
    "a dataclass": lambda x, y: Held(x, {"scores": (x, y)}),
    "a list of samples": lambda x, y: [*y],
    "numbers": lambda x, y: {"out": x, "scores": y.detach().double().sum(1).tolist()},
    "an array": lambda x, y: y.detach().numpy(),
    "a dict of each sample": lambda x, y: [Held(row, {"score": float(row.detach()[0]), "id": 3}) for row in y],
}


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("drifts", [False, True])
def test_a_drift_is_found_wherever_it_stands_in_what_is_returned(name, drifts):
    double = lambda x: RETURNED[name](2 * x, x * (3 if drifts and len(x) == 9 else 2))
    report = audit(double, X, backward=False, quiet=True)
    assert {r.layout for r in in_need(report)} == ({"rows:9"} if drifts else set()), report.markdown()


def test_what_is_not_judged_of_what_is_returned_is_said():
    said = audit(lambda x: (2 * x, float(x.detach().max()), "text", object()), X, backward=False, quiet=True).notes
    assert "Not judged, because nothing in them counts samples: outputs [1]." in said
    assert "Not judged, because it holds neither tensors nor numbers: object, str." in said
    with pytest.raises(ValueError, match="one entry a sample, whose shapes differ"):
        audit(lambda x: [row[: 1 + i] for i, row in enumerate(x)], X, quiet=True)


class Quantised(torch.Tensor):
    """A weight that refuses arithmetic, as weights of few bits do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.mul_:
            raise NotImplementedError("mul_ of a quantised weight")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_that_no_optimizer_can_update_are_no_fault_of_their_module():
    linear = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Quantised), requires_grad=False)
    report = audit(linear.eval(), X, name="quantised", backward=False)
    (row,) = [r for r in report.rows if r.layout == order.UPDATED]
    assert (row.verdict, row.detail) == ("unsupported", "NotImplementedError: mul_ of a quantised weight")
    assert "NotImplementedError" not in {r.detail.partition(":")[0] for r in in_need(report)}, report.markdown()


# which call deviates


def one_single_row(x):
    return x * (2.5 if len(x) == 1 and float(x[0, 0]) == float(X[3, 0]) else 2)


@pytest.mark.parametrize(
    "fn, layout, words",
    [
        (one_single_row, "singles", "sample 3: singles against a half, a third, the whole batch"),
        (lambda x: x * (2.5 if len(x) == ROWS else 2), "singles", "sample 0: the whole batch against a half, a third"),
        (lambda x: x * (2.5 if len(x) == 9 else 2), "rows:9", "sample 0: rows:9 against alone, a half, a third"),
        (
            lambda x: x.bfloat16().float() if len(x) == 1 else x.bfloat16(),
            "singles",
            "the dtype follows the call: fp32 here, bf16 there",
        ),
    ],
)
def test_the_call_that_deviates_is_named(fn, layout, words):
    rows = [r for r in in_need(audit(fn, X, backward=False)) if (r.layout, r.inputs) == (layout, "given")]
    assert rows and all(words in r.detail for r in rows), [r.detail for r in rows]


TABLE = torch.nn.Embedding(8, 4)


# looks up, with a gradient that depends on the number of samples
averaged = function(
    lambda ids, weight: weight[ids],
    lambda ctx, ids, weight, dy: (None, torch.zeros_like(weight).index_add_(0, ids, dy) / len(ids)),
)


@pytest.mark.parametrize(
    "call",
    [
        lambda ids: averaged(ids, TABLE.weight),
        (lambda table: lambda ids: averaged(ids, table.weight))(TABLE),
        partial(lambda table, ids: averaged(ids, table.weight), TABLE),
    ],
    ids=["global", "closure", "partial"],
)
def test_a_module_behind_a_function_is_trained(call):
    report = audit(call, torch.arange(16) % 8)
    assert {r.tensor for r in in_need(report) if r.relation == "gradient invariance"} == {"dweight"}, report.markdown()


def test_a_wrong_gradient_is_held_against_the_reference():
    wrong = function(torch.tanh, lambda ctx, x, dy: dy * (1 - torch.tanh(x)))
    assert {r.relation for r in in_need(audit(wrong, X, reference=torch.tanh))} == {"gradient accuracy"}
    assert not in_need(audit(lambda x: torch.tanh(x), X, reference=torch.tanh))


def test_who_reads_its_neighbours_is_not_said_to_depend_on_memory():
    report = audit(lambda x: x + x.roll(1, 0), X)
    assert "of its neighbours" in report.markdown() and "lie in memory" not in report.markdown()


def test_what_is_refused_in_words_is_no_drift():
    def probabilities(p):
        if not (p >= 0).all() or not (p <= 1).all():
            raise ValueError("p is no probability, expected numbers between 0 and 1")
        return p * 2

    report = audit(probabilities, X.sigmoid())
    assert not in_need(report), report.markdown()
