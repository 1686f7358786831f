"""Renders a tile of an interpreted kernel as text and as HTML that reads in light and dark."""

import base64
import io
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image

FEW, ROWS, COLUMNS = 16, 8, 16  # numbers in a line of text; rows and columns up to which a tile is a table
PLUS, MINUS, MASKED = (0, 114, 178), (213, 94, 0), (128, 128, 128)  # blue, vermilion, grey: for colour-blind readers
STRONGEST = 0.6  # opacity of the largest number's colour: text on it reads in light and dark
CELL = "padding:1px 6px;border:1px solid rgba(128,128,128,.35);text-align:right;white-space:nowrap"
HATCHED = "repeating-linear-gradient(45deg,rgba(128,128,128,.45) 0 2px,transparent 2px 6px)"


@dataclass
class Tile:
    """The value of a name: numbers (a bf16's as fp32), or text for a pointer and anything else."""

    name: str
    dtype: str = ""
    values: np.ndarray | None = None  # of the tile's shape; () for a scalar
    live: np.ndarray | None = None  # which lanes a mask lets through
    note: str = ""  # where a pointer points; the value of anything else

    @property
    def kind(self) -> str:
        shape = f" {list(self.values.shape)}" if self.values is not None and self.values.ndim else ""
        return f"{self.dtype}{shape}"

    def text(self) -> list[str]:
        """Returns lines for a terminal; a masked lane is a dot."""
        head = f"{self.name}  {self.kind}".rstrip() if self.name else self.kind
        if short := self._short():
            return [f"{head}{short}"]
        if self.values.ndim == 1:
            return [f"{head}  {_row(self.values, self.live)}{self._range()}"]
        flat = self.values.reshape(-1, self.values.shape[-1])
        live = [None] * len(flat) if self.live is None else self.live.reshape(flat.shape)
        shown = [*range(len(flat))] if len(flat) <= ROWS else [*range(ROWS // 2), len(flat) - 1]
        lines = [f"  row {i}: {_row(flat[i], live[i], FEW // 2)}" for i in shown]
        return [f"{head}{self._range()}", *lines[:-1], *["  …"] * (len(shown) < len(flat)), lines[-1]]

    def html(self) -> str:
        """Returns the tile as words, a coloured table or, if it is large, a picture."""
        head = f'<b>{escape(self.name)}</b> <span style="opacity:.7">{escape(self.kind)}</span>'
        if short := self._short():
            return f"{head}{escape(short)}"
        rows, columns = self.values.reshape(-1, self.values.shape[-1]).shape
        if rows <= ROWS and columns <= COLUMNS:
            return f"{head}{self._table(rows, columns)}"
        line = "" if self.values.ndim > 1 else f"<br>{escape(_row(self.values, self.live))}"
        return f"{head}{escape(self._range())}{line}<br>{self._picture(rows, columns)}"

    def _short(self) -> str:
        """Returns the words for a scalar, text, or a tile of one number or of integers in equal steps; else ''."""
        values = self.values
        if values is None or not values.ndim:
            return f" = {self.note if values is None else number(values)}"
        if self.live is not None or values.size <= 2:
            return ""
        if (values == values.flat[0]).all():
            return f"  all {number(values.flat[0])}"
        steps = np.unique(np.diff(values)) if values.ndim == 1 and values.dtype.kind in "iu" else ()
        return f"  {values[0]} {values[1]} … {values[-1]}" if len(steps) == 1 and len(values) > 3 else ""

    def _range(self) -> str:
        held = self.values if self.live is None else self.values[self.live]
        if held.dtype == bool or self.values.size <= FEW or not held.size:
            return ""
        return f"   (from {number(held.min())} to {number(held.max())})"

    def _colors(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns each number's (red, green, blue), and in [0, 1] how strong it is; a NaN is as strong as infinity."""
        values = np.nan_to_num(self.values.astype(np.float64), nan=np.inf)
        finite = np.isfinite(values) & (True if self.live is None else self.live)
        top = np.abs(values[finite]).max(initial=0.0) or 1.0
        return np.where((values >= 0)[..., None], PLUS, MINUS), np.clip(np.abs(values) / top, 0, 1)

    def _table(self, rows: int, columns: int) -> str:
        color, strength = self._colors()
        lanes = np.ones(self.values.shape, bool) if self.live is None else self.live
        cells = []
        for value, rgb, strong, live in zip(self.values.flat, color.reshape(-1, 3), strength.flat, lanes.flat):
            back = f"rgba({','.join(map(str, rgb))},{STRONGEST * strong:.2f})" if live else HATCHED
            title = "" if live else ' title="masked"'
            cells.append(f'<td style="{CELL};background:{back}"{title}>{number(value)}</td>')
        lines = ("".join(cells[i : i + columns]) for i in range(0, len(cells), columns))
        body = "".join(f'<tr style="background:none">{line}</tr>' for line in lines)
        table = f'<table style="border-collapse:collapse;margin:2px 0;font-size:12px">{body}</table>'
        return f'<div style="overflow-x:auto">{table}</div>'

    def _picture(self, rows: int, columns: int) -> str:
        """Returns an image, a pixel a number: blue above zero, orange below, grey where masked."""
        color, strength = self._colors()
        pixels = np.concatenate([color, 255 * strength[..., None]], -1).astype(np.uint8)
        if self.live is not None:
            pixels[~self.live] = (*MASKED, 100)
        png, size = io.BytesIO(), max(2, min(8, 480 // columns))
        Image.fromarray(pixels.reshape(rows, columns, 4)).save(png, "png")
        alt = f"{self.name}: {' × '.join(map(str, self.values.shape))} numbers as colours"
        style = f"width:{size * columns}px;height:{12 if rows == 1 else size * rows}px;max-width:100%"
        style += ";border:1px solid rgba(128,128,128,.5);image-rendering:pixelated"
        data = base64.b64encode(png.getvalue()).decode()
        return f'<img alt="{escape(alt)}" title="{escape(alt)}" style="{style}" src="data:image/png;base64,{data}">'


def _row(values: np.ndarray, live: np.ndarray | None, few: int = FEW) -> str:
    """Returns numbers, only the ends of a run of more than `few`, and how many lanes are masked."""
    live = np.ones(len(values), bool) if live is None else live
    cuts = [0, *(np.flatnonzero(live[1:] != live[:-1]) + 1), len(values)]
    words = []
    for start, end in zip(cuts, cuts[1:]):
        run = [number(v) if live[start] else "·" for v in values[start:end]]
        if len(set(run)) == 1 and len(run) > (3 if live[start] else 1):
            words.append(f"{run[0]} × {len(run)}")
        else:
            words += run if len(run) <= few else [*run[: few // 2], "…", *run[-2:]]
    return " ".join(words)


def number(value) -> str:
    """Returns a number in at most four digits."""
    kind = np.asarray(value).dtype.kind
    return ("yes" if value else "no") if kind == "b" else f"{int(value)}" if kind in "iu" else f"{float(value):.4g}"
