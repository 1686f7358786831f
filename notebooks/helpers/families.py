"""The session of the audit `families`: what `apply` says of a tiny model of each family, what the bits say, and where
the stock model drifts first."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product

import torch

from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import LOCALISER, NEEDS_FIX, PASS, UNSUPPORTED, Row, control_row
from bi_kernels.audit.localiser.compare import BACKWARD, FORWARD, PARAMETER, Cause
from bi_kernels.audit.localiser.locate import locate
from bi_kernels.audit.localiser.report import Report
from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.session import Session
from bi_kernels.audit.targets.base import Target
from bi_kernels.audit.targets.candidates import Candidate
from bi_kernels.audit.targets.model import Relation
from bi_kernels.audit.targets.session import check_library

check_library()
with warnings.catch_warnings(action="ignore"):  # of a library that asks a notebook for widgets
    from bi_kernels.audit.targets import family_verdict
    from bi_kernels.audit.targets import tiny_families as tiny
    from bi_kernels.audit.targets.transformers import STOCK, quiet
    from bi_kernels.integrations.transformers import check as bits

FAMILIES = "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma3_text", "gpt_neox", "mamba"
QUICK = "qwen3_moe", "mamba"  # a mixture, and a family that is told NO
LAYOUTS = {  # of `check`, in the auditor's words
    "padded right": "batch",
    "padded left": "left_padded",
    "packed": "packed",
    "in chunks": "chunked",
    "decoded": "decode",
}
CACHED = "chunked", "decode", "generate, left-padded"
SPLIT = "micro_batches:each"
COLUMNS = {
    "padded right · left · packed": ("batch", "left_padded", "packed"),
    "chunked · decoded · generated": CACHED,
    "gradients, split": (SPLIT,),
}
LOCATED = (5, 40, 12), (24, 24)  # sequences for the localiser; the second, without padding, for a backward
ROUNDS = 3  # of the localiser


def start(audit: str, given: dict) -> "FamiliesSession":
    """Begins the audit with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    session = FamiliesSession(audit, asdict(p), choose(p.device), Candidate("bi_kernels", {}))
    _ = session.models
    return session


@dataclass
class FamiliesSession(Session):
    """A session whose subjects are models of Transformers, tiny on any device and at real widths on a GPU."""

    verdicts: list[dict] = field(default_factory=list)  # of each tiny family: see `family_verdict.judge`

    @property
    def families(self) -> Sequence[str]:
        return QUICK if self.quick else FAMILIES

    @property
    def models(self) -> list[str]:
        """Returns the names of the models at real widths. Raises ValueError for an unknown one."""
        from helpers.families_at_width import WIDTHS  # which imports this module

        named = self.parameters["models"]
        few = [*WIDTHS][: 1 if self.quick else None]
        chosen = {"": few, "all": [*WIDTHS], "none": []}.get(named)
        chosen = [name.strip() for name in named.split(";")] if chosen is None else chosen
        for name in chosen:
            if name not in WIDTHS:
                raise ValueError(f"models holds {name!r}, expected all, none, or some of {'; '.join(WIDTHS)}")
        return chosen

    def target(self, op: str, case: str, dtype: str = "", candidate: str = "bi_kernels") -> "Family":
        return Family(self, op, case, dtype or self.dtypes[0], candidate)


class Family(Target):
    """A model of one family, whose rows are about `apply`, or about a control."""

    def __init__(self, session: FamiliesSession, op: str, case: str, dtype: str, candidate: str):
        self.whose, self.command = (session.audit, op, case, candidate, dtype, session.device_label), session.command

    def check_row(self, check: bits.Check, refused: str = "", **more) -> Row:
        """Returns the row of a comparison; refused: why nothing was promised, where `apply` said NO."""
        layout = SPLIT if check.gradient else _layout(check.name)
        relation = Relation.GRADIENT if check.gradient else Relation.PARITY if layout in CACHED else Relation.INVARIANCE
        drift = Drift(check.differ, check.elements) if not check.error else None
        said = {"against": "one micro-batch" if check.gradient else "singles", "detail": refused or check.error}
        said |= {"tensor": check.where or ("every gradient" if check.gradient else "logits")}
        return self.row(relation, layout, drift, **said | {"verdict": UNSUPPORTED if refused else ""} | more)


def _layout(name: str) -> str:
    name = name.removesuffix(" against alone")
    return "generate, left-padded" if name.startswith("generated") else LAYOUTS.get(name, name)


def judge(session: FamiliesSession) -> list[Row]:
    """Judges a tiny model of each family: `apply`'s answer, every layout, a split, `generate` and `restore`; returns the
    rows, which it records as they come. Where `apply` says NO, the row that counts is that the bits say so, too."""
    rows = []
    for name, dtype in product(session.families, session.dtypes):
        with quiet():
            found = family_verdict.judge(name, session.device.type, [dtype], [dtype])
        label = name if len(session.dtypes) == 1 else f"{name}, {dtype}"
        session.verdicts.append(found | {"label": label})
        mine = [*_rows(session.target(name, "tiny", dtype), found)]
        session.add(mine)
        rows += mine
    return rows


def _rows(target: Family, found: dict) -> Iterator[Row]:
    if "says" not in found:
        yield target.row(Relation.CONTRACTED, "apply", None, detail=found["why"])
        return
    right, answer = family_verdict.agree(found), "/".join(("NO", "yes")[yes] for yes in found["says"])
    said = {"tensor": "answers that the bits contradict", "detail": f"apply says {answer}"}
    yield target.row(Relation.CONTRACTED, "apply", Drift(int(not right), 1), "bits", **said)
    for check in found["checks"]:
        kept = {k: v for k, v in check.items() if k != "dtype"}
        promised = found["says"][1 if check["gradient"] else 0]
        yield target.check_row(bits.Check(**kept), "" if promised else f"apply says {answer}")
    lost = int(found["restored"] is not True)
    said = {"tensor": "models that are not as before", "detail": "results and gradients of a step"}
    yield target.row(Relation.DETERMINISM, "restored", Drift(lost, 1), "before apply", **said)


def headline(session: FamiliesSession) -> str:
    """Says how many families keep their bits, and which do not."""
    asked = [v for v in session.verdicts if "says" in v]
    kept = [v for v in asked if all(v["says"]) and all(v["bits"])]
    lost = [f"`{v['label']}`" for v in asked if v not in kept]
    honest = all(map(family_verdict.agree, asked)) and len(asked) == len(session.verdicts)
    no = f" {', '.join(lost)} {'does' if len(lost) == 1 else 'do'} not." if lost else ""
    said = "says so in each case" if honest else "or the model fails in some: see the rows that need a fix"
    return f"**{len(kept)} of {len(session.verdicts)} families keep their bits after `apply`.{no}** `apply` {said}."


def table(session: FamiliesSession) -> list[dict]:
    """Returns a line for each family: the answer, and how many elements differ in which layout."""
    lines = []
    for found in session.verdicts:
        line = {"family": found["label"]}
        if "says" not in found:
            lines.append(line | {"`apply` says": found["why"]})
            continue
        checks = {SPLIT if c["gradient"] else _layout(c["name"]): c for c in found["checks"]}
        line["`apply` says"] = "yes" if all(found["says"]) else "NO"
        for title, layouts in COLUMNS.items():
            line[title] = " · ".join(_shown(checks.get(layout)) for layout in layouts)
        lines.append(line | {"restored": "yes" if found["restored"] is True else "NO"})
    return lines


def _shown(check: dict | None) -> str:
    """Returns how many elements differ, in per cent; – where the layout is not asked."""
    if check is None:
        return "–"
    return check["error"] or (
        f"{max(100 * check['differ'] / check['elements'], 0.1):.1f} %" if check["differ"] else "0"
    )


def why_not(session: FamiliesSession) -> list[dict]:
    """Returns a line for each family that was told NO: the first reasons of its report."""
    lines = []
    for found in session.verdicts:
        if "says" in found and not all(found["says"]):
            lines.append({"family": found["label"], "why": found["report"].splitlines()[0].partition("NO. ")[2]})
    return lines


def controls(session: FamiliesSession) -> list[Row]:
    """Judges the stock model of each family in fp32, in the same layouts and split, which must drift; returns the
    rows."""
    rows = []
    for name in session.families:
        with quiet():
            model = tiny.built(name, dtype=torch.float32).to(session.device)
            asked = next((v for v in session.verdicts if v["family"] == name), {"not asked": ()})["not asked"]
            checks = bits.check(model, [layout for layout in LAYOUTS if layout not in asked])
        mine = [session.target(name, "tiny", "fp32").check_row(c) for c in checks]
        for backward in (False, True):
            rows.append(control_row(STOCK, [r for r in mine if (r.relation == Relation.GRADIENT) == backward]))
    session.add(rows)
    return rows


def located(session: FamiliesSession) -> list[dict]:
    """Looks for the first op of each stock family that drifts, forward and backward; records whether one was named, and
    returns the lines of a table."""
    g = torch.Generator().manual_seed(session.parameters["seed"])
    draw = lambda n: torch.randint(1, tiny.VOCABULARY, (n,), generator=g).to(session.device)
    batches = [[draw(n) for n in lengths] for lengths in LOCATED]
    lines = []
    for name in session.families:
        with quiet():
            model = tiny.built(name, 1, torch.float32).to(session.device)
            if tiny.is_mixture(model):
                model.set_experts_implementation("eager")  # a loop over experts, which keeps a token's rows apart
            report = locate(model, batches[0], rounds=ROUNDS)
            forward, backward = _first(report)
            backward = backward or _first(locate(model, batches[1], rounds=ROUNDS))[1]
        lines += [_line(name, "forward", forward), _line(name, "backward", backward)]
        target = session.target(name, "1 layer", "fp32")
        said = {"tensor": "ops", "verdict": PASS if forward else NEEDS_FIX, "detail": report.verdict}
        session.add([target.row(LOCALISER, "singles", Drift(0, 1), "batch", **said)])
    return lines


def _first(report: Report) -> tuple[Cause | None, Cause | None]:
    """Returns the first op that drifts forward, and the first backward."""
    causes = {c.direction: c for c in reversed(report.causes)}
    return causes.get(FORWARD), causes.get(BACKWARD) or causes.get(PARAMETER)


def _line(name: str, direction: str, cause: Cause | None) -> dict:
    if cause is None:
        return {"family": name, "direction": direction, "op": "none seen", "module": "–", "source": "–"}
    steps = cause.op.split(" in batch")[0].split(" → ")
    op = " → ".join(steps if len(steps) < 3 else [steps[0], "…", *[s for s in steps[-1:] if s != "…"]])
    return {"family": name, "direction": direction, "op": op, "module": cause.path, "source": cause.source}
