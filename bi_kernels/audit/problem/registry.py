"""The registry: one short entry an op, and what an audit needs to call any candidate for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import bi_kernels
from bi_kernels import reference
from bi_kernels.audit.evidence.drift import Tensors
from bi_kernels.audit.problem.inputs import cancel, draw, draw_ids, generator
from bi_kernels.contract import DTYPES, EPS, SHAPES, SWEEP, evaluate, linears


@dataclass(frozen=True)
class Op:
    """One row of the audits.

    tokens: the inputs that every token has its own row of, with their trailing dimensions in terms of the shape set
    ("heads, head_dim"), or ending in ":bool" for a mask, or "vocab:id" for a token id below that; shared: the weights,
    likewise, or ending in ":t" where the op takes the transpose; order: the positional order of both, where it is not
    tokens and then shared; out: the output's dtype, where it is not the op's (several of one shape are stacked);
    scale: of the shared inputs, a power of two; constants: further keyword arguments; function: the public function,
    where it is not `name`; row: its row of the contract, likewise; positions: the op takes `positions`, or
    `cu_seqlens` where a call packs whole sequences; cache: the token inputs that a call is given of the tokens before
    its own, too, with the arguments of `bi_kernels.attention`; outputs: their names, and their dtype where it is
    another ("lse:fp32"); reduction: the length of its sum; cases: shape name -> extra dimensions, for an op audited at
    several shapes; ieee: IEEE operations only, so a CPU must give the bits of a GPU; casts: the input has another
    dtype than the output.
    """

    name: str
    audit: str
    tokens: dict[str, str]
    shared: dict[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    out: str = ""
    scale: str = "1"
    constants: dict = field(default_factory=dict)
    function: str = ""
    row: str = ""
    positions: bool = False
    cache: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    reduction: str = "1"
    cases: Callable[[str], dict[str, dict]] = lambda shapes: {"": {}}
    ieee: bool = False
    casts: bool = False

    def returned(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The dtype of each output by name, where that of the op is `dtype`."""
        return {name.partition(":")[0]: DTYPES.get(name.partition(":")[2] or self.out, dtype) for name in self.outputs}


_ATTENTION = {"q": "heads, head_dim", "k": "kv_heads, head_dim", "v": "kv_heads, head_dim"}
_ATTENDS = {"cache": ("k", "v"), "outputs": ("out", "lse:fp32"), "reduction": "head_dim"}


def _groups(shapes: str) -> dict[str, dict]:
    return {"gqa": {}, "mha": {"kv_heads": SHAPES[shapes]["heads"]}}


def _linears(*names: str) -> Callable[[str], dict[str, dict]]:
    return lambda shapes: {k: {"N": n, "K": d} for k, (n, d) in linears(shapes).items() if not names or k in names}


OPS = {
    op.name: op
    for op in (
        Op("silu", "elementwise", {"x": "mlp"}),
        Op("gelu", "elementwise", {"x": "mlp"}),
        Op("gelu_tanh", "elementwise", {"x": "mlp"}, constants={"approximate": "tanh"}, function="gelu"),
        Op("swiglu", "elementwise", {"gate": "mlp", "up": "mlp"}),
        Op("add", "elementwise", {"x": "hidden", "residual": "hidden"}, ieee=True),
        Op("scale", "elementwise", {"x": "hidden"}, constants={"factor": 0.08838834764831845}, ieee=True),
        Op("bias_add", "elementwise", {"x": "hidden"}, {"bias": "hidden"}, ieee=True),
        Op("mask_fill", "elementwise", {"x": "hidden", "mask": "hidden:bool"}, constants={"value": -1e4}, ieee=True),
        Op("cast", "elementwise", {"x": "hidden"}, ieee=True, casts=True),
        Op("rope", "elementwise", {"x": "heads, head_dim"}, positions=True, ieee=True),
        Op(
            "rope_interleaved",
            "elementwise",
            {"x": "heads, head_dim"},
            constants={"interleaved": True},
            function="rope",
            row="rope",
            positions=True,
            ieee=True,
        ),
        Op("linear", "gemm", {"x": "K"}, {"weight": "N, K"}, cases=_linears(), reduction="K"),
        Op(
            "linear_bias",
            "gemm",
            {"x": "K"},
            {"weight": "N, K", "bias": "N"},
            function="linear",
            row="linear",
            cases=_linears("qkv"),
            reduction="K",
        ),
        Op("rms_norm", "rms_norm", {"x": "hidden"}, {"weight": "hidden"}, constants={"eps": EPS}, reduction="hidden"),
        Op(
            "qk_norm",
            "rms_norm",
            {"x": "heads, head_dim"},
            {"weight": "head_dim"},
            constants={"eps": EPS},
            row="rms_norm",
            reduction="head_dim",
        ),
        Op(
            "add_rms_norm",
            "rms_norm",
            {"x": "hidden", "residual": "hidden"},
            {"weight": "hidden"},
            constants={"eps": EPS},
            reduction="hidden",
        ),
        Op("embedding", "vocabulary", {"ids": "vocab:id"}, {"weight": "vocab, hidden"}, constants={"padding_id": 3}),
        Op(
            "lm_head_logprob",
            "vocabulary",
            {"hidden": "hidden", "targets": "vocab:id"},
            {"weight": "vocab, hidden"},
            order=("hidden", "weight", "targets"),
            out="fp32",
            scale="hidden ** -0.5",
            constants={"temperature": 0.7, "ignore_index": 3},
            reduction="hidden",
        ),
        Op(
            "token_logprob",
            "vocabulary",
            {"logits": "vocab", "targets": "vocab:id"},
            out="fp32",
            constants={"temperature": 0.7, "ignore_index": 3},
            reduction="vocab",
        ),
        Op("log_softmax", "vocabulary", {"logits": "vocab"}, out="fp32", reduction="vocab"),
        Op("attention", "attention", _ATTENTION, cases=_groups, **_ATTENDS),
        Op(
            "attention_window",
            "attention",
            _ATTENTION,
            constants={"window": 33},
            function="attention",
            row="attention",
            **_ATTENDS,
        ),
        Op("matmul", "gemm", {"a": "K"}, {"b": "N, K:t"}, row="linear", cases=_linears("o"), reduction="K"),
    )
}


def audited(audit: str) -> list[Op]:
    """The ops of an audit: its own; all of them (dtype); those whose gradients no other audit judges (backward)."""
    shared = {"dtype": {op.audit for op in OPS.values()}, "backward": {"elementwise", "gemm"}}
    return [op for op in OPS.values() if op.audit in shared.get(audit, {audit})]


@dataclass(frozen=True)
class Problem:
    """An op at one shape, dtype and device, with the inputs it is judged on."""

    op: Op
    case: str
    dtype: torch.dtype
    shapes: str
    device: torch.device
    seed: int = 0

    @property
    def dims(self) -> dict[str, int]:
        numbers = {k: v for k, v in SHAPES[self.shapes].items() if k != "lengths"}
        return numbers | self.op.cases(self.shapes)[self.case]

    @property
    def input_dtype(self) -> torch.dtype:
        if not self.op.casts:
            return self.dtype
        return torch.bfloat16 if self.dtype == torch.float32 else torch.float32

    @property
    def returned(self) -> dict[str, torch.dtype]:
        return self.op.returned(self.dtype)

    @property
    def contract_row(self) -> str:
        return self.op.row or self.op.name

    @property
    def reduction(self) -> int:
        return int(evaluate(self.op.reduction, **self.dims))

    def _generator(self, kind: str) -> torch.Generator:
        return generator(self.device, self.seed, self.op.name, self.case, self.dtype, kind)

    def _shape(self, dims: str) -> tuple[int, ...]:
        return tuple(int(evaluate(d, **self.dims)) for d in dims.split(":")[0].split(","))

    def inputs(self, kind: str, tokens: int, poisoned: torch.Tensor | None = None) -> tuple[dict, dict]:
        """(per-token inputs of `tokens` rows, shared inputs), of one family."""
        g = self._generator(kind)

        def make(dims: str, *lead: int, kind: str = kind) -> torch.Tensor:
            shape = lead + self._shape(dims)
            if dims.endswith(":bool"):
                return torch.rand(shape, generator=g, device=self.device) < 0.3
            if dims.endswith(":id"):
                return draw_ids(kind, lead, int(evaluate(dims.split(":")[0], **self.dims)), g)
            x = draw(kind, shape, self.input_dtype, g, shared=not lead, poisoned=poisoned)
            if not lead and self.op.scale != "1":
                x *= evaluate(self.op.scale, **self.dims)
            return x.t().contiguous() if dims.endswith(":t") else x

        values = self.op.cache[-1:]  # of attention: with wide scores every weight is 0 or 1, and the bounds say nothing
        given = {
            k: make(v, tokens, kind="normal" if values and kind == "wide" and k not in values else kind)
            for k, v in self.op.tokens.items()
        }
        if kind == "cancelling":
            for k in self.op.cache:  # tokens weigh what those 32 before them do, and take from the sum what those added
                cancel(
                    given[k][: tokens // 64 * 64].unflatten(0, (-1, 64)).movedim(1, -1), shared=k != self.op.cache[-1]
                )
        return given, {k: make(v) for k, v in self.op.shared.items()}

    def arguments(self, tokens: dict, shared: dict) -> list[torch.Tensor]:
        """The tensors in the op's positional order."""
        given = tokens | shared
        return [given[name] for name in self.op.order or given]

    def constants(self, longest: int) -> dict:
        constants = dict(self.op.constants)
        if self.op.positions:
            constants["table"] = bi_kernels.rope_table(
                max(longest, max(SWEEP["rows"])), self.dims["head_dim"], device=self.device
            )
        if self.op.casts:
            constants["dtype"] = self.dtype
        return constants

    def reference(self, tokens: dict, shared: dict, constants: dict, positions: torch.Tensor, lengths: list[int]):
        """(y64, S) of the contract, on these inputs; several outputs are joined."""
        extra = {"positions": positions} if self.op.positions else {"lengths": lengths} if self.op.cache else {}
        found = getattr(reference, self.op.function or self.op.name)(**tokens, **shared, **constants, **extra)
        return found if isinstance(found[0], torch.Tensor) else tuple(joined(part) for part in zip(*found))


def joined(outputs: torch.Tensor | Sequence[torch.Tensor]) -> Tensors:
    """Several outputs of one shape and dtype as one tensor, their number its last dimension; others as they are, a
    tuple."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    alike = len({(t.shape, t.dtype) for t in outputs}) == 1
    return torch.stack(tuple(outputs), -1) if alike else tuple(outputs)


def problems(
    audit: str, dtypes: list[str], shapes: str, device: torch.device, seed: int = 0, ops: tuple[str, ...] = ()
) -> list[Problem]:
    """Every op of an audit (or those named), at every case and dtype; on the interpreter one linear layer of the
    backward audit and one attention stand for the others."""
    one = {"backward": "o", "attention": "gqa", "dtype": "gqa"}.get(audit) if device.type == "cpu" else None
    return [
        Problem(op, case, DTYPES[d], shapes, device, seed)
        for op in audited(audit)
        if not ops or op.name in ops
        for case in op.cases(shapes)
        if one in (None, case) or one not in op.cases(shapes)
        for d in dtypes
    ]
