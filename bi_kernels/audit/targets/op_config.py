"""A problem: an op at one shape, dtype and device, with the inputs that it is judged on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

import bi_kernels
from bi_kernels import reference
from bi_kernels.audit.compare import Tensors
from bi_kernels.audit.inputs import INTEGERS, KINDS, cancel, draw, draw_ids, draw_integers, generator
from bi_kernels.audit.registry import Op, audited
from bi_kernels.contract import DTYPES, SHAPES, SWEEP, VARIANT, dtype_name, evaluate


@dataclass(frozen=True)
class OpConfig:
    """An op at one shape, dtype and device, with the inputs it is judged on."""

    op: Op
    case: str
    dtype: torch.dtype
    shapes: str
    device: torch.device
    seed: int = 0
    sizes: dict[str, int] = field(default_factory=dict)  # dimensions in place of the shape set's
    brief: bool = False  # a variant beside the op that it is of, which is asked everything: see [sweep.variant]
    first: bool = True  # of the op's cases and dtypes, asked what depends on neither

    @property
    def dims(self) -> dict[str, int]:
        return SHAPES[self.shapes] | self.op.cases(self.shapes)[self.case] | self.sizes

    @property
    def input_dtype(self) -> torch.dtype:
        if not self.op.casts:
            return self.dtype
        return torch.bfloat16 if self.dtype == torch.float32 else torch.float32

    @property
    def returned(self) -> dict[str, torch.dtype]:
        return self.op.returned(self.dtype)

    @property
    def accurate_on(self) -> tuple[str, ...]:
        """Names the families of inputs on which results are held against fp64."""
        return (*KINDS, INTEGERS) if self.op.integers else KINDS

    @property
    def contract_row(self) -> str:
        return self.op.row or self.op.name

    @property
    def reduction(self) -> int:
        return int(evaluate(self.op.reduction, **self.dims))

    def _shape(self, dims: str) -> tuple[int, ...]:
        return tuple(int(evaluate(d, **self.dims)) for d in dims.split(":")[0].split(","))

    def inputs(self, kind: str, tokens: int, poisoned: torch.Tensor | None = None) -> tuple[dict, dict]:
        """(per-token inputs of `tokens` rows, shared inputs), of one family."""
        g = generator(self.device, self.seed, self.op.name, self.case, self.dtype, kind)

        def make(dims: str, *lead: int, kind: str = kind) -> torch.Tensor:
            shape = lead + self._shape(dims)
            if dims.endswith(":bool"):
                return torch.rand(shape, generator=g, device=self.device) < 0.3
            if dims.endswith(":id"):
                *each, count = shape
                return draw_ids(kind, tuple(each), count, g)
            if kind == INTEGERS:
                x = draw_integers(shape, self.input_dtype, g, shared=not lead)
            else:
                x = draw(kind, shape, self.input_dtype, g, shared=not lead, poisoned=poisoned)
            if not lead:
                x *= evaluate(self.op.scale, **self.dims)
            if dims.endswith(":fp32") and x.dtype != torch.float32:
                x = x.float() * (1 + 2.0**-12)  # which no 16 bits hold
            return x.t().contiguous() if dims.endswith(":t") else x

        *keys, values = self.op.cache or ("",)
        # of attention: with wide scores every weight is 0 or 1, and the bounds say nothing
        tame = "normal" if values and kind == "wide" else kind
        given = {k: make(v, tokens, kind=kind if k == values else tame) for k, v in self.op.tokens.items()}
        if kind == "cancelling":
            for k in self.op.cache:  # tokens weigh what those 32 before them do, and take from the sum what those added
                cancel(given[k][: tokens // 64 * 64].unflatten(0, (-1, 64)).movedim(1, -1), shared=k in keys)
        return given, {k: make(v) for k, v in self.op.shared.items()}

    def arguments(self, tokens: dict, shared: dict) -> list[torch.Tensor]:
        """Returns the tensors in the op's positional order."""
        given = tokens | shared
        return [given[name] for name in self.op.order or given]

    def constants(self, longest: int) -> dict:
        constants = dict(self.op.constants)
        if self.op.positions:
            longest = max(longest, *SWEEP["rows"])
            width = int(evaluate(self.op.rotary, **self.dims))
            constants["table"] = bi_kernels.rope_table(longest, width, device=self.device, scaling=self.op.scaling)
        if self.op.casts:
            constants["dtype"] = self.dtype
        return constants

    def where(self, positions: torch.Tensor) -> dict:
        """Returns what a reference is told of positions besides their table, where the op takes any."""
        told = {"positions": positions} if self.op.positions else {}
        return told | ({"scaling": self.op.scaling} if self.op.scaling else {})

    def reference(self, tokens: dict, shared: dict, constants: dict, positions: torch.Tensor, lengths: list[int]):
        """(y64, S) of the contract, on these inputs; several outputs are joined."""
        extra = self.where(positions) or ({"lengths": lengths} if self.op.cache else {})
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
) -> list[OpConfig]:
    """Returns every op of an audit (or those named), at every case and dtype; on the interpreter one linear layer of
    the backward audit and one attention stand for the others, and variants are asked less, as is fp16 beside bf16,
    but not one op alone, and not by the audit of dtypes."""
    one = {"backward": "o", "attention": "gqa", "dtype": "gqa"}.get(audit) if device.type == "cpu" else None
    chosen = [op for op in audited(audit) if not ops or op.name in ops]
    names = {op.name for op in chosen if op.audit == audit and device.type == "cpu"}
    several = len(chosen) > 1 and audit != "dtype"
    less = {"fp16"} if device.type == "cpu" and several and "bf16" in dtypes else set()
    found = [
        OpConfig(op, case, DTYPES[d], shapes, device, seed, brief=op.variant_of in names or d in less)
        for op in chosen
        for case in op.cases(shapes)
        if one in (None, case) or one not in op.cases(shapes)
        for d in dtypes
    ]
    wanted = dtypes if len(dtypes) == 1 else VARIANT["dtypes"]
    found = [p for p in found if p.op.variant_of not in names or dtype_name(p.dtype) in wanted]
    firsts = {p.op.name: p for p in reversed(found)}
    return [replace(p, first=p is firsts[p.op.name]) for p in found]
