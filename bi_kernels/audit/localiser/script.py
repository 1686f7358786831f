"""Writes the script that shows one cause by itself."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from bi_kernels import checks
from bi_kernels.audit.localiser.cause import Cause
from bi_kernels.audit.localiser.replay import Program, reach
from bi_kernels.audit.reproduce.script import TEMPLATES


def write(cause: Cause, programs: Sequence[Program], folder: Path, number: int) -> None:
    """Writes the script and what it loads, and names it in the cause if it shows the drift here."""
    if any(p.result is None for p in programs) or not any(p.ops for p in programs):
        return
    folder.mkdir(parents=True, exist_ok=True)
    words = re.sub(r"\W+", "-", f"{cause.path}-{cause.parameter.rpartition('.')[2]}-{cause.op}").strip("-")
    path = folder / f"{number:02}-{words[:60]}.py"
    saved = path.with_suffix(".pt")
    torch.save({name: p.saved() for name, p in zip("ab", programs)}, saved)
    modules = {k: v for p in programs for k, v in p.modules.items()}
    text = TEMPLATES.get_template("replay.py.jinja").render(
        title=f"{cause.op} in {cause.path or 'the model'}, {cause.direction}: {' and '.join(cause.layouts)}.",
        interpreted=checks.INTERPRETED and any("kernel" in op for p in programs for op in p.ops),
        saved=saved.name,
        modules=reach(modules, folder),
        between=" against ".join(cause.layouts),
    )
    path.write_text(text, encoding="utf-8")
    scope = {"__file__": str(path), "__name__": "reproducer"}
    exec(compile(text, str(path), "exec"), scope)
    a, b = scope["results"]()
    if scope["differ"](a, b).any():
        cause.script = path
