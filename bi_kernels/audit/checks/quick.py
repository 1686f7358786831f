"""The quick form of an audit: a few checks of each op, those that kill most mutants. A notebook that is run by itself
makes them, and so does `bi-audit run --quick`."""

from bi_kernels.audit.checks import forward, gradient
from bi_kernels.audit.findings import Row
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step

LAYOUTS = ("singles", "batch", "left_padded:16", "chunked:7", "decode")
OF_ATTENTION = ("batch", "chunked:7", "decode")  # whose calls are many
GRADIENT_LAYOUTS = ("singles", "batch", "permuted")


def check(subject: OpUnderTest, wants_forward: bool = True, wants_backward: bool = False) -> list[Row]:
    """Returns the rows of an op at one case: a few layouts, and accuracy, of its results, its gradients or both."""
    if refused := forward.supported(subject):
        return [refused]
    rows: list[Row] = []
    if wants_forward:
        rows += forward.by_layout(subject, OF_ATTENTION if subject.problem.op.cache else LAYOUTS)
        rows += subject.attempt("accuracy", "rows", lambda: forward.accuracy(subject), against="fp64")
    if wants_backward:
        step = Step(subject, CANCELLING)
        packed = step.gradients()
        said = {"against": "packed", "inputs": CANCELLING, "rows": step.count}
        for layout in GRADIENT_LAYOUTS:
            rows += gradient.compared(
                subject, gradient.INVARIANCE, layout, lambda: step.gradients(layout), lambda: packed, **said
            )
        made = lambda: gradient.gradient_accuracy(subject, "normal")
        rows += subject.attempt(gradient.ACCURACY, "rows", made, against="fp64", inputs="normal")
    return rows
