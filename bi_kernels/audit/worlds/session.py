"""The session of the audit of worlds: every world's evidence against that of one rank, the controls, what it costs."""

import base64
import shutil
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from bi_kernels.audit.chain.relations import GRADIENT, INVARIANCE, PARITY, Whole
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.session import Session
from bi_kernels.audit.worlds.launch import launched
from bi_kernels.audit.worlds.ways import CONTROLS, HERE
from bi_kernels.audit.worlds.world import WORLDS, World, case, digest

WEIGHTS = "weights after training"


def start(audit: str, given: dict) -> "WorldSession":
    """Begins the audit of worlds with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    device = choose(p.device, p.shapes)
    if device.type == "cuda" and p.nproc > torch.cuda.device_count():
        raise ValueError(f"nproc is {p.nproc}, expected at most {torch.cuda.device_count()}, the GPUs of this machine")
    return WorldSession(audit, asdict(p), device, Candidate("bi_kernels", {}))


@dataclass
class Evidence:
    """What the ranks of a world left, put together."""

    leaves: dict[str, str] = field(default_factory=dict)
    logprob: dict[str, str] = field(default_factory=dict)
    decode: dict[str, str] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)  # what a later rank has of the same, where that differs

    @classmethod
    def of(cls, ranks: list[dict]) -> "Evidence":
        found = cls()
        for said in ranks:
            for kind in ("leaves", "logprob", "decode"):
                for name, value in said.get(kind, {}).items():
                    if getattr(found, kind).setdefault(name, value) != value:
                        found.other[f"{kind} {name}"] = value
        return found

    def against(self, one: "Evidence", kind: str) -> dict[str, str]:
        """Returns what the ranks have of a kind: where they differ among themselves, what differs from one rank's."""
        mine, theirs = getattr(self, kind), getattr(one, kind)
        return {n: v if v != theirs.get(n) else self.other.get(f"{kind} {n}", v) for n, v in mine.items()}


@dataclass
class WorldSession(Session):
    """A session whose subject is a decoder's step, in processes that torchrun starts."""

    evidence: dict[World, Evidence] = field(default_factory=dict)
    broken: dict[str, Evidence] = field(default_factory=dict)  # by control
    costs: list[dict] = field(default_factory=list)

    @property
    def worlds(self) -> list[World]:
        """Lists the worlds of at most `nproc` ranks, one rank first."""
        return [w for w in WORLDS if w.ranks <= self.parameters["nproc"]]

    @property
    def who(self) -> Whole:
        layers = case(self.parameters["shapes"])["layers"]
        return Whole(layers, self.parameters["dtype"], self.device_label, self.command)

    def judge(self) -> list[Row]:
        """Runs every world, those of as many ranks in one go, and judges it by what one rank has; returns the rows,
        which it records as they come."""
        found = []
        for ranks in sorted({w.ranks for w in self.worlds}):
            jobs = [(w.name, w, f"{HERE}:OURS") for w in self.worlds if w.ranks == ranks]
            broken = [(name, w, way) for name, (way, w, _) in CONTROLS.items() if w.ranks == ranks]
            timed = [("costs", w, "costs") for _, w, _ in jobs if self.on_gpu and 1 in w and ranks > 1]
            told = {k: self.parameters[k] for k in ("shapes", "dtype", "seed")} | {"device": self.device.type}
            every = jobs + broken + timed
            told["jobs"] = [{"way": way, "world": w} for _, w, way in every]
            folder = Path(tempfile.mkdtemp())
            try:
                said, why = launched(folder, told, ranks, self.parameters["seconds"])
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            for (name, world, way), of in zip(every, said):
                if way == "costs":
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
        return found

    def _missing(self, world: World, why: str) -> Row:
        if World() not in self.evidence and world != World():
            why = f"{why}; one rank left nothing to compare with"
        return self.who.row(INVARIANCE, world.name, None, "packed", detail=why)

    def _rows(self, world: World) -> list[Row]:
        """Returns the rows of a world; those of one rank say of how much there is evidence at all."""
        if World() not in self.evidence:
            return [self._missing(world, "")]
        mine, one, count = self.evidence[world], self.evidence[World()], sum(case(self.parameters["shapes"])["lengths"])
        about = lambda relation, drift, part, **more: replace(
            self.who.about(relation, world.name, drift, [part], rows=count, **more), against="one rank"
        )
        rows = [about(INVARIANCE, _values(mine.against(one, "logprob"), one.logprob), "logprob")]
        detail = f"SHA-256 {digest(mine.leaves | mine.logprob)}"
        gradient, weight = (_tensors(mine, one, kind) for kind in ("gradient", "weight"))
        rows.append(about(GRADIENT, gradient, "gradients, a leaf each", detail=detail))
        rows.append(about(WEIGHTS, weight, "weights, a leaf each"))
        if mine.decode:
            ends = {name: _ending(one.logprob[name], value) for name, value in mine.decode.items()}
            decoded = mine.against(Evidence(decode=ends), "decode")
            rows.append(about(PARITY, _values(decoded, ends), "logprob"))
        return rows

    def controls(self) -> list[Row]:
        """Judges the ways that others take, each by what has to differ; returns their rows."""
        one, found = self.evidence.get(World(), Evidence()), []
        for name, (_, world, kind) in CONTROLS.items():
            if world.ranks > self.parameters["nproc"]:
                continue
            mine = self.broken.get(name, Evidence())
            drift = (
                _values(mine.against(one, "logprob"), one.logprob) if kind == "logprob" else _tensors(mine, one, kind)
            )
            relation = INVARIANCE if kind == "logprob" else GRADIENT
            row = self.who.about(relation, world.name, drift, [kind]) if mine.logprob else self._missing(world, "")
            found.append(replace(row, candidate=name, against="one rank").as_control())
        self.add(found)
        return found

    @property
    def untimed(self) -> str:
        """Says why nothing is timed."""
        asked = self.on_gpu and self.parameters["nproc"] > 1
        return "No measurement ended; the verdicts say why." if asked else "Nothing is timed: that takes two GPUs."

    def compared(self) -> list[dict]:
        """Returns a line a measurement: milliseconds of ours and of the usual way, ours over theirs, and the goal."""
        found, ranks = [], {w.name: w.ranks for w in WORLDS}
        goals = {(g["what"], g["ranks"]): g["most"] for g in case(self.parameters["shapes"])["timed"]["goals"]}
        for cost in self.costs:
            (_, ours), (usual, theirs) = cost["ms"].items()
            most, times = goals.get((cost["what"], ranks[cost["world"]])), ours / theirs
            goal = f"{'✔' if times <= most else '✘'} {most} at most" if most else ""
            said = {"world": cost["world"], "what": cost["what"], "of": cost["case"], "ours, ms": f"{ours:.3g}"}
            found.append(said | {"the usual way": usual, "ms": f"{theirs:.3g}", "times": f"{times:.2f}", "goal": goal})
        return found

    def hashes(self) -> list[dict]:
        """Returns a line a world: the one SHA-256 of its logprobs, gradients and weights."""
        return [
            {"world": w.name, "ranks": w.ranks, "SHA-256": digest(e.leaves | e.logprob)}
            for w, e in self.evidence.items()
        ]


def _numbers(value: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(value), np.float32).copy())


def _ending(whole: str, part: str) -> str:
    """Returns the last numbers of a text, as many as another has."""
    count = len(base64.b64decode(part))
    return base64.b64encode(base64.b64decode(whole)[-count:]).decode()


def _values(mine: dict[str, str], one: dict[str, str]) -> Drift:
    """Compares logprobs element by element; those of a sequence that nobody computed all differ."""
    names = sorted(one, key=int)
    theirs = [_numbers(one[name]) for name in names]
    ours = [_numbers(mine[name]) if name in mine else torch.full_like(t, torch.nan) for name, t in zip(names, theirs)]
    return compare(torch.cat(ours), torch.cat(theirs)) if names else Drift(0, 0)


def _tensors(mine: Evidence, one: Evidence, kind: str) -> Drift:
    """Counts the leaves of gradients or weights that differ, that are missing, or that two ranks have differently."""
    names = [name for name in one.leaves if name.startswith(kind)]
    leaves = mine.against(one, "leaves")
    wrong = [name for name in names if leaves.get(name) != one.leaves[name]]
    return Drift(len(wrong), len(names))
