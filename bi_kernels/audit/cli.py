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
    """Finds out whether an op's result for a token depends on what else is in the batch."""


@cli.command("list")
def list_() -> None:
    """Lists the audits, their notebooks and their parameters."""
    for audit in runner.audits().values():
        click.echo(f"{audit.name:12} {audit.title}")
        click.echo(f"{'':12} notebooks/{audit.notebook.name}; parameters: {', '.join(audit.parameters)}")


OF_A_RUN = (
    click.argument("names", nargs=-1, metavar="[AUDIT]..."),
    click.option(
        "--candidate",
        help="What to audit: bi_kernels (default), torch, package.module:function or path/to/file.py:function.",
    ),
    click.option("--dtype", help="bf16, fp16 or fp32. Default: all three for ops, bf16 for whole models."),
    click.option("--shapes", help="tiny (default), qwen3-8b or llama3-8b. The CPU interpreter runs tiny only."),
    click.option(
        "--inputs", help="For the audit `any`: 'x:bf16[300,64] ids:int64[300]<1000 eps:1e-6', or file.py:function."
    ),
    click.option("--device", help="auto (default), cpu or cuda."),
    click.option("--seed", type=int, help="Seed of the inputs. Default: 0."),
    click.option(
        "--nproc",
        type=int,
        help="For the audit `world`: number of processes, with a GPU each if there are. Default: 4.",
    ),
    click.option(
        "-p", "extra", nargs=2, multiple=True, metavar="NAME VALUE", help="Sets any other parameter of a notebook."
    ),
)


def _of_a_run(command):
    """Adds what every command that starts audits takes."""
    for option in reversed(OF_A_RUN):
        command = option(command)
    return command


PATH = click.Path(path_type=Path)
PUBLISH = click.option("--publish", is_flag=True, help="Writes into audits/, whose reports are committed.")


@cli.command(cls=Loaded)
@_of_a_run
@click.option(
    "--out", type=PATH, help="Folder of the reports. Default: runs/DEVICE-SHAPES, and what else narrows the run."
)
@PUBLISH
@click.option(
    "--quick",
    "hurried",
    is_flag=True,
    help="Checks every op in about a minute: bf16, a few layouts, one random case, one control for each audit. "
    "Writes no reports.",
)
@click.option("--resume", is_flag=True, help="Skips reports made by the same sources and parameters.")
@click.option("--jobs", type=click.IntRange(min=1), help="Number of audits at a time. Default: 1, or 2 with --quick.")
@click.option("--timeout", type=click.FloatRange(min=0), default=0, help="Most seconds for one audit.")
@click.option("--cell-timeout", type=click.FloatRange(min=0), default=0, help="Most seconds for one notebook cell.")
@click.option(
    "--junit", type=PATH, metavar="FILE", help="Writes JUnit XML, one case for each op, shape, dtype and relation."
)
@click.option("--summary", type=PATH, metavar="FILE", help="Appends a Markdown summary, for $GITHUB_STEP_SUMMARY.")
@click.option(
    "--digests", type=PATH, metavar="FILE", help="Warns where bits differ from those that `bi-audit digest` recorded."
)
@click.option(
    "--fail-on",
    "level",
    type=click.Choice(ci.LEVELS),
    default="needs-fix",
    show_default=True,
    help="What makes the exit status 1. drift: bits that differ, atomics, missed controls, audits that stopped. "
    "needs-fix: also accuracy and the contract. warning: also digests.",
)
def run() -> None:
    """Runs audits and writes their reports. Without a name: all but any, zoo, bench, world and recipes.

    A stopped audit keeps what it has recorded. Exit status: 0 all verdicts pass; 1 something needs a fix (see
    --fail-on); 2 nothing could be audited, because the command, its folders or bi-audit itself is wrong.
    """


@cli.command(cls=Loaded)
@click.argument("groups", nargs=-1, metavar="[GROUP]...")
@click.option("--device", default="auto", show_default=True, help="auto or cuda.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random shapes and of the numbers.")
@click.option("--tiny", is_flag=True, help="Times a few small cases of each group.")
@click.option("--out", type=PATH, help="Folder of the report. Default: a folder in runs/.")
@PUBLISH
def bench() -> None:
    """Times the ops next to their peers.

    GROUP is gemm, drawn, gradients, attention, decode, rows, lm_head or calls. Default: all of them. Needs a checkout,
    and a CUDA GPU that does nothing else. A missed goal is shown and fails nothing. Exit status: 0 everything was
    measured; 1 a case was not, or the stopwatch is wrong; 2 the command was wrong.
    """


@cli.command(cls=Loaded)
@click.option(
    "--candidate", required=True, help="file.py:build or package.module:build; build() returns (model, batch)."
)
@click.option("--layouts", help="Layouts to compare. Default: batch,singles. One layout with --record or --against.")
@click.option("--forward", is_flag=True, help="Leaves out the backward.")
@click.option("--out", type=PATH, help="Folder for scripts, one for each cause.")
@click.option("--record", type=PATH, metavar="DIR", help="Records one layout's run in DIR.")
@click.option("--against", type=PATH, metavar="DIR", help="Compares one layout's run with the run recorded in DIR.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda, for a build() that asks.")
@click.option("--seed", type=int, default=0, show_default=True)
def locate() -> None:
    """Names the first op that drifts.

    Compares two layouts of a model, or two recorded runs. build() returns (model, batch) or (model, batch, loss),
    see docs/locate.md. Exit status: 0 nothing drifts; 1 something does; 2 the command was wrong, the model raised,
    or its output could not be compared.
    """


@cli.command(cls=Loaded)
@click.argument("names", nargs=-1, metavar="[AUDIT]...")
@click.option("--sample", type=click.IntRange(min=1), help="Number of mutants, hand-made ones first. Default: all.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sample.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Number of mutants at a time.")
@click.option("--out", type=PATH, help="Folder of the report. Default: runs/DEVICE-mutants/mutants.")
@PUBLISH
@click.option(
    "--equivalents", type=PATH, help="TOML file of mutants that change nothing promised. Default: the package's own."
)
def mutate() -> None:
    """Counts the planted bugs that audits catch.

    Breaks our own kernels and launchers, one place at a time. An interrupted run continues when it is called again.
    Exit status: 0 the kill rate's goal is met and every equivalent holds; 1 otherwise; 2 the command was wrong.
    """


@cli.command(cls=Loaded)
@click.argument("file", type=PATH)
@_of_a_run
@click.option("--check", is_flag=True, help="Compares only, and fails if a digest differs or is missing.")
def digest() -> None:
    """Records digests of a candidate's bits.

    FILE gets a SHA-256 of each output and the versions that made it. `bi-audit run --digests FILE` warns where bits
    differ, and names the versions that changed. One FILE holds any number of candidates and architectures.
    """


@cli.command(cls=Loaded)
@click.argument("place", default="audits", type=PATH, metavar="[DIR]")
def report() -> None:
    """Writes reports and their index anew.

    Makes every report in DIR (default: audits) from its run's evidence, and DIR/README.md. Verdicts, executed
    notebooks and provenance stay as they are.
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
