"""What stepping through a program recorded, as HTML in Jupyter and as text elsewhere."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
import torch

from bi_kernels.audit.kernel_error import KernelError
from bi_kernels.contract import dtype_name
from bi_kernels.workbench.tiles import Tile

WIDTH = 100  # columns of a terminal
HANGING = "white-space:pre-wrap;padding-left:5ch;text-indent:-5ch"  # a wrapped line stays right of its number


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


@dataclass
class Line:
    """A statement that ran: the values of the names that it assigned, and what it read and wrote."""

    number: int
    code: str
    tiles: list[Tile] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    done: bool = False


@dataclass
class Loop:
    """A loop that ran: the rounds asked for, each with the loop's variables and the lines in it."""

    number: int
    code: str
    rounds: Sequence[int]
    kept: dict[int, tuple[list[Tile], list]] = field(default_factory=dict)
    count: int = 0
    raised: bool = False

    def begin(self, variables: list[Tile]) -> None:
        """Begins a round, and forgets one that nobody asked for."""
        late = self.count - max([-r for r in self.rounds if r < 0], default=1)
        if late >= 0 and late not in self.rounds:
            self.kept.pop(late, None)
        self.kept[self.count] = variables, []
        self.count += 1

    @property
    def body(self) -> list:
        return self.kept[self.count - 1][1] if self.count else []

    def end(self, raised: bool) -> None:
        """Keeps the rounds asked for, and the one that raised."""
        wanted = {r % self.count for r in self.rounds if -self.count <= r < self.count} if self.count else set()
        self.raised = raised and self.count - 1 in self.kept
        self.kept = {r: x for r, x in self.kept.items() if r in wanted or raised and r == self.count - 1}

    def round(self, r: int) -> str:
        return f"round {r + 1}" + ("" if self.raised else f" of {self.count}")


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
        found = [t.values for t, _ in self._tiles(self.lines) if t.name == name and t.values is not None]
        if not found:
            raise KeyError(f"{name!r} is no tile of {self.kernel} in the lines that were kept")
        return torch.from_numpy(np.array(found[-1]))

    def _tiles(self, lines: list) -> Iterator[tuple[Tile, Line]]:
        for x in lines:
            if isinstance(x, Loop):
                for variables, body in x.kept.values():
                    yield from ((tile, x) for tile in variables)
                    yield from self._tiles(body)
            else:
                yield from ((tile, x) for tile in x.tiles)

    @property
    def title(self) -> str:
        used = max([i for i, n in enumerate(self.grid, 1) if n > 1], default=1)
        place, size = (str(v[0] if used == 1 else v[:used]) for v in (self.program, self.grid))
        words = ", ".join(f"{k} {_argument(v)}" for k, v in self.arguments.items())
        return f"{self.kernel}, program {place} of {size}: {words}"

    def __repr__(self) -> str:
        lines = [self.title, *self._text(self.lines, "")]
        lines += [f"KernelError: {self.error}"] * bool(self.error)
        return "\n".join(part for line in lines for part in _wrapped(line))

    def _text(self, events: list, indent: str) -> Iterator[str]:
        for x in events:
            yield from (f"{indent}{_number(x, i)} {line}" for i, line in enumerate(x.code.splitlines()))
            if isinstance(x, Loop):
                for r, (variables, body) in x.kept.items():
                    said = ", ".join(line for tile in variables for line in tile.text())
                    yield f"{indent}     {x.round(r)}{': ' * bool(said)}{said}"
                    yield from self._text(body, f"{indent}     | ")
                continue
            shown = [line for access in x.accesses for line in (str(access), *_written(access))]
            shown += [line for tile in x.tiles for line in tile.text()]
            yield from (f"{indent}       {line}" for line in shown)

    def _repr_html_(self) -> str:
        error = ""
        if self.error:
            edge = "border-left:4px solid rgb(213,94,0);padding-left:8px"
            error = f'<div style="{edge}"><b>{escape(str(self.error))}</b></div>'
        body = "".join(self._html(self.lines))
        font = "font-family:monospace;font-size:13px;line-height:1.45;text-align:left"
        return f'<div style="{font}"><div style="margin-bottom:6px">{escape(self.title)}</div>{body}{error}</div>'

    def _html(self, events: list) -> Iterator[str]:
        for x in events:
            numbered = enumerate(x.code.splitlines())
            lines = (f'<span style="opacity:.6">{_number(x, i)}</span> {escape(line)}' for i, line in numbered)
            code = "".join(f'<div style="{HANGING}">{line}</div>' for line in lines)
            if isinstance(x, Loop):
                yield code
                for r, (variables, body) in x.kept.items():
                    said = ", ".join(tile.html() for tile in variables)
                    inner = f'<div style="opacity:.85">{x.round(r)}{": " * bool(said)}{said}</div>'
                    inner += "".join(self._html(body))
                    edge = "border-left:2px solid rgba(128,128,128,.5);margin:3px 0 6px 1.5em;padding-left:.6em"
                    yield f'<div style="{edge}">{inner}</div>'
                continue
            shown = [f'<span style="opacity:.85">{escape(str(a))}</span>{_written_html(a)}' for a in x.accesses]
            shown += [tile.html() for tile in x.tiles]
            inner = "".join(f"<div>{part}</div>" for part in shown)
            yield f'{code}<div style="margin:0 0 6px 5ch">{inner}</div>'


def _number(x: Line | Loop, i: int) -> str:
    return f"{x.number + i:4}"


def _wrapped(line: str) -> list[str]:
    """Returns a line as some of at most WIDTH columns; the rounds of a loop stay right of its bars."""
    hanging = re.match(r"(?: *\|)*", line)[0].ljust(len(line) - len(line.lstrip(" |")) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=hanging, break_on_hyphens=False)


def _argument(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    return f"= {value!r}"


def _written(access: Access) -> list[str]:
    return [] if access.tile is None else [line.strip() for line in access.tile.text()]


def _written_html(access: Access) -> str:
    return "" if access.tile is None else f" {access.tile.html()}"
