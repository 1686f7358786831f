"""The registry: what an audit needs to call any candidate for an op. Where that is short, the op's row of the contract
holds it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bi_kernels.contract import CONTRACT, DTYPES, EPS, SHAPES, linears


@dataclass(frozen=True)
class Op:
    """One op of the registry: what an audit needs to call any candidate for it."""

    name: str
    audit: str
    # inputs of which every token has a row: their trailing dimensions in terms of the shape set, as "heads, head_dim";
    # a mask ends in ":bool", a token id below n is "n:id"; ":fp32" whatever the op's dtype
    tokens: dict[str, str]
    shared: dict[str, str] = field(default_factory=dict)  # weights, likewise; ":t" where the op takes the transpose
    order: tuple[str, ...] = ()  # the positional order of both, where it is not tokens and then shared
    scale: str = "1"  # of the shared inputs, a power of two
    constants: dict = field(default_factory=dict)  # further keyword arguments
    function: str = ""  # the public function, where it is not `name`
    row: str = ""  # its row of the contract, likewise
    positions: bool = False  # takes `positions`, or `cu_seqlens` where a call packs whole sequences
    rotary: str = "head_dim"  # features that its table turns
    scaling: dict | None = None  # of its table
    cache: tuple[str, ...] = ()  # token inputs that a call is given of the tokens before its own, too
    outputs: tuple[str, ...] = ("out",)  # their names, and their dtype where it is not the op's: "lse:fp32"
    reduction: str = "1"  # the length of its sum
    cases: Callable[[str], dict[str, dict]] = lambda shapes: {"": {}}  # shape set -> {case: extra dimensions}
    integers: bool = False  # nothing but a sum of products may round before the result, so integers may not round
    ieee: bool = False  # IEEE operations only, so a CPU must give the bits of a GPU
    casts: bool = False  # the input has another dtype than the output
    # values of its public arguments besides those of `constants`; names joined by ", " go together
    arguments: dict[str, tuple] = field(default_factory=dict)
    free: dict[str, tuple] = field(default_factory=dict)  # likewise, of arguments that change no bit
    multiples: dict[str, int] = field(default_factory=dict)  # dimensions that are no other number
    variant_of: str = ""  # an op of the same audit and code, from which it differs in one thing

    def returned(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Returns the dtype of each output by name, where that of the op is `dtype`."""
        return {name: DTYPES.get(own, dtype) for name, _, own in (out.partition(":") for out in self.outputs)}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

# what several ops share
_ROPE = {"function": "rope", "row": "rope", "positions": True, "ieee": True, "multiples": {"head_dim": 2}}
_LINEAR = {"row": "linear", "reduction": "K", "integers": True}
_EPS = {"eps": (2.0**-40, 2.0**-17, 0.5)}
_NORM = {"constants": {"eps": EPS}, "reduction": "hidden", "arguments": _EPS | {"offset": (0.0, 1.0)}}
_LOGPROB = {
    "outputs": ("out:fp32",),
    "constants": {"temperature": 0.7, "ignore_index": 3},
    "arguments": {"temperature": (1.0, 0.25, 3.0), "ignore_index": (-100, 0)},
}
_ATTENTION = {
    "tokens": {"q": "heads, head_dim", "k": "kv_heads, head_dim", "v": "kv_heads, head_dim"},
    "cache": ("k", "v"),
    "outputs": ("out", "lse:fp32"),
    "reduction": "head_dim",
    "function": "attention",
    "row": "attention",
    "arguments": {"causal, window": ((True, 1), (True, 16), (True, 100), (False, None)), "scale": (0.5, 0.03125)},
}


def _groups(shapes: str) -> dict[str, dict]:
    return {"gqa": {}, "mha": {"kv_heads": SHAPES[shapes]["heads"]}}


def _linears(*names: str) -> Callable[[str], dict[str, dict]]:
    return lambda shapes: {k: {"N": n, "K": d} for k, (n, d) in linears(shapes).items() if not names or k in names}


def _expert(shapes: str) -> dict[str, dict]:
    return {"": {"experts": 8, "N": SHAPES[shapes]["mlp"] // 8, "K": SHAPES[shapes]["hidden"] // 2}}


_EVERY = (
    *(Op(name, **row["registry"]) for name, row in CONTRACT["ops"].items() if "registry" in row),
    Op(
        "clamped_swiglu",
        "elementwise",
        {"gate": "mlp", "up": "mlp"},
        arguments={"limit": (0.5, 2.1), "alpha": (1.0, -0.3), "offset": (0.0, 0.7)},
    ),
    Op("soft_cap", "elementwise", {"x": "mlp"}, constants={"cap": 30.0}, arguments={"cap": (50.0, 0.1)}),
    Op("add", "elementwise", {"x": "hidden", "residual": "hidden"}, ieee=True),
    Op(
        "scale",
        "elementwise",
        {"x": "hidden"},
        constants={"factor": 0.08838834764831845},
        arguments={"factor": (1.0, -3.0, 0.0)},
        ieee=True,
    ),
    Op("bias_add", "elementwise", {"x": "hidden"}, {"bias": "hidden"}, ieee=True),
    Op(
        "mask_fill",
        "elementwise",
        {"x": "hidden", "mask": "hidden:bool"},
        constants={"value": -1e4},
        arguments={"value": (0.0, float("-inf"))},
        ieee=True,
    ),
    Op(
        "scaled_heads",
        "elementwise",
        {"x": "heads, head_dim"},
        {"weight": "heads, 1"},
        function="scaled",
        row="scaled",
        ieee=True,
    ),
    Op("cast", "elementwise", {"x": "hidden"}, ieee=True, casts=True),
    Op("rope", "elementwise", {"x": "heads, head_dim"}, **_ROPE),
    Op("rope_interleaved", "elementwise", {"x": "heads, head_dim"}, constants={"interleaved": True}, **_ROPE),
    Op(
        "rope_partial",
        "elementwise",
        {"x": "heads, head_dim"},
        rotary="head_dim // 2",
        **_ROPE | {"multiples": {"head_dim": 4}},
    ),
    Op("rope_scaled", "elementwise", {"x": "heads, head_dim"}, scaling=YARN, **_ROPE),
    Op("linear", "gemm", {"x": "K"}, {"weight": "N, K"}, cases=_linears(), **_LINEAR),
    Op(
        "linear_bias",
        "gemm",
        {"x": "K"},
        {"weight": "N, K", "bias": "N"},
        function="linear",
        cases=_linears("qkv"),
        **_LINEAR,
    ),
    Op(
        "routed_linear",
        "gemm",
        {"x": "K", "experts": "experts:id"},
        {"weight": "experts, N, K"},
        cases=_expert,
        **_LINEAR | {"row": "routed_linear"},
    ),
    Op(
        "routed_linear_bias",
        "gemm",
        {"x": "K", "experts": "experts:id"},
        {"weight": "experts, N, K", "bias": "experts, N"},
        function="routed_linear",
        cases=_expert,
        **_LINEAR | {"row": "routed_linear"},
    ),
    Op("rms_norm", "rms_norm", {"x": "hidden"}, {"weight": "hidden"}, **_NORM),
    Op(
        "qk_norm",
        "rms_norm",
        {"x": "heads, head_dim"},
        {"weight": "head_dim"},
        row="rms_norm",
        **_NORM | {"reduction": "head_dim"},
    ),
    Op(
        "rms_norm_offset",
        "rms_norm",
        {"x": "hidden"},
        {"weight": "hidden:fp32"},
        function="rms_norm",
        **_NORM | {"constants": {"eps": EPS, "offset": 1.0}},
    ),
    Op(
        "layer_norm", "rms_norm", {"x": "hidden"}, {"weight": "hidden", "bias": "hidden"}, **_NORM | {"arguments": _EPS}
    ),
    Op(
        "layer_norm_heads",
        "rms_norm",
        {"x": "heads, head_dim"},
        {"weight": "head_dim", "bias": "head_dim"},
        function="layer_norm",
        row="layer_norm",
        **_NORM | {"reduction": "head_dim", "constants": {"eps": EPS, "heads": True}, "arguments": _EPS},
    ),
    Op(
        "row_sum", "rms_norm", {"x": "mlp"}, reduction="mlp", constants={"scale": 0.3}, arguments={"scale": (1.0, -2.0)}
    ),
    Op("add_rms_norm", "rms_norm", {"x": "hidden", "residual": "hidden"}, {"weight": "hidden"}, **_NORM),
    Op(
        "embedding",
        "vocabulary",
        {"ids": "vocab:id"},
        {"weight": "vocab, hidden"},
        constants={"padding_id": 3},
        arguments={"padding_id": (None, 0)},
    ),
    Op(
        "lm_head_logprob",
        "vocabulary",
        {"hidden": "hidden", "targets": "vocab:id"},
        {"weight": "vocab, hidden"},
        order=("hidden", "weight", "targets"),
        scale="hidden ** -0.5",
        reduction="hidden",
        free={"keep_bytes": (10**6, 10**12)},
        **_LOGPROB,
    ),
    Op("token_logprob", "vocabulary", {"logits": "vocab", "targets": "vocab:id"}, reduction="vocab", **_LOGPROB),
    Op("softmax", "vocabulary", {"x": "vocab"}, reduction="vocab"),
    Op("log_softmax", "vocabulary", {"logits": "vocab"}, outputs=("out:fp32",), reduction="vocab"),
    Op("attention", "attention", cases=_groups, **_ATTENTION),
    Op("attention_window", "attention", constants={"window": 33}, variant_of="attention", **_ATTENTION),
    Op(
        "attention_soft_cap",
        "attention",
        constants={"soft_cap": 5.0},
        variant_of="attention",
        **_ATTENTION | {"arguments": {"soft_cap": (50.0, 0.5), "scale": (0.5,)}},
    ),
    Op(
        "attention_sinks",
        "attention",
        shared={"sinks": "heads"},
        constants={"chunk": 33},
        variant_of="attention",
        **_ATTENTION | {"arguments": {"chunk": (1, 16, None)}},
    ),
    Op(
        "attention_narrow_v",
        "attention",
        variant_of="attention",
        **_ATTENTION | {"tokens": _ATTENTION["tokens"] | {"v": "kv_heads, head_dim - head_dim // 3"}, "arguments": {}},
    ),
    Op("matmul", "gemm", {"a": "K"}, {"b": "N, K:t"}, cases=_linears("o"), **_LINEAR),
)
OPS = {op.name: op for op in _EVERY}


def audited(audit: str) -> list[Op]:
    """Returns the ops of an audit: its own; all of them (dtype, random); those whose gradients no other audit judges
    (backward)."""
    every = {op.audit for op in OPS.values()}
    shared = {"dtype": every, "random": every, "backward": {"elementwise", "gemm"}}
    return [op for op in OPS.values() if op.audit in shared.get(audit, {audit})]
