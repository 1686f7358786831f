"""The gradient check: what a real backward() leaves, over layouts and micro-batch splits of the same step.

Upstream gradient and denominator belong to the step, not to the call: every logical token keeps its own in every layout,
and padding has none. Gradients of tokens are gathered back to logical order; gradients of parameters are what stands in
`main_grad`, or in `.grad` where the candidate leaves it there, after the last call.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import torch

from bi_kernels import contract
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.problem.attention_keys import keys
from bi_kernels.audit.problem.call_layouts import VIEWS, Call, layouts, shapes_launched
from bi_kernels.audit.problem.inputs import draw, generator
from bi_kernels.audit.problem.subject import (
    NEEDS_FIX,
    PASS,
    SHARPEST,
    UNSUPPORTED,
    Row,
    Subject,
    gather,
    poisoned_memory,
    refusal,
    sentence,
)
from bi_kernels.audit.relations.forward import against_bound
from bi_kernels.audit.static import binary as static
from bi_kernels.contract import SHAPES, SWEEP, dtype_name
from bi_kernels.reference_gradients import gradient
from bi_kernels.tokens import TokenLayout

LAYOUTS = tuple(SWEEP["gradient_layouts"])
ALONE = ("batch", "left_padded:16", "permuted")  # where parameters without main_grad are asked, too
BESIDE = ("batch", "left_padded:16", "permuted", "neighbours")  # where a sample that is not finite has company
PADDED = ("batch", "left_padded:16")  # where padding that holds NaN must reach no gradient of a parameter
ACCURATE = ("normal", "wide", SHARPEST)  # inputs on which gradients are held against fp64
NAN_PADDING = "normal, NaN in padding"
INVARIANCE, ACCURACY, DETERMINISM, STATIC = "gradient invariance", "gradient accuracy", "determinism", "atomics-free"


def token_layout(call: Call, lengths: Sequence[int]) -> TokenLayout:
    """The layout of a call's whole sequences."""
    sample = np.repeat(np.arange(len(lengths)), lengths)
    flat = call.index.reshape(-1)
    found = {
        s: np.flatnonzero((flat >= 0) & (sample[np.maximum(flat, 0)] == s)) for s in np.unique(sample[flat[flat >= 0]])
    }
    found = dict(sorted(found.items(), key=lambda item: item[1][0]))  # as they lie in memory
    return TokenLayout(
        [int(at[0]) for at in found.values()], [len(at) for at in found.values()], flat.size, [int(s) for s in found]
    )


class Step:
    """One training step of a subject: its inputs, parameters and upstream gradient, and its gradients under a layout."""

    def __init__(self, subject: Subject, kind: str, lengths: Sequence[int] = ()):
        self.subject, self.kind = subject, kind
        self.lengths = list(lengths) or gradient_lengths(subject)
        self.count = sum(self.lengths)
        p = subject.problem
        sample = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths)).to(p.device)
        self.poisoned = (sample == 3) if kind == "nonfinite" else torch.zeros_like(sample, dtype=torch.bool)
        self.at = torch.from_numpy(np.concatenate([np.arange(n) for n in self.lengths])).to(p.device)
        self.tokens, self.shared = p.inputs(kind, self.count, self.poisoned)
        if "ignore_index" in p.op.constants:  # every sample has a token to train on
            starts = torch.tensor([0, *self.lengths[:-1]]).cumsum(0).to(p.device)
            self.tokens["targets"][starts] = p.op.constants["ignore_index"] + 1
        self.layouts = layouts(self.lengths, p.seed)
        self.dy: list[torch.Tensor] = []

    def upstream(self, outputs: Sequence[torch.Tensor], lead: int) -> None:
        """Draws the step's upstream gradient, once the outputs' shapes are known."""
        p = self.subject.problem
        g = generator(p.device, p.seed, "upstream", self.kind)
        kind = "normal" if self.kind == "nonfinite" else self.kind
        for y in outputs:
            dy = draw(kind if y.dim() > lead else "normal", (self.count, *y.shape[lead:]), y.dtype, g)
            if self.kind == SHARPEST:  # else the sum of a few bf16 numbers is exact in fp32, in any order
                most = 6 if y.dtype == torch.float16 else 12
                exponents = torch.randint(
                    -most, most + 1, (self.count, *[1] * (dy.dim() - 1)), generator=g, device=p.device
                )
                dy *= torch.exp2(exponents.float()).to(dy.dtype)
            dy[self.poisoned] = 0
            self.dy.append(dy)

    def gradients(
        self, calls: Sequence[Call], main_grad: bool = True, view: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
    ) -> dict[str, torch.Tensor]:
        """{input: its gradient}, of tokens in logical order; view: in which the op is given its tokens and what comes upstream."""
        s, device = self.subject, self.subject.problem.device
        shared = {k: t.detach().clone().requires_grad_(t.is_floating_point()) for k, t in self.shared.items()}
        for t in shared.values():
            if main_grad and t.is_floating_point():
                t.main_grad = torch.zeros_like(t, dtype=torch.float32, memory_format=torch.contiguous_format)
        out = {k: torch.zeros_like(t) for k, t in self.tokens.items() if t.is_floating_point()}
        for call in calls:
            index = torch.from_numpy(call.index.reshape(-1)).to(device)
            real = index >= 0
            rows = index.clamp(min=0)
            tokens = {
                k: gather(t, call.index, self.kind in ("nonfinite", NAN_PADDING)).requires_grad_(t.is_floating_point())
                for k, t in self.tokens.items()
            }
            cached = keys(call, self.lengths) if s.problem.op.cache else None  # those of the queries: samples are whole
            with token_layout(call, self.lengths):
                y = s.forward(
                    {k: view(t) for k, t in tokens.items()},
                    shared,
                    call.index.shape,
                    self.at[rows],
                    call.cu_seqlens,
                    cached,
                )
            outputs, expected = y if isinstance(y, (tuple, list)) else (y,), list(s.problem.returned)
            if len(expected) > 1 and len(outputs) != len(expected):
                raise ValueError(f"the candidate returned {len(outputs)} of the outputs {', '.join(expected)}")
            if not self.dy:
                self.upstream(outputs, call.index.ndim)
            upstream = [
                (o, view(dy[rows].masked_fill(~real.view(-1, *[1] * (dy.dim() - 1)), 0).reshape(o.shape)))
                for dy, o in zip(self.dy, outputs)
                if o.requires_grad
            ]
            if not upstream:
                raise ValueError("no output of the candidate requires a gradient")
            with poisoned_memory(0xFF if s.calls % 2 else 0x00):
                torch.autograd.backward(*zip(*upstream))
            for k in out:
                if tokens[k].grad is None:
                    raise ValueError(f"the candidate's backward left no gradient for {k}")
                grad = tokens[k].grad.reshape(-1, *out[k].shape[1:])
                out[k][rows[real]] = grad[real]
                if self.kind not in ("nonfinite", NAN_PADDING) and (grad[~real] != 0).any():
                    raise ValueError(
                        f"the candidate's backward left a gradient of {k} in padding, which has none upstream"
                    )
        for k, t in shared.items():
            if t.is_floating_point():
                out[k] = t.main_grad if t.grad is None and main_grad else t.grad
                if out[k] is None:
                    raise ValueError(f"the candidate's backward left no gradient for {k}")
        return out


def gradient_lengths(subject: Subject) -> list[int]:
    """The samples of a step: long ones where the tensor core does the work, the forward audits' for fp32."""
    shape = SHAPES[subject.problem.shapes]
    return shape.get("gradient_lengths", shape["lengths"]) if subject.problem.dtype.itemsize == 2 else shape["lengths"]


def judge_gradients(subject: Subject) -> list[Row]:
    return list(by_split(subject))


def by_split(subject: Subject) -> Iterator[Row]:
    """Invariance over layouts and splits, `.grad` without a main_grad, and determinism, tensor by tensor."""
    kinds = {SHARPEST: LAYOUTS, "nonfinite": BESIDE} | ({NAN_PADDING: PADDED} if subject.problem.op.shared else {})
    for kind, names in kinds.items():
        step = Step(subject, kind)
        try:
            base = step.gradients(step.layouts["packed"])
        except Exception as error:
            yield subject.row(
                INVARIANCE,
                "packed",
                None,
                "singles",
                kind,
                step.count,
                verdict=refusal(subject, error),
                detail=sentence(error),
            )
            return
        finite = ~step.poisoned
        keep = lambda g, step=step, finite=finite: {
            k: t[finite] if k in step.tokens else t for k, t in g.items() if kind != "nonfinite" or k in step.tokens
        }
        for name in names:
            against = "singles" if name == "packed" else "packed"
            launched = shapes_launched(step.layouts[name])
            yield from _compared(
                subject,
                lambda: keep(step.gradients(step.layouts[name])),
                lambda: keep(base if name != "packed" else step.gradients(step.layouts["singles"])),
                INVARIANCE,
                name,
                against,
                kind,
                step.count,
                launched,
            )
        if kind == SHARPEST:
            for name, view in VIEWS.items():
                yield from _compared(
                    subject,
                    lambda: step.gradients(step.layouts["packed"], view=view),
                    lambda: base,
                    INVARIANCE,
                    name,
                    "packed",
                    kind,
                    step.count,
                    "tokens and upstream gradient",
                )
            own: dict = {}
            alone = lambda: own or own.update(step.gradients(step.layouts["packed"], main_grad=False)) or own
            for name in ALONE if subject.problem.op.shared else ():
                yield from _compared(
                    subject,
                    lambda: step.gradients(step.layouts[name], main_grad=False),
                    alone,
                    INVARIANCE,
                    name,
                    "packed",
                    kind,
                    step.count,
                    "without main_grad",
                    ".grad",
                )
            runs = SWEEP["interpreter_gradient_runs" if subject.problem.device.type == "cpu" else "runs"]
            for _ in range(runs - 1):
                again = _compared(
                    subject,
                    lambda: step.gradients(step.layouts["packed"]),
                    lambda: base,
                    DETERMINISM,
                    "packed",
                    "itself",
                    kind,
                    step.count,
                    f"backward, {runs} runs",
                )
                if any(r.verdict == NEEDS_FIX for r in again):
                    break
            yield from again
        del step, base


def judge_gradient_accuracy(subject: Subject) -> list[Row]:
    rows: list[Row] = []
    for kind in ACCURATE:
        try:
            rows += gradient_accuracy(subject, kind)
        except Exception as error:
            rows.append(subject.row(ACCURACY, "rows", None, "fp64", kind, detail=sentence(error)))
    return rows


def _compared(
    subject: Subject,
    make,
    expected,
    relation: str,
    name: str,
    against: str,
    kind: str,
    count: int,
    detail: str,
    left_in: str = "",
) -> list[Row]:
    try:
        found, wanted = make(), expected()
        return [
            subject.row(
                relation,
                name,
                compare(found[k], wanted[k]),
                against,
                kind,
                count,
                tensor=f"d{k}{left_in}",
                detail=detail,
            )
            for k in wanted
        ]
    except Exception as error:
        return [subject.row(relation, name, None, against, kind, count, detail=f"{detail}; {sentence(error)}")]


def gradient_accuracy(subject: Subject, kind: str, most: int = 300) -> list[Row]:
    """Every gradient against fp64, as a share of the contract's bound: of tokens in their dtype, of parameters in fp32; of
    `normal` inputs also what a parameter without main_grad has in `.grad`."""
    lengths, total = [], 0
    for n in gradient_lengths(subject):
        lengths.append(min(n, most - total))
        total += lengths[-1]
        if total == most:
            break
    step = Step(subject, kind, lengths)
    found = {f"d{k}": (k, y) for k, y in step.gradients(step.layouts["packed"]).items()}
    if kind == "normal" and step.shared:
        own = step.gradients(step.layouts["packed"], main_grad=False)
        found |= {f"d{k}.grad": (k, own[k]) for k in step.shared}
    p = subject.problem
    constants = dict(subject.constants())
    if p.op.positions:
        constants["positions"] = step.at
    exact = gradient(p.op.function or p.op.name, step.tokens | step.shared, constants, step.dy, lengths)
    rows = []
    for tensor, (k, y) in found.items():
        dtype = y.dtype
        limit = contract.bound(
            p.contract_row, dtype, exact[k].exact, exact[k].magnitude, exact[k].n, gradient=k, inputs=p.dtype
        )
        rows.append(
            against_bound(
                subject, ACCURACY, y, exact[k].exact, limit, dtype, kind, step.count, f"{dtype_name(dtype)}", tensor
            )
        )
    return rows


def atomics_free(
    judged: Sequence[tuple[Subject, static.Launches]], levels: Sequence[str] = ("",)
) -> tuple[list[Row], list[static.Variant]]:
    """What the static audit finds in each candidate's source and in every variant that its judging launched: a row a
    subject, and all variants, each of them once. levels: a row for each instead, of what is found at that level alone."""
    every = static.Launches()
    for _, launches in judged:
        every.variants.update(launches.variants)
    examined = static.examined(every)
    sources = {s.function: static.source(s.function) for s, _ in judged}
    rows = []
    for (subject, launches), level in product(judged, levels):
        variants = [examined[key] for key in launches.variants]
        findings = list(
            dict.fromkeys([*sources[subject.function], *launches.findings, *(f for v in variants for f in v.findings)])
        )
        findings = [f for f in findings if level in ("", f.level)]
        compiled = sum(v.level != "AST only" for v in variants)
        if findings:
            detail, verdict = "; ".join(map(str, findings[:3])), NEEDS_FIX
        elif variants:
            kernels = ", ".join(dict.fromkeys(v.kernel for v in variants))
            detail = f"{compiled} of {len(variants)} variants compiled, of {kernels}"
            verdict = PASS if compiled == len(variants) else NEEDS_FIX
        else:
            detail, verdict = "launches no Triton kernel: its binary is not seen", UNSUPPORTED
        row = subject.row(
            STATIC, "source, PTX, SASS", Drift(len(findings), len(variants)), verdict=verdict, inputs="", detail=detail
        )
        row.max_abs = row.max_rel = row.max_ulp = None
        rows.append(row)
    return rows, static.distinct(examined.values())


def gradient_coverage(rows: Sequence[Row], subjects: Sequence[Subject]) -> list[Row]:
    """A needs-fix row for every gradient, layout and relation that is required and not in the rows."""
    missing = []
    for s in subjects:
        mine = [
            r
            for r in rows
            if not r.control
            and (r.op, r.case, r.dtype) == (s.problem.op.name, s.problem.case, dtype_name(s.problem.dtype))
        ]
        if any(r.verdict == UNSUPPORTED and r.relation != STATIC for r in mine):
            continue
        required = [(STATIC, "source, PTX, SASS", "out", "")]
        for k, dims in (s.problem.op.tokens | s.problem.op.shared).items():
            if dims.endswith((":id", ":bool")):
                continue
            required += [(INVARIANCE, layout, f"d{k}", SHARPEST) for layout in (*LAYOUTS, *VIEWS)]
            required += [(INVARIANCE, layout, f"d{k}.grad", SHARPEST) for layout in ALONE if s.problem.op.shared]
            required += [(INVARIANCE, layout, f"d{k}", "nonfinite") for layout in BESIDE if k in s.problem.op.tokens]
            required += [(DETERMINISM, "packed", f"d{k}", SHARPEST)]
            required += [(ACCURACY, "rows", f"d{k}", kind) for kind in ACCURATE]
            required += [(ACCURACY, "rows", f"d{k}.grad", "normal")] * (k in s.problem.op.shared)
            required += [(INVARIANCE, layout, f"d{k}", NAN_PADDING) for layout in PADDED if s.problem.op.shared]
        found = {(r.relation, r.layout, r.tensor, r.inputs) for r in mine}
        missing += [
            s.row(relation, layout, None, inputs=kind, tensor=tensor, detail="required, not run")
            for relation, layout, tensor, kind in required
            if (relation, layout, tensor, kind) not in found
        ]
    return missing
