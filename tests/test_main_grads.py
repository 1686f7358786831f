"""MainGrads between steps: saved and resumed, clipped, and what it cannot hold."""

import copy
import hashlib
import pickle
import warnings

import pytest
import torch
from conftest import assert_same_bits, slow_but
from hypothesis import given
from hypothesis import strategies as st

import bi_kernels
from bi_kernels import MainGrads, linear
from bi_kernels.audit.compare import compare
from bi_kernels.model import CONFIGS, Decoder, packed
from bi_kernels.ops import lm_head
from bi_kernels.ops.gemm import gemm
from bi_kernels.ops.square_sum import BLOCK, block_sums, total


def weights(*shapes: tuple[int, ...], dtype=torch.bfloat16) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


# Buffers and masters


@pytest.mark.parametrize("op", ["linear", "lm_head_logprob"])
def test_a_steps_first_fold_does_not_read_the_zeros_it_begins_with(op, monkeypatch):
    g = torch.Generator().manual_seed(0)
    x, targets = torch.randn(20, 32, generator=g).bfloat16(), torch.randint(0, 48, (20,), generator=g)
    weight = torch.nn.Parameter(torch.randn(48, 32, generator=g).bfloat16())
    grads, continued = MainGrads([weight]), []
    for module in (gemm, lm_head):
        flag = module.consume_zero_flag
        noted = lambda *a, flag=flag: continued.append(not flag(*a)) or not continued[-1]
        monkeypatch.setattr(module, "consume_zero_flag", noted)

    def backward() -> torch.Tensor:
        y = linear(x, weight) if op == "linear" else bi_kernels.lm_head_logprob(x, weight, targets)[0]
        y.float().square().sum().backward()
        return weight.main_grad.clone()

    first, second = backward(), backward()
    grads.drop()
    weight.main_grad += 0.0  # whoever writes there, it is read again
    assert_same_bits(backward(), first)
    assert_same_bits(backward(), second)
    grads.drop()
    assert_same_bits(backward(), first)
    grads.drop()
    weight.main_grad = torch.ones_like(weight.main_grad)
    assert (backward() != first).all(), "another buffer goes on from what it holds"
    assert continued == [False, True, True, True, False, True]


def test_the_masters_are_fp32_copies_whose_grad_is_main_grad():
    first, second, frozen = weights((6, 4), (6, 4), (6, 4))
    frozen.requires_grad_(False)
    grads = MainGrads([first, second, first, frozen])
    assert len(grads.masters) == 2 and not hasattr(frozen, "main_grad")
    for p, master in zip((first, second), grads.masters):
        assert_same_bits(master.detach(), p.detach().float())
        assert master.grad is p.main_grad and p.grad is None
        assert_same_bits(p.main_grad, torch.zeros(6, 4))


def test_a_step_rounds_the_masters_into_the_parameters_and_zeroes_the_buffers():
    (p,) = weights((6, 4))
    before = p.detach().clone()
    grads = MainGrads([p])
    optimizer = torch.optim.SGD(grads.masters, lr=2.0**-12)  # below half a unit of bf16, until steps add up
    for step in range(1, 41):
        linear(torch.ones(3, 4, dtype=torch.bfloat16), p).sum().backward()
        grads.join()
        assert grads.masters[0].grad is p.main_grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        grads.finish()
        assert_same_bits(grads.masters[0].detach(), before.float() - step * 3 * 2.0**-12, f"step {step}")
        assert_same_bits(p.detach(), grads.masters[0].detach().bfloat16(), f"step {step}, rounded once")
        assert_same_bits(p.main_grad, torch.zeros(6, 4), f"step {step}, zeroed")
    assert compare(p.detach(), before).mismatches


def test_a_tied_parameter_has_two_folds_that_are_joined_once():
    table, other = weights((6, 4), (6, 4))
    grads = MainGrads([table, other], tied=[table])
    assert not hasattr(other, "embedding_main_grad")
    ids = torch.tensor([1, 5, 1])
    for _ in range(2):
        hidden = bi_kernels.embedding(ids, table)
        logprob, _ = bi_kernels.lm_head_logprob(hidden, table, ids)
        logprob.sum().backward()
    embedding, head = table.embedding_main_grad.clone(), table.main_grad.clone()
    assert embedding[[1, 5]].any() and not embedding[[0, 2, 3, 4]].any() and head.all(-1).all()
    grads.join()
    assert_same_bits(table.main_grad, head + embedding)
    grads.join()
    assert_same_bits(table.main_grad, head + embedding, "joined again")
    assert_same_bits(table.embedding_main_grad, torch.zeros(6, 4))
    assert grads.masters[0].grad is table.main_grad


def test_a_parameter_that_a_backward_comes_to_twice_is_told():
    table, square = weights((12, 8), (8, 8), dtype=torch.float32)
    ids, x = torch.tensor([1, 5, 1]), torch.ones(3, 8)
    tied = lambda: linear(bi_kernels.embedding(ids, table), table).sum().backward()
    grads = MainGrads([table, square])
    with pytest.raises(ValueError, match=r"^embedding: weight is both an embedding's and a product's.* `tied` of Main"):
        tied()
    with pytest.warns(UserWarning, match="^linear: a backward comes to weight twice, so that its gradient depends"):
        linear(linear(x, square), square).sum().backward()
    grads.release()
    MainGrads([table, square], tied=[table])
    with warnings.catch_warnings(action="error"):
        tied()
        y = linear(x, square).sum()
        y.backward(retain_graph=True)
        y.backward()


def test_a_step_that_trains_nothing_or_is_not_finished_is_told():
    (p,) = weights((6, 4))
    grads, other = MainGrads([p]), torch.optim.SGD([p], lr=1.0)
    p.main_grad += 1
    grads.join()
    other.step()
    with pytest.warns(UserWarning, match=r"^MainGrads: finish was called, and no optimizer has the masters"):
        grads.finish()
    optimizer = torch.optim.SGD(grads.masters, lr=1.0)
    with warnings.catch_warnings(action="error"):
        for _ in range(2):
            grads.join()
            grads.join()
            optimizer.step()
            grads.finish()
        grads.join()
        grads.finish()  # a step that was skipped
    p.main_grad += 1
    grads.join()
    optimizer.step()
    with pytest.raises(ValueError, match="^MainGrads: join was called where the masters of the step before"):
        grads.join()
    state = copy.deepcopy(p.detach())
    grads.finish()
    assert (p != state).all()
    p.main_grad += 1
    grads.join()
    grads.drop()
    assert not p.main_grad.any() and grads.state_dict()


@pytest.mark.parametrize("which", ["another", "frozen", "equal"])
def test_a_tied_parameter_that_is_not_given_is_refused(which):
    table, other, frozen = weights((6, 4), (6, 4), (6, 4))
    frozen.requires_grad_(False)
    tied = {"another": other, "frozen": frozen, "equal": torch.nn.Parameter(table.detach().clone())}[which]
    why = {"frozen": "requires no gradient, expected one that does"}.get(which, "is not among the parameters given")
    with pytest.raises(ValueError, match=f"^MainGrads: tied holds a parameter that {why}$"):
        MainGrads([table, frozen], tied=[tied])


def test_masters_get_every_gradient_whatever_the_loop_looks_like():
    x, dy = (torch.randn(8, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (40, 12))
    for zeroed in (
        lambda optimizer: None,
        lambda optimizer: optimizer.zero_grad(),
        lambda optimizer: optimizer.zero_grad(False),
    ):
        (weight,) = weights((24, 40))
        before, grads = weight.detach().clone(), MainGrads([weight])
        optimizer = torch.optim.SGD(grads.masters, lr=1.0)
        for _ in range(2):
            zeroed(optimizer)
            linear(x, weight[:12]).backward(dy)  # a view: its gradient is in .grad
            linear(x, weight)[:, 12:].backward(dy)
            grads.join()
            assert weight.grad is None and grads.masters[0].grad is weight.main_grad and weight.main_grad.all()
            optimizer.step()
            grads.finish()
        assert (weight != before).float().mean() > 0.9


# Saved and resumed

STEPS, LENGTHS = 3, (5, 9)


class Run:
    """A training run. seed: of the weights that it begins with; given: what MainGrads is told besides."""

    def __init__(self, seed: int = 0, **given):
        self.model = Decoder(CONFIGS["world"], seed=seed)
        self.grads = MainGrads(self.model.named_parameters(), self.model.tied, **given)
        self.optimizer = torch.optim.AdamW(self.grads.masters, lr=2.0**-6)
        self.done = 0

    def backward(self) -> None:
        for group in self.grads.mine:
            g = torch.Generator().manual_seed(100 * self.done + group)
            ids, targets = torch.randint(0, self.model.config.vocab, (2, sum(LENGTHS)), generator=g)
            self.model.logprobs(ids, targets, packed(LENGTHS, "cpu"))[0].sum().neg().backward()
            self.grads.close(group)

    def step(self) -> None:
        self.backward()
        self.grads.join()
        self.grads.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.grads.finish()
        self.done += 1

    def state(self) -> dict:
        return {"done": self.done, "grads": self.grads.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict) -> None:
        self.grads.load_state_dict(state["grads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]

    def digest(self) -> str:
        every = [*self.model.parameters(), *self.grads.masters]
        return hashlib.sha256(b"".join(t.detach().view(torch.uint8).numpy().tobytes() for t in every)).hexdigest()


@pytest.mark.parametrize("given", slow_but([{}, {"groups": 3}], {}))
def test_a_run_resumed_after_any_step_ends_in_the_same_bits(given):
    whole, states = Run(**given), []
    for _ in range(STEPS):
        states.append(copy.deepcopy(whole.state()))
        whole.step()
    assert [state["done"] for state in states] == [*range(STEPS)]
    for state in states[1:]:
        resumed = Run(seed=1, **given)
        assert resumed.digest() != whole.digest()
        resumed.load(state)
        while resumed.done < STEPS:
            resumed.step()
        assert resumed.digest() == whole.digest(), state["done"]


def test_weights_that_are_loaded_are_not_undone_by_the_masters():
    p, q = weights((6, 4), (5,))
    grads = MainGrads([p, q])
    optimizer = torch.optim.SGD(grads.masters, lr=1.0)
    grads.masters[1].data += 2.0**-14  # below what bf16 shows: weights that nobody loaded keep it
    kept = grads.masters[1].detach().clone()
    with torch.no_grad():
        p.copy_(torch.full((6, 4), 3.0))
    grads.join()
    optimizer.step()
    grads.finish()
    assert (p == 3).all() and (grads.masters[0] == 3).all()
    assert grads.masters[1].equal(kept) and grads.state_dict()["masters"][0].eq(3).all()


def test_a_state_within_a_step_or_of_something_else_is_refused_and_changes_nothing():
    p, q = weights((6, 4), (5,))
    grads = MainGrads([("first", p), ("second", q)])
    state = copy.deepcopy(grads.state_dict())
    assert state["names"] == ["first", "second"]
    p.main_grad += 1
    with pytest.raises(ValueError, match="^MainGrads: state_dict was called within a step, expected after finish$"):
        grads.state_dict()
    grads.finish()
    for name, other in (("names", ["first", "third"]), ("shapes", [(4, 6), (5,)]), ("contract", 0), ("shared", (0, 2))):
        before = p.detach().clone()
        with pytest.raises(ValueError, match=f"^MainGrads: the state's {name} is "):
            grads.load_state_dict(state | {name: other, "masters": [m + 1 for m in state["masters"]]})
        assert p.equal(before)
    with pytest.raises(ValueError, match="^MainGrads: the state's contract is None, expected "):
        grads.load_state_dict({"state": {}})


# The norm


@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4), cut=st.integers(0, 4))
def test_the_norm_is_one_tree_however_the_numbers_are_shared(sizes, cut):
    g = torch.Generator().manual_seed(sum(sizes))
    parts = [torch.randn(size, generator=g) * 10.0 ** float(torch.randn((), generator=g)) for size in sizes]
    rooms = [torch.nn.functional.pad(t, (0, -len(t) % BLOCK)) for t in parts]
    flat = torch.cat([*rooms, torch.zeros(cut * BLOCK)])
    whole = total(torch.cat([block_sums(t, squared=True) for t in parts]))
    at = min(cut, len(flat) // BLOCK) * BLOCK
    shared = torch.cat([block_sums(flat[:at], squared=True), block_sums(flat[at:], squared=True)])
    assert whole.equal(total(shared[: sum(map(len, rooms)) // BLOCK]))
    exact = sum(t.double().square().sum() for t in parts)
    assert abs(whole.double() - exact) <= exact * 2.0**-18


def test_gradients_are_scaled_to_the_norm_and_no_further():
    p, q = weights((40, 40), (5,))
    grads = MainGrads([p, q])
    p.main_grad += 3.0
    q.main_grad += 4.0
    norm = grads.clip_grad_norm_(2.0**20)
    assert (p.main_grad == 3).all() and norm.equal(torch.tensor(9.0 * 1600 + 16 * 5).sqrt())
    grads.clip_grad_norm_(1.0)
    assert abs(grads.clip_grad_norm_(1.0).item() - 1) < 2.0**-18
    p.main_grad[0, 0] = torch.inf
    with pytest.raises(ValueError, match="^MainGrads: the gradients' norm is inf, expected a finite one$"):
        grads.clip_grad_norm_(1.0, error_if_nonfinite=True)
    for wrong, kind in ((0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(kind, match="^MainGrads: max_norm is "):
            grads.clip_grad_norm_(wrong)


def test_groups_have_the_norm_of_one_fold_where_their_gradients_are_the_same():
    norms = []
    for how in ({}, {"groups": 2}):
        p, q = weights((40, 40), (5,))
        grads = MainGrads([p, q], **how)
        for group in grads.mine:
            if group == 0:
                g = torch.Generator().manual_seed(3)
                p.main_grad += torch.randn(40, 40, generator=g)
                q.main_grad += torch.randn(5, generator=g)
            grads.close(group)
        grads.join()
        norms.append(grads.clip_grad_norm_(1.0))
    assert norms[0].equal(norms[1]) and norms[0] > 30


def test_gradients_that_are_not_joined_or_cut_over_ranks_are_not_clipped():
    p, q = weights((40, 40), (5,))
    grads = MainGrads([p, q], groups=2)
    p.main_grad += 3.0
    grads.close(0)
    with pytest.raises(ValueError, match="^MainGrads: clip_grad_norm_ was called before join, expected after it$"):
        grads.clip_grad_norm_(1.0)
    p.cut = (0, 40, 80)
    with pytest.raises(ValueError, match="^MainGrads: parameter 0 is cut over ranks, expected whole weights"):
        grads.clip_grad_norm_(1.0)


def test_a_step_that_was_begun_is_dropped_by_a_load():
    table, q = weights((6, 4), (5,))
    grads = MainGrads([table, q], tied=[table], groups=2)
    state = copy.deepcopy(grads.state_dict())
    table.embedding_main_grad += 1.0
    with pytest.raises(ValueError, match="^MainGrads: state_dict was called within a step"):
        grads.state_dict()
    grads.close(0)
    q.grad = torch.ones_like(q)
    grads.load_state_dict(state)
    for group in grads.mine:
        grads.close(group)
    grads.join()
    assert not table.main_grad.any() and not q.main_grad.any()


# What it cannot hold


def refused(*args, **given) -> str:
    with pytest.raises((TypeError, ValueError)) as error:
        MainGrads(*args, **given)
    return str(error.value)


def test_what_it_cannot_hold_is_one_sentence():
    p, q = weights((6, 4), (5,))
    q.requires_grad_(False)
    of = "expected what model.parameters() returns"
    assert refused(p) == f"MainGrads: parameters is of type Parameter, {of}"
    assert refused(3) == f"MainGrads: parameters is of type int, {of}"
    assert refused([p, "q"]) == "MainGrads: parameter 1 is of type str, expected a parameter"
    said = "expected fp32, fp16 or bf16 on a device"
    double = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    assert refused([("w", double)]) == f"MainGrads: w is of dtype torch.float64, {said}"
    assert refused([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))]).endswith(f"torch.complex64, {said}")
    meta = torch.nn.Parameter(torch.zeros(3, device="meta"))
    assert refused([meta]) == f"MainGrads: parameter 0 is on the meta device, {said}"
    assert refused([p, q], tied=[q]).startswith("MainGrads: tied holds a parameter that requires no gradient")
    first = MainGrads([p])
    assert refused([("w", p)]) == "MainGrads: w has another MainGrads' main_grad, expected one that was released"
    first.release()
    second = MainGrads([p])
    del second  # nobody steps with it any more
    assert MainGrads([p]).parameters[0] is p


def test_a_model_with_buffers_is_copied_and_pickled():
    model = torch.nn.Linear(4, 4, bias=False)
    grads = MainGrads(model.parameters())
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert copied.weight.equal(loaded.weight) and len(grads.masters) == 1
