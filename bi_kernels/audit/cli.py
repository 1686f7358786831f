"""bi-audit list | run | report."""

import os
import re
import sys
from pathlib import Path

import click
from rich.console import Console



@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Audits whether an op's result for a token depends on what else was in the batch."""


@cli.command("list")
def list_() -> None:
    """Names the audits, their notebooks and their parameters."""
    import papermill

    from bi_kernels.audit.runner import audits
    for audit in audits().values():
        parameters = papermill.inspect_notebook(str(audit.notebook))
        click.echo(f"{audit.name:12} {audit.title}")
        click.echo(f"{'':12} notebooks/{audit.notebook.name}; parameters: {', '.join(parameters)}")


@cli.command()
@click.argument("names", nargs=-1, metavar="[AUDIT]...")
@click.option("--candidate", help="bi_kernels (default), torch, package.module:function or path/to/file.py:function.")
@click.option("--dtype", help="bf16, fp16 or fp32; all of them unless given.")
@click.option("--shapes", help="tiny (default), qwen3-8b or llama3-8b; the interpreter runs tiny.")
@click.option("--device", help="auto (default), cpu or cuda.")
@click.option("--seed", type=int, help="Seed of the inputs, 0 unless given.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the documents; audits/DEVICE-SHAPES unless given.")
@click.option("-p", "extra", nargs=2, multiple=True, metavar="NAME VALUE", help="Any other parameter of the notebooks.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Audits run at a time.")
def run(names, out, extra, jobs, **options) -> None:
    """Runs audits (all of them unless named) and writes their documents.

    Exit status: 0 all verdicts pass, 1 something needs a fix, 2 the command was wrong.
    """
    import papermill

    from bi_kernels.audit.report import report as index
    from bi_kernels.audit.runner import audits, collect
    from bi_kernels.audit.runner import run as run_audits
    every = audits()
    for name in names:
        if name not in every:
            raise click.UsageError(f"unknown audit {name!r}, expected {', '.join(every)}")
    names = list(dict.fromkeys(names)) or list(every)
    # a notebook by itself may look at bf16 alone
    parameters = {"dtype": "all"} | {k: v for k, v in options.items() if v is not None}
    for name, value in extra:
        known = papermill.inspect_notebook(str(every[names[0]].notebook))
        if name not in known:
            raise click.UsageError(f"unknown parameter {name!r}, expected one of {', '.join(known)}")
        parameters[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    sessions = _checked(names, parameters)
    first = sessions[0]
    if out is None:
        device = re.sub(r"[^a-z0-9]+", "-", _device_name(first).lower())
        candidate = "" if first.candidate.spec == "bi_kernels" else "-" + re.sub(r"\W+", "-", first.candidate.spec)
        out = Path("audits") / f"{device}-{first.parameters['shapes']}{candidate}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise click.UsageError(f"--out is {str(out)!r}, which cannot be written ({error.strerror})") from None
    console = Console(stderr=True)
    passed = run_audits(names, parameters, out, jobs, console)
    rows = collect(out)
    for folder in (out, out.parent) if out.parent.name == "audits" else (out, ):
        (folder / "README.md").write_text(index(folder), encoding="utf-8")
    mine = [r for r in rows if r["audit"] in names]
    failing = [r for r in mine if not r["control"] and r["verdict"] == "needs-fix"]
    controls = [r for r in mine if r["control"]]
    for line in _summary(failing, out):
        click.echo(line)
    click.echo(f"{len(mine) - len(controls)} checks, {len(failing)} need a fix; controls caught: "
               f"{sum(bool(r['caught']) for r in controls)} of {len(controls)}; documents in {out}")
    sys.exit(0 if passed else 1)


def _summary(failing: list[dict], out: Path) -> list[str]:
    """One line for each op, shape, dtype and relation that needs a fix: where it drifts, how much at first, and how to
    see it."""
    groups: dict[tuple, list[dict]] = {}
    for r in failing:
        groups.setdefault((r["op"], r["case"], r["dtype"], r["relation"]), []).append(r)
    lines = []
    for key, rows in groups.items():
        counts = sorted({r["rows"] for r in rows if r["layout"] == "rows"} - {0})
        others = list(dict.fromkeys(r["layout"] for r in rows if r["layout"] != "rows"))
        where = ([f"M = {', '.join(map(str, counts))}"] if counts else []) + others
        first = min(rows, key=lambda r: (r["layout"] != "rows", r["rows"]))
        size = f"{first['mismatches']} of {first['elements']} elements differ" if first["elements"] else first["detail"]
        lines.append(f"needs-fix  {' '.join(filter(None, key))}: {'; '.join(where)}. First: {size} at M = {first['rows']}, "
                     f"{first['inputs']}, index {first['first_index']}. "
                     + first["repro"].replace("python repro/", f"python {out / first['audit'] / 'repro'}/"))
    return lines


def _checked(names: list[str], parameters: dict) -> list:
    """The sessions that the notebooks will start, made here first so that a wrong parameter is one line, at once."""
    from bi_kernels.audit.session import start
    try:
        return [start(name, dict(parameters)) for name in names]
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _device_name(session) -> str:
    from bi_kernels.audit.provenance import device_name
    return device_name(session.device)


@cli.command()
@click.argument("folder", default="audits", type=click.Path(path_type=Path), metavar="[DIR]")
def report(folder: Path) -> None:
    """Writes DIR/README.md, the index with the status matrix, from the verdicts below DIR (audits unless given)."""
    from bi_kernels.audit.report import report as index
    if not folder.is_dir():
        raise click.UsageError(f"DIR is {str(folder)!r}, which is not a folder")
    (folder / "README.md").write_text(index(folder), encoding="utf-8")
    click.echo(f"wrote {folder / 'README.md'}")


def main() -> None:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    try:
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"bi-audit: {error.format_message()}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("bi-audit: interrupted; finished documents are whole", err=True)
        sys.exit(130)
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
