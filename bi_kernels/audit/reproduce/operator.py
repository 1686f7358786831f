"""Scripts that show the drifts of an op of the registry."""

import re
from itertools import product
from pathlib import Path

import torch

from bi_kernels import checks
from bi_kernels.audit.checks.limits import OVER_INT32
from bi_kernels.audit.checks.memory import ALIGNED
from bi_kernels.audit.checks.single_call import SINGLE_CALL
from bi_kernels.audit.evidence.kinds import NO_GRAD_NEEDED
from bi_kernels.audit.evidence.verdicts import DETERMINISM, INVARIANCE, Row
from bi_kernels.audit.problem.call_layouts import VIEWS
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.problem.subject import OpUnderTest
from bi_kernels.audit.relations.long_sequences import LONG
from bi_kernels.audit.reproduce.imports import import_of
from bi_kernels.audit.reproduce.script import Script, render, unscripted
from bi_kernels.contract import dtype_name

RELATIONS = "invariance", "parity", DETERMINISM, INVARIANCE
MEMORIES = "", "00", "10", "01", "11"  # what fresh memory may hold in the first call of both results
OWN = "op", "call", "made", "computed", "gradient", "parts", "whole", "other", "differ", "gap", "torch", "layout"
FLAT = "whole, other = (torch.cat([y.double().flatten() for y in made]) for made in (whole, other))"


def scripts(s: OpUnderTest, candidate: Candidate, rows: list[Row], folder: Path) -> list[Script]:
    """Returns a script for each row of one subject that drifts; says in a row why it has none."""
    found, names = [], set()
    function, imports = import_of(candidate, s.problem.op, folder)
    for r in rows:
        if r.relation not in RELATIONS or not r.mismatches:
            continue
        if why := reason(r):
            unscripted([r], why)
            continue
        name = slug(s, r)
        names.add(name := next(n for n in (name, *(f"{name}-{i}" for i in range(2, 99))) if n not in names))
        several = [True] if len(s.parts) > 1 else [False, True]  # which add_rms_norm's only part does not say
        ways = product(MEMORIES, several)
        texts = [Writer(s, r, function, imports, memory, many).text() for memory, many in ways]
        found.append(Script(folder / f"{name}.py", r, list(dict.fromkeys(texts))))
    return found


def reason(r: Row) -> str:
    """Says why no script is written for a row, '' where one is."""
    if r.layout == "random":
        return "hypothesis drew its layouts; the audit draws them again"
    if r.relation == INVARIANCE and r.rows == sum(LONG["lengths"]):
        return "none replays the step of long sequences; the audit does"
    return "none makes a call of so many elements; the audit does" if r.layout.startswith(OVER_INT32) else ""


def slug(s: OpUnderTest, r: Row) -> str:
    """Names the script of a row by what it shows."""
    p, gradient = s.problem, r.tensor if r.relation == INVARIANCE and r.against != SINGLE_CALL else ""
    layout = f"{r.layout}-{r.rows}" if r.layout == "rows" else r.layout
    parts = p.op.name, p.case, dtype_name(p.dtype), gradient, layout, r.inputs
    return "-".join(re.sub(r"[^\w.]+", "-", part).strip("-") for part in parts if part)


class Writer:
    """Writes the script of one row. memory: what torch.empty holds in the first call of both results, "0" ones and "1"
    zeros, and then by turns; "" leaves memory alone."""

    def __init__(self, s: OpUnderTest, r: Row, function: str, imports: str, memory: str, several: bool):
        self.s, self.r, self.op, self.memory, self.imports = s, r, s.problem.op, memory, imports
        self.tensors = list(self.op.order or [*self.op.tokens, *self.op.shared])
        self.function = function
        if function in (*OWN, *self.tensors):
            self.imports, self.function = f"{imports}\nfn = {function}", "fn"
        self.several = several  # outputs
        self.told = bool(self.op.constants or self.op.positions or self.op.cache or self.op.casts)

    def text(self) -> str:
        r, p = self.r, self.s.problem
        what, lines, bits = self.program()
        where = f"{p.device}, Triton's interpreter as bi_kernels mends it" if checks.INTERPRETED else p.device
        count = f"{r.mismatches} of {r.elements} elements of {r.tensor}"
        named = " ".join(filter(None, (p.op.name, p.case, dtype_name(p.dtype))))
        used = any("over_used_memory(" in line for line in lines)
        return render(
            title=f"{named}: {what} have different bits.",
            said=f"In a fresh process ({where}) {count} differ, as reported. Inputs: {r.inputs}.",
            imports=self.imports,
            helpers=[
                "from bi_kernels.audit.reproduce.replay import Operator",
                *["from bi_kernels.audit.reproduce.samples import over_used_memory"] * used,
            ],
            lines=lines,
            bits=bits,
            interpreted=checks.INTERPRETED,
            mended=checks.INTERPRETED,
        )

    def program(self) -> tuple[str, list[str], str]:
        """Returns in words what is compared, the lines that compute `whole` and `other`, and the integers as which."""
        r = self.r
        if r.against == SINGLE_CALL:
            axis = r.detail.partition(";")[0]  # it stands first
            return self._helper(f"used({self.function}, {axis!r}, {r.layout!r})", f"a call as usual and {r.layout}")
        if r.against == NO_GRAD_NEEDED:
            called = f"trained_and_not({self.function}, {r.layout!r})"
            return self._helper(called, f"a call without gradients and one that trains ({r.layout})", trained=True)
        if r.relation == INVARIANCE or r.relation == DETERMINISM and r.detail.startswith("backward"):
            if r.layout in VIEWS:
                called = f"gradients_viewed({self.function}, {r.layout!r}, {r.tensor!r})"
                return self._helper(called, f"gradients of inputs in one piece and as {r.layout}", trained=True)
            return self._gradients()
        if r.against == ALIGNED:
            called = f"viewed({self.function}, {r.layout!r})"
            return self._helper(called, f"inputs in one piece and as {r.layout}")
        return self._rows() if r.layout == "rows" else self._layouts()

    def _operator(self, **more) -> list[str]:
        """Returns the line that makes `op`, and the one that names its inputs."""
        p = self.s.problem
        given = {"case": p.case, "dtype": dtype_name(p.dtype), "shapes": p.shapes, "device": p.device.type}
        given |= {"seed": p.seed, "inputs": self.r.inputs} | more
        threads = {"threads": torch.get_num_threads()} if torch.get_num_threads() != 1 else {}
        listed = ", ".join(f"{k}={v!r}" for k, v in (given | threads).items())
        return [f"op = Operator({p.op.name!r}, {listed})  # what was judged"]

    def _named(self) -> str:
        return f"{', '.join(self.tensors)}{',' * (len(self.tensors) == 1)} = op.tensors()"

    def _helper(self, called: str, what: str, **more) -> tuple[str, list[str], str]:
        return what, [*self._operator(**more), f"whole, other = op.{called}", FLAT], "int64"

    def _end(self, lines: list[str], size: int) -> tuple[list[str], str]:
        """Returns the lines, of several outputs with the one that joins them, and the integers of a dtype's size."""
        integers = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
        return ([*lines, FLAT], "int64") if self.several else (lines, integers[size])

    @property
    def _size(self) -> int:
        """Returns the bytes of an element of the op's only output."""
        return next(iter(self.s.problem.returned.values())).itemsize

    def _fn(self, which: int) -> list[str]:
        """Returns the line that makes `used`, the function over memory that was in use; none where memory is left
        alone."""
        said = "torch.empty holds ones in one call and zeros in the next"
        first = self.memory[which : which + 1]
        return [f"used = over_used_memory({self.function}, first={first})  # {said}"] * bool(first)

    @property
    def _name(self) -> str:
        return "used" if self.memory else self.function

    def _rows(self) -> tuple[str, list[str], str]:
        """The first rows in one call, and among all."""
        r, n, leaky = self.r, self.s.largest, self.r.inputs == "nonfinite"
        m, tokens = r.rows, self.op.tokens
        some = ", ".join(f"{k}[:{m}]" if k in tokens else k for k in self.tensors)
        apart = f", apart={m}" * (leaky and bool(self.op.cache) and m < n)
        where = lambda count, more="": f", **op.where({count}{more})" * self.told
        first = f"[y[:{m}] for y in CALL]" if self.several else f"CALL[:{m}]"
        lines = [*self._operator(count=n, **({"finite": m} if leaky else {})), self._named()]
        lines += ["torch.set_grad_enabled(False)  # as in a rollout", "", *self._fn(0)]
        whole = f"{self._name}({', '.join(self.tensors)}{where(n, apart)})"
        lines += [f"whole = {first.replace('CALL', whole)}", *self._fn(1)]
        lines += [f"other = {self._name}({some}{where(m)})"]
        return f"the first {m} row{'s' * (m > 1)} in a call of {n} and in a call of {m}", *self._end(lines, self._size)

    def _call(self) -> str:
        """Returns the call of the op on the tokens of `call`."""
        held = lambda k: f"op.take({k}, call.{'keys' if k in self.op.cache else 'tokens'})"
        given = ", ".join(held(k) if k in self.op.tokens else k for k in self.tensors)
        return f"{given}{', **call.where' * self.told}"

    def _layouts(self) -> tuple[str, list[str], str]:
        r = self.r
        other, against = r.layout.split("=") if r.relation == "parity" else (r.layout, r.against)
        against = other if against == "itself" else against
        returned = "op.gathered(layout, made)" + "[0]" * (not self.several)
        lines = [*self._operator(), self._named(), "torch.set_grad_enabled(False)  # as in a rollout", "", ""]
        lines += [
            f"def computed(layout{', fn' * bool(self.memory)}):",
            '    """What the calls of a layout make, a row a token."""',
            "    made = []",
            "    for call in op.calls(layout):  # its tokens, by number, and where they are",
            f"        made.append({'fn' if self.memory else self.function}({self._call()}))",
            f"    return {returned}",
            "",
            "",
        ]
        more = ", used" * bool(self.memory)
        lines += [*self._fn(0), f"whole = computed({against!r}{more})", *self._fn(1)]
        lines += [f"other = computed({other!r}{more})"]
        words = f"the layouts {against} and {other}" if other != against else f"two runs of the layout {other}"
        return words, *self._end(lines, self._size)

    def _gradients(self) -> tuple[str, list[str], str]:
        """A real backward over the calls of a layout."""
        r, tokens = self.r, self.op.tokens
        key, main_grad = r.tensor.removeprefix("d").removesuffix(".grad"), not r.tensor.endswith(".grad")
        floating = [k for k, dims in (tokens | self.op.shared).items() if not dims.endswith((":id", ":bool"))]
        shared = [k for k in floating if k in self.op.shared]
        reset = []
        for k in shared:
            reset.append(f"    {k}.grad = None")
            reset += [f"    {k}.main_grad = torch.zeros_like({k}, dtype=torch.float32)"] * main_grad
        inner, given = [], []
        for k in self.tensors:
            held = f"op.take({k}, call.{'keys' if k in self.op.cache else 'tokens'})"
            if k in tokens and k == key:
                inner.append(f"part = {held}.requires_grad_()")
            wanted = ".requires_grad_()" * (k in floating)
            given.append("part" if k == key and k in tokens else f"{held}{wanted}" if k in tokens else k)
        of_token = key in tokens
        given = ", ".join(given) + ", **call.where" * self.told
        inner += ["with op.token_layout(call):", f"    y = {self.function}({given})", "op.backward(y, call)"]
        inner += ["parts.append(part.grad)"] * of_token
        left = f"{key}.main_grad if {key}.grad is None else {key}.grad" if main_grad else f"{key}.grad"
        poisoned = of_token and r.inputs == "nonfinite"
        ends = "op.gathered(layout, parts)[0]"
        ends = f"op.judged({ends})" if poisoned else ends
        lines = [*self._operator(trained=True), self._named(), *(f"{k}.requires_grad_()" for k in shared), "", ""]
        lines += ["def gradient(layout):", f'    """{r.tensor} that backward leaves over the calls of a layout."""']
        lines += [*reset, *["    parts = []"] * of_token]
        lines += ["    for call in op.calls(layout):  # its tokens, by number, and where they are"]
        lines += [*(f"        {line}" for line in inner), f"    return {ends if of_token else left}", "", ""]
        against = r.layout if r.against == "itself" else r.against
        lines += [f"whole = gradient({against!r}).double()", f"other = gradient({r.layout!r}).double()"]
        words = f"{r.tensor} in the layouts {against} and {r.layout}"
        return words if against != r.layout else f"{r.tensor} of two runs", lines, "int64"
