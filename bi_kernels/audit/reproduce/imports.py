"""Writes the lines that bring a candidate into a script as `fn`, wherever the script is run from."""

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

from bi_kernels.audit.registry import Op
from bi_kernels.audit.targets.candidates import Candidate


def import_of(candidate: Candidate, op: Op, folder: Path) -> tuple[str, str]:
    """Returns the name of a candidate's function for `op` in a script in `folder`, and the lines that import it."""
    name = op.function or op.name
    stock = "torch.nn.functional" if name in ("silu", "gelu", "linear") else "bi_kernels.audit.stock"
    home = {"bi_kernels": "bi_kernels", "torch": stock}.get(candidate.spec)
    return (name, f"from {home} import {name}") if home else import_of_spec(candidate.spec, folder)


def import_of_spec(spec: str, folder: Path) -> tuple[str, str]:
    """Returns the name and the lines for `package.module:function` or `path/to/file.py:function`."""
    module, _, function = spec.rpartition(":")
    path = Path(module)
    if not module.endswith(".py"):
        return function, f"{reach(module, folder)}from {module} import {function}"
    if not importable(path):
        file = f"str({beside(module, folder)}) + {f':{function}'!r}"
        return function, f"from bi_kernels.audit.targets.candidates import load\n\n{function} = load({file})"
    return function, f"{_path(path.resolve().parent, folder)}from {path.stem} import {function}"


def importable(path: Path) -> bool:
    """Tells whether a file can be imported by its name: by some names another module would come, or none."""
    if not path.stem.isidentifier() or path.stem in sys.stdlib_module_names:
        return False
    try:
        found = importlib.util.find_spec(path.stem)
    except ValueError:
        return False
    return found is None or Path(found.origin or "").resolve() == path.resolve()


def reach(module: str, folder: Path) -> str:
    """Returns the lines after which a module that is not installed can be imported; none where it is."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or module.partition(".")[0] == "bi_kernels":
        return ""
    top = Path(file).resolve().parents[module.count(".") + (Path(file).name == "__init__.py")]
    if any(top.is_relative_to(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib")):
        return ""
    return _path(top, folder)


def _path(top: Path, folder: Path) -> str:
    return f"sys.path.insert(0, str({beside(top, folder)}))\n"


def beside(path: str | Path, folder: Path) -> str:
    """Returns Python for a path, from where the script lies."""
    relative = Path(os.path.relpath(Path(path).resolve(), folder.resolve()))
    return f"Path(__file__).parent / {relative.as_posix()!r}"
