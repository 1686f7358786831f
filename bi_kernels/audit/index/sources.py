"""The sources of a document: what judged and was judged, folder by folder, and whether it is still what it was.

All of the package, not what one audit loads of it: controls and ranks load each other's kernels, and a document that is
called older than it is costs a run, one that is called current and is not costs its reader. But for what no audit
loads: what stands here, which reads documents that are made, the workbench, and what breaks the kernels, of which
mutants are made.
Of that, what writes their page and says why some change nothing judges none of them: the page follows it (words.py).
And of the experiments, which notebooks import one by one, those that nothing which an audit loads names: no import
in the document's notebook, in another experiment that counts, or anywhere else in the package, and no string there.
Nor does a run on a GPU load Triton's interpreter as it is mended here, nor any but the chain's the localiser: there it
is recorded, and counts for nothing. Nor does what reads a command line and tells a terminal: a document says its own.
Of Python the code counts, its comments, and the line that each stands on, which documents cite; the words of docstrings
do where a document may hold them (CITED).
"""

import ast
import hashlib
import io
import json
import re
import subprocess
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

FILE = "sources.json"
PACKAGE = Path(__file__).parents[2]
NOTEBOOKS = PACKAGE / "notebooks", PACKAGE.parent / "notebooks"  # of a wheel, of a checkout
KINDS = ".py", ".toml", ".json"
KERNELS, AUDITOR, NOTEBOOK = "other kernels", "another auditor", "another notebook"
MUTANTS, EXPERIMENTS = "audit/mutants", "audit/experiments"
INTERPRETER, LOCALISER, WORKBENCH = "interpreter", "audit/localiser", "workbench"
LOCALISING = "localising"  # in a notebook that asks it
COMMANDS = tuple(f"{PACKAGE.name}/audit/{name}" for name in ("cli.py", "runs/command.py"))
# of mutants: what writes their page, and says why some change nothing; and its digest's name among sources
WRITERS = tuple(f"{MUTANTS}/{name}" for name in ("command.py", "document.py", "equivalents.toml"))
PAGE = f"{PACKAGE.name}/{MUTANTS}/page"
CURRENT, NOT_RECORDED, OTHERWISE = "current", "not recorded", "recorded by another rule"
EVERY = "*"  # as what an import of all of a folder names
# in what a report calls a class, and in reproducers of recipes
CITED = "integrations/transformers/", "audit/recipes/", "audit/problem/inputs.py"
RULE = "rule"  # by which sources were recorded
THIS = "docstrings apart"
NAMED = 2  # folders, or files of experiments, that a sentence names


def blob(content: bytes) -> str:
    """Returns git's name of a file's content, by which a commit can be asked for it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@cache
def judging(content: bytes) -> bytes:
    """Returns of a Python file what judges: the words of docstrings are gone, their lines are not. Of what is no Python
    in UTF-8 with lines that end as here, all of it."""
    try:
        tree = ast.parse(content.decode())
    except (SyntaxError, ValueError):
        return content
    if b"\r" in content or content.startswith(b"\xef\xbb\xbf"):
        return content
    lines = content.split(b"\n")
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            said = node.body[0]
            first, last = said.lineno - 1, said.end_lineno - 1
            after = lines[last][said.end_col_offset :]
            lines[first : last + 1] = [lines[first][: said.col_offset] + b'""', *[b""] * (last - first)]
            lines[last] += after
    return b"\n".join(lines)


def folders(blobs: dict[str, str]) -> dict[str, str]:
    """Returns {folder: digest of its files' names and contents} of {path: name of what judges of its content}, and the
    experiments' files besides."""
    found = defaultdict(list)
    for path in sorted(path for path in blobs if path.endswith(KINDS) and not path.endswith((*WRITERS, *COMMANDS))):
        found[path.rpartition("/")[0]].append(f"{path} {blobs[path]}")
    files = {k: v for k, v in blobs.items() if k.rpartition("/")[0] == f"{PACKAGE.name}/{EXPERIMENTS}"}
    return files | {name: hashlib.sha1("\n".join(lines).encode()).hexdigest() for name, lines in found.items()}


def package(notebook: Path | None = None, of_mutants: bool = False) -> dict[str, str]:
    """Returns the sources in the package as it stands of which the document of a notebook is made, or mutants are."""
    apart = [NOTEBOOKS[0], Path(__file__).parent, PACKAGE / WORKBENCH, *[PACKAGE / MUTANTS] * (not of_mutants)]
    files = [path for path in PACKAGE.rglob("*") if path.suffix in KINDS and not any(map(path.is_relative_to, apart))]
    names = [path.relative_to(PACKAGE.parent).as_posix() for path in files]
    found = folders({name: _named(name, path.read_bytes()) for name, path in zip(names, files, strict=True)})
    if of_mutants:  # which all experiments judge
        page = "".join(blob((PACKAGE / name).read_bytes()) for name in WRITERS)
        return {k: v for k, v in found.items() if not k.endswith(KINDS)} | {PAGE: blob(page.encode())}
    loaded = experiments(files, notebook)
    del found[f"{PACKAGE.name}/{EXPERIMENTS}"]
    return {k: v for k, v in found.items() if not k.endswith(".py") or Path(k).stem in loaded}


def _named(name: str, content: bytes) -> str:
    """Returns git's name of what judges in a file."""
    cited = name.startswith(tuple(f"{PACKAGE.name}/{place}" for place in CITED))
    return blob(judging(content) if name.endswith(".py") and not cited else content)


def experiments(files: list[Path], notebook: Path | None) -> set[str]:
    """Returns the modules of experiments that a run of a notebook may load: what it, a file of the package or another
    of them imports, wherever in a file that stands."""
    read = {path: path.read_text(encoding="utf-8") for path in files if path.suffix == ".py"}
    own = {path.stem: read.pop(path) for path in list(read) if path.parent == PACKAGE / EXPERIMENTS}
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"] if notebook else []
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()]
    cells_text = "\n".join(line for line in lines if not line.startswith(("%", "!")))
    found, todo = set(), ["__init__", *(name for text in (*read.values(), cells_text) for name in _imported(text))]
    while todo:
        if (name := todo.pop()) == EVERY:
            return {*own}
        if name in own and name not in found:
            found.add(name)
            todo += _imported(own[name])
    return found


@cache
def _imported(text: str) -> set[str]:
    """Returns the experiments that a text names, in whatever way; EVERY where it may load any."""
    folder = f"{PACKAGE.name}.{EXPERIMENTS}".replace("/", ".")
    parent, _, last = folder.rpartition(".")
    names = set(re.findall(rf"{re.escape(folder)}\.(\w+)", text))
    if last not in text and "from ." not in text:
        return names
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            if node.level or node.module == parent and last in {alias.name for alias in node.names}:
                names.add(EVERY)
            elif node.module == folder:
                names |= {alias.name for alias in node.names}
    return names


def code(notebook: Path) -> str:
    """Returns a digest of a notebook's cells without their outputs."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return blob(json.dumps([(cell["cell_type"], "".join(cell["source"])) for cell in cells]).encode())


def record(folder: Path, notebook: Path | None = None) -> None:
    """Writes of what sources a document is, beside what they found; notebook: none, of mutants."""
    known = package(notebook) | {notebook.name: code(notebook)} if notebook else package(of_mutants=True)
    (folder / FILE).write_text(json.dumps({RULE: THIS} | known, indent=1) + "\n", encoding="utf-8")


def changed(recorded: dict[str, str], made: dict[str, str] = MappingProxyType({})) -> dict[str, list[str]]:
    """Returns the sources that are others now, come or gone, and the notebook, by what they are: KERNELS, AUDITOR or
    NOTEBOOK; made: the document's provenance."""
    books = [path for place in NOTEBOOKS for path in place.glob("*.ipynb") if path.name in recorded]
    of_mutants = not any(name.endswith(".ipynb") for name in recorded)
    now = package(books[0] if books else None, of_mutants) | {path.name: code(path) for path in books}
    found: dict[str, list[str]] = {KERNELS: [], AUDITOR: [], NOTEBOOK: []}
    apart = [INTERPRETER] * made.get("architecture", "").startswith("sm_") + [LOCALISER] * (not _localises(books))
    unloaded = tuple(f"{PACKAGE.name}/{name}/" for name in apart)
    for name in sorted(name for name in {*now, *recorded} - {RULE} if not f"{name}/".startswith(unloaded)):
        kind = NOTEBOOK if name.endswith(".ipynb") else AUDITOR if "audit" in name.split("/") else KERNELS
        if now.get(name) != recorded.get(name):
            found[kind].append(name)
    return found


def _localises(notebooks: list[Path]) -> bool:
    """Returns whether one of the notebooks imports the chain's questions to the localiser."""
    return any(LOCALISING in path.read_text(encoding="utf-8") for path in notebooks)


def others(recorded: dict[str, str], commit: str) -> list[str]:
    """Returns the recorded sources of which a commit holds another content; none where no git knows the commit."""
    held = _held(commit.removesuffix("+changes"))
    if not held:  # installed into a folder of somebody's repository
        return []
    apart = lambda name: name.endswith(".ipynb") or name in (PAGE, RULE)  # which a document follows after its run
    return [name for name, known in recorded.items() if not apart(name) and held.get(name) != known]


def _held(commit: str) -> dict[str, str]:
    """Returns the package's sources as a commit holds them; none where no git knows the commit."""
    run = partial(subprocess.run, capture_output=True, check=True)
    git = ["git", "-C", str(PACKAGE.parent)]
    try:
        listed = run([*git, "ls-tree", "-r", "-z", commit, "--", PACKAGE.name]).stdout.decode().split("\0")
        files = dict(reversed(line.split("\t", 1)) for line in listed if line.endswith(KINDS))
        names = [about.split()[2] for about in files.values()]
        found = io.BytesIO(run([*git, "cat-file", "--batch"], input="\n".join(names).encode()).stdout)
        contents = [found.read(int(found.readline().split()[2]) + 1)[:-1] for _ in names]
    except (OSError, subprocess.CalledProcessError, IndexError):  # no git, no such commit, not all of it
        return {}
    return folders({name: _named(name, content) for name, content in zip(files, contents, strict=True)})


def status(recorded: dict[str, str], made: dict[str, str]) -> str:
    """Says in a few words whether a document is of the sources that are here, and of the commit that its provenance
    names."""
    if not recorded:
        return NOT_RECORDED
    if recorded.get(RULE) != THIS:
        return OTHERWISE
    said = [f"{kind} since ({_some(names)})" for kind, names in changed(recorded, made).items() if names]
    if lies := others(recorded, made.get("commit", "")):
        said.append(f"not of its commit ({_some(lies)})")
    return "; ".join(said) or CURRENT


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    short = [name.removeprefix(f"{PACKAGE.name}/") for name in names[:NAMED]]
    return ", ".join(short) + (f" and {more} more" if more > 0 else "")
