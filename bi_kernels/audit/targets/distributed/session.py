"""The session of the audit of parallelism: the evidence of every configuration against that of one rank."""

import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import torch

from bi_kernels.audit.axes import HASH, Side
from bi_kernels.audit.compare import Drift, compare, raw
from bi_kernels.audit.findings import PRECONDITION, Row
from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.session import Session
from bi_kernels.audit.targets.base import Target
from bi_kernels.audit.targets.candidates import Candidate
from bi_kernels.audit.targets.distributed.controls import CONTROLS, HERE
from bi_kernels.audit.targets.distributed.launch import launch
from bi_kernels.audit.targets.distributed.step import PARALLEL_CONFIGS, ParallelConfig, case, decoder
from bi_kernels.audit.targets.model import Relation

COMPARED = {  # by relation: the values' kind, and what a row calls them
    Relation.INVARIANCE: ("logprob", "logprob"),
    Relation.GRADIENT: ("gradient", f"{HASH} of gradients"),
    Side.TRAINED: ("weight", f"{HASH} of weights"),
    Relation.PARITY: ("decode", "logprob"),
}
HASHED = "gradient", "weight"  # kinds of values that are SHA-256; others are logprobs
TIMING = "helpers.parallel_timing:measured"  # next to the notebooks: a function that ranks run in place of a step


def start(audit: str, given: dict) -> "DistributedSession":
    """Begins the audit of parallelism with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    device = choose(p.device, p.shapes)
    if device.type == "cuda" and p.nproc > torch.cuda.device_count():
        raise ValueError(f"nproc is {p.nproc}, expected at most {torch.cuda.device_count()}, the GPUs of this machine")
    return DistributedSession(audit, asdict(p), device, Candidate("bi_kernels", {}))


class Evidence:
    """What the ranks of a configuration left: by name, as "gradient layers.0.q 2", the values of those that have it."""

    def __init__(self, config: ParallelConfig, ranks: list[dict]):
        self.config, self.values = config, defaultdict(list)
        for rank in ranks:
            for name, value in rank["values"].items():
                self.values[name].append(value)
        self.unmoved = [name for rank in ranks for name in rank.get("unmoved", [])]
        self.ops = [rank["ops"] for rank in ranks if rank.get("ops")]

    def of(self, kind: str) -> dict:
        """Returns the first rank's values of a kind, by name."""
        return {name: values[0] for name, values in self.values.items() if name.startswith(f"{kind} ")}

    def against(self, one: "Evidence", kind: str) -> tuple[Drift, list[str]]:
        """Returns the drift of all ranks' values of a kind from those of one rank, for decode from its prefill; and the
        names of values that a rank should have left and did not, which count as drift."""
        expected, found, missing = one.of(kind), {}, []
        if kind == "decode":
            prefill = one.of("logprob")
            expected = {name: prefill[name.replace(kind, "logprob")][-len(v) :] for name, v in expected.items()}
        differ = lambda a, b: a != b if isinstance(a, str) else not raw(a).equal(raw(b))
        for name, value in expected.items():
            copies = self.config.tp
            if kind in HASHED:
                of = name.split(" ")[1]
                copies = self.config.ranks if self.config.whole(of) else self.config.dp
            mine = self.values.get(name, [])
            found[name] = next((v for v in mine if differ(v, value)), value)
            if len(mine) != copies:
                missing.append(name)
        if kind in HASHED or not expected:
            return Drift(sum(found[n] != v or n in missing for n, v in expected.items()), len(expected)), missing
        left = [torch.full_like(v, torch.nan) if n in missing else v for n, v in found.items()]
        return compare(torch.cat(left), torch.cat([*expected.values()])), missing

    def digest(self) -> str:
        """Returns one SHA-256 of all logprobs, gradients and weights of all ranks."""
        text = lambda v: v if isinstance(v, str) else sha256(v.numpy().tobytes()).hexdigest()
        of_name = {k: sorted({*map(text, v)}) for k, v in sorted(self.values.items()) if not k.startswith("decode ")}
        return sha256("".join(f"{k} {v}\n" for k, values in of_name.items() for v in values).encode()).hexdigest()


@dataclass
class DistributedSession(Session):
    """A session whose target is a decoder's steps, on ranks that are processes."""

    evidence: dict[ParallelConfig, Evidence] = field(default_factory=dict)
    broken: dict[str, Evidence] = field(default_factory=dict)  # by control
    costs: list[dict] = field(default_factory=list)

    @property
    def configs(self) -> list[ParallelConfig]:
        """Lists the configurations of `least` to `nproc` ranks, and those of one rank; in the quick form two."""
        if self.quick:
            return [*PARALLEL_CONFIGS[:2]]
        least, most = self.parameters["least"], self.parameters["nproc"]
        return [c for c in PARALLEL_CONFIGS if c == c.alone or least <= c.ranks <= most]

    @property
    def strategies(self) -> dict[str, tuple]:
        """Returns the controls; in the quick form the first."""
        return dict([*CONTROLS.items()][: 1 if self.quick else None])

    @property
    def sizes(self) -> list[int]:
        """Lists how many ranks the configurations and the controls have, in the order in which they run."""
        broken = {config.ranks for _, config, _ in self.strategies.values()}
        return sorted({c.ranks for c in self.configs} | {n for n in broken if n <= self.parameters["nproc"]})

    @property
    def timed(self) -> bool:
        """Tells whether there is something to time: on GPUs, at shapes that the contract has for it."""
        return self.on_gpu and "timed" in case(self.parameters["shapes"])

    def judge(self) -> list[Row]:
        """Runs every configuration, those of as many ranks in one go, and compares it with one rank; returns the rows,
        which it records as they come."""
        found, ours = [], "QUICK" if self.quick else "OURS"
        for ranks in self.sizes:
            jobs = [(c.name, c, f"{HERE}:{'EXPERTS' if c.ep else ours}") for c in self.configs if c.ranks == ranks]
            every = jobs + [(name, c, broken) for name, (broken, c, _) in self.strategies.items() if c.ranks == ranks]
            if self.timed and ranks > 1:
                every += [("timing", c, TIMING) for _, c, _ in jobs if 1 in c[:2] and not (c.tokens or c.mixture)]
            evidence, why = self._launch(every, ranks)
            for (name, config, strategy), of in zip(every, evidence):
                if strategy == TIMING:
                    self.costs += [{"world": config.name} | cost for cost in of[0]["costs"]]
                elif name in CONTROLS:
                    self.broken[name] = Evidence(config, of)
                else:
                    self.evidence[config] = Evidence(config, of)
            rows = [row for _, c, _ in jobs for row in self._rows(c, why)]
            if why and len(evidence) >= len(jobs):  # a control or a measurement, which is named
                name, config, _ = every[min(len(evidence), len(every) - 1)]
                rows.append(self._row(Relation.INVARIANCE, config, None, "logprob", f"{name}: {why}"))
            self.add(rows)
            found += rows
        return found

    def _launch(self, jobs: list[tuple], ranks: int) -> tuple[list[list[dict]], str]:
        told = {k: self.parameters[k] for k in ("shapes", "dtype", "seed")} | {"device": self.device.type}
        told["jobs"] = [{"strategy": strategy, "config": config} for _, config, strategy in jobs]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return launch(Path(folder), told, ranks, self.parameters["seconds"])

    def _rows(self, config: ParallelConfig, why: str) -> list[Row]:
        """Returns the rows of a configuration. Those of one rank say whether there is something to compare with: its
        logprobs are numbers, every parameter has a gradient, and decode has prefill's bits."""
        if config.alone not in self.evidence and config != config.alone:
            why = f"{why}; one rank left nothing to compare with"
        if config not in self.evidence or config.alone not in self.evidence:
            return [self._row(Relation.INVARIANCE, config, None, "logprob", why)]
        mine, one = self.evidence[config], self.evidence[config.alone]
        detail, rows = f"SHA-256 {mine.digest()}", []
        if config == config.alone:
            numbers = torch.cat([*one.of("logprob").values()])
            wrong = Drift(int((~numbers.isfinite()).sum()), numbers.numel())
            rows.append(self._row(PRECONDITION, config, wrong, "logprobs that are no numbers"))
            unmoved = Drift(len(one.unmoved), len({name.rsplit(" ", 1)[0] for name in one.of("gradient")}))
            rows.append(self._row(PRECONDITION, config, unmoved, "parameters without a gradient", detail))
        for relation, (kind, tensor) in COMPARED.items():
            decoded = relation == Relation.PARITY
            if decoded and config.dp == 1 or not decoded and config != config.alone:
                drift, _ = mine.against(one, kind)
                rows.append(self._row(relation, config, drift, tensor, detail if kind == "gradient" else ""))
        return rows

    def _row(self, relation: str, config: ParallelConfig, drift: Drift | None, tensor: str, detail: str = "") -> Row:
        """Returns a row; it needs a fix where nothing was compared."""
        who, shapes, dtype = Target(), case(self.parameters["shapes"]), self.parameters["dtype"]
        sizes = decoder(self.parameters["shapes"], config.mixture)
        layers = f"{sizes.layers} layer{'s' * (sizes.layers > 1)}" + f" of {sizes.experts} experts" * config.mixture
        who.whose = self.audit, "decoder", layers, "bi_kernels", dtype, self.device_label
        who.command = self.command
        if drift is not None and not drift.elements:
            drift, detail = None, f"{tensor}: there was nothing to compare"
        against = "one rank" if config != config.alone else "its own prefill" if relation == Relation.PARITY else ""
        rows = drift.elements if drift and tensor.startswith("logprob") else sum(shapes["lengths"])
        return who.row(relation, config.name, drift, against, rows=rows, tensor=tensor, detail=detail)

    def controls(self) -> list[Row]:
        """Compares the strategies that others use with one rank, each by what has to differ; returns their rows."""
        found = []
        for name, (_, config, relation) in self.strategies.items():
            if config.ranks <= self.parameters["nproc"]:
                kind, tensor = COMPARED[relation]
                one = self.evidence.get(config.alone, Evidence(config.alone, []))
                drift, missing = self.broken.get(name, Evidence(config, [])).against(one, kind)
                why = "the control left too little" if missing else ""  # it must differ, and not be absent
                row = self._row(relation, config, None if missing else drift, tensor, why)
                found.append(replace(row, candidate=name).as_control())
        self.add(found)
        return found
