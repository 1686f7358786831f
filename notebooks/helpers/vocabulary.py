"""The experiments of the embedding and LM-head audit."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

import bi_kernels
from bi_kernels.audit import stock
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import INVARIANCE, Row
from bi_kernels.audit.inputs import generator, on
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step, token_layout
from bi_kernels.contract import DTYPES
from bi_kernels.grads import MainGrads
from bi_kernels.ops.embedding import MANY
from helpers.common import Found, size

FEW = 66, 9000  # of hidden, whose rows no copy of 16 bytes takes whole, and of the vocabulary
HANDED = 33, 9  # tokens: of the latter the LM head's parts are wider than a block, and have to end with one
FREQUENT = "one id, frequent in one call"
OFTEN = 7 * MANY // 6, 1, 7 * MANY // 6  # tokens of samples: those of the id are over 2 * MANY together, and not alone
SPLITS = ("packed", "batch", "left_padded:16", "permuted", "micro_batches:each", "micro_batches:ragged")


def by_dtype(session, experiment: Callable) -> Found:
    """Returns an experiment's rows and lines in every dtype of the session; on the interpreter, in the first."""
    found = [experiment(session, dtype) for dtype in (session.dtypes if session.on_gpu else session.dtypes[:1])]
    return [row for rows, _ in found for row in rows], [line for _, lines in found for line in lines]


def gathered(session, dtype: str) -> Found:
    """Returns every token that holds an id gets the bits of that id's row of the table, wherever it stands."""
    s = session.subject("embedding", dtype)
    count, rows, lines = sum(s.lengths), [], []
    tokens, shared = s.inputs("normal", count)
    for name in ("packed", "batch", "left_padded", "permuted", "decode", "neighbours"):
        drift = compare(s.layout(name, "normal"), shared["weight"][tokens["ids"]])
        rows.append(s.row("parity", f"{name}=table", drift, "the table's rows", "normal", count))
        lines.append({"layout": name, "dtype": dtype, "tokens": count, "different ids": len(tokens["ids"].unique())})
        lines[-1]["against the table's rows"] = str(drift)
    return rows, lines


def frequent(session, dtype: str) -> Found:
    """Returns the gradient of a table of which one id has so many tokens of a call that programs of its own add them,
    against a call a sample, none of which has so many; and of torch's table, as a control."""
    ways = {"bi_kernels": bi_kernels.embedding, "torch's embedding": stock.embedding}
    found = [_frequent(session.subject("embedding", dtype, call, name)) for name, call in ways.items()]
    rows = [found[0][0], found[1][0].as_control()]
    return rows, [line for _, line in found]


def _frequent(s: OpUnderTest) -> tuple[Row, dict]:
    step = Step(s, CANCELLING, OFTEN)
    often = torch.arange(step.count, device=s.problem.device) % 50 != 9
    step.tokens["ids"] = step.tokens["ids"].masked_fill(often, 5)
    drift = compare(step.gradients()["weight"], step.gradients("micro_batches:each")["weight"])
    row = s.row(INVARIANCE, FREQUENT, drift, "micro_batches:each", CANCELLING, step.count, tensor="dweight")
    line = {"candidate": s.candidate, "dtype": row.dtype, "tokens": step.count, "of one id": int(often.sum())}
    return row, line | {"dweight, one call against a call a sample": str(drift)}


def outside(session) -> list[Row]:
    """Judges ids outside the table, written where no check sees them: their output is NaN, and no row beside the table
    in a flat buffer is read or gets their gradient. On the interpreter every call checks its ids."""
    s, vocab, width = session.subject("embedding", session.dtypes[0]), 9, 33
    if not session.on_gpu:
        return []
    g = generator(session.device, session.parameters["seed"], "outside")
    flat = torch.randn(vocab + 3, width, generator=g, device=session.device).to(s.problem.dtype)
    ids = torch.tensor([1, 2, 3, 4, 8], device=session.device)
    written = torch.tensor([1, vocab, -1, vocab + 2, 8], device=session.device)
    there, dy = (written >= 0) & (written < vocab), torch.ones(len(ids), width, device=session.device)

    def made() -> Drift:
        weight, buffer = flat[:vocab].detach().requires_grad_(), torch.zeros(flat.shape, device=session.device)
        weight.main_grad = buffer[:vocab]
        given = ids.clone()
        bi_kernels.embedding(given, weight)  # checks them
        given.data.copy_(written)
        y = bi_kernels.embedding(given, weight)
        y.backward(dy.to(y.dtype))
        known, expected = written[there], torch.full_like(y, torch.nan)
        expected[there] = flat[known]
        of_table = torch.zeros_like(buffer).index_add_(0, known, dy[there])
        y = torch.where(y.isnan(), torch.nan, y.detach())
        return compare((y, buffer), (expected.detach(), of_table))

    return s.attempt("contract", "outside the table", made, against="NaN", rows=len(ids), detail="out and dweight")


def handoff(session, dtype: str, tokens: Sequence[int] = HANDED) -> Found:
    """lm_head_logprob of so many tokens against the ops that it fuses, and with its logits kept or not: the same bits,
    gradients too.

    On a GPU at the model's own size; on the interpreter a vocabulary of several blocks, which tiny shapes have not.
    """
    found = [_handoff(session, dtype, count) for count in tokens[: 1 if session.quick else None]]
    return [row for rows, _ in found for row in rows], [line for _, lines in found for line in lines]


def _handoff(session, dtype: str, tokens: int) -> Found:
    s = session.subject("lm_head_logprob", dtype)
    own = session.on_gpu and session.parameters["shapes"] != "tiny"
    width, vocab = (size(session)["hidden"], size(session)["vocab"]) if own else FEW
    g = generator(session.device, session.parameters["seed"], "handoff", dtype)
    make = lambda *shape: torch.randn(shape, generator=g, device=session.device)
    hidden, weight = (make(rows, width).to(DTYPES[dtype]) for rows in (tokens, vocab))
    targets = torch.randint(0, vocab, (tokens,), generator=g, device=session.device)
    targets[::7] = -100
    upstream = make(tokens), make(tokens)

    def results(call, times: int = 1) -> list[torch.Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
        outputs = call(h, w)
        for left in reversed(range(times)):
            h.grad, w.main_grad = None, torch.zeros_like(w.main_grad)
            torch.autograd.backward(outputs, upstream, retain_graph=left > 0)
        return [*(y.detach() for y in outputs), h.grad, w.main_grad]

    said = {"targets": targets, "temperature": 0.7}
    ours = partial(bi_kernels.lm_head_logprob, **said)
    fused = results(ours)
    some = partial(ours, keep_bytes=4096 * tokens * hidden.element_size())
    ways = {
        "logits kept": partial(results, partial(ours, keep_bytes=float("inf"))),
        "4096 columns kept": partial(results, some),
        "4096 columns kept, second backward": partial(results, some, times=2),
        "linear, then token_logprob": partial(
            results, lambda h, w: bi_kernels.token_logprob(bi_kernels.linear(h, w), **said)
        ),
    }
    rows, lines = [], []
    for name, made in ways.items():
        line = {"hidden × vocabulary": f"{width} × {vocab}", "dtype": dtype, "tokens": tokens}
        line["against lm_head_logprob"] = name
        for tensor, y, expected in zip(("logprob", "entropy", "dhidden", "dweight"), made(), fused):
            drift = compare(y, expected)
            rows.append(s.row("parity", name, drift, "lm_head_logprob", "normal", tokens, tensor=tensor))
            line[tensor] = f"{drift.mismatches} of {drift.elements} differ"
        lines.append(line)
    return rows, lines


def _tied_gradient(session, dtype: str, layout: str, paths=("embedding", "head"), two: bool = True) -> torch.Tensor:
    """Returns the fp32 gradient of a table used as an embedding and as an LM head, after a step under a layout; paths:
    those of the two that train it; two: whether each has an accumulator."""
    step = Step(session.subject("embedding", dtype), "normal")
    table = torch.nn.Parameter(step.shared["weight"].clone())
    grads = MainGrads([table], tied=[table] if two else [])
    g = generator(session.device, session.parameters["seed"], "tied")
    make = lambda draw: draw((step.count,), generator=g, device=session.device)
    upstream = make(torch.randn) * torch.exp2(12 * make(torch.rand) - 6)
    ids, (vocab, hidden) = step.tokens["ids"], table.shape
    targets = (ids * 7 + 1) % vocab
    for call in step.layouts[layout]:
        index = on(session.device, call.index)
        real, at = index >= 0, index.clamp(min=0)
        with token_layout(call, step.lengths):
            embedding, head = (table if path in paths else table.detach() for path in ("embedding", "head"))
            x, wanted = bi_kernels.embedding(ids[at], embedding), targets[at].masked_fill(~real, -100)
            known = x if two else x.detach().requires_grad_()
            logprob, _ = bi_kernels.lm_head_logprob(known, head, wanted, temperature=hidden**0.5)
        if logprob.requires_grad:
            logprob.backward(upstream[at].masked_fill(~real, 0))
        if not two:  # in a backward of its own: within one, the second fold is refused
            x.backward(known.grad)
    grads.join()
    return table.main_grad


def tied(session, dtype: str = "bf16") -> Found:
    """Returns a tied table: equal bits for every split, and each path's fold that of an untied table. One accumulator
    for both paths, for contrast, is the control of the last row."""
    s = session.subject("embedding", dtype)
    gradient = partial(_tied_gradient, session, dtype)
    whole, one = gradient("packed"), gradient("packed", two=False)
    apart = gradient("packed", ["head"]) + gradient("packed", ["embedding"])

    def row(layout: str, drift: Drift, against: str = "packed") -> Row:
        return s.row(INVARIANCE, layout, drift, against, tensor="dweight")

    untied, drift = "each path untied, added once", compare(whole, apart)
    rows = [row("tied=untied", drift, untied)]
    lines = [{"layout": untied, "dtype": dtype, "two accumulators": str(drift), "one, for contrast": "–"}]
    control = row("tied", compare(one, one))
    for name in SPLITS[1:]:
        drift = compare(gradient(name), whole)
        contrast = compare(gradient(name, two=False), one)
        rows.append(row(f"tied {name}", drift))
        told = {"two accumulators": str(drift), "one, for contrast": str(contrast)}
        lines.append({"layout": name, "dtype": dtype} | told)
        if contrast.mismatches and not control.mismatches:
            control = row(f"tied {name}", contrast)
    control.candidate = "tied weight with one accumulator"
    return [*rows, control.as_control()], lines
