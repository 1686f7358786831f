"""The quick run: what of each op of the registry is asked where nobody wants to wait, in two processes, without
notebooks. It asks what kills most of the bugs that `bi-audit mutate` plants."""

import importlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.parameters import OTHERS, command
from bi_kernels.audit.runs.runner import stopped

DTYPE = "bf16"
LAYOUTS = ("singles", "batch", "left_padded:16", "chunked:7", "decode")
OF_ATTENTION = ("batch", "decode")  # whose calls are many
SLOW = "attention"  # its ops begin first
Part = tuple[str, dict, str, int]  # audit, parameters, op, or '' for controls, and its number


def audited(names: list[str]) -> list[str]:
    """Returns the audits whose ops the quick run knows. Raises ValueError where none is."""
    mine = [name for name in names if name not in OTHERS and name not in ("dtype", "backward")]
    if not mine:
        raise ValueError(f"--quick asks about ops one by one, as of gemm or attention, not about {', '.join(names)}")
    return mine


def run(parameters: dict[str, dict], jobs: int, done: Callable[[str, list[Row]], object]) -> dict[str, list[dict]]:
    """Judges every op of some audits, and a control of each; returns the rows by audit, with one that says so where a
    process died.

    parameters: of each audit; done: is called with the name of an op and its rows, as they come.
    """
    found: dict[str, list[dict]] = {name: [] for name in parameters}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin) as pool:
        parts = [part for several in pool.map(_parts, *zip(*parameters.items())) for part in several]
        parts.sort(key=lambda part: part[0] != SLOW)
        waiting = {pool.submit(_judge, part): part for part in parts}
        for future in as_completed(waiting):
            audit, _, op, _ = waiting[future]
            if isinstance(future.exception(), BrokenProcessPool):
                found[audit].append(stopped(audit, f"{op or 'a control'}: its process, or one beside it, died"))
            else:
                rows = future.result()
                found[audit] += [r.json() for r in rows]
                done(op or f"a control of {audit}", rows)
    return found


def _begin() -> None:
    """Prepares a process, which ends with the one that it works for."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _parts(audit: str, parameters: dict) -> list[Part]:
    """Returns what of an audit is judged at a time: each op at its first case, and a control."""
    made = _load(audit, parameters).make()
    first = {s.problem.op.name: i for i, s in reversed([*enumerate(made)])}
    return [*((audit, parameters, op, i) for op, i in sorted(first.items())), (audit, parameters, "", 0)]


def _judge(part: Part) -> list[Row]:
    audit, parameters, op, number = part
    session = _load(audit, parameters)
    # only now, for they import triton
    modules = ("broken.judge", "drawn.cases", "drawn.questions", "relations.forward")
    controls, cases, questions, forward = (importlib.import_module(f"bi_kernels.audit.{name}") for name in modules)
    if not op:
        one = next(c for c in controls.groups(session) if controls.EVERY[c[0]].relation == "invariance")
        rows = controls.judge_control(session, one)
    else:
        s = session.make()[number]
        p = s.problem
        refused = forward.supported(s)
        rows = [refused] if refused else [*forward.by_layout(s, OF_ATTENTION if p.op.cache else LAYOUTS)]
        if not refused:
            said = s.candidate, s.device, command("random", parameters | {"op": op, "first": 0, "cases": 1})
            rows += questions.judge(cases.draw(p.op, s.function, 0, p.dtype, p.device, p.seed, *said))
    for row in rows:
        row.audit = audit
    return rows


def _load(audit: str, parameters: dict):
    return importlib.import_module("bi_kernels.audit").load(audit, parameters)
