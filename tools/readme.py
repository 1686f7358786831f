"""Writes what README.md does not type: the output below each block of code, and its tables.

    python tools/readme.py            # all of it
    python tools/readme.py ops speed  # these tables alone
    python tools/readme.py --check    # writes nothing; ends with 1 and a diff where README.md says something else

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. An output stands between `<!-- output: 8 lines -->`
and `<!-- end -->`: the first lines of the Python block before it, run on the CPU interpreter, with a model's random
weights instead of a download. Needs the extra `test` and a checkout.
"""

import difflib
import json
import lzma
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
H200 = ROOT / "audits" / "nvidia-h200-qwen3-8b"
WHERE = {"FA4": "https://github.com/Dao-AILab/flash-attention", "QuACK": "https://github.com/Dao-AILab/quack"}
CUTE = (  # what the table says beside peers written in CuTe, where they were timed
    ("attention, forward", "FA4", {"group": "attention", "direction": "forward"}),
    ("attention, backward", "FA4", {"group": "attention", "direction": "backward"}),
    ("attention, decode", "FA4", {"group": "decode"}),
    ("RMSNorm, forward", "QuACK", {"op": "rms_norm", "direction": "forward"}),
    ("RMSNorm, backward", "QuACK", {"op": "rms_norm", "direction": "backward"}),
)
PIECE = re.compile(r"<!-- (?:table: (\w+)|output(?:: (\d+) lines)?) -->\n.*?<!-- end -->\n", re.S)
OFFLINE = """
import transformers, warnings
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

def from_pretrained(name, **options):
    sizes = {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    config = Qwen3Config(num_key_value_heads=8, tie_word_embeddings=True, **sizes)
    return AutoModelForCausalLM.from_config(config, **options)

AutoModelForCausalLM.from_pretrained = from_pretrained
transformers.PreTrainedModel.to = lambda model, device: model  # there is no GPU
transformers.logging.set_verbosity_error()
"""


def run(code: str, **more: str) -> str:
    """Returns what a block of Python prints, in a new process on the CPU. more: variables of its environment."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | more
    code = (OFFLINE if "from_pretrained" in code else "") + code
    done = subprocess.run([sys.executable, "-"], input=code, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    line = lambda cells: f"| {' | '.join(cells)} |"
    return "\n".join([line(head), f"|{':--|' * len(head)}", *map(line, rows)])


def versions() -> str:
    """Returns which versions are needed, and how long the first answer takes here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"3\.\d+$", c)]
    needs = {d.partition(">=")[0]: d.partition(">=")[2] for d in project["dependencies"]}
    block = next(code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "audit(" in code)
    seconds = []
    with tempfile.TemporaryDirectory() as cache:  # the first run compiles what it imports
        for _ in range(2):
            began = time.monotonic()
            run(block, PYTHONPYCACHEPREFIX=cache, PYTHONDONTWRITEBYTECODE="")
            seconds.append(math.ceil(time.monotonic() - began))
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    needed = [f"Python {pythons[0]} to {pythons[-1]}"]
    needed += [f"{name}≥{text}" for name, text in needs.items()]
    machine = cpu[1].strip() if cpu else platform.machine()
    first, then = seconds
    said = f"`audit` answers in {first} s at first, then {then} s, on two cores ({machine}, no GPU)."
    return f"Needs {'; '.join(needed)}. {said}"


def models() -> str:
    """Returns what docs/families.md begins with."""
    (said,) = re.findall(r"^(\*\*.*?\*\*.*?experts\.)", (ROOT / "docs" / "families.md").read_text(), re.S | re.M)
    asked = "Each family was tried as a tiny model with random weights, in fp32, on the interpreter."
    return f"{' '.join(said.split())} {asked} [Each of them](docs/families.md)."


def ops() -> str:
    """Returns the public ops and what the H200 reports say of each: forward, backward, dtypes."""
    import bi_kernels  # noqa: PLC0415
    from bi_kernels.audit.findings import PACKED, grouped, read_rows  # noqa: PLC0415 (as above)
    from bi_kernels.audit.registry import OPS  # noqa: PLC0415

    rows = [r for path in sorted(H200.glob(f"*/{PACKED}")) for r in read_rows(path.parent) if not r["control"]]
    judged: dict[str, dict[str, list[dict]]] = {}
    for r in rows:
        if r["op"] in OPS:
            side = "backward" if r["relation"].startswith("gradient") else "forward"
            judged.setdefault(OPS[r["op"]].function or r["op"], {}).setdefault(side, []).append(r)
    lines = []
    audit_of = lambda name: next(op.audit for op in OPS.values() if (op.function or op.name) == name)
    for known in grouped([name for name in bi_kernels.__all__ if name in judged], audit_of).values():
        cells = []
        for side in ("forward", "backward"):
            mine = [r for name in known for r in judged[name].get(side, [])]
            cells.append("–" if not mine else "✘" if any(r["verdict"] == "needs-fix" for r in mine) else "✓")
        dtypes = {r["dtype"] for name in known for r in judged[name]["forward"] if r["verdict"] == "pass"}
        order = [d for d in ("bf16", "fp16", "fp32") if d in dtypes]
        lines.append([", ".join(f"`{name}`" for name in known), *cells, "/".join(order)])
    return table(["op", "forward", "backward", "dtypes"], lines)


def speed() -> str:
    """Returns the table of times on the H200, from the reports' data."""
    packed = (H200 / "bench" / "benchmark.jsonl.xz").read_bytes()
    bench = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
    steps = {r["what"]: r["of stock"] for r in tables((H200 / "transformers" / "README.md").read_text(), "of stock")}
    chain = tables((H200 / "chain" / "README.md").read_text(), "of stock compiled")[0]

    def cells(what: str, against: str, **where) -> list[str]:
        times = [r["times"] for r in bench if all(r.get(k) == v for k, v in where.items()) and r.get("times")]
        mean = math.exp(statistics.mean(map(math.log, times)))
        spread = f"{min(times):.2f} to {max(times):.2f}" if len(times) > 1 else "–"
        return [what, against, f"**{mean:.2f}**", spread]

    gradient = {"group": "gradients", "direction": "dW into main_grad"}
    heads = [r for r in bench if r["group"] == "lm_head" and r["case"].startswith("nothing kept")]
    bench += [{"group": "head", "times": r["ms"][r["case"]][0] / r["ms"]["torch.compile"][0]} for r in heads]
    eager = next(r for r in bench if r["group"] == "calls" and r["op"] == "decode step")
    calls = [r | {"group": "call"} for r in bench if r["group"] == "calls" and r is not eager]
    bench += calls
    counts = Counter(r["group"] for r in bench)
    one = lambda what, against, times: [what, against, f"**{float(times):.2f}**", "–"]
    rows = [
        one("Hugging Face Qwen3, forward and backward", "stock", steps["forward and backward of a step"]),
        one("Hugging Face Qwen3, decode in a graph", "stock", steps["a decode step in a CUDA graph"]),
        one(f"{chain['layers']} layers of Qwen3-8B, forward and backward", "eager", chain["of stock eager"]),
        one("the same", "`torch.compile`", chain["of stock compiled"]),
        one(f"{eager['case'].partition(',')[0]} of it, eager decode", "eager", eager["times"]),
        cells(f"{counts['gemm']:,} products of models", "cuBLAS", group="gemm"),
        cells(f"{counts['drawn']} random products", "cuBLAS", group="drawn"),
        cells("dW into `main_grad`", "cuBLAS, fp32", **gradient),
        cells("attention, forward", "cuDNN", group="attention", direction="forward"),
        cells("attention, backward", "cuDNN", group="attention", direction="backward"),
        cells("attention, decode", "SDPA's fastest", group="decode"),
        cells("LM head, no logits kept", "`torch.compile`", group="head"),
        cells(f"eager calls of {len(calls)} ops, CPU time", "PyTorch", group="call"),
    ]
    for what, peer, where in CUTE:
        mine = [r for r in bench if where.items() <= r.items() and peer in r.get("ms", {})]
        bench += [{"group": f"{what}, {peer}", "times": r["ms"][r["who"]][0] / r["ms"][peer][0]} for r in mine]
        rows += [cells(what, f"[{peer}]({WHERE[peer]})", group=f"{what}, {peer}")] if mine else []
    return table(["what", "against", "mean", "range"], rows)


def _cells(line: str) -> list[str]:
    *first, last = line.strip("|").split("|")
    return [cell.strip() for cell in (*first, *last.split(" · "))]  # the last columns of a wide table may share one


def tables(text: str, column: str) -> list[dict[str, str]]:
    """Returns the rows of the Markdown tables that have a column; parts of a wide table, which follow each other and
    begin with the same columns, are one."""
    found: list[list[dict[str, str]]] = []
    for part in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = map(_cells, part.strip().splitlines())
        lines = [dict(zip(head, cells)) for cells in rows]
        before = found[-1] if found else []
        if len(before) == len(lines) and all(old.get(head[0]) == new[head[0]] for old, new in zip(before, lines)):
            found[-1] = [old | new for old, new in zip(before, lines)]
        else:
            found.append(lines)
    return [line for lines in found for line in lines if column in line]


TABLES = {"models": models, "versions": versions, "ops": ops, "speed": speed}


def written(text: str, wanted: list[str]) -> str:
    """Returns README's text with its tables and outputs made anew; wanted: names of those, all if empty."""

    def piece(match: re.Match) -> str:
        name = match[1] or "output"
        if wanted and name not in wanted:
            return match[0]
        if name != "output":
            return f"<!-- table: {name} -->\n{TABLES[name]()}\n<!-- end -->\n"
        code = re.findall(r"```python\n(.*?)```", text[: match.start()], re.S)[-1]
        lines = run(code).rstrip().splitlines()
        shown = lines if not match[2] or len(lines) <= int(match[2]) else [*lines[: int(match[2])], "…"]
        return "\n".join([match[0].partition("\n")[0], "```", *shown, "```", "<!-- end -->\n"])

    return PIECE.sub(piece, text)


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.insert(0, str(ROOT))
    wanted = [name for name in sys.argv[1:] if name != "--check"]
    before = README.read_text(encoding="utf-8")
    after = written(before, wanted)
    if "--check" not in sys.argv:
        README.write_text(after, encoding="utf-8")
    elif before != after:
        print("".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "README.md", "made anew")))
        sys.exit(1)


if __name__ == "__main__":
    main()
