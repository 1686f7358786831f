"""Judges mutants several at a time, and keeps every verdict as it comes, so that an interrupted run goes on."""

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import torch

from bi_kernels.audit import parameters
from bi_kernels.audit.executor import Died, ForkServer, Process
from bi_kernels.audit.registry import OPS
from mutation.operators import Mutant
from mutation.reach import ops_for, package

PRELOAD = "torch", "triton", "numpy", "numba", "hypothesis"
LEAST = 90  # seconds that a mutant has at least; more where the clean package takes long
TIMES = 3
# the first, which shows most reorderings, is asked everything, and attention in both, of which kernels of its own, or
# several programs, compute the second; fp16 is as bf16
DTYPE_ORDER = ("fp32", "bf16")
SEEDS = 0, 1, 2  # what kills by luck of one of them is not caught


def made_of() -> str:
    """Returns a digest of what is broken and of what judges it: verdicts of other sources do not count."""
    digest = hashlib.sha256()
    for path in sorted([*package().rglob("*.py"), package() / "contract.toml", *Path(__file__).parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


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
        ops: Sequence[str],
        limits: tuple[float, float],
        seeds: Sequence[int] = SEEDS,
        dtypes: Sequence[str] = DTYPE_ORDER,
    ) -> dict:
        """Returns the verdict on a mutant, or on the package as it is; limits: seconds for all, and for an answer."""
        path = self.package / mutant.file if mutant else None
        if path:
            text = path.read_text(encoding="utf-8")
            path.write_text(mutant.applied(text), encoding="utf-8")
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink()
        asks = [(op, dtype, dtype == DTYPE_ORDER[0] or bool(OPS[op].cache)) for dtype in dtypes for op in ops]
        seconds, patience = map(int, limits)
        began = time.monotonic()
        try:
            process = Process(self.server, self.environment)
            process.begin("mutation.judge:judge", self.folder.name, asks, seeds, self.device, patience)
            found = process.result(seconds=seconds)
        except Died as died:
            if died.status is None:  # the copy is of no more use
                raise
            relation, detail = "crashed", f"status {died.status}"
            if died.late:
                relation, detail = "time", f"more than {seconds} s"
            elif died.status == -signal.SIGALRM:
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


class Clean:
    """The unbroken package, asked in each dtype and with each seed before anything of it is broken: the seconds that an
    op takes, those of the answer that takes longest, and what does not pass."""

    def __init__(self, ops: Sequence[str]):
        self.left = {(op, dtype, seed): op for op in ops for dtype in DTYPE_ORDER for seed in SEEDS}
        self.seconds, self.longest = dict.fromkeys(ops, 0.0), dict.fromkeys(ops, 0.0)
        self.wrong: dict[str, str] = {}

    def take(self, found: dict) -> None:
        """Takes what was found of one op in one dtype with one seed; of another op, nothing."""
        op = self.left.pop((found["op"], found["dtype"], found["seed"]), None)
        if op:
            self.seconds[op] += found["seconds"]
            self.longest[op] = max(self.longest[op], found.get("longest", 0.0))
            if found["verdict"] != "survived":
                self.wrong.setdefault(op, f"{op} in {found['relation']} {found['layout']} ({found['detail']})")

    def ready(self, ops: Sequence[str]) -> bool:
        return not set(ops) & set(self.left.values())

    def limits(self, ops: Sequence[str]) -> tuple[float, float]:
        """Returns the seconds that a mutant of these ops may take, and an answer of it: one that hangs gives none."""
        seconds, longest = sum(self.seconds[op] for op in ops), max(self.longest[op] for op in ops)
        return max(LEAST, TIMES * seconds), max(LEAST, TIMES * longest)


def judged(
    chosen: Sequence[Mutant], device: str, jobs: int, kept: Path, tell: Callable[[dict, int], object]
) -> list[dict]:
    """Returns the verdict on every mutant, in their order; what `kept` holds of the same sources is not judged again.

    tell: gets each verdict as it comes, and how many are left. Raises ValueError, which names each op that needs a fix
    before it is broken.
    """
    own, known, passed = {"made": made_of(), "device": device}, {}, []
    for line in kept.read_text(encoding="utf-8").splitlines() if kept.exists() else ():
        found = json.loads(line)
        if own.items() <= found.items():
            if "id" in found:
                known[found["id"]] = found
            else:
                passed.append(found)
    todo = [m for m in chosen if m.id not in known]
    for number, m in enumerate(m for m in chosen if m.id in known):
        tell(known[m.id], len(chosen) - number - 1)
    ops = dict.fromkeys(op for m in todo for op in ops_for(m.file, m.function))
    clean, waiting = Clean(sorted(ops, key=lambda op: not OPS[op].cache)), list(todo)  # attention takes longest
    for found in passed:
        clean.take(found)
    parts: dict[str, list] = {}
    with ThreadPoolExecutor(jobs) as pool, copies(jobs, device) as call, kept.open("a", encoding="utf-8") as file:
        broken = lambda copy, m, mine, dtypes: copy.judge(m, mine, clean.limits(mine), SEEDS, dtypes)
        unbroken = lambda copy, op, dtype, seed: copy.judge(None, [op], (3600, 3600), [seed], [dtype])
        tasks: dict = {pool.submit(call, unbroken, *of): of for of in clean.left}

        def begin() -> None:
            for m in [m for m in waiting if not clean.wrong and clean.ready(ops_for(m.file, m.function))]:
                waiting.remove(m)
                parts[m.id] = [pool.submit(call, broken, m, *part) for part in asked_apart(ops_for(m.file, m.function))]
                tasks.update(dict.fromkeys(parts[m.id], m))

        try:
            begin()
            while tasks:
                for task in wait(tasks, return_when=FIRST_COMPLETED).done:
                    of = tasks.pop(task)
                    found = of_parts(parts[of.id]) if isinstance(of, Mutant) else task.result()
                    if not found or isinstance(of, Mutant) and of.id in known:  # a part is missing, or of no more use
                        continue
                    if isinstance(of, Mutant):
                        found = own | {"id": of.id} | said(of) | found
                        known[of.id] = found
                        tell(found, len(chosen) - len(known))
                    else:
                        found = own | found | dict(zip(("op", "dtype", "seed"), of))
                        clean.take(found)
                    if isinstance(of, Mutant) or found["verdict"] == "survived":
                        file.write(json.dumps(found) + "\n")
                        file.flush()
                begin()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if clean.wrong:
        raise ValueError(f"before anything is broken, these need a fix: {'; '.join(clean.wrong.values())}")
    return [known[m.id] for m in chosen]


def asked_apart(ops: Sequence[str]) -> list[tuple[list[str], Sequence[str]]]:
    """Returns ops and dtypes that one process asks: attention's take minutes each, and have one each."""
    rest = [op for op in ops if not OPS[op].cache]
    long = [([op], [dtype]) for dtype in DTYPE_ORDER for op in ops if OPS[op].cache]
    return [*long, *[(rest, DTYPE_ORDER)] * bool(rest)]


def of_parts(parts: Sequence[Future]) -> dict:
    """Returns the verdict on a mutant whose parts are asked apart: killed as soon as one says so, and those that nobody
    began are left; survived once all do. Before that, nothing."""
    done = [part.result() for part in parts if part.done() and not part.cancelled()]
    for found in done:
        if found["verdict"] != "survived":
            for part in parts:
                part.cancel()
            return found
    if len(done) < len(parts):
        return {}
    told = next((f for f in done if f.get("detail")), done[0])  # by which seed alone it is killed
    total = {k: round(sum(f[k] for f in done), 1) for k in ("checks", "seconds")}
    return told | total | {"longest": max(f["longest"] for f in done)}


def said(m: Mutant) -> dict:
    """Returns what a verdict says of its mutant."""
    told = {"file": m.file, "function": m.function, "line": m.line, "operator": m.operator}
    return told | {"before": m.before, "text": m.text, "ops": ops_for(m.file, m.function)}
