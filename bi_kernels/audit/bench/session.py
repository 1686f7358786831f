"""The session of the performance notebook: what it measures, what it checks of its own stopwatch, and the goals."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

import bi_kernels
from bi_kernels.audit import profiler
from bi_kernels.audit.bench import attention, calls, cases, gemm, goals, lm_head, rows
from bi_kernels.audit.bench.measure import Bench
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, Row
from bi_kernels.audit.parameters import choose, groups_of, read
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.session import Session

TIMING = "timing"
MEASURES: dict[str, Callable[[Bench], None]] = {
    "gemm": gemm.gemm,
    "drawn": gemm.drawn,
    "gradients": gemm.gradients,
    "attention": attention.attention,
    "decode": attention.decode,
    "rows": rows.rows,
    "lm_head": lm_head.lm_head,
    "calls": calls.calls,
}


def start(audit: str, given: dict) -> "BenchSession":
    """Begins the measurements with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    return BenchSession(audit, asdict(p), choose(p.device, p.shapes), Candidate("bi_kernels", {}))


@dataclass
class BenchSession(Session):
    """A session that times. A goal that is missed is shown, and fails nothing; a cell that is not measured does, and
    a stopwatch that is wrong."""

    bench: Bench = field(init=False)

    def __post_init__(self):
        p = self.parameters
        file = self.out / "benchmark.jsonl" if self.out else None
        self.bench = Bench(self.device, cases.settings(p["shapes"]), p["seed"], file)

    @property
    def dtypes(self) -> list[str]:
        return ["bf16"]

    @property
    def groups(self) -> list[str]:
        return groups_of(self.parameters["groups"])

    @property
    def command(self) -> str:
        p = self.parameters
        if p["shapes"] == "tiny":
            return super().command
        seed = [f"--seed {p['seed']}"] if p["seed"] else []
        return " ".join(["bi-audit bench", *p["groups"].split(";"), *seed]).replace("bench  ", "bench ").strip()

    def measure(self) -> list[dict]:
        """Measures the device's limits and every group, and records whether each cell has a measurement."""
        self.bench.find_limits()
        for group in self.groups:
            MEASURES[group](self.bench)
            self.add([self._complete(group)])
        return self.bench.records

    def whole(self, group: str) -> int:
        """Returns how many measurements a group has where the shapes are not tiny."""
        return cases.counted(group, "", self.parameters["seed"])

    def of(self, group: str) -> list[dict]:
        """Returns the measurements of a group."""
        return [r for r in self.bench.records if r["group"] == group and "op" in r]

    def shown(self, group: str) -> list[dict]:
        """Returns the measurements of a group where they are times: without a GPU none."""
        return self.of(group) if self.bench.times else []

    def goals(self) -> list[dict]:
        """Holds the measurements against the contract's goals, those of tiny shapes against none; leaves them in a
        file."""
        records = [] if self.parameters["shapes"] == "tiny" else self.bench.records
        found = goals.judged(records, self.bench.settings["goals"])
        if self.out:
            (self.out / goals.FILE).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return found

    def counters(self) -> tuple[list[dict], str]:
        """Reads the hardware's counters for the kernels of profiler.CASES, in a run of every group on a GPU, and keeps
        them; or says in a sentence why there are none."""
        if not self.bench.times or self.parameters["shapes"] == "tiny" or set(self.groups) != set(MEASURES):
            return [], "Counters are read in a run of every group at shapes that are not tiny, on a GPU."
        self.bench.empty()
        try:
            with self.bench.alone():
                found = profiler.counters()
        except RuntimeError as error:
            return [], f"{error}."
        return [self.bench.keep({"group": "counters"} | line) for line in found], ""

    def left_out(self) -> str:
        """Says which cells of decode's grid are left out."""
        table = self.bench.settings["decode"]
        large = [cell for cell in cases.decode(table) if cell.bytes > table["largest"]]
        gib = lambda n: f"{n / 2**30:.0f} GiB"
        named = "; ".join(f"{cell.name}, of {gib(cell.bytes)}" for cell in large)
        more = f"Hatched, contiguous and paged, are the caches of more than {gib(table['largest'])} ({named})."
        return more if large else "Every cell of the grid is there."

    def bars(self, group: str, by: Sequence[str] = ("take",)) -> dict:
        """Returns the goals of a group by some of their fields, or of what they are of."""
        every = [g for g in self.bench.settings["goals"] if g["of"]["group"] == group]
        key = lambda goal: tuple((goal | goal["of"])[name] for name in by)
        return {key(g) if len(by) > 1 else key(g)[0]: g.get("least", g.get("most")) for g in every}

    def _row(self, op: str, layout: str, wrong: int, of: int, **said) -> Row:
        verdict = NEEDS_FIX if wrong else PASS
        row = Row("", op, "", "bi_kernels", "bf16", self.device_label, TIMING, layout, "", "normal", of, verdict)
        return replace(row, mismatches=wrong, elements=of, **said)

    def _complete(self, group: str) -> Row:
        wanted = cases.counted(group, self.parameters["shapes"], self.parameters["seed"])
        failed = [r for r in self.bench.records if r["group"] == group and "error" in r]
        detail = f"{failed[0]['case']}: {failed[0]['error']}" if failed else ""
        return self._row(group, "every cell is measured", wanted - len(self.of(group)), wanted, detail=detail)

    @torch.no_grad()
    def _stopwatch(self, repeated: int) -> float:
        """Returns how many times as long as a product one takes that is computed so often, the two taking turns."""
        table = self.bench.settings["gemm"]
        layer, m = cases.layers(table, shards=False)[0], table["rows"][len(table["rows"]) // 2]
        x, w = self.bench.numbers.take(m, layer.k), self.bench.numbers.take(layer.n, layer.k)
        once = lambda i: bi_kernels.linear(x, w)
        timings, _ = self.bench.timed({"once": once, "again": lambda i: [once(i) for _ in range(repeated)]})
        return timings["again"].device.median / timings["once"].device.median

    def controls(self) -> list[Row]:
        """Asks the stopwatch: a product against itself takes as long; one that is computed twice does not, which is the
        control."""
        s = self.bench.settings
        itself, twice = self._stopwatch(1), self._stopwatch(2)
        same = self._row("stopwatch", "against itself", int(abs(itself - 1) > s["same"]), 1, detail=f"{itself:.2f}")
        slow = self._row("stopwatch", "against itself", int(twice >= s["slowed"]), 1, detail=f"{twice:.2f}")
        found = [same, replace(slow, candidate="a linear that is computed twice").as_control()]
        self.add(found)
        return found
