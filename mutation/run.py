"""Judges mutants several at a time, and keeps every verdict as it comes, so that an interrupted run goes on."""

import hashlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import torch

from bi_kernels.audit import parameters
from bi_kernels.audit.executor import Died, ForkServer, Process
from bi_kernels.audit.registry import OPS
from mutation.judge import PASSED, STUCK
from mutation.operators import Mutant
from mutation.reach import ALL, SM_90, SOME, on_hopper, ops_for, package

PRELOAD = "torch", "triton", "numpy", "numba", "torch.fx.experimental.symbolic_shapes"
# which judge nothing: files and folders of this package, and of the one that is broken
TELL = {"command.py", "document.py", "plan.py", "cli.py", "options.py", "index", "report"}
# of which no op's questions know anything: `MODELS` alone, and what they judge
OF_MODELS = {"models.py", "functions.py", "adapter.py", "classified.py", "mode", "integrations"}
GRACE = 20  # seconds before the end of a run's time, after which no mutant begins
# seconds that a mutant has at least, as several share a GPU; more where the clean package takes long
LEAST = {"cpu": 90, "cuda": 300}
TIMES = 3
# the first, which shows most reorderings, is asked everything, and attention in both, of which kernels of its own, or
# several programs, compute the second; fp16 is as bf16
DTYPE_ORDER = ("fp32", "bf16")
OPEN = "open"  # the verdict where time ran out
SEEDS = 0, 1, 2  # what kills by luck of one of them is not caught


@cache
def made_of(by_model: bool) -> str:
    """Returns a digest of what is broken and of what judges it, ops alone or models too: verdicts of other sources do
    not count."""
    digest, folders = hashlib.sha256(), (package(), Path(__file__).parent, parameters.notebooks() / "helpers")
    left = TELL | (set() if by_model else OF_MODELS)
    judges = lambda folder, path: left.isdisjoint(path.relative_to(folder).parts)
    every = [path for folder in folders for path in sorted(folder.rglob("*.py")) if judges(folder, path)]
    for path in [*every, package() / "contract.toml"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def attends(op: str) -> bool:
    """Tells whether an op is attention, which takes minutes, and which has kernels of its own for 16 bits."""
    return op in OPS and bool(OPS[op].cache)


def asks_of(mutant: Mutant) -> tuple[tuple[str, str, str], ...]:
    """Returns what a mutant is judged by: ops, dtypes, and how much is asked of each. Kernels for sm_90 compute 16 bits
    alone."""
    ops = sorted(ops_for(mutant.file, mutant.function), key=attends)
    if on_hopper(mutant.file):
        return tuple((op, "bf16", SM_90) for op in ops)
    depth = lambda op, dtype: ALL if dtype == DTYPE_ORDER[0] or op == "attention" else SOME
    return tuple((op, dtype, depth(op, dtype)) for dtype in DTYPE_ORDER for op in ops)


class Copy:
    """A copy of the package, of which one mutant at a time is judged in a process of its own.

    environment: of these processes; server: which forks them.
    """

    def __init__(self, device: str, environment: dict, server: ForkServer):
        self.device, self.environment, self.server = device, environment, server
        self.folder = tempfile.TemporaryDirectory()
        self.package = Path(self.folder.name, package().name)
        shutil.copytree(package(), self.package)  # with what is compiled of it, numba's cache too
        shutil.copytree(parameters.notebooks() / "helpers", Path(self.folder.name, "notebooks", "helpers"))

    def judge(
        self,
        mutant: Mutant | None,
        asks: Sequence[tuple[str, str, str]],
        limits: tuple[int, int],
        seeds: Sequence[int] = SEEDS,
        until: float = math.inf,
        only: Sequence[str] = (),
        passed: Sequence[dict] = (),
        likely: dict | None = None,
    ) -> dict:
        """Returns the verdict on a mutant, or on the package as it is; limits: seconds for all, and for an answer;
        only, passed, likely: as `questions.killer` has them. It is OPEN, with what has passed, at `until`, by
        time.monotonic()."""
        passed = [*passed]
        if time.monotonic() > until - GRACE:
            return {"verdict": OPEN, "passed": passed}
        path = self.package / mutant.file if mutant else None
        if path:
            text = path.read_text(encoding="utf-8")
            path.write_text(mutant.applied(text), encoding="utf-8")
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink()
        began, (seconds, patience) = time.monotonic(), limits
        left, told = min(seconds, until - began), []
        try:
            process = Process(self.server, self.environment)
            process.begin(
                "mutation.judge:judge", self.folder.name, [*asks], seeds, self.device, patience, [*only], passed, likely
            )
            found = process.result(told.append, left)
        except Died as died:
            if died.status is None:  # the copy is of no more use
                raise
            if died.late and left < seconds:
                more = [json.loads(line.removeprefix(PASSED)) for line in told if line.startswith(PASSED)]
                return {"verdict": OPEN, "passed": [*passed, *more]}
            relation, detail = "crashed", f"status {died.status}"
            if died.late:
                relation, detail = "time", f"more than {seconds} s"
            elif died.status in (-signal.SIGALRM, -STUCK):
                relation, detail = "time", f"an answer took more than {patience} s"
            found = {"verdict": "killed", "relation": relation, "layout": "", "detail": detail}
        finally:
            if path:
                path.write_text(text, encoding="utf-8")
        return found | {"seconds": round(time.monotonic() - began, 1)}


def visible() -> list[str]:
    """Returns what CUDA calls each GPU that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(i) for i in range(max(1, torch.cuda.device_count()))]


@contextmanager
def copies(count: int, device: str) -> Iterator[Callable]:
    """Yields what calls a function with a copy of the package that is free, in a thread of the caller's."""
    free: SimpleQueue = SimpleQueue()
    every = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    every["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p and Path(p) != package().parent)
    every |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    every = {k: v for k, v in every.items() if k != "BI_AUDIT_OUT" and (k, device) != ("TRITON_INTERPRET", "cuda")}
    with tempfile.TemporaryDirectory() as turns, ForkServer(PRELOAD, every) as server:
        for number in range(count):
            own = {}
            if device == "cuda":  # those of one GPU wait for each other's memory, and for nobody else's
                gpu = visible()[number % len(visible())]
                own = {"CUDA_VISIBLE_DEVICES": gpu, "TMPDIR": str(Path(turns, gpu))}
                Path(turns, gpu).mkdir(exist_ok=True)
            free.put(Copy(device, every | own, server))

        def call(function: Callable, *args):
            copy = free.get()
            try:
                return function(copy, *args)
            finally:
                free.put(copy)

        yield call


def limits(clean: Sequence[dict], asks: Sequence[tuple[str, str, str]], least: int, seeds: int) -> tuple[int, int]:
    """Returns the seconds that a mutant of which this is asked may take for everything, and for one answer.

    clean: what the unbroken package took with one seed, one entry for each of what is asked.
    """
    mine = [found for found in clean if (found["op"], found["dtype"], found["depth"]) in asks]
    seconds, longest = sum(f["seconds"] for f in mine), max(f.get("longest", 0.0) for f in mine)
    return max(least, int(TIMES * seeds * seconds)), max(least, int(TIMES * longest))


def _asked_of_clean(found: dict) -> tuple:
    """Returns what a verdict on the unbroken package is of: op, dtype, depth, seed, and the stages, or none for all."""
    return (*(found[k] for k in ("op", "dtype", "depth", "seed")), tuple(found["only"]))


def _confirming(found: dict, seeds: Sequence[int]) -> list[tuple]:
    """Returns what the unbroken package is to be asked with these seeds: what killed a mutant with each."""
    return [(*by[:3], seed, (by[3],)) for seed in seeds if (by := found.get("by", {}).get(str(seed)))]


def judged(
    chosen: Sequence[Mutant],
    device: str,
    jobs: int,
    kept: Path,
    tell: Callable[[dict, int], object],
    seeds: Sequence[int] = SEEDS,
    until: float = math.inf,
) -> tuple[list[dict], int]:
    """Returns the verdicts on mutants, in their order, and how many are open at `until`, by time.monotonic(). What
    `kept` holds of the same sources is not judged again; what killed a mutant by others is asked first.

    The unbroken package is judged before a mutant, in each dtype that it is asked in and with the first seed; with
    every other one afterwards, in the stages that killed with it. tell: gets each verdict as it comes, and how many are
    left. Raises ValueError, which names each op that needs a fix before it is broken.
    """
    known, passed, likely, asked = {}, {}, {}, {m.id: asks_of(m) for m in chosen}
    key = lambda found: found.get("id") or _asked_of_clean(found)

    def own(found: dict) -> dict:
        """Returns what a verdict says where it is of these sources."""
        ops = {ask[0] for ask in asked.get(found["id"], ())} if "id" in found else {found["op"]}
        return {"made": made_of(by_model=not ops <= OPS.keys()), "device": device, "seeds": len(seeds)}

    for line in kept.read_text(encoding="utf-8").splitlines() if kept.exists() else ():
        found = json.loads(line)
        if not own(found).items() <= found.items():
            likely |= {key(found): {k: found[k] for k in ("op", "dtype", "stage")}} if found.get("by") else {}
            continue
        if found["verdict"] == OPEN:
            passed[found["id"]] = found["passed"]
        else:
            known[key(found)] = found
    with ThreadPoolExecutor(jobs) as pool, copies(jobs, device) as call, kept.open("a", encoding="utf-8") as file:

        def every(tasks: dict) -> Iterator[tuple[object, dict]]:
            """Yields what each task found as it comes. tasks: {what it is of: arguments of Copy.judge}, which may grow
            meanwhile."""
            running, begun = {}, set()
            while begun < tasks.keys() or running:
                new = [key for key in tasks if key not in begun]
                running |= {pool.submit(call, Copy.judge, *tasks[key]): key for key in new}
                begun.update(new)
                for task in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(task), task.result()

        def keep(found: dict) -> None:
            found = own(found) | found
            if found["verdict"] != OPEN:
                known[key(found)] = found
            file.write(json.dumps(found) + "\n")
            file.flush()

        def of_unbroken(which: Sequence[tuple]) -> dict:
            return {of: (None, [of[:3]], (3600, 3600), [of[3]], until, of[4]) for of in which if of not in known}

        def judge(tasks: dict, more: Callable[[], dict] = dict) -> None:
            """Judges the unbroken package, and mutants as soon as what they are asked is known of it."""
            wrong, left = [], len(chosen) - len(known.keys() & {m.id for m in chosen})
            unbroken = {of for of in tasks if not isinstance(of, Mutant)}
            for of, found in every(tasks):
                if isinstance(of, Mutant):
                    if found["verdict"] != OPEN:
                        keep({"id": of.id} | said(of) | found)
                        tell(found, left := left - 1)
                    elif len(found["passed"]) > len(passed.get(of.id, ())):
                        keep({"id": of.id} | found)
                    continue
                unbroken.discard(of)
                if found["verdict"] == "survived":
                    keep(found | dict(zip(("op", "dtype", "depth", "seed", "only"), of)))
                elif found["verdict"] != OPEN:
                    wrong.append(f"{of[0]} in {found['relation']} {found['layout']} ({found['detail']})")
                if wrong and not unbroken:
                    raise ValueError(f"before anything is broken, these need a fix: {'; '.join(dict.fromkeys(wrong))}")
                tasks |= {} if wrong else more()

        try:
            for number, m in enumerate([m for m in chosen if m.id in known], 1):
                tell(known[m.id], len(chosen) - number)
            todo = {m: asked[m.id] for m in chosen if m.id not in known}
            clean = lambda asks: [(*ask, seeds[0], ()) for ask in asks]
            kinds = sorted({ask for asks in todo.values() for ask in asks}, key=lambda ask: (not attends(ask[0]), ask))

            def ready() -> dict:
                """Returns the tasks of mutants of which everything asked is known of the unbroken package."""
                found = {}
                for m in [m for m, asks in todo.items() if all(of in known for of in clean(asks))]:
                    asks = todo.pop(m)
                    most = limits([known[of] for of in clean(asks)], asks, LEAST[device], len(seeds))
                    there = passed.get(m.id, ())
                    left = most[0] - sum(int(p["seconds"]) for p in there)
                    found[m] = (m, asks, (max(1, left), most[1]), seeds, until, (), there, likely.get(m.id))
                return found

            judge(of_unbroken(clean(kinds)) | ready(), ready)  # attention first
            judge(of_unbroken(sorted({of for m in chosen for of in _confirming(known.get(m.id, {}), seeds[1:])})))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    found = [known[m.id] for m in chosen if m.id in known]
    return found, len(chosen) - sum(all(of in known for of in _confirming(f, seeds[1:])) for f in found)


def said(m: Mutant) -> dict:
    """Returns what a verdict says of its mutant."""
    told = {"file": m.file, "function": m.function, "line": m.line, "operator": m.operator}
    return told | {"before": m.before, "text": m.text, "ops": ops_for(m.file, m.function)}
