"""`batch_invariant_mode`: models of other libraries keep their bits, and nothing is left behind."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bi_kernels import MainGrads, TokenLayout, batch_invariant_mode
from bi_kernels.mode.mode import ROUTES

ROWS, WIDTH = 7, 48
NEAR = 2.0**-7  # of bf16


class Gpt(nn.Module):
    """A decoder in the style of a short training script: functions of PyTorch, and parameters used as they are."""

    def __init__(self, vocabulary: int = 64, width: int = WIDTH, heads: int = 3, layers: int = 2):
        super().__init__()
        self.heads, self.embedding = heads, nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        made = lambda *shape: nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)
        self.qkv = nn.ParameterList(made(3 * width, width) for _ in range(layers))
        self.out = nn.ParameterList(made(width, width) for _ in range(layers))
        self.up = nn.ParameterList(made(2 * width, width) for _ in range(layers))
        self.down = nn.ParameterList(made(width, 2 * width) for _ in range(layers))
        self.steps = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(layers))
        self.scale = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits (batch, length, vocabulary)."""
        x = F.rms_norm(self.embedding(ids), (WIDTH,))
        for qkv, out, up, down, step, scale in zip(
            self.qkv, self.out, self.up, self.down, self.steps, self.scale, strict=True
        ):
            q, k, v = F.linear(x * (1 + scale), qkv).unflatten(-1, (3, self.heads, -1)).unbind(2)
            q, k = (F.normalize(t, dim=-1) for t in (q, k))
            y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
            x = x + y.transpose(1, 2).flatten(2) @ out.T
            x = x + step * (F.relu(x @ up.T).square() @ down.T)
        return 15 * torch.tanh(self.head(x) / 15)


class Vit(nn.Module):
    """A vision transformer as libraries write it: patches, a class token, learned places, LayerNorm, GELU."""

    def __init__(self, width: int = WIDTH, heads: int = 3):
        super().__init__()
        self.heads, self.patches = heads, nn.Conv2d(3, width, 4, 4)
        self.token, self.places = (nn.Parameter(torch.randn(1, n, width)) for n in (1, 10))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma, self.head = nn.Parameter(torch.randn(width)), nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (images, classes)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.gamma * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x).mean(1))


MODELS = {
    "gpt": (Gpt, lambda g: torch.randint(0, 64, (ROWS, 19), generator=g)),
    "vit": (Vit, lambda g: torch.randn(ROWS, 3, 12, 12, generator=g)),
}


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Tells whether PyTorch's result is the same but for rounding."""
    found, expected = found.double(), expected.double()
    return bool((found - expected).norm() <= NEAR * expected.norm())


def step(
    model: nn.Module, inputs: Tensor, counts: tuple[int, ...], strict: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns results and gradients of a step of micro-batches of `counts` rows."""
    grads, found = MainGrads(model.parameters()), []
    for rows in inputs.split(counts):
        with TokenLayout.packed(range(len(rows) + 1)), batch_invariant_mode(strict=strict):  # a row is a sequence
            y = model(rows)
            found.append(y.detach())
            weight = torch.linspace(-1, 1, y.shape[-1])
            (y * weight).sum().backward()
    grads.join()
    gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    grads.release()
    return torch.cat(found), gradients


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_library_keeps_its_bits(name):
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make(), draw(torch.Generator().manual_seed(1))
    whole, one = step(model, inputs, (ROWS,)), step(model, inputs, (1,) * ROWS)
    three = step(model, inputs, (2, 3, 2))
    for found, gradients in (one, three):
        assert torch.equal(found, whole[0])
        assert [n for n, g in gradients.items() if not torch.equal(g, whole[1][n])] == []
    for p in model.parameters():
        p.grad, p.main_grad = None, None
    y = model(inputs)
    (y * torch.linspace(-1, 1, y.shape[-1])).sum().backward()
    assert is_near(whole[0], y.detach())
    assert [n for n, p in model.named_parameters() if not is_near(whole[1][n], p.grad)] == []


def test_without_a_route_the_gradients_of_a_product_follow_the_split(monkeypatch):
    """The control of the test above: PyTorch's own product and its sum of a weight's gradient."""
    for route in (F.linear, torch.Tensor.__matmul__):
        monkeypatch.setitem(ROUTES, route, None)
    torch.manual_seed(0)
    model, inputs = Gpt(), MODELS["gpt"][1](torch.Generator().manual_seed(1))
    whole, one = (step(model, inputs, counts, strict=False) for counts in ((ROWS,), (1,) * ROWS))
    assert any(not torch.equal(g, whole[1][n]) for n, g in one[1].items())


FUNCTIONS = {
    "mm": lambda x, w: x.mm(w),
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "addmm of a part": lambda x, w: torch.addmm(w[0], x, w, beta=0.5),
    "matmul": lambda x, w: x[:, None] @ w,
    "bmm": lambda x, w: torch.bmm(x[:, None], w.expand(len(x), -1, -1)),
    "softmax": lambda x, w: F.softmax(x, -1),
    "log_softmax": lambda x, w: x.log_softmax(-1),
    "mean": lambda x, w: x.mean(-1, keepdim=True),
    "mean of two": lambda x, w: x.unflatten(-1, (6, 8)).mean((1, 2)),
    "sum": lambda x, w: x.sum(1),
    "layer_norm": lambda x, w: F.layer_norm(x, (WIDTH,), w[0], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, (WIDTH,), w[0]),
    "topk": lambda x, w: x.round().topk(5).indices,
    "norm": lambda x, w: torch.linalg.vector_norm(x, dim=-1),
    "cross_entropy": lambda x, w: F.cross_entropy(x, x.argmax(-1), reduction="none"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_gives_a_result_the_dtype_that_pytorch_gives_it(name, dtype):
    x, w = torch.randn(3, WIDTH).to(dtype), torch.randn(WIDTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            expected = FUNCTIONS[name](x, w)
        except RuntimeError:  # PyTorch's own takes no mixture
            pytest.skip("no such function of PyTorch's")
        with batch_invariant_mode(strict=True):
            assert FUNCTIONS[name](x, w).dtype == expected.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_its_bits_whatever_the_batch(name, dtype):
    g = torch.Generator().manual_seed(2)
    x, w = (torch.randn(*shape, generator=g).to(dtype) for shape in ((33, WIDTH), (WIDTH, WIDTH)))
    call = FUNCTIONS[name]
    with batch_invariant_mode(strict=True) as mode:
        whole = call(x, w)
        alone = [call(x[i : i + 1], w) for i in range(len(x))]
    assert torch.equal(torch.cat(alone), whole) and mode.routed
    if whole.is_floating_point():
        assert is_near(whole, call(x, w))


def test_complex_products_have_their_bits_wherever_they_lie():
    """A CPU fuses them, but not at the end of a tensor: rotary embeddings of DeepSeek-V2 are such products."""
    g = torch.Generator().manual_seed(0)
    a, b, dy = (torch.randn(40, 2, generator=g) for _ in range(3))

    def product(n: int) -> Tensor:
        x = a[:n].clone().requires_grad_()
        with batch_invariant_mode():
            y = torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(b[:n]))
        y.backward(dy[:n])
        return torch.cat([y.detach(), x.grad], 1)

    assert all(torch.equal(product(n), product(40)[:n]) for n in (1, 3, 5, 7))


def test_ties_are_broken_by_index():
    with batch_invariant_mode():
        at = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]]).topk(2).indices
    assert at.tolist() == [[1, 2]]


def test_what_has_no_form_is_named_or_refused():
    x = torch.randn(3, 4)
    with batch_invariant_mode() as mode:
        x.cumsum(0)
    assert "cumsum" in mode.report() and mode.unknown
    with pytest.raises(ValueError, match="cumsum"), batch_invariant_mode(strict=True):
        x.cumsum(0)


def test_the_mode_leaves_nothing_behind():
    x, seen = torch.randn(5, 4), []
    with pytest.raises(KeyError), batch_invariant_mode() as mode:
        raise KeyError
    with batch_invariant_mode() as mode:
        thread = threading.Thread(target=lambda: seen.append(x.mean(-1)))
        thread.start()
        thread.join()
        assert not mode.routed, "another thread has no mode"
    x.mean(-1)
    assert not mode.routed


def test_a_layout_says_where_padding_is():
    torch.manual_seed(0)
    model, g = Gpt(layers=1), torch.Generator().manual_seed(3)
    ids, lengths, found = torch.randint(0, 64, (3, 12), generator=g), [12, 4, 7], []
    for calls in ([[0, 1, 2]], [[0], [1], [2]]):
        grads = MainGrads(model.parameters())
        for rows in calls:
            width = max(lengths[i] for i in rows)
            with TokenLayout.padded([lengths[i] for i in rows], width), batch_invariant_mode(strict=True):
                y = model(ids[rows, :width])
                sum(y[j, : lengths[i]].square().sum() for j, i in enumerate(rows)).backward()
        grads.join()
        found.append([p.main_grad.clone() for p in model.parameters()])
        grads.release()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_a_checkpoint_computes_again_is_in_the_mode_or_refused():
    torch.manual_seed(0)
    model, g = Gpt(layers=1), torch.Generator().manual_seed(3)
    ids, lengths, found = torch.randint(0, 64, (3, 12), generator=g), [12, 4, 7], []
    for again in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        for calls in ([[0, 1, 2]], [[0], [1], [2]]):
            grads = MainGrads(model.parameters())
            for rows in calls:
                layout = TokenLayout.padded([lengths[i] for i in rows], max(lengths[i] for i in rows))
                given = ids[rows, : layout.rows // len(rows)]
                beside = torch.zeros(*given.shape, 64, requires_grad=True)  # as a reentrant checkpoint wants one
                run = lambda t, beside: model(t) + beside
                with layout, batch_invariant_mode(strict=True) as mode:
                    if again:
                        with pytest.raises(ValueError, match="called in a checkpoint.* checkpoint mode.within"):
                            checkpoint(run, given, beside, **again)
                        run = functools.partial(checkpoint, layout.within(mode.within(run)), **again)
                    y = run(given, beside)
                sum(y[j, : lengths[i]].square().sum() for j, i in enumerate(rows)).backward()
            grads.join()
            found.append([p.main_grad.clone() for p in model.parameters()])
            grads.release()
    assert all(found[0][0].any() and torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_a_weight_on_the_left_is_folded_over_tokens_too():
    torch.manual_seed(0)
    x, u, found = torch.randn(6, WIDTH, 9), torch.randn(6, ROWS, 9), []
    for split in ([6], [1] * 6, [2, 4]):
        w = nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))
        grads = MainGrads([w])
        with batch_invariant_mode(strict=True):
            for part, upstream in zip(x.split(split), u.split(split)):
                with TokenLayout.packed([9 * i for i in range(len(part) + 1)]):
                    ((w @ part) * upstream).sum().backward()
        grads.join()
        found.append(w.main_grad)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert (found[0] - torch.einsum("bmt,bkt->mk", u, x)).abs().max() < NEAR


def test_the_gradient_of_a_stack_of_matrices_is_named():
    stack = nn.Parameter(torch.randn(3, 5, 4))
    with batch_invariant_mode() as mode:
        torch.bmm(torch.randn(3, 2, 5), stack)
    assert "the gradient of a parameter in bmm" in mode.report()


def test_half_of_a_parameter_s_columns_keeps_pytorch_s_gradient():
    """Its main_grad would be in pieces."""
    weight = nn.Parameter(torch.randn(6, 8))
    weight.main_grad = torch.zeros(6, 8)
    with batch_invariant_mode() as mode:
        a, b = weight.chunk(2, -1)
        (torch.ones(3, 4) @ a.T + torch.ones(3, 4) @ b.T).sum().backward()
    assert torch.equal(weight.grad, torch.full((6, 8), 3.0)) and "chunk" in mode.report()
