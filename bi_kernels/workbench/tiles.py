"""A tile as numbers: what a line of an interpreted kernel makes, as text and as HTML that reads in light and dark."""

import base64
import struct
import zlib
from dataclasses import dataclass
from html import escape

import numpy as np

FEW, ROWS, COLUMNS = 16, 8, 16  # numbers in a line of text; rows and columns up to which a tile is a table
PLUS, MINUS, HATCH = (0, 114, 178), (213, 94, 0), (128, 128, 128)  # blue, vermilion, grey: for colour-blind readers
STRONGEST = 0.6  # opacity of the largest number's colour: text on it reads in light and dark
CELL = "padding:1px 6px;border:1px solid rgba(128,128,128,.35);text-align:right;white-space:nowrap"
MASKED = f"{CELL};background:repeating-linear-gradient(45deg,rgba(128,128,128,.45) 0 2px,transparent 2px 6px)"


@dataclass
class Tile:
    """The value of a name: its numbers, those of a bf16 too, or text where it is no tile."""

    name: str
    dtype: str = ""
    values: np.ndarray | None = None  # of the tile's shape; of a scalar ()
    live: np.ndarray | None = None  # which lanes a mask lets through
    note: str = ""  # of a pointer where it points, of anything else its value

    @property
    def head(self) -> str:
        shape = f" {list(self.values.shape)}" if self.values is not None and self.values.ndim else ""
        return f"{self.name}  {self.dtype}{shape}".rstrip()

    def text(self) -> list[str]:
        """Returns lines for a terminal; a masked lane is a dot."""
        if self.values is None:
            return [f"{self.head} = {self.note}"]
        if not self.values.ndim:
            return [f"{self.head} = {number(self.values)}"]
        if short := self._short():
            return [f"{self.head}  {short}"]
        if self.values.ndim == 1:
            return [f"{self.head}  {self._row(self.values, self.live)}{self._range()}"]
        flat = self.values.reshape(-1, self.values.shape[-1])
        live = [None] * len(flat) if self.live is None else self.live.reshape(flat.shape)
        shown = [*range(len(flat))] if len(flat) <= ROWS else [*range(ROWS // 2), len(flat) - 1]
        lines = [f"  row {i}: {self._row(flat[i], live[i], FEW // 2)}" for i in shown]
        return [f"{self.head}{self._range()}", *lines[:-1], *["  …"] * (len(shown) < len(flat)), lines[-1]]

    def html(self) -> str:
        head = (
            f'<b>{escape(self.name)}</b> <span style="opacity:.7">{escape(self.head[len(self.name) :].strip())}</span>'
        )
        if self.values is None or not self.values.ndim:
            return f"{head} = {escape(self.note if self.values is None else number(self.values))}"
        if short := self._short():
            return f"{head} {escape(short)}"
        flat = self.values.reshape(-1, self.values.shape[-1])
        if len(flat) <= ROWS and flat.shape[1] <= COLUMNS:
            return f"{head}{self._table(flat)}"
        line = "" if self.values.ndim > 1 else f"<br>{escape(self._row(self.values, self.live))}"
        return f"{head}{escape(self._range())}{line}<br>{self._map(flat)}"

    def _short(self) -> str:
        """Returns the words for a tile of one number or of integers in equal steps, '' for any other."""
        values = self.values
        if self.live is not None or values.size <= 2:
            return ""
        if (values == values.flat[0]).all():
            return f"all {number(values.flat[0])}"
        steps = np.unique(np.diff(values)) if values.ndim == 1 and values.dtype.kind in "iu" else ()
        return f"{values[0]} {values[1]} … {values[-1]}" if len(steps) == 1 and len(values) > 3 else ""

    def _row(self, values: np.ndarray, live: np.ndarray | None, few: int = FEW) -> str:
        """Returns numbers, only the ends of a run of more than `few`, and how many lanes are masked."""
        live = np.ones(len(values), bool) if live is None else live
        cuts = [0, *(np.flatnonzero(live[1:] != live[:-1]) + 1), len(values)]
        words = []
        for start, end in zip(cuts, cuts[1:]):
            if not live[start]:
                words.append("·" if end == start + 1 else f"· × {end - start}")
                continue
            run = [number(v) for v in values[start:end]]
            if len(set(run)) == 1 and len(run) > 3:
                words.append(f"{run[0]} × {len(run)}")
            elif len(run) <= few:
                words += run
            else:
                words += [*run[: few // 2], "…", *run[-2:]]
        return " ".join(words)

    def _range(self) -> str:
        held = self.values if self.live is None else self.values[self.live]
        if held.dtype == bool or self.values.size <= FEW or not held.size:
            return ""
        return f"   (from {number(held.min())} to {number(held.max())})"

    def _strength(self) -> np.ndarray:
        """Returns in [−1, 1] how strong each number's colour is."""
        values = self.values.astype(np.float64)
        finite = np.isfinite(values) & (True if self.live is None else self.live)
        top = np.abs(values[finite]).max(initial=0.0) or 1.0
        return np.where(np.isfinite(values), np.clip(values / top, -1, 1), np.sign(np.nan_to_num(values, nan=1.0)))

    def _table(self, flat: np.ndarray) -> str:
        strength = self._strength().reshape(flat.shape)
        live = np.ones(flat.shape, bool) if self.live is None else self.live.reshape(flat.shape)
        rows = []
        for row in zip(flat, strength, live):
            cells = []
            for value, far, held in zip(*row):
                red, green, blue = PLUS if far >= 0 else MINUS
                colour = f"{CELL};background:rgba({red},{green},{blue},{STRONGEST * abs(far):.2f})"
                title = "" if held else ' title="masked"'
                cells.append(f'<td style="{colour if held else MASKED}"{title}>{number(value)}</td>')
            rows.append(f'<tr style="background:none">{"".join(cells)}</tr>')
        table = f'<table style="border-collapse:collapse;margin:2px 0;font-size:12px">{"".join(rows)}</table>'
        return f'<div style="overflow-x:auto">{table}</div>'

    def _map(self, flat: np.ndarray) -> str:
        """Returns an image, a cell a number: blue above zero, orange below, hatched where masked."""
        width = max(2, min(8, 480 // flat.shape[1]))
        cell = np.ones((12 if len(flat) == 1 else width, width))  # in pixels
        strength = np.kron(self._strength().reshape(flat.shape), cell)
        pixels = np.zeros((*strength.shape, 4), np.uint8)
        pixels[..., :3] = np.where((strength >= 0)[..., None], PLUS, MINUS)
        pixels[..., 3] = 255 * np.abs(strength)
        if self.live is not None:
            masked = np.kron(~self.live.reshape(flat.shape), cell).astype(bool)
            lines = np.add(*np.indices(strength.shape)) % 4 == 0
            pixels[masked] = (*HATCH, 0)
            pixels[masked & lines] = (*HATCH, 200)
        data = base64.b64encode(png(pixels)).decode()
        what = f"{self.name}: {' × '.join(map(str, self.values.shape))} numbers as colours"
        style = "max-width:100%;border:1px solid rgba(128,128,128,.5);image-rendering:pixelated"
        return f'<img alt="{escape(what)}" title="{escape(what)}" style="{style}" src="data:image/png;base64,{data}">'


def number(value) -> str:
    """Returns a number in at most four digits."""
    if isinstance(value, (bool, np.bool_)) or np.asarray(value).dtype == bool:
        return "yes" if value else "no"
    return f"{int(value)}" if np.issubdtype(np.asarray(value).dtype, np.integer) else f"{float(value):.4g}"


def png(pixels: np.ndarray) -> bytes:
    """Encodes pixels, uint8 of shape (height, width, 4)."""
    height, width, _ = pixels.shape
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
