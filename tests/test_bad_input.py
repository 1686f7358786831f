"""Bad input is one clear sentence that names the op, the argument, its value and what is allowed: the same one when the
same call was made right before, whatever an op remembers of that."""

import os
import subprocess
import sys
from fractions import Fraction
from math import inf, nan

import pytest
import torch

import bi_kernels as bi
from bi_kernels.audit.inputs import draw, generator
from bi_kernels.ops.norm import WIDEST
from bi_kernels.tokens import TokenLayout


def numbers(*shape: int) -> torch.Tensor:
    return draw("normal", shape, torch.bfloat16, generator("cpu", *shape))


def changed(t: torch.Tensor, at: int, value: float) -> torch.Tensor:
    t = t.clone()
    t[at] = value
    return t


X, W, BIAS, NORM, MASK = numbers(5, 32), numbers(24, 32), numbers(24), numbers(32), torch.zeros(5, 32) > 0
T, IGNORED = torch.tensor([1, 0, 23, 7, 7]), torch.full((5,), -100)
HEADS, POSITIONS, TABLE = numbers(6, 2, 16), torch.arange(6), bi.rope_table(512, 16)
Q, K, PAGES = numbers(6, 4, 16), numbers(6, 2, 16), numbers(5, 8, 2, 16)
B, KB, CU = Q.view(2, 3, 4, 16), K.view(2, 3, 2, 16), torch.tensor([0, 2, 6])
PACKED = {"q": Q, "k": K, "v": K, "cu_seqlens_q": CU, "lengths_k": None}
PAGED = {"k": PAGES, "v": PAGES, "block_table": torch.tensor([[0, 1], [4, 2]]), "lengths_k": torch.tensor([16, 9])}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048, "low_freq_factor": 4.0}
LLAMA3 |= {"high_freq_factor": 4.0}
RIGHT = {  # op: a call that nothing is wrong with
    "silu": {"x": X},
    "gelu": {"x": X, "approximate": "tanh"},
    "swiglu": {"gate": X, "up": X},
    "geglu": {"gate": X, "up": X, "approximate": "none"},
    "clamped_swiglu": {"gate": X, "up": X},
    "soft_cap": {"x": X, "cap": 30.0},
    "add": {"x": X, "residual": X},
    "scale": {"x": X, "factor": 0.5},
    "bias_add": {"x": X, "bias": NORM},
    "mask_fill": {"x": X, "mask": MASK, "value": 0.0},
    "cast": {"x": X, "dtype": torch.float32},
    "rope": {"x": HEADS, "table": TABLE, "positions": POSITIONS},
    "rope_table": {"positions": 4, "head_dim": 16},
    "linear": {"x": X, "weight": W, "bias": BIAS},
    "matmul": {"a": X, "b": W.t().contiguous()},
    "rms_norm": {"x": X, "weight": NORM, "eps": 0.5},
    "qk_norm": {"x": X[:, None], "weight": NORM},
    "add_rms_norm": {"x": X, "residual": X, "weight": NORM},
    "layer_norm": {"x": X, "weight": NORM, "bias": NORM},
    "row_sum": {"x": X, "scale": 0.5},
    "softmax": {"x": X},
    "scaled": {"x": X, "weight": NORM},
    "shifted": {"x": X, "weight": NORM},
    "embedding": {"ids": T, "weight": W, "padding_id": 1},
    "token_logprob": {"logits": numbers(5, 24), "targets": T},
    "log_softmax": {"logits": X},
    "lm_head_logprob": {"hidden": X, "weight": W, "targets": T},
    "attention": {"q": B, "k": KB, "v": KB, "lengths_k": torch.tensor([3, 1]), "window": 2},
}
NO_FP32_MIX = "torch.float32 … torch.bfloat16"


def bad_type(words: str, **instead) -> tuple:
    return TypeError, words, instead


def bad_value(words: str, **instead) -> tuple:
    return ValueError, words, instead


def scaled(error: type, words: str, scaling: object, **more) -> tuple:
    return error, words, {"scaling": scaling} | more


BAD = {  # op: [(error, words of its sentence, arguments in place of those that are right)]
    "silu": [
        bad_value("x is on meta … supported are cuda, and cpu", x=X.to("meta")),
        bad_type("x is a list … torch.Tensor", x=[1.0]),
        bad_type("x is … None … torch.Tensor", x=None),
    ],
    "gelu": [bad_value("approximate is 'tan' … 'none' or 'tanh'", approximate="tan")],
    "swiglu": [
        bad_type("up … torch.float16 … torch.bfloat16", up=X.half()),
        bad_value("up has shape (5, 8) … (5, 32)", up=X[:, :8]),
    ],
    "geglu": [
        bad_value("up has shape (5, 8) … (5, 32)", up=X[:, :8]),
        bad_value("approximate is 'erf' … 'none' or 'tanh'", approximate="erf"),
    ],
    "clamped_swiglu": [
        bad_value("limit is 0.0 … expected a … number", limit=0.0),
        bad_value(f"alpha is {2.0**200!r} … expected a … number", alpha=2.0**200),
        bad_value("offset is nan … expected a … number", offset=nan),
        bad_type("offset is None … expected a … number", offset=None),
    ],
    "soft_cap": [
        *[bad_value(f"cap is {cap!r} … expected a … number", cap=cap) for cap in (0, -1.0, inf, nan)],
        bad_type("cap is '30' … expected a … number", cap="30"),
    ],
    "add": [
        bad_type(f"residual … {NO_FP32_MIX}", residual=X.float()),
        bad_value("residual is on meta … cpu", residual=X.to("meta")),
        bad_value("residual has shape (32,) … (5, 32)", residual=X[0]),
        bad_type("residual is a float … torch.Tensor", residual=1.0),
        bad_type("residual is … None … torch.Tensor", residual=None),
    ],
    "scale": [bad_type("factor … 'a'", factor="a")],
    "bias_add": [
        bad_type("bias … torch.float16 … torch.bfloat16", bias=W[0].half()),
        bad_value("bias has shape (24,) … (32,)", bias=BIAS),
    ],
    "mask_fill": [
        bad_value("mask is on meta … cpu", mask=MASK.to("meta")),
        bad_value("mask has shape (3, 32) … (5, 32)", mask=MASK[:3]),
        bad_type("mask … torch.int32 … torch.bool", mask=MASK.int()),
        bad_type("mask is … None … torch.Tensor", mask=None),
        bad_type("value … None", value=None),
    ],
    "cast": [
        bad_type("dtype is torch.float8_e4m3fn … supported are bf16, fp16, fp32", dtype=torch.float8_e4m3fn),
        bad_type("dtype is … supported are", dtype="bf16"),
    ],
    "rope": [
        bad_value("x has shape (16,) … (..., heads, head_dim)", x=HEADS[0, 0]),
        bad_value("17 … even", x=numbers(6, 2, 17)),
        bad_value("positions … cu_seqlens", positions=None),
        bad_value("positions … cu_seqlens", cu_seqlens=torch.tensor([0, 6])),
        bad_value("positions is on meta … cpu", positions=POSITIONS.to("meta")),
        bad_type("positions … torch.float32 … integers", positions=POSITIONS.float()),
        bad_type("positions … torch.bool … integers", positions=POSITIONS > 0),
        bad_value("positions has shape (5,) … (6,)", positions=POSITIONS[:5]),
        bad_value("positions has shape (2, 6) … (6,)", positions=POSITIONS.expand(2, 6)),
        bad_type("positions is a list … torch.Tensor", positions=[0, 1]),
        *[
            bad_value(f"cu_seqlens … {allowed}", positions=None, cu_seqlens=torch.tensor(ends))
            for ends, allowed in (
                ([0, 2, 5], "end at 6"),
                ([1, 6], "start at 0"),
                ([0, 4, 2, 6], "never decrease"),
                ([[0, 6]], "one dimension"),
                ([0.0, 6.0], "integers"),
                ([False, True], "integers"),
                ([], "integers"),
            )
        ],
        bad_value(
            "x has shape (1, 6, 2, 16) … (tokens, heads, head_dim)",
            x=HEADS[None],
            positions=None,
            cu_seqlens=torch.tensor([0, 6]),
        ),
        bad_type("table is … None … RopeTable", table=None),
        bad_type("table is … Tensor … RopeTable", table=TABLE.cos),
        bad_type("sin … None … torch.Tensor", table=TABLE._replace(sin=None)),
        bad_value("cos is on meta … cpu", table=TABLE._replace(cos=TABLE.cos.to("meta"))),
        bad_type("table.cos … torch.float64 … torch.float32", table=bi.RopeTable(*(t.double() for t in TABLE))),
        bad_value("table.cos has shape (8, 16) … (8, 8)", table=bi.rope_table(8, 32)),
        bad_value("table.sin has shape (9, 8) … (512, 8)", table=TABLE._replace(sin=TABLE.sin[:9])),
        bad_value("table.cos has shape () … 8", table=bi.RopeTable(*(t[0, 0] for t in TABLE))),
        bad_value("(512, 0) … (512, 8) … or fewer columns", table=bi.RopeTable(*(t[:, :0] for t in TABLE))),
    ],
    "rope_table": [
        bad_value("positions is 0 … at least 1", positions=0),
        bad_value("head_dim is 7 … even", head_dim=7),
        scaled(TypeError, "scaling is 'yarn' … a dict with a rope_type", "yarn"),
        scaled(ValueError, "scaling's rope_type is None … linear, ntk, yarn, llama3", {}),
        scaled(ValueError, "scaling's rope_type is 'dynamic' … linear, ntk, yarn, llama3", {"rope_type": "dynamic"}),
        scaled(ValueError, "of rope_type 'linear' has no factor … expected factor", {"rope_type": "linear"}),
        scaled(ValueError, "of rope_type 'yarn' has 'low_freq_factor' … beta_fast", YARN | {"low_freq_factor": 1}),
        scaled(ValueError, "scaling's factor is 0 … a positive number", {"rope_type": "linear", "factor": 0}),
        scaled(TypeError, "scaling's factor is '8' … expected a number", {"rope_type": "linear", "factor": "8"}),
        scaled(TypeError, "scaling's truncate is 1 … True or False", YARN | {"truncate": 1}),
        scaled(ValueError, "rope_theta is 1000000.0 … theta, which is 10000", YARN | {"rope_theta": 1e6}),
        scaled(ValueError, "scaling's beta_slow is 1 … less than beta_fast", YARN | {"beta_fast": 1}),
        scaled(ValueError, "scaling's low_freq_factor is 4.0 … high_freq_factor", LLAMA3),
        scaled(ValueError, "theta is 1.0 … more than 1", YARN, theta=1.0),
    ],
    "linear": [
        bad_type("weight has dtype torch.float16 … x has torch.bfloat16 … equal", weight=W.half()),
        bad_type(f"bias … {NO_FP32_MIX}", bias=BIAS.float()),
        bad_value("weight is on meta … x is on cpu … one device", weight=W.to("meta")),
        bad_value("bias is on meta … cpu", bias=BIAS.to("meta")),
        bad_value("x has shape (5, 4) … (..., 32) … (24, 32)", x=X[:, :4]),
        bad_value("x has shape () … (..., 32)", x=X[0, 0]),
        bad_value("weight has shape (32,) … (N, K)", weight=W[0]),
        bad_value("bias has shape (3,) … (24,)", bias=BIAS[:3]),
        bad_type("weight is … None … torch.Tensor", weight=None),
    ],
    "matmul": [
        bad_type(f"b … {NO_FP32_MIX}", b=W.t().float()),
        bad_value("(5, 32) … (24, 32) … (K, N)", b=W),
        bad_value("a has shape (32,) … (..., M, K)", a=X[0]),
    ],
    "rms_norm": [
        bad_type("eps is '1e-6' … number", eps="1e-6"),
        bad_type("eps is Fraction(1, 2) … number", eps=Fraction(1, 2)),
        bad_value("weight has shape (8,) … (32,)", weight=NORM[:8]),
        bad_value("weight has shape (24, 32) … (32,)", weight=W),
        bad_value("weight is on meta … cpu", weight=NORM.to("meta")),
        bad_type("weight has dtype torch.float16 … x has torch.bfloat16 … torch.float32", weight=NORM.half()),
        bad_value("offset is 1.0 and weight is None … a weight", weight=None, offset=1.0),
        bad_value("offset is inf … number of fp32", offset=inf),
        bad_type("offset is None … number", offset=None),
        bad_value(f"the last dimension of x is 0 … 1 to {WIDEST}", x=X[:, :0], weight=NORM[:0]),
        bad_value(
            f"the last dimension of x is {WIDEST + 1} … 1 to {WIDEST}",
            x=torch.zeros(1, WIDEST + 1),
            weight=torch.zeros(WIDEST + 1),
        ),
    ],
    "qk_norm": [bad_value("x has shape (32,) … (..., heads, head_dim)", x=NORM)],
    "layer_norm": [
        bad_type("bias has dtype torch.float16 … x has torch.bfloat16 … or bias torch.float32", bias=NORM.half()),
        bad_value("bias has shape (8,) … (32,)", bias=NORM[:8]),
        bad_value("weight is on meta … cpu", weight=NORM.to("meta")),
        bad_value(f"the last dimension of x is 0 … 1 to {WIDEST}", x=X[:, :0], weight=None, bias=None),
        bad_value("x has shape (32,) … (..., heads, head_dim)", x=NORM, heads=True),
        bad_type("heads is 1 … True or False", heads=1),
        bad_value("eps is -1.0 … number from 0 on", eps=-1.0),
    ],
    "row_sum": [
        bad_value("x has shape () … (..., n)", x=X[0, 0]),
        bad_type("scale is '2' … number", scale="2"),
        bad_value("scale is nan … number of fp32", scale=nan),
        bad_type("out_dtype is torch.float64 … supported are bf16, fp16, fp32", out_dtype=torch.float64),
    ],
    "softmax": [
        bad_value("x has shape () … (..., n)", x=X[0, 0]),
        bad_type("out_dtype is 'bf16' … supported are bf16, fp16, fp32", out_dtype="bf16"),
    ],
    "scaled": [
        bad_value("weight has shape (8,) … does not broadcast to x's (5, 32)", weight=NORM[:8]),
        bad_value("weight has shape (1, 5, 32) … does not broadcast to x's (5, 32)", weight=X[None]),
        bad_value("weight is on meta … cpu", weight=NORM.to("meta")),
        bad_value("features is 3 … expected 1 to 2", features=3),
        bad_value("features is 1 … expected 2 to 2", weight=X, features=1),
        bad_type("features is 1.0 … integer", features=1.0),
    ],
    "shifted": [bad_type("weight is … None … torch.Tensor", weight=None)],
    "add_rms_norm": [
        bad_type("eps is None … number", eps=None),
        bad_value("residual has shape (2, 32) … (5, 32)", residual=X[:2]),
        bad_type("residual has dtype torch.float32 … x has torch.bfloat16", residual=X.float()),
        bad_value("residual is on meta … cpu", residual=X.to("meta")),
    ],
    "embedding": [
        bad_value("ids holds 24 at flat index 2 … 0 to 23", ids=changed(T, 2, 24)),
        bad_value("ids holds -1 at flat index 3 … 0 to 23", ids=changed(T, 3, -1).reshape(1, 5)),
        bad_type("ids has dtype torch.float32 … integers", ids=T.float()),
        bad_type("ids has dtype torch.bool … integers", ids=T > 3),
        bad_type("ids is a list … torch.Tensor", ids=[1, 2]),
        bad_value("weight has shape (32,) … (vocab, hidden)", weight=NORM),
        bad_value("weight is on meta … supported are cuda, and cpu", weight=W.to("meta")),
        *[bad_value(f"padding_id is {i} … None or 0 to 23", padding_id=i) for i in (24, -1)],
        *[bad_type(f"padding_id is {i!r} … None or", padding_id=i) for i in ("3", 2.5, Fraction(1))],
    ],
    "log_softmax": [
        bad_value("logits has shape (5, 0) … (..., V)", logits=torch.zeros(5, 0)),
        bad_value("logits has shape () … (..., V)", logits=torch.tensor(1.0)),
        bad_type("out_dtype is None … supported are bf16, fp16, fp32", out_dtype=None),
    ],
    "lm_head_logprob": [
        bad_value("targets has shape (0,) … at least one token", hidden=X[:0], targets=T[:0]),
        bad_value("hidden has shape (5, 32) … (32, 24) … (..., H) and (V, H)", weight=W.t()),
        bad_value("hidden has shape (5, 32) … (32,) … (V, H)", weight=NORM),
        bad_type("weight has dtype torch.float16 … hidden has torch.bfloat16 … equal", weight=W.half()),
        bad_value("weight is on meta … cpu … one device", weight=W.to("meta")),
        *[bad_value(f"keep_bytes is {n} … at least 0", keep_bytes=n) for n in (-1, nan)],
        bad_type("keep_bytes is '1 GB' … number", keep_bytes="1 GB"),
    ],
    "token_logprob": [
        bad_value("targets has shape (0,) … at least one token", logits=torch.zeros(0, 8), targets=T[:0]),
        bad_value("logits has shape (5, 0) … (..., V)", logits=torch.zeros(5, 0)),
    ],
    "attention": [
        bad_value("q has shape (6, 4, 16) … (batch, length, heads, D)", q=Q),
        bad_value("q has shape (2, 3, 4, 16) … (tokens, heads, D)", **PACKED | {"q": B}),
        bad_value("k has shape (6, 2, 16) … 4 dimensions", k=K, v=K),
        bad_value("k has shape (6, 2, 16) … v (5, 2, 16) … equal", **PACKED | {"v": K[:5]}),
        bad_value("q has 4 heads … k 0 … multiple", k=KB[:, :, :0], v=KB[:, :, :0]),
        bad_value("q has 2 heads … k 4 … multiple", q=KB, k=B, v=B),
        bad_value("heads of 16 … of 8 … equal widths", k=KB[..., :8], v=KB[..., :8]),
        *[bad_value(f"width {n} … 1 to 256", **dict.fromkeys("qkv", torch.zeros(2, 1, 1, n))) for n in (0, 257)],
        bad_value("k holds 1 sequences … 2, as q", k=KB[:1], v=KB[:1]),
        bad_value("k has 5 rows … q 6 … cu_seqlens_k", **PACKED | {"k": K[:5], "v": K[:5]}),
        *[
            bad_value(f"{name} is {n} … 0 to 3", **{"lengths_k": None, name: torch.tensor(n)})
            for name in ("lengths_q", "lengths_k")
            for n in ([3, 4], [-1, 3])
        ],
        bad_value("is [17, 1] … 0 to 16", **PAGED | {"lengths_k": torch.tensor([17, 1])}),
        bad_value("lengths_k has shape (1,) … (2,) integers", lengths_k=torch.tensor([3])),
        bad_value("lengths_q … torch.float32 … integers", lengths_q=torch.ones(2)),
        bad_value("torch.bool … integers", lengths_q=torch.tensor([True, False])),
        bad_value("lengths_q is given … expected both", lengths_q=torch.tensor([3, 2]), lengths_k=None),
        bad_value("cu_seqlens_k is given without", cu_seqlens_k=torch.tensor([0, 6])),
        *[
            bad_value(f"{name} … given with cu_seqlens_q", **PACKED | {name: value})
            for name, value in (("lengths_q", T[:2]), ("lengths_k", T[:2]), ("left_padded", True))
        ],
        bad_type("lengths_q is a list … torch.Tensor", lengths_q=[3, 2]),
        *[
            bad_value(f"cu_seqlens_q is {ends} … {allowed}", **PACKED | {"cu_seqlens_q": torch.tensor(ends)})
            for ends, allowed in (
                ([0, 4, 2, 6], "never decrease"),
                ([1, 6], "start at 0"),
                ([0, 5], "end at 6"),
                ([0, 7], "end at 6"),
            )
        ],
        bad_value("shape (1,) … (sequences + 1,)", **PACKED | {"cu_seqlens_q": torch.tensor([0])}),
        *[
            bad_value(f"cu_seqlens_k … {allowed}", **PACKED | {"cu_seqlens_k": torch.tensor(ends)})
            for ends, allowed in (([0, 2, 5], "end at 6"), ([0, 6], "expected 3, as cu_seqlens_q"))
        ],
        *[
            bad_value(f"block_table holds {held} … 0 to 4", **PAGED | {"block_table": torch.tensor(table)})
            for table, held in (([[0, -1], [2, 2]], "-1 to 2"), ([[0, 5], [2, 2]], "0 to 5"))
        ],
        bad_value("(1, 2) … (2, pages)", **PAGED | {"block_table": torch.tensor([[0, 1]])}),
        bad_value("block_table … lengths_k with it", **PAGED | {"lengths_k": None}),
        bad_value("block_table has no backward … no_grad", **PAGED | {"q": B.clone().requires_grad_()}),
        bad_value("window is 2 and causal is False", causal=False),
        bad_value("window is 0 … at least 1", window=0),
        *[bad_type(f"window is {n!r} … integer", window=n) for n in (2.0, Fraction(2))],
        *[bad_value(f"scale is {n!r} … number", scale=n) for n in (0, -1.0, nan, inf)],
        bad_type("scale is '1' … number", scale="1"),
        bad_type("k has dtype torch.float16 … q has torch.bfloat16 … equal", k=KB.half()),
        bad_type(f"v has dtype {NO_FP32_MIX.replace(' …', ' … q has')} … equal", v=KB.float()),
    ],
}
for name, trained in (("token_logprob", "logits"), ("lm_head_logprob", "hidden")):
    leaf = RIGHT[name][trained].clone().requires_grad_()
    BAD[name] += [
        bad_value("targets holds 24 at flat index 1 … 0 to 23 or -100", targets=changed(T, 1, 24)),
        bad_value("targets holds -2 at flat index 4 … 0 to 23 or -1", targets=changed(T, 4, -2), ignore_index=-1),
        bad_value("holds nothing but ignore_index -100, expected at least one", targets=IGNORED, **{trained: leaf}),
        bad_value("targets has shape (3,) … (5,)", targets=T[:3]),
        bad_value("targets is on meta … cpu … one device", targets=T.to("meta")),
        bad_type("targets has dtype torch.float32 … integers", targets=T.float()),
        *[bad_type(f"ignore_index is {i!r} … integer", ignore_index=i) for i in (None, "x", 2.5)],
        *[bad_value(f"temperature is {t!r} … number", temperature=t) for t in (0, 0.0, -1.0, nan)],
        *[bad_type(f"temperature is {t!r} … number", temperature=t) for t in ("1", None)],
    ]
CASES = [pytest.param(name, *row, id=f"{name}: {row[1]}") for name, rows in BAD.items() for row in rows]


def sentence(error: type, call, **given) -> str:
    with pytest.raises(error) as caught:
        call(**given)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 250, said
    return said


@pytest.mark.parametrize("name, error, words, instead", CASES)
def test_a_mistake_is_one_clear_sentence_whatever_was_right_before(name, error, words, instead):
    op, right = getattr(bi, name), RIGHT[name]
    said = sentence(error, op, **right | instead)
    assert said.startswith(f"{name}: ") and all(word in said for word in words.split(" … ")), said
    op(**right)
    assert sentence(error, op, **right | instead) == said


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "rope_table"])
def test_other_dtypes_are_refused(name):
    floating = lambda t: isinstance(t, torch.Tensor) and t.is_floating_point()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.complex64, torch.float64, torch.bool):
        given = {k: t.to(dtype) if floating(t) else t for k, t in RIGHT[name].items()}
        said = sentence(TypeError, getattr(bi, name), **given)
        assert said.startswith(f"{name}: "), said
        assert f"has dtype {str(dtype).removeprefix('torch.')}" in said and "supported are bf16, fp16, fp32" in said


PARAMETERS = [(name, k) for name, right in RIGHT.items() for k in ("weight", "bias", "b") if k in right]


@pytest.mark.parametrize("name, parameter", PARAMETERS)
def test_a_main_grad_that_cannot_be_added_to_is_refused_where_the_parameter_trains(name, parameter):
    op, p = getattr(bi, name), RIGHT[name][parameter].clone()
    given, what = RIGHT[name] | {parameter: p}, f"{name}: {parameter}.main_grad"
    p.main_grad = "none of the op's business"
    op(**given)
    p.requires_grad_()
    for buffer, error, words in (
        (torch.zeros_like(p), TypeError, "has dtype torch.bfloat16 … torch.float32"),
        ([0.0], TypeError, "has type list … torch.float32"),
        (torch.zeros(3), ValueError, f"has shape (3,) on cpu … {tuple(p.shape)} on cpu as {parameter}"),
        (torch.zeros(p.shape, device="meta"), ValueError, "on meta … on cpu"),
        (torch.zeros(*p.shape, 2)[..., 0], ValueError, "contiguous"),
    ):
        p.main_grad = buffer
        said = sentence(error, op, **given)
        assert said.startswith(what) and all(word in said for word in words.split(" … ")), said
    del p.main_grad
    with TokenLayout.packed([0, 2, 6]):
        said = sentence(ValueError, op, **given)
        assert said.startswith(f"{name}: ") and "has 5 tokens" in said and "6 rows" in said
        op(**RIGHT[name])  # no gradient, no layout


def test_the_embedding_s_own_buffer_is_held_to_the_same():
    weight = W.clone().requires_grad_()
    weight.embedding_main_grad = torch.zeros_like(W)
    said = sentence(TypeError, bi.embedding, ids=T, weight=weight)
    assert said.startswith("embedding: weight.embedding_main_grad has dtype torch.bfloat16, expected torch.float32")


def test_tokens_that_are_all_ignored_are_no_mistake_where_no_gradient_is_wanted():
    for name in ("token_logprob", "lm_head_logprob"):
        assert not any(y.any() for y in getattr(bi, name)(**RIGHT[name] | {"targets": IGNORED}))


LAYOUTS = [  # how one is made, its arguments, words of the sentence
    *[
        (TokenLayout.packed, [ends], f"cu_seqlens {words}")
        for ends, words in (
            (torch.tensor([0, 4, 2]), "is [0, 4, 2] … start at 0, never decrease"),
            ([1, 4], "is [1, 4] … start at 0"),
            ([], "is [] … start at 0"),
            ([0], "is [0] … never decrease, and end"),
            (torch.tensor([0.0, 4.0]), "has shape (2,) … torch.float32 … integers"),
            (torch.tensor([[0, 4]]), "has shape (1, 2) … one dimension"),
            (torch.tensor([False, True]), "… torch.bool … integers"),
            ([0, 2.5, 5], "… 2.5 … integers"),
            (5, "is 5 … integers"),
        )
    ],
    *[
        (TokenLayout, given, " … ".join(map(str, given[:2])))
        for given in (([0, 6], [4, 3], 8), ([-1], [2], 8), ([0, 4], [3, -2], 8), ([0, 5], [5], 10), ([0], [5, 3], 10))
    ],
    (TokenLayout, ([0, 3], [4, 2], 8), "start at [0, 3] with lengths [4, 2] … 8 rows, fewer than 2**31, and not to ov"),
    (TokenLayout.padded, ([], 8), "lengths is empty … at least one sequence"),
    (TokenLayout.padded, (torch.tensor([3, 9]), 8), "lengths holds 9 … at most the width 8"),
    (TokenLayout.padded, (torch.tensor([[1, 2]]), 4), "lengths … (1, 2)"),
    (TokenLayout.padded, ([1.5, 2.0], 4), "lengths … 1.5 … integers"),
    (TokenLayout.packed, ([0, 2, 5], [1, 1]), "order is [1, 1] … 2 different numbers"),
    (TokenLayout.packed, ([0, 2, 5], [0]), "order is [0] … 2 different"),
    (TokenLayout.packed, ([0, 2, 5], "ab"), "order is 'ab'"),
]


@pytest.mark.parametrize("make, given, words", LAYOUTS, ids=[row[-1] for row in LAYOUTS])
def test_a_token_layout_that_cannot_be_is_one_clear_sentence(make, given, words):
    said = sentence((TypeError, ValueError), lambda: make(*given))
    assert said.startswith("TokenLayout: ") and all(word in said for word in words.split(" … ")), said


def test_values_that_are_written_to_are_looked_at_again():
    pages, ids = torch.tensor([[1, 7], [0, 1]]), torch.tensor([0, 8])
    q, k, weight = numbers(2, 1, 4, 16), numbers(2, 8, 2, 16), numbers(9, 16)
    lengths, short, long = torch.tensor([8, 3]), torch.tensor([8, 9]), torch.tensor([9, 9])
    for _ in range(2):
        bi.attention(q, k, k, lengths_k=lengths)
        lengths[1] = 9
        with pytest.raises(ValueError, match=r"lengths_k is \[8, 9\], expected 0 to 8"):
            bi.attention(q, k, k, lengths_k=lengths)
        lengths[1] = 3
        bi.attention(q, k, k, lengths_k=short, block_table=pages)
        with pytest.raises(ValueError, match="block_table holds 0 to 7, expected 0 to 1"):
            bi.attention(q, k, k, lengths_k=long, block_table=pages)
        bi.embedding(ids, weight)
        ids[0] = 9
        with pytest.raises(ValueError, match="ids holds 9 at flat index 0, expected 0 to 8"):
            bi.embedding(ids, weight)
        ids[0] = 0
    with pytest.raises(ValueError, match="expected 0 to 7"):
        bi.embedding(ids, weight[:8])


def test_a_cpu_tensor_without_the_interpreter_says_what_to_set():
    code = "import torch, bi_kernels\nbi_kernels.linear(torch.ones(2, 16), torch.ones(3, 16))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: linear: x is on cpu and Triton's interpreter is off; set TRITON_INTERPRET=1 before Python "
        "starts, or move it to a CUDA device"
    )
