"""A recorded run on disk: digests in safetensors, their events in JSON. docs/locate.md describes the format."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bi_kernels.audit.localiser.tracing.digest import VERSION, Digest
from bi_kernels.audit.localiser.tracing.events import Event, Slot
from bi_kernels.audit.localiser.tracing.geometry import Geometry, Reading, Tokens
from bi_kernels.audit.localiser.tracing.run import Run

FORMAT = 1
EVENT = ("phase", "path", "op", "source", "node", "launch")
SLOT = ("parameter", "size", "floating", "writers")
JSON, DATA = "run.json", "digests.safetensors"


def hash_of(tensors) -> str:
    """Returns the SHA-256 of the tensors of a batch."""
    found = hashlib.sha256()
    for t in tensors:
        t = t.detach().cpu().contiguous()
        found.update(f"{t.dtype}{tuple(t.shape)}".encode())
        found.update(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return found.hexdigest()


def save(run: Run, batch: str, folder: Path) -> None:
    """Writes a run; batch: the hash of its batch."""
    slots = [s for events in run.events for e in events for s in (*e.inputs, *e.outputs)]
    rows = {id(d.rows): d.rows for s in slots for d in s.digests or ()}
    starts = dict(zip(rows, np.cumsum([0, *map(len, rows.values())]).tolist()))

    def slot(s: Slot) -> dict:
        held = s.digests and [[d.form, d.features, d.keys, starts[id(d.rows)], len(d.rows)] for d in s.digests]
        return {k: getattr(s, k) for k in SLOT} | {"digests": held}

    def event(e: Event) -> dict:
        slots = {"inputs": [*map(slot, e.inputs)], "outputs": [*map(slot, e.outputs)]}
        return {k: getattr(e, k) for k in EVENT} | slots

    grids = {f"tokens.{i}": g.grid for i, g in enumerate(run.geometries)}
    grids |= {f"cached.{i}": g.cached for i, g in enumerate(run.geometries) if g.cached is not None}
    folder.mkdir(parents=True, exist_ok=True)
    flat = np.concatenate([np.zeros(0, np.int64), *rows.values()])
    save_file({"digests": flat} | {k: np.ascontiguousarray(v) for k, v in grids.items()}, folder / DATA)
    about = {"format": FORMAT, "digest": VERSION, "layout": run.layout, "batch": batch, "lengths": run.tokens.lengths}
    about |= {"weights": run.weights, "gradients": run.gradients}
    about["calls"] = [{"events": [*map(event, events)]} for events in run.events]
    (folder / JSON).write_text(json.dumps(about), encoding="utf-8")


def load(folder: Path, batch: str) -> Run:
    """Reads a run. Raises ValueError: no recording, one of another format, or of another batch."""
    try:
        about = json.loads((folder / JSON).read_text(encoding="utf-8"))
        if (about.get("format"), about.get("digest")) != (FORMAT, VERSION):
            raise ValueError(
                f"{folder} is a recording of format {about.get('format')} (digest {str(about.get('digest'))[:1]}), "
                f"expected format {FORMAT} (digest {VERSION[0]})"
            )
        if about["batch"] != batch:
            raise ValueError(f"{folder} is a recording of another batch, of samples of {about['lengths']} tokens")
        data = load_file(folder / DATA)
    except (OSError, json.JSONDecodeError, SafetensorError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder} holds no recorded run ({type(error).__name__})") from None
    flat, tokens = data["digests"], Tokens(tuple(about["lengths"]))

    def slot(s: dict) -> Slot:
        digests = s["digests"] and tuple(
            Digest(form, features, keys, flat[at : at + n], Reading(form, ()))
            for form, features, keys, at, n in s["digests"]
        )
        return Slot(s["parameter"], s["size"], digests, tuple(map(tuple, s["writers"])), s["floating"])

    def event(e: dict) -> Event:
        return Event(*(e[k] for k in EVENT[:-1]), *([*map(slot, e[k])] for k in ("inputs", "outputs")), e["launch"])

    events = [[*map(event, call["events"])] for call in about["calls"]]
    geometries = [Geometry(data[f"tokens.{i}"], tokens, data.get(f"cached.{i}")) for i in range(len(events))]
    gradients = {k: (d, tuple(map(tuple, w))) for k, (d, w) in about["gradients"].items()}
    return Run(about["layout"], tokens, geometries, events, about["weights"], gradients)
