"""Judges every decoder family of the installed Transformers on the CPU, and writes the table of docs/families.md.

    python tools/families.py                # all of them, and the table
    python tools/families.py qwen3 gpt_oss  # these alone, printed
    python tools/families.py --again        # forgets what an interrupted run had judged
    python tools/families.py --device cuda  # on a GPU: what drifts there may keep its bits on a CPU; printed

Each family runs in a process of its own with a time limit; its error is its result. Rows are kept in
runs/families.jsonl until the code changes, so that an interrupted run goes on. Needs the extra `test`.
"""

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
if "cuda" not in " ".join(sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
import transformers

from bi_kernels.audit.targets import tiny_families as tiny
from bi_kernels.audit.targets.family_verdict import agree, judge

PAGE, ROWS = ROOT / "docs" / "families.md", ROOT / "runs" / "families.jsonl"
LIMIT = 300  # seconds a family
PREFACE = """\
# Decoder families

**After `apply`, {yes} of {of} decoder families of Transformers {version} keep their bits, forward and
backward.** Of these, {mixtures} are mixtures of experts. {half} more are batch-invariant only. {no} are not, and
`apply` says why.{unjudged} Verdict and bits disagree in {odd} families.

`python tools/families.py --dtypes {told}` writes this page. It builds each family from its configuration: random
weights, two layers or one of each kind, hidden size 64, 8 experts. On the Triton interpreter, it compares raw
bits of each sequence alone with those padded left and right, packed, prefilled in chunks and decoded. It compares
gradients over two splits, too, all in {dtypes}. `restore` must give back stock's bits. A layout is skipped where stock
Transformers, in fp32, computes something else in it: Bart, for example, counts positions from the start of the row.
"""


def digest() -> str:
    """Returns one hash of the code that a row depends on, and of Transformers' version."""
    code = hashlib.sha256(transformers.__version__.encode())
    for path in sorted((ROOT / "bi_kernels").rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()[:16]


def _child(name: str, device: str, dtypes: list[str], pipe) -> None:
    torch.set_num_threads(1)
    pipe.send(judge(name, device, dtypes))


def rows(names: list[str], jobs: int, device: str, dtypes: list[str]) -> Iterator[dict]:
    """Yields a row for each family, judged by `jobs` processes at a time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([judge.__module__])
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, (here, there) = waiting.pop(0), context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, device, dtypes, there))
            process.start()
            there.close()
            running[name] = process, here, time.monotonic()
        multiprocessing.connection.wait([pipe for _, pipe, _ in running.values()], timeout=1)
        for name, (process, pipe, began) in [*running.items()]:
            row, late = None, time.monotonic() - began > LIMIT
            if pipe.poll():
                try:
                    row = pipe.recv()
                except EOFError:
                    row = {"family": name, "built": False, "why": f"its process ended with {process.exitcode}"}
            elif late:
                row = {"family": name, "built": False, "why": f"took more than {LIMIT} s"}
            if row:
                process.kill()
                process.join()
                del running[name]
                yield row


def said(row: dict) -> str:
    """Returns the row in one line."""
    if "says" not in row:
        return f"{row['family']}: {row['why']}"
    says, bits = ("/".join(("NO", "yes")[v] for v in row[k]) for k in ("says", "bits"))
    back = "" if row["restored"] is True else f"; not restored: {row['restored']}"
    return f"{row['family']}: {says}, bits {bits}; {drift(row)}{back}"


def drift(row: dict) -> str:
    """Returns where bits differ, as "padded left 21 %, gradients 0.6 %": in fp32 where they do, else in bf16."""
    for dtype in ("float32", "bfloat16"):
        found = []
        for c in row["checks"]:
            name = "gradients" if c["gradient"] else c["name"].split(" against")[0].removesuffix(" in a batch")
            if c["dtype"] == dtype and c["error"]:
                found.append(f"{name} {c['error']}")
            elif c["dtype"] == dtype and c["differ"]:
                found.append(f"{name} {max(100 * c['differ'] / c['elements'], 0.1):.1f} %")
        if found:
            return ", ".join(found)
    return "0 bits differ"


def _reasons(row: dict) -> list[str]:
    """Returns why modules or gradients are left to PyTorch, each reason once, without the modules that never run."""
    lines = row["report"].partition("Left to PyTorch:")[2].splitlines()
    found = [re.split(r"  +", line.strip().partition(" × ")[2], maxsplit=1)[-1] for line in lines if " × " in line]
    ran = [r for r in dict.fromkeys(found) if "trial call did not" not in r]
    short = [r.replace(": no batch-invariant form is known", "") for r in ran or dict.fromkeys(found)]
    return short or [r for line in row["report"].splitlines()[:2] for r in line.partition("NO. ")[2:] if r]


def _why(row: dict) -> str:
    return "; ".join(_reasons(row))


def _table(head: tuple[str, ...], found: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(r)} |" for r in (head, (":--",) * len(head), *found))


def page(judged: list[dict], left_out: dict[str, str], dtypes: list[str]) -> str:
    """Returns docs/families.md."""
    asked = [r for r in judged if "says" in r]
    yes = [r for r in asked if all(r["says"])]
    half = [r for r in asked if r["says"][0] and not r["says"][1]]
    no = [r for r in asked if not r["says"][0]]
    failed = [r for r in judged if "says" not in r]
    odd = [r for r in asked if not agree(r)]
    mixtures = sum(r["mixture"] for r in yes)
    lacks = Counter(part for r in no for part in _reasons(r))
    name = lambda r: f"`{r['family']}`" + (", experts" if r["mixture"] else "")
    given = {"yes": len(yes), "of": len(judged), "mixtures": mixtures, "version": transformers.__version__}
    given["dtypes"] = " and ".join(dtypes) + (", and what a batch generates in bf16" if "bf16" in dtypes else "")
    given |= {"told": " ".join(dtypes), "unjudged": f" {len(failed)} could not be judged." if failed else ""}
    text = [PREFACE.format(**given, odd=len(odd), no=len(no), half=len(half))]
    if lacks:
        common = [(what, str(n)) for what, n in lacks.most_common(12)]
        text += ["## What the others lack\n", _table(("left to PyTorch", "families"), common), ""]
    if odd:
        text += ["## Verdict and bits disagree\n"]
        text += [_table(("family", "`apply` says", "bits"), [(name(r), _says(r), drift(r)) for r in odd]), ""]
    of_kind = lambda has: ", ".join(f"`{r['family']}`" for r in yes if r["mixture"] == has)
    text += ["## Yes, yes\n", _table(("", "families"), [("mixtures", of_kind(True)), ("dense", of_kind(False))]), ""]
    if half:
        rows = [(name(r), _why(r), drift(r)) for r in half]
        text += ["## Batch-invariant only\n", _table(("family", "why", "bits that differ"), rows), ""]
    if no:
        text += [
            "## No\n",
            _table(("family", "why", "bits that differ"), [(name(r), _why(r), drift(r)) for r in no]),
            "",
        ]
    text += ["## Not judged\n"]
    text += [_table(("model type", "why"), [(f"`{r['family']}`", r["why"]) for r in failed]), ""] if failed else []
    by_reason: dict[str, list[str]] = {}
    for model, why in left_out.items():
        by_reason.setdefault(why, []).append(f"`{model}`")
    return "\n".join(text + [f"- {', '.join(models)}: {why}." for why, models in by_reason.items()]) + "\n"


def _says(row: dict) -> str:
    return "/".join(("NO", "yes")[v] for v in row["says"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("families", nargs="*", help="model types, as qwen3_moe; all where none is given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda prints, and writes no page")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--again", action="store_true", help="judges every family anew")
    given = parser.parse_args()
    keeps = not given.families and given.device == "cpu"
    every, now = list(tiny.families()), f"{digest()} {' '.join(given.dtypes)}"
    if unknown := sorted(set(given.families) - set(every)):
        parser.error(f"families: {', '.join(unknown)} unknown, expected some of {', '.join(every)}")
    known = {}
    if ROWS.exists() and keeps and not given.again:
        known = {r["family"]: r for r in map(json.loads, ROWS.read_text().splitlines()) if r["code"] == now}
    names = [n for n in given.families or every if n not in known]
    if keeps:
        ROWS.parent.mkdir(exist_ok=True)
        ROWS.write_text("".join(json.dumps(r) + "\n" for r in known.values()))
    done, total = len(known), len(known) + len(names)
    for row in rows(names, given.jobs, given.device, given.dtypes):
        done += 1
        print(f"{done}/{total} {said(row)}", flush=True)
        if given.families:
            print(row.get("report", ""))
        elif keeps:
            known[row["family"]] = row
            with ROWS.open("a") as file:
                file.write(json.dumps(row | {"code": now}) + "\n")
    if keeps:
        PAGE.write_text(page([known[n] for n in every if n in known], tiny.left_out(), given.dtypes))


if __name__ == "__main__":
    main()
