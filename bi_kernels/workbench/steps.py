"""The recorded lines of one program of a kernel, as HTML in Jupyter and as text elsewhere."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import ClassVar

import numpy as np
import torch

from bi_kernels.audit.kernel_error import KernelError
from bi_kernels.contract import dtype_name
from bi_kernels.workbench.tiles import Tile

WIDTH = 100  # columns of a terminal
FONT = "font-family:monospace;font-size:13px;line-height:1.45;text-align:left"
HANGING = "white-space:pre-wrap;padding-left:5ch;text-indent:-5ch"  # a wrapped line stays right of its number
ROUND = "border-left:2px solid rgba(128,128,128,.5);margin:3px 0 6px 1.5em;padding-left:.6em"
ERROR = "border-left:4px solid rgb(213,94,0);padding-left:8px"


@dataclass
class Access:
    """What a line reads or writes: which elements, and under which mask."""

    kind: str
    where: str
    live: np.ndarray
    tile: Tile | None = None  # what it writes

    def __str__(self) -> str:
        masked = self.live.size - int(self.live.sum())
        lanes = f" ({masked} of {self.live.size} lanes are masked)" if masked and self.live.any() else ""
        return f"{self.kind} {self.where}{lanes}"

    def text(self) -> list[str]:
        return [str(self), *(line.strip() for line in (self.tile.text() if self.tile else []))]

    def html(self) -> str:
        return f'<span style="opacity:.85">{escape(str(self))}</span> {self.tile.html() if self.tile else ""}'


@dataclass
class Line:
    """A statement that ran: the values of the names that it assigned, and what it read and wrote."""

    kept: ClassVar[dict] = {}  # no rounds
    number: int
    code: str
    tiles: list[Tile] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    done: bool = False


@dataclass
class Loop:
    """A loop that ran: the rounds asked for, each with the loop's variables and the lines in it."""

    accesses: ClassVar[tuple] = ()
    tiles: ClassVar[tuple] = ()
    number: int
    code: str
    rounds: Sequence[int]
    kept: dict[int, tuple[list[Tile], list]] = field(default_factory=dict)
    count: int = 0
    raised: bool = False

    def begin(self, variables: list[Tile]) -> None:
        """Begins a round, and forgets one that nobody asked for."""
        late = self.count - max([-r for r in self.rounds if r < 0], default=1)
        if late not in self.rounds:
            self.kept.pop(late, None)
        self.kept[self.count] = variables, []
        self.count += 1

    @property
    def body(self) -> list:
        return self.kept[self.count - 1][1] if self.count else []

    def end(self, raised: bool) -> None:
        """Keeps the rounds asked for, and the one that raised."""
        wanted = {r % self.count for r in self.rounds if -self.count <= r < self.count}
        self.raised = raised and self.count - 1 in self.kept
        self.kept = {r: x for r, x in self.kept.items() if r in wanted or raised and r == self.count - 1}

    def round(self, r: int, variables: Sequence[str]) -> str:
        of = "" if self.raised else f" of {self.count}"
        return f"round {r + 1}{of}{': ' * bool(variables)}{', '.join(variables)}"


@dataclass(repr=False)
class Steps:
    """The lines of one program of a kernel, as they ran."""

    kernel: str
    program: tuple[int, ...]
    grid: tuple[int, ...]
    arguments: dict  # as the program left them
    lines: list[Line | Loop]
    error: KernelError | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns the last value of a name that was kept, a bf16 as fp32; raises KeyError for a name without one."""
        found = [t.values for t in _tiles(self.lines) if t.name == name and t.values is not None]
        if not found:
            raise KeyError(f"{name!r} is no tile of {self.kernel} in the lines that were kept")
        return torch.from_numpy(np.array(found[-1]))

    @property
    def title(self) -> str:
        used = max([i for i, n in enumerate(self.grid, 1) if n > 1], default=1)
        place, size = (str(v[0] if used == 1 else v[:used]) for v in (self.program, self.grid))
        words = ", ".join(f"{k} {_argument(v)}" for k, v in self.arguments.items())
        return f"{self.kernel}, program {place} of {size}: {words}"

    def __repr__(self) -> str:
        error = [f"KernelError: {self.error}"] if self.error else []
        return "\n".join(part for line in (self.title, *_text(self.lines, ""), *error) for part in _wrapped(line))

    def _repr_html_(self) -> str:
        error = f'<div style="{ERROR}"><b>{escape(str(self.error))}</b></div>' if self.error else ""
        title = f'<div style="margin-bottom:6px">{escape(self.title)}</div>'
        return f'<div style="{FONT}">{title}{"".join(_html(self.lines))}{error}</div>'


def _tiles(events: list) -> Iterator[Tile]:
    for x in events:
        yield from x.tiles
        for variables, body in x.kept.values():
            yield from (*variables, *_tiles(body))


def _text(events: list, indent: str) -> Iterator[str]:
    for x in events:
        yield from (f"{indent}{i:4} {line}" for i, line in enumerate(x.code.splitlines(), x.number))
        yield from (f"{indent}       {line}" for shown in (*x.accesses, *x.tiles) for line in shown.text())
        for r, (variables, body) in x.kept.items():
            yield f"{indent}     {x.round(r, [line for tile in variables for line in tile.text()])}"
            yield from _text(body, f"{indent}     | ")


def _html(events: list) -> Iterator[str]:
    for x in events:
        for i, line in enumerate(x.code.splitlines(), x.number):
            yield f'<div style="{HANGING}"><span style="opacity:.6">{i:4}</span> {escape(line)}</div>'
        shown = "".join(f"<div>{part.html()}</div>" for part in (*x.accesses, *x.tiles))
        yield f'<div style="margin:0 0 6px 5ch">{shown}</div>'
        for r, (variables, body) in x.kept.items():
            head = f'<div style="opacity:.85">{x.round(r, [tile.html() for tile in variables])}</div>'
            yield f'<div style="{ROUND}">{head}{"".join(_html(body))}</div>'


def _wrapped(line: str) -> list[str]:
    """Wraps a line at WIDTH columns; the rounds of a loop stay right of its bars."""
    hanging = re.match(r"(?: *\|)*", line)[0].ljust(len(line) - len(line.lstrip(" |")) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=hanging, break_on_hyphens=False)


def _argument(value) -> str:
    return f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, torch.Tensor) else f"= {value!r}"
