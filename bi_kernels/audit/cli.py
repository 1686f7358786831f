"""Names the commands of bi-audit and their options: list | run | bench | locate | mutate | digest | report."""

import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

import click

from bi_kernels.audit import worker
from bi_kernels.audit.runs import ci, runner


class Loaded(click.Command):
    """A command that is a function of `commands`, by its name: torch is loaded when it runs, and not for its help."""

    def invoke(self, context: click.Context):
        if self.name == "run" and not context.params["hurried"] and "torch" not in sys.modules:
            worker.warm()  # torch takes two seconds to load
        commands = importlib.import_module("bi_kernels.audit.commands")
        return context.invoke(getattr(commands, self.name), **context.params)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Audits whether an op's result for a token depends on what else was in the batch."""


@cli.command("list")
def list_() -> None:
    """Names the audits, their notebooks and their parameters."""
    for audit in runner.audits().values():
        click.echo(f"{audit.name:12} {audit.title}")
        click.echo(f"{'':12} notebooks/{audit.notebook.name}; parameters: {', '.join(audit.parameters)}")


OF_A_RUN = (
    click.argument("names", nargs=-1, metavar="[AUDIT]..."),
    click.option(
        "--candidate", help="bi_kernels (default), torch, package.module:function or path/to/file.py:function."
    ),
    click.option(
        "--dtype", help="bf16, fp16 or fp32; unless given, all of them for ops, bf16 for whole models and recipes."
    ),
    click.option("--shapes", help="tiny (default), qwen3-8b or llama3-8b; the interpreter runs tiny."),
    click.option(
        "--inputs", help="Of the audit any: 'x:bf16[300,64] ids:int64[300]<1000 eps:1e-6', or file.py:function."
    ),
    click.option("--device", help="auto (default), cpu or cuda."),
    click.option("--seed", type=int, help="Seed of the inputs, 0 unless given."),
    click.option(
        "--nproc", type=int, help="Of the audit world: processes, each with a GPU if there are; 4 unless given."
    ),
    click.option(
        "-p", "extra", nargs=2, multiple=True, metavar="NAME VALUE", help="Any other parameter of the notebooks."
    ),
)


def _of_a_run(command):
    """Adds what every command that starts audits takes."""
    for option in reversed(OF_A_RUN):
        command = option(command)
    return command


PATH = click.Path(path_type=Path)
PUBLISH = click.option("--publish", is_flag=True, help="Writes below audits/, whose documents are committed.")


@cli.command(cls=Loaded)
@_of_a_run
@click.option(
    "--out", type=PATH, help="Folder of the documents; runs/DEVICE-SHAPES unless given, with what else narrows the run."
)
@PUBLISH
@click.option(
    "--quick",
    "hurried",
    is_flag=True,
    help="A minute for all ops: bf16, a few layouts and a drawn case of each, a control an audit; no documents.",
)
@click.option("--resume", is_flag=True, help="Leaves documents that are of the same sources and parameters.")
@click.option("--jobs", type=click.IntRange(min=1), help="Audits run at a time; 1 unless given, 2 with --quick.")
@click.option("--timeout", type=click.FloatRange(min=0), default=0, help="Seconds that an audit may take.")
@click.option("--cell-timeout", type=click.FloatRange(min=0), default=0, help="Seconds that a cell of one may take.")
@click.option("--junit", type=PATH, metavar="FILE", help="Writes JUnit XML: a case an op, shape, dtype and relation.")
@click.option("--summary", type=PATH, metavar="FILE", help="Appends Markdown, as to $GITHUB_STEP_SUMMARY.")
@click.option(
    "--digests", type=PATH, metavar="FILE", help="Warns where bits are not those that `bi-audit digest` recorded."
)
@click.option(
    "--fail-on",
    "level",
    type=click.Choice(ci.LEVELS),
    default="needs-fix",
    show_default=True,
    help="What makes the exit status 1. drift: bits that differ, atomics, missed controls, audits that stopped; "
    "needs-fix: accuracy and the contract besides; warning: digests besides.",
)
def run() -> None:
    """Runs audits (unless named, all but any, zoo, bench, world and recipes) and writes their documents.

    They run in the order named; if none is, and several at a time, the longest start first. What an audit had recorded
    stays where it is stopped, by --timeout, --cell-timeout or you. Exit status: 0 all verdicts pass, 1 something needs
    a fix (see --fail-on), 2 nothing could be judged: the command is wrong, or its folders or bi-audit itself.
    """


@cli.command(cls=Loaded)
@click.argument("groups", nargs=-1, metavar="[GROUP]...")
@click.option("--device", default="auto", show_default=True, help="auto or cuda.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the shapes that are drawn, and of the numbers."
)
@click.option("--tiny", is_flag=True, help="A few small cells of each group, to try it out.")
@click.option("--out", type=PATH, help="Folder of the document; below runs/ unless given, by device and what is timed.")
@PUBLISH
def bench() -> None:
    """Times the ops beside their peers and the device's limits, and writes a document.

    GROUP is gemm, drawn, gradients, attention, decode, rows, lm_head or calls; all of them unless named. Needs a CUDA
    GPU that does nothing else. A goal that is missed is shown and does not fail the command. Exit status: 0 every cell
    was measured, 1 one was not, or the stopwatch is wrong, 2 the command was wrong.
    """


@cli.command(cls=Loaded)
@click.option("--candidate", required=True, help="file.py:build or package.module:build; build() makes (model, batch).")
@click.option(
    "--layouts", help="Layouts to compare, batch,singles unless given; one of them with --record or --against."
)
@click.option("--forward", is_flag=True, help="Leaves the backward out.")
@click.option("--out", type=PATH, help="Folder of reproducers, a script a cause.")
@click.option("--record", type=PATH, metavar="DIR", help="Writes the digests of one layout's run to DIR.")
@click.option("--against", type=PATH, metavar="DIR", help="Compares one layout's run with the one recorded in DIR.")
@click.option(
    "--device", default="auto", show_default=True, help="auto, cpu or cuda: what build() is to use, if it asks."
)
@click.option("--seed", type=int, default=0, show_default=True)
def locate() -> None:
    """Names the first op that drifts, in a model or between two recorded runs.

    build() returns (model, batch) or (model, batch, loss); docs/locate.md says what these may be. Exit status: 0
    nothing drifts, 1 something does, 2 the command was wrong, the model raised, or nothing drifts
    before an output that could not be compared.
    """


@cli.command(cls=Loaded)
@click.argument("names", nargs=-1, metavar="[AUDIT]...")
@click.option("--sample", type=click.IntRange(min=1), help="So many, hand-made ones first; all unless given.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Mutants judged at a time.")
@click.option("--out", type=PATH, help="Folder of the document; runs/DEVICE-mutants/mutants unless given.")
@PUBLISH
@click.option("--equivalents", type=PATH, help="TOML of mutants that change nothing promised; the package's own.")
def mutate() -> None:
    """Breaks this package's own kernels and launchers, one place at a time, and counts what the audits catch.

    Interrupted, it goes on where it was when it is called again. Exit status: 0 the goal for the kill rate is met and
    every entry of the file of equivalents holds, 1 not so, 2 the command was wrong.
    """


@cli.command(cls=Loaded)
@click.argument("file", type=PATH)
@_of_a_run
@click.option("--check", is_flag=True, help="Only compares: ends with 1 if a digest differs or is missing; FILE stays.")
def digest() -> None:
    """Records SHA-256 digests of the candidate's output bits in FILE, with the versions that made them.

    `bi-audit run --digests FILE` warns where the bits are others, and names the versions that changed. One FILE holds
    any number of candidates and architectures.
    """


@cli.command(cls=Loaded)
@click.argument("place", default="audits", type=PATH, metavar="[DIR]")
def report() -> None:
    """Writes every report below DIR (audits unless given) from what its run left, and the index, DIR/README.md.

    It changes no verdicts, executed notebooks or provenance.
    """


def main() -> None:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # how a CI's timeout ends a job
    try:
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"bi-audit: {error.format_message()}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo(
            "bi-audit: interrupted; finished documents are whole, and --resume does not make them again", err=True
        )
        sys.exit(130)
    except OSError as error:  # a full disk, a folder that went away
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"bi-audit: {where}{error.strerror or error}; finished documents are whole", err=True)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        click.echo("bi-audit: this is a mistake in bi-audit itself, and no verdict", err=True)
        sys.exit(2)
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
