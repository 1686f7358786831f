"""The session of an audit of a whole model: `chain` and `training`."""

from dataclasses import asdict, dataclass, field

import torch

from bi_kernels.audit import parallel
from bi_kernels.audit.chain import generation, plain, speed
from bi_kernels.audit.chain.layouts import Step, case
from bi_kernels.audit.chain.relations import CONTROLS, GENERATING, invariance
from bi_kernels.audit.evidence.verdicts import Row, control_row, up_to_a_drift
from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.session import Session

QUICK = ("micro_batches:ragged",)  # the layouts of the quick form: padded and packed calls in one step


def start(audit: str, given: dict) -> "ModelSession":
    """Begins an audit of a model with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    return ModelSession(audit, asdict(p), choose(p.device, p.shapes), Candidate("bi_kernels", {}))


@dataclass
class ModelSession(Session):
    """A session whose subject is a decoder of this package's ops."""

    shares: dict = field(default_factory=dict)  # by dtype: {layout: {kind of tensor: share of elements that differ}}
    costs: list[dict] = field(default_factory=list)  # of the step, on a GPU: seconds and memory

    @property
    def case(self) -> dict:
        """Returns what the contract's [chain] says of these shapes: lengths, chunks, prompts."""
        return case(self.parameters["shapes"])

    def step(self, dtype: str, **changes) -> Step:
        """Returns a training step of the decoder; changes: layers, ops, checkpointing, as Step has them."""
        p = self.parameters
        return Step(p["shapes"], dtype, self.device, p["seed"], **changes)

    def judge(self) -> list[Row]:
        """Judges every layout of the step, in every dtype; returns the rows, which it records as they come."""
        found = []
        for dtype in self.dtypes:
            shares, step = self.shares.setdefault(dtype, {}), self.step(dtype)
            for row in invariance(step, self.device_label, self.command, QUICK * self.quick, shares):
                self.add([row])
                found.append(row)
            if self.on_gpu:
                self.costs += speed.whole(step)
        return found

    def stock(self) -> dict:
        """Returns {layout: {kind of tensor: share of its elements that differ}} of a decoder of stock ops in bf16,
        whose gradients PyTorch leaves in `.grad`, added up in fp32 over micro-batches."""
        shares: dict = {}
        step = self.step("bf16", layers="stock_layers", ops=plain)
        for _ in invariance(step, "", "", QUICK * self.quick, shares):
            pass
        return shares

    def controls(self) -> list[Row]:
        """Judges decoders with one op broken, or one thing forgotten: each must be flagged by its relation."""
        torch.cuda.empty_cache()  # the processes that judge them need memory too
        every = [name for name, *_ in (*CONTROLS, *GENERATING)]
        rows = list(parallel.each(self, control, every[1:2] if self.quick else every))
        self.add(rows)
        return rows


def control(session: ModelSession, name: str) -> Row:
    """Returns the row of a control: the one that flags it, or the first of its relation."""
    found = next(c for c in (*CONTROLS, *GENERATING) if c[0] == name)
    if len(found) == 4:
        _, relation, telling, change = found
        step = session.step("bf16", layers="control_layers", **change)
        rows = invariance(step, session.device_label, "", telling)
        rows = up_to_a_drift(row for row in rows if row.relation == relation)
    else:
        _, relation, ops = found
        rows, _ = generation.judge(session, "bf16", ops, "control_layers")
        rows = [row for row in rows if row.relation == relation]
    return control_row(name, rows)
