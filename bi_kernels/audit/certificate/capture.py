"""Captures: the token ids and logprobs that an engine or a trainer recorded. Five fields, three file formats, one
recorder; docs/certify.md is the schema."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

INTEGERS = {  # the least and the largest value of each
    "sample": (-(2**63), 2**63 - 1),
    "position": (0, 2**31 - 1),
    "token": (0, 2**31 - 1),
    "batch_size": (1, 2**31 - 1),
}
FIELDS = ("sample", "position", "token", "logprob", "batch_size")
REQUIRED = FIELDS[:-1]
CHUNK = 2**16  # lines of JSON that are parsed at a time


@dataclass(frozen=True)
class Capture:
    """Columns of equal length: sample, position, token and batch_size (or None) are int64, logprob float64."""

    sample: np.ndarray
    position: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    batch_size: np.ndarray | None
    name: str
    dtype: str  # of the logprobs, as they were recorded

    def __len__(self) -> int:
        return len(self.token)

    def take(self, rows: np.ndarray) -> "Capture":
        """Returns some rows."""
        return replace(self, **{f: v[rows] for f in FIELDS if (v := getattr(self, f)) is not None})


class Recorder:
    """Collects the tokens of an engine or a trainer, a call of `add` for each sequence, and saves them.

    One object records one side. `certify` takes it as it is, too.
    """

    def __init__(self):
        self._added: list[dict] = []

    def add(self, sample: int, position, token, logprob, batch_size: int | None = None) -> None:
        """Records tokens of a sample; token, logprob: (tokens,), tensors, arrays or lists.

        position: that of the first token, or of each: (tokens,). batch_size: sequences in the call. Raises ValueError
        for lengths that differ.
        """
        token, logprob, position = (np.atleast_1d(_array(v)) for v in (token, logprob, position))
        if position.shape == (1,):
            position = position + np.arange(len(token))
        if not token.shape == logprob.shape == position.shape:
            shapes = ", ".join(str(v.shape) for v in (token, logprob, position))
            raise ValueError(f"shapes of token, logprob and position are {shapes}, expected one length")
        every = lambda value: np.full(len(token), value, np.int64)
        columns = {"sample": every(sample), "position": position, "token": token, "logprob": logprob}
        self._added.append(columns | ({} if batch_size is None else {"batch_size": every(batch_size)}))

    def columns(self) -> dict[str, np.ndarray]:
        """Returns the fields of all tokens, in the order in which they came. Raises ValueError if there are none."""
        if not self._added:
            raise ValueError("the recorder holds no token; call add() before")
        if len({*map(len, self._added)}) > 1:
            raise ValueError("batch_size was given to some calls of add() only; give it to all or to none")
        return {name: np.concatenate([columns[name] for columns in self._added]) for name in self._added[0]}

    def save(self, path: str | Path) -> None:
        """Writes a capture: .safetensors, .parquet or .jsonl. Raises ValueError for another suffix."""
        _format(Path(path))[1](self.columns(), Path(path))


def capture(source, name: str) -> Capture:
    """Returns a checked capture of a path, a Recorder, or a mapping (or DataFrame) of the five fields.

    name: of a source without a path. Raises ValueError: one sentence with the field, its value and what is allowed.
    """
    if isinstance(source, str | os.PathLike):
        path, name = Path(source), str(source)
        reader = _format(path)[0]
        if not path.is_file():
            raise ValueError(f"{name} is not a file")
        if not path.stat().st_size:
            raise ValueError(f"{name} is empty")
        columns = reader(path)
    elif isinstance(source, Recorder):
        columns = source.columns()
    elif isinstance(source, Mapping) or hasattr(source, "columns"):
        columns = source
    else:
        raise ValueError(f"{name} is {type(source).__name__}, expected a path, a Recorder or a mapping of columns")
    if missing := [f for f in REQUIRED if f not in columns]:
        there = ", ".join(map(str, columns)) or "none"
        raise ValueError(f"{name} has no column {missing[0]!r}; expected {', '.join(FIELDS)}; found {there}")
    arrays = {f: _array(columns[f]) for f in FIELDS if f in columns}
    lengths = {f: v.shape for f, v in arrays.items()}
    if any(len(shape) != 1 for shape in lengths.values()) or len({*lengths.values()}) > 1:
        told = ", ".join(f"{f} {list(shape)}" for f, shape in lengths.items())
        raise ValueError(f"{name} has columns of shapes {told}; expected one dimension and one length")
    if not len(arrays["token"]):
        raise ValueError(f"{name} holds no token")
    ids = {f: _checked(f, arrays[f], name) for f in INTEGERS if f in arrays}
    dtype = str(getattr(columns["logprob"], "dtype", arrays["logprob"].dtype)).removeprefix("torch.")
    logprob = arrays["logprob"]
    if logprob.dtype.kind != "f":
        raise ValueError(f"{name}: logprob{_wrong(logprob, (float,))}, expected floating-point numbers")
    return Capture(**{"batch_size": None} | ids, logprob=logprob.astype(np.float64), name=name, dtype=dtype)


def _array(value) -> np.ndarray:
    """Returns an array of a tensor, list or column; dtypes that NumPy does not know, as bf16, become fp32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() and value.element_size() < 4 else value
    return np.asarray(value)


def _checked(field: str, values: np.ndarray, name: str) -> np.ndarray:
    """Returns a column of integers as int64. Raises ValueError for another type, or what is out of range."""
    least, most = INTEGERS[field]
    allowed = "integers" if field == "sample" else f"integers from {least} to {most}"
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name}: {field}{_wrong(values, (int,))}, expected {allowed}")
    bad = (values < least) | (values > most)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"{name}: {field} is {values[row]} in row {row + 1}, expected {allowed}")
    return values.astype(np.int64)


def _wrong(values: np.ndarray, kinds: tuple[type, ...]) -> str:
    """Says which value of a column has the wrong type: a NaN, the first of mixed types, or any of another dtype."""
    if values.dtype == object:
        row = next((i for i, v in enumerate(values) if type(v) not in kinds), 0)
        return f" is {values[row]!r} in row {row + 1}"
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        return f" is {values[row]} in row {row + 1}"
    return f" has dtype {values.dtype}"


# Formats


def _format(path: Path) -> tuple:
    """Returns (reader, writer) of a file's suffix."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{path} has the suffix {path.suffix!r}, expected {', '.join(FORMATS)}")
    return FORMATS[path.suffix]


def _read_safetensors(path: Path) -> dict:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (the recorder of another format needs neither)

    try:
        with safe_open(path, "pt") as file:
            names = [*file.keys()]
            return {name: file.get_tensor(name) for name in names if name in FIELDS} or dict.fromkeys(names)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error})") from None


def _write_safetensors(columns: dict, path: Path) -> None:
    from safetensors.numpy import save_file  # noqa: PLC0415 (as above)

    save_file(columns, path)


def _parquet():
    try:
        import pyarrow.parquet  # noqa: PLC0415 (optional)
    except ModuleNotFoundError:
        raise ValueError("Parquet needs pyarrow, which is not installed; run pip install pyarrow") from None
    return pyarrow


def _read_parquet(path: Path) -> dict:
    arrow = _parquet()
    try:
        table = arrow.parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file ({str(error).splitlines()[0]})") from None
    found = {name: table[name] for name in table.column_names if name in FIELDS}
    return {name: column.to_numpy() for name, column in found.items()} or dict.fromkeys(table.column_names)


def _write_parquet(columns: dict, path: Path) -> None:
    arrow = _parquet()
    arrow.parquet.write_table(arrow.table(columns), path)


def _read_jsonl(path: Path) -> dict:
    parts: list[dict[str, np.ndarray]] = []
    for first, lines in _chunks(path):
        rows = _parsed(lines, first, path)
        names = [f for f in FIELDS if f in rows[0]] or [*rows[0]]
        try:
            values = {f: [row[f] for row in rows] for f in names}
        except KeyError as error:
            line = first + next(i for i, row in enumerate(rows) if error.args[0] not in row)
            raise ValueError(f"{path}, line {line}: no {error.args[0]!r}, which other lines have") from None
        if "logprob" in values:  # JSON knows no NaN; an integer is a number
            values["logprob"] = [np.nan if v is None else v for v in values["logprob"]]
        parts.append({f: _column(f, v, first, path) for f, v in values.items()})
    if not parts:
        raise ValueError(f"{path} holds no token")
    if len({frozenset(part) for part in parts}) > 1:
        raise ValueError(f"{path} has lines with and without batch_size; give it in all or in none")
    return {f: np.concatenate([part[f] for part in parts]) for f in parts[0]}


def _chunks(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yields the number of the first line, and some lines; without blank ones at the end."""
    with path.open("rb") as file:
        first = 1
        while lines := [*islice(file, CHUNK)]:
            count = len(lines)
            while lines and not lines[-1].strip():
                lines.pop()
            if lines:
                yield first, lines
            first += count


def _parsed(lines: list[bytes], first: int, path: Path) -> list[dict]:
    """Returns the objects of some lines: parsed at once, or one by one where something is wrong."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        rows = []
    if len(rows) == len(lines) and all(type(row) is dict for row in rows):
        return rows
    rows = []
    for number, line in enumerate(lines, first):
        try:
            rows.append(json.loads(line))
        except ValueError:
            start = line.decode(errors="replace").strip()[:60]
            raise ValueError(
                f"{path}, line {number}: {start!r} is not JSON, expected an object of the fields"
            ) from None
        if type(rows[-1]) is not dict:
            raise ValueError(f"{path}, line {number}: {type(rows[-1]).__name__}, expected an object of the fields")
    return rows


def _column(field: str, values: list, first: int, path: Path) -> np.ndarray:
    """Returns a column of JSON's numbers."""
    allowed, what = ((int, float), "a number") if field == "logprob" else ((int,), "an integer")
    row = next((i for i, v in enumerate(values) if type(v) not in allowed), None) if field in FIELDS else None
    if row is not None:
        raise ValueError(f"{path}, line {first + row}: {field} is {json.dumps(values[row])}, expected {what}")
    try:
        return np.array(values, np.float64 if field == "logprob" else np.int64 if field in INTEGERS else object)
    except OverflowError:
        row = next(i for i, v in enumerate(values) if abs(v) >= 2**63)
        raise ValueError(f"{path}, line {first + row}: {field} is {values[row]}, expected 64 bits") from None


def _write_jsonl(columns: dict, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in zip(*(v.tolist() for v in columns.values())):
            file.write(json.dumps(dict(zip(columns, row))) + "\n")


FORMATS = {
    ".safetensors": (_read_safetensors, _write_safetensors),
    ".parquet": (_read_parquet, _write_parquet),
    ".jsonl": (_read_jsonl, _write_jsonl),
}
