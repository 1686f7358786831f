"""The benchmark notebook's session: what it measures, the controls of its stopwatch, and the goals."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch

import bi_kernels
from benchmarks import attention, calls, cases, linear, profiler, rows
from benchmarks.measure import Bench
from benchmarks.tables import evaluate
from bi_kernels.audit.findings import NEEDS_FIX, PASS, Row
from bi_kernels.audit.index import goals
from bi_kernels.audit.parameters import choose, groups_of, read
from bi_kernels.audit.session import Session
from bi_kernels.audit.targets.candidates import Candidate

TIMING = "timing"
MEASURES: dict[str, Callable[[Bench], None]] = {
    "gemm": linear.gemm,
    "drawn": linear.drawn,
    "gradients": linear.gradients,
    "attention": attention.attention,
    "decode": attention.decode,
    "rows": rows.rows,
    "lm_head": rows.lm_head,
    "calls": calls.calls,
}


def start(audit: str, given: dict) -> "BenchSession":
    """Begins the measurements with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    return BenchSession(audit, asdict(p), choose(p.device, p.shapes), Candidate("bi_kernels", {}))


@dataclass
class BenchSession(Session):
    """A session that times. A cell without a measurement fails it, and so does a wrong stopwatch; a missed goal is
    shown."""

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
        return " ".join(filter(None, ["bi-audit bench", *p["groups"].split(";"), *seed]))

    def measure(self) -> list[dict]:
        """Measures the device's limits and every group, and records whether each cell has a measurement."""
        self.bench.find_limits()
        for group in self.groups:
            MEASURES[group](self.bench)
            self.add([self._complete(group)])
        return self.bench.records

    def whole(self, group: str) -> int:
        """Returns how many measurements a group has where the shapes are not tiny."""
        return cases.expected(group, "", self.parameters["seed"])

    def timed(self, group: str) -> list[dict]:
        """Returns the measurements of a group where they are times; none without a GPU."""
        return [r for r in self.bench.records if r["group"] == group and "op" in r] if self.bench.times else []

    def goals(self) -> list[dict]:
        """Compares the measurements with the contract's goals, and writes goals.json. No goal is for tiny shapes."""
        records = [] if self.parameters["shapes"] == "tiny" else self.bench.records
        found = evaluate(records, self.bench.settings["goals"])
        if self.out:
            (self.out / goals.FILE).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return found

    def counters(self) -> tuple[list[dict], str]:
        """Returns the hardware's counters for the kernels of profiler.CASES, where every group runs on a GPU; else none
        and why, in a sentence."""
        if not self.bench.times or self.parameters["shapes"] == "tiny" or set(self.groups) != set(MEASURES):
            return [], "Counters are read in a run of every group at shapes that are not tiny, on a GPU."
        self.bench.free_cache()
        try:
            with self.bench.alone():
                found = profiler.counters()
        except RuntimeError as error:
            return [], f"{error}."
        return [self.bench.keep({"group": "counters"} | line) for line in found], ""

    def left_out(self) -> str:
        """Says which cells of decode's grid are left out."""
        table = self.bench.settings["decode"]
        gib = lambda n: f"{n / 2**30:.0f} GiB"
        named = [f"{cell.name}, of {gib(cell.bytes)}" for cell in cases.decode(table) if cell.bytes > table["largest"]]
        more = f"Hatched, contiguous and paged: caches of more than {gib(table['largest'])} ({'; '.join(named)})."
        return more if named else "Every cell of the grid is there."

    def bars(self, group: str, *by: str) -> dict:
        """Returns the goals of a group by some of their fields, or of the fields of their measurements."""
        every = [g for g in self.bench.settings["goals"] if g["of"]["group"] == group]
        key = lambda goal: tuple((goal | goal["of"])[name] for name in by)
        return {key(g) if len(by) > 1 else key(g)[0]: g.get("least", g.get("most")) for g in every}

    def _row(self, op: str, check: str, wrong: int, of: int, detail: str) -> Row:
        verdict = NEEDS_FIX if wrong else PASS
        row = Row("", op, "", "bi_kernels", "bf16", self.device_label, TIMING, check, "", "normal", of, verdict)
        return replace(row, mismatches=wrong, elements=of, detail=detail)

    def _complete(self, group: str) -> Row:
        expected = cases.expected(group, self.parameters["shapes"], self.parameters["seed"])
        mine = [r for r in self.bench.records if r["group"] == group]
        failed = [f"{r['case']}: {r['error']}" for r in mine if "error" in r]
        missing = expected - sum("op" in r for r in mine)
        return self._row(group, "every cell is measured", missing, expected, "".join(failed[:1]))

    @torch.no_grad()
    def _stopwatch(self, repeated: int) -> float:
        """Returns the time of `repeated` equal products in times of one, the two taking turns."""
        table = self.bench.settings["gemm"]
        layer, m = cases.layers(table, shards=False)[0], table["rows"][len(table["rows"]) // 2]
        x, w = self.bench.numbers.take(m, layer.k), self.bench.numbers.take(layer.n, layer.k)
        once = lambda i: bi_kernels.linear(x, w)
        timings, _ = self.bench.timed({"once": once, "again": lambda i: [once(i) for _ in range(repeated)]})
        return timings["again"].device.median / timings["once"].device.median

    def controls(self) -> list[Row]:
        """Checks the stopwatch: a product takes as long as itself, and one computed twice, the control, does not."""
        s = self.bench.settings
        itself, twice = self._stopwatch(1), self._stopwatch(2)
        same = self._row("stopwatch", "against itself", int(abs(itself - 1) > s["same"]), 1, f"{itself:.2f}")
        slow = self._row("stopwatch", "against itself", int(twice >= s["slowed"]), 1, f"{twice:.2f}")
        found = [same, replace(slow, candidate="a linear that is computed twice").as_control()]
        self.add(found)
        return found
