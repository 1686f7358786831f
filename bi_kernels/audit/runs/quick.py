"""The quick run: a few checks of each op of the registry, in two processes, without notebooks. They are those that
catch most of the bugs that `bi-audit mutate` plants."""

import importlib
from collections.abc import Callable
from concurrent.futures import as_completed

from bi_kernels.audit.executor import Died, Pool
from bi_kernels.audit.findings import Row, needs_fix
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


def run(parameters: dict[str, dict], jobs: int, say: Callable[[str], object]) -> dict[str, list[dict]]:
    """Judges every op of some audits, and a control of each; returns the rows by audit, with one that says so where a
    process died.

    parameters: of each audit; say: gets a line an op, as its rows come.
    """
    found: dict[str, list[dict]] = {name: [] for name in parameters}
    with Pool(jobs) as pool:
        listed = [pool.submit(f"{__name__}:_parts", *of) for of in parameters.items()]
        parts = sorted((part for future in listed for part in future.result()), key=lambda part: part[0] != SLOW)
        waiting = {pool.submit(f"{__name__}:_judge", part): part for part in parts}
        for future in as_completed(waiting):
            audit, _, op, _ = waiting[future]
            try:
                rows = future.result()
            except Died as died:
                found[audit].append(stopped(audit, f"{op or 'a control'}: its process died ({died})"))
                continue
            found[audit] += [r.json() for r in rows]
            bad, count = needs_fix(rows), len(rows)
            of_control = "missed" if bad else "caught"
            word = of_control if rows[0].control else f"{len(bad)} need a fix" if bad else "pass"
            say(f"  {op or f'a control of {audit}':24} {count:3} check{'s' * (count > 1):1}  {word}")
    return found


def _parts(audit: str, parameters: dict) -> list[Part]:
    """Returns what of an audit is judged at a time: each op at its first case, and a control."""
    made = _load(audit, parameters).make()
    first = {s.problem.op.name: i for i, s in reversed([*enumerate(made)])}
    return [*((audit, parameters, op, i) for op, i in sorted(first.items())), (audit, parameters, "", 0)]


def _judge(part: Part) -> list[Row]:
    audit, parameters, op, number = part
    session = _load(audit, parameters)
    # only now, for they import triton
    modules = ("controls.run", "checks.ops", "checks.forward")
    controls, quick, forward = (importlib.import_module(f"bi_kernels.audit.{name}") for name in modules)
    if not op:
        one = next(c for c in controls.groups(session) if controls.EVERY[c[0]].relation == "invariance")
        rows = controls.judge_control(session, one)
    else:
        s = session.make()[number]
        refused = forward.supported(s)
        rows = [refused] if refused else [*forward.by_layout(s, OF_ATTENTION if s.problem.op.cache else LAYOUTS)]
        if not refused:
            rows += quick.drawn(s, command("random", parameters | {"op": op, "first": 0, "cases": 1}))
    for row in rows:
        row.audit = audit
    return rows


def _load(audit: str, parameters: dict):
    return importlib.import_module("bi_kernels.audit").load(audit, parameters)
