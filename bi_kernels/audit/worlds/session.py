"""The session of the audit of worlds: every world's evidence against that of one rank, the controls, what it costs."""

import base64
import json
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from bi_kernels.audit.chain.relations import GRADIENT, INVARIANCE, PARITY, Whole
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.evidence.kinds import Side
from bi_kernels.audit.evidence.verdicts import PRECONDITION, Row
from bi_kernels.audit.index import goals
from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.session import Session
from bi_kernels.audit.worlds.first import differing
from bi_kernels.audit.worlds.launch import launched
from bi_kernels.audit.worlds.ways import CONTROLS, HERE
from bi_kernels.audit.worlds.world import WORLDS, World, case, digest


def start(audit: str, given: dict) -> "WorldSession":
    """Begins the audit of worlds with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    device = choose(p.device, p.shapes)
    if device.type == "cuda" and p.nproc > torch.cuda.device_count():
        raise ValueError(f"nproc is {p.nproc}, expected at most {torch.cuda.device_count()}, the GPUs of this machine")
    return WorldSession(audit, asdict(p), device, Candidate("bi_kernels", {}))


KINDS = "leaves", "logprob", "decode"
TIMING = "helpers.parallel_timing:measured"  # next to the notebooks; what ranks run that measure


@dataclass
class Evidence:
    """What the ranks of a world left, put together."""

    leaves: dict[str, str] = field(default_factory=dict)
    logprob: dict[str, str] = field(default_factory=dict)
    decode: dict[str, str] = field(default_factory=dict)
    unmoved: list[str] = field(default_factory=list)  # parameters without a gradient
    other: dict[str, str] = field(default_factory=dict)  # what a later rank has of the same, where that differs
    ops: list[list[dict]] = field(default_factory=list)  # what each op gave, of each rank that says so
    times: Counter = field(default_factory=Counter)  # that each was left, by a rank each

    @classmethod
    def of(cls, ranks: list[dict]) -> "Evidence":
        found = cls()
        for said in ranks:
            found.unmoved += said.get("unmoved", [])
            found.ops += [said["ops"]] if said.get("ops") else []
            for kind in KINDS:
                for name, value in said.get(kind, {}).items():
                    found.times[f"{kind} {name}"] += 1
                    if getattr(found, kind).setdefault(name, value) != value:
                        found.other[f"{kind} {name}"] = value
        return found

    def against(self, one: "Evidence", kind: str, world: World) -> dict[str, str]:
        """Returns what the ranks have of what one rank has: where they differ among themselves, what differs from that;
        "" of what not all ranks left that should have it."""
        found = {}
        for name, theirs in getattr(one, kind).items():
            at = f"{kind} {name}"
            value = getattr(self, kind).get(name, "")
            everybody = world.ranks if kind == "leaves" and "norm" in name else world.dp
            expected = everybody if kind == "leaves" else world.tp
            found[name] = "" if self.times[at] != expected else value if value != theirs else self.other.get(at, value)
        return found

    def digest(self) -> str:
        """Returns one SHA-256 of what all ranks left of a step: logprobs, gradients, weights."""
        return digest(self.leaves | self.logprob | {f"other {k}": v for k, v in self.other.items()})


@dataclass
class WorldSession(Session):
    """A session whose subject is a decoder's step, on ranks that are processes."""

    evidence: dict[World, Evidence] = field(default_factory=dict)
    broken: dict[str, Evidence] = field(default_factory=dict)  # by control
    costs: list[dict] = field(default_factory=list)

    @property
    def worlds(self) -> list[World]:
        """Lists the worlds of `least` to `nproc` ranks, behind that of one rank; of the quick form the first two."""
        if self.quick:
            return [*WORLDS[:2]]
        least, most = self.parameters["least"], self.parameters["nproc"]
        return [w for w in WORLDS if w == World() or least <= w.ranks <= most]

    @property
    def broken_ways(self) -> dict[str, tuple]:
        """Returns the controls; of the quick form the first."""
        return dict([*CONTROLS.items()][: 1 if self.quick else None])

    @property
    def sizes(self) -> list[int]:
        """Lists how many ranks the worlds and the controls have, in the order in which they run."""
        broken = {world.ranks for _, world, _ in self.broken_ways.values()}
        return sorted({w.ranks for w in self.worlds} | {n for n in broken if n <= self.parameters["nproc"]})

    @property
    def timed(self) -> bool:
        """Tells whether there is something to time: on GPUs, at shapes that the contract has for it."""
        return self.on_gpu and "timed" in case(self.parameters["shapes"])

    @property
    def who(self) -> Whole:
        layers = case(self.parameters["shapes"])["layers"]
        return Whole(layers, self.parameters["dtype"], self.device_label, self.command)

    def judge(self) -> list[Row]:
        """Runs every world, those of as many ranks in one go, and judges it by what one rank has; returns the rows,
        which it records as they come."""
        found = []
        for ranks in self.sizes:
            ours = f"{HERE}:{'QUICK' if self.quick else 'OURS'}"
            jobs = [(w.name, w, ours) for w in self.worlds if w.ranks == ranks]
            broken = [(name, w, way) for name, (way, w, _) in self.broken_ways.items() if w.ranks == ranks]
            timed = [
                ("timing", w, TIMING) for _, w, _ in jobs if self.timed and 1 in w[:2] and ranks > 1 and not w.tokens
            ]
            every = jobs + broken + timed
            told = {k: self.parameters[k] for k in ("shapes", "dtype", "seed")} | {"device": self.device.type}
            told |= {"jobs": [{"way": way, "world": w} for _, w, way in every], "timing": TIMING}
            folder = Path(tempfile.mkdtemp())
            try:
                said, why = launched(folder, told, ranks, self.parameters["seconds"])
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            for (name, world, way), of in zip(every, said):
                if way == TIMING:
                    self.costs += [{"world": world.name} | cost for cost in of[0]["costs"]]
                elif name in CONTROLS:
                    self.broken[name] = Evidence.of(of)
                else:
                    self.evidence[world] = Evidence.of(of)
            rows = [
                row for _, w, _ in jobs for row in (self._rows(w) if w in self.evidence else [self._missing(w, why)])
            ]
            if why and len(said) >= len(jobs):  # a control or a measurement, which is named
                name, world, _ = every[min(len(said), len(every) - 1)]
                rows.append(self._missing(world, f"{name}: {why}"))
            self.add(rows)
            found += rows
        if self.costs:
            self.goals()
        return found

    def goals(self) -> list[dict]:
        """Returns a goal a measurement that has one, and whether it is met, as `compared` marks it; and those of which
        nothing was measured, met: None. Leaves them in a file, for the report's first sentence and the index."""
        ranks, most = {w.name: w.ranks for w in WORLDS}, self._goals()
        found, left = [], dict(most)
        for cost in self.costs:
            at = cost["what"], ranks[cost["world"]]
            ours, theirs = cost["ms"].values()
            if at in most:
                left.pop(at, None)
                found.append({"what": f"{at[0]}, {at[1]} ranks: {cost['case']}", "met": ours / theirs <= most[at]})
        found += [{"what": f"{what}, {n} ranks", "met": None} for what, n in left]
        if self.out:
            (self.out / goals.FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return found

    def _goals(self) -> dict[tuple[str, int], float]:
        """Returns how many times the usual way each measurement may take, by what it is and ranks."""
        return {(g["what"], g["ranks"]): g["most"] for g in case(self.parameters["shapes"])["timed"]["goals"]}

    def _missing(self, world: World, why: str) -> Row:
        if World() not in self.evidence and world != World():
            why = f"{why}; one rank left nothing to compare with"
        return self.who.row(INVARIANCE, world.name, None, "packed", detail=why)

    def _rows(self, world: World) -> list[Row]:
        """Returns the rows of a world. Of one rank they ask whether there is something to compare with: that logprobs
        are numbers, that every parameter has a gradient, and that decode has prefill's bits."""
        if World() not in self.evidence:
            return [self._missing(world, "")]
        mine, one = self.evidence[world], self.evidence[World()]
        detail = f"SHA-256 {mine.digest()}"
        if world == World():
            numbers = torch.cat([_numbers(v) for v in one.logprob.values()] or [torch.zeros(0)])
            wrong = Drift(int((~numbers.isfinite()).sum()), numbers.numel())
            parameters = len({name.rsplit(" ", 1)[0] for name in one.leaves if name.startswith("gradient")})
            rows = [self._row(PRECONDITION, world, wrong, "logprobs that are no numbers")]
            unmoved = Drift(len(one.unmoved), parameters)
            rows.append(self._row(PRECONDITION, world, unmoved, "parameters without a gradient", detail=detail))
        else:
            logprob = _values(mine.against(one, "logprob", world), one.logprob)
            rows = [self._row(INVARIANCE, world, logprob, "logprob")]
            rows.append(self._row(GRADIENT, world, _leaves(mine, one, "gradient", world), "gradients", detail=detail))
            rows.append(self._row(Side.TRAINED, world, _leaves(mine, one, "weight", world), "weights"))
        if world.dp == 1:
            ends = {name: _ending(one.logprob[name], value) for name, value in one.decode.items()}
            decoded = mine.against(Evidence(decode=ends), "decode", world)
            rows.append(self._row(PARITY, world, _values(decoded, ends), "logprob"))
        return rows

    def _row(self, relation: str, world: World, drift: Drift, part: str, **more) -> Row:
        """Returns a row; without an element that was compared it needs a fix."""
        count = drift.elements if part.startswith("logprob") else sum(case(self.parameters["shapes"])["lengths"])
        if not drift.elements:
            return replace(self._missing(world, f"{part}: there was nothing to compare"), relation=relation)
        row = self.who.about(relation, world.name, drift, [part], rows=count, **more)
        return replace(row, against="one rank" if world != World() else "its own prefill" if relation == PARITY else "")

    def controls(self) -> list[Row]:
        """Judges the ways that others take, each by what has to differ; returns their rows."""
        one, found = self.evidence.get(World(), Evidence()), []
        for name, (_, world, kind) in self.broken_ways.items():
            if world.ranks > self.parameters["nproc"]:
                continue
            mine = self.broken.get(name, Evidence())
            relation = INVARIANCE if kind == "logprob" else GRADIENT
            which = "logprob" if kind == "logprob" else "leaves"
            asked = {n: v for n, v in mine.against(one, which, world).items() if which == kind or n.startswith(kind)}
            if not asked or "" in asked.values():  # it must differ, and not be absent
                row = self._missing(world, "the control left too little")
            else:
                values = _values(asked, one.logprob) if which == kind else _leaves(mine, one, kind, world)
                row = self._row(relation, world, values, kind)
            found.append(replace(row, candidate=name).as_control())
        self.add(found)
        return found

    def firsts(self) -> list[dict]:
        """Returns a line a world, and a way that others take, that cuts weights: the first op whose output differs from
        one rank's, while all before it agree."""
        one = (self.evidence.get(World()) or Evidence()).ops
        cut = [world for world in self.evidence if world.dp == 1 < world.tp and not world.tokens]
        lines = [("ours", world, self.evidence[world]) for world in cut]
        lines += [(name, CONTROLS[name][1], found) for name, found in self.broken.items() if found.ops]
        found = []
        for who, world, mine in lines:
            where = differing(one[0], mine.ops) if one and mine.ops else ("nothing was left", 0)
            op, before = where or ("none", len(one[0]))
            found.append({"who": who, "world": world.name, "first op that differs": op, "outputs before it": before})
        return found

    @property
    def untimed(self) -> str:
        """Says why nothing is timed."""
        asked = self.timed and self.parameters["nproc"] > 1
        return (
            "No measurement ended; the verdicts say why."
            if asked
            else "Nothing is timed: that takes two GPUs, and shapes that are not tiny."
        )

    def compared(self) -> list[dict]:
        """Returns a line a measurement: milliseconds of ours and of the usual way, ours over theirs, and the goal."""
        found, ranks, most_of = [], {w.name: w.ranks for w in WORLDS}, self._goals()
        for cost in self.costs:
            (_, ours), (usual, theirs) = cost["ms"].items()
            most, times = most_of.get((cost["what"], ranks[cost["world"]])), ours / theirs
            goal = f"{'✔' if times <= most else '✘'} {most} at most" if most else ""
            said = {"world": cost["world"], "what": cost["what"], "of": cost["case"], "ours, ms": f"{ours:.3g}"}
            found.append(said | {"the usual way": usual, "ms": f"{theirs:.3g}", "times": f"{times:.2f}", "goal": goal})
        return found

    def hashes(self) -> list[dict]:
        """Returns a line a world: the one SHA-256 of its logprobs, gradients and weights."""
        return [{"world": w.name, "ranks": w.ranks, "SHA-256": e.digest()} for w, e in self.evidence.items()]


def _numbers(value: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(value), np.float32).copy())


def _ending(whole: str, part: str) -> str:
    """Returns the last numbers of a text, as many as another has."""
    count = len(base64.b64decode(part))
    return base64.b64encode(base64.b64decode(whole)[-count:]).decode()


def _values(mine: dict[str, str], one: dict[str, str]) -> Drift:
    """Compares logprobs element by element; those of a sequence that a rank did not leave all differ."""
    if not one:
        return Drift(0, 0)
    theirs = {name: _numbers(value) for name, value in one.items()}
    ours = [_numbers(mine[name]) if mine.get(name) else torch.full_like(t, torch.nan) for name, t in theirs.items()]
    return compare(torch.cat(ours), torch.cat([*theirs.values()]))


def _leaves(mine: Evidence, one: Evidence, kind: str, world: World) -> Drift:
    """Counts the leaves of gradients or weights that differ, or that a rank did not leave that has them."""
    leaves = mine.against(one, "leaves", world)
    names = [name for name in one.leaves if name.startswith(kind)]
    return Drift(sum(leaves[name] != one.leaves[name] for name in names), len(names))
