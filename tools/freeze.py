"""Freezes what the auditor says, and compares what it says later: the safety net of the rewrite as one engine.

    python tools/freeze.py record tests/frozen.json.gz runs/interpreter-tiny [mutants.json]
    python tools/freeze.py compare tests/frozen.json.gz runs/interpreter-tiny [--map tools/renamed.toml] [--only any]

Three sources: the rows of `bi-audit run` in a folder, of every audit; `audit()` of the tests' right and wrong callables
(called "any" here); and `locate` on its planted faults ("locate"). A frozen file may hold who kills which mutant, too.
`compare` lists the checks that are missing or new, and the verdicts that changed; it ends with 1 if there are any.
renamed.toml holds tables named like a column, or "column of op", of old = "new".
"""

import argparse
import gzip
import json
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEY = (
    "audit",
    "op",
    "case",
    "candidate",
    "dtype",
    "relation",
    "layout",
    "against",
    "inputs",
    "rows",
    "tensor",
    "control",
)


SOURCE = re.compile(r", [\w/]+\.py:\d+")  # where a planted fault stands


def entry(row: dict) -> tuple[str, list]:
    """Returns a row's key, and what was found: its verdict and how many elements differ."""
    return SOURCE.sub("", "|".join(str(row[k]) for k in KEY)), [row["verdict"], row["mismatches"], row["caught"]]


def of_runs(folder: Path) -> Iterable[dict]:
    """Yields the rows of every audit in a folder of reports."""
    for path in sorted(folder.glob("*/verdicts.json")):
        yield from json.loads(path.read_text(encoding="utf-8"))


def of_callables() -> Iterable[dict]:
    """Yields the rows of `audit()` on the tests' callables, right and wrong."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)  # the corpora draw when they are imported
    import test_callables  # noqa: PLC0415 (main says where tests are, and turns the interpreter on)
    import test_fair  # noqa: PLC0415

    from bi_kernels.audit import audit  # noqa: PLC0415

    wrong = {name: given for name, (given, _) in test_callables.DRIFTING.items()}
    for corpus in (test_callables.INVARIANT, wrong, test_fair.CALLABLES):
        for name, (function, *inputs) in corpus.items():
            print(f"any: {name}", file=sys.stderr)
            report = audit(function, *inputs, name=name, quiet=True, seconds=600.0)
            yield from (vars(r) for r in report.rows)


def of_faults() -> Iterable[dict]:
    """Yields a line for each fault that `locate` is to name."""
    from locator.run import run_faults  # noqa: PLC0415

    for line in run_faults("cpu"):
        said = {"audit": "locate", "op": line["fault"], "relation": line["expected"], "layout": line["named"]}
        verdict = {"verdict": "pass" if line["right"] else "needs-fix", "mismatches": line["causes"], "caught": None}
        yield dict.fromkeys(KEY, "") | said | verdict


def found(runs: Path, only: str) -> dict[str, list[list]]:
    """Returns {key: what was found, once for each row that has it}."""
    sources = {"runs": lambda: of_runs(runs), "any": of_callables, "locate": of_faults}
    rows: dict[str, list[list]] = {}
    for name, source in sources.items():
        for row in source() if only in ("", name) else ():
            key, value = entry(row)
            rows.setdefault(key, []).append(value)
    return {key: sorted(values, key=str) for key, values in rows.items()}


def renamed(key: str, names: dict[str, dict[str, str]]) -> str:
    """Returns a key with the names that columns have now."""
    values = key.split("|")
    of_op = {k: names.get(k, {}) | names.get(f"{k} of {values[1]}", {}) for k in KEY}
    return SOURCE.sub("", "|".join(of_op[k].get(v, v) for k, v in zip(KEY, values, strict=True)))


def compared(before: dict, after: dict) -> list[str]:
    """Returns a line for each difference."""
    lines = [f"missing  {k}" for k in before.keys() - after.keys()] + [
        f"new      {k}" for k in after.keys() - before.keys()
    ]
    for key in before.keys() & after.keys():
        old, new = (Counter(v[0] for v in side[key]) for side in (before, after))
        if old != new:
            lines.append(f"changed  {key}: {dict(old)} then, {dict(new)} now")
        elif before[key] != after[key]:
            lines.append(f"other    {key}: {before[key]} then, {after[key]} now")
    return sorted(lines)


def main() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("mutants", type=Path, nargs="?")
    parser.add_argument("--map", type=Path, default=ROOT / "tools" / "renamed.toml")
    parser.add_argument("--only", choices=("", "runs", "any", "locate"), default="")
    given = parser.parse_args()
    rows = found(given.runs, given.only)
    if given.what == "record":
        killed = json.loads(given.mutants.read_text()) if given.mutants else []
        killers = {m["id"]: [m["verdict"], m.get("op"), m.get("relation"), m.get("layout")] for m in killed}
        with gzip.open(given.file, "wt", encoding="utf-8") as file:
            json.dump({"rows": rows, "mutants": killers}, file, ensure_ascii=False)
        print(f"{len(rows)} checks, {len(killers)} mutants")
        return
    names = tomllib.loads(given.map.read_text()) if given.map.exists() else {}
    with gzip.open(given.file, "rt", encoding="utf-8") as file:
        before = json.load(file)["rows"]
    wanted = lambda key: (
        given.only in ("", key.partition("|")[0]) or given.only == "runs" and key[:4] not in ("any|", "loca")
    )
    before = {renamed(key, names): value for key, value in before.items() if wanted(key)}
    lines = compared(before, rows)
    print(*lines, sep="\n")
    print(f"{len(before)} checks then, {len(rows)} now; {len(lines)} differences")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
