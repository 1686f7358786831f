"""The commands of bi-audit: a dataclass a command, each of its fields an argument."""

import argparse
from dataclasses import dataclass, make_dataclass
from pathlib import Path

from bi_kernels.audit.parameters import OPTIONS, option

EXTRA = {"flags": ["-p"], "nargs": 2, "action": "append", "metavar": ("NAME", "VALUE")}
LEVELS = ("never", "drift", "needs-fix", "warning")  # each fails on all that the one before it fails on


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}, expected an integer of at least 1")
    return int(text)


def publish(how: str = "verdicts packed, no executed notebook"):
    return option(False, f"Writes into audits/, to be committed: {how}.")


def some(name: str):
    return option((), flags=(), nargs="*", metavar=name)


@dataclass
class List:
    """Lists the audits, their notebooks and their parameters."""


Audited = make_dataclass(  # what every command that starts audits takes
    "Audited",
    [
        ("names", tuple, some("AUDIT")),
        *((name, int if name in ("seed", "nproc") else str, option(None, text)) for name, text in OPTIONS.items()),
        ("extra", tuple, option((), "Sets any other parameter of a notebook.", **EXTRA)),
    ],
)


@dataclass
class Run(Audited):
    """Runs audits and writes their reports. Without a name: all but any, zoo, bench, world and recipes.

    A stopped audit keeps what it has recorded. Exit status: 0 all verdicts pass; 1 something needs a fix (see
    --fail-on); 2 nothing could be audited, because the command, its folders or bi-audit itself is wrong.
    """

    out: Path = option(None, "Folder of the reports. Default: runs/DEVICE-SHAPES, and what else narrows the run.")
    publish: bool = publish()
    quick: bool = option(
        False,
        "Makes a few checks of every op in a minute, in bf16: a few layouts, one random case, one control a relation.",
    )
    resume: bool = option(False, "Skips reports made by the same kernels, versions and parameters.")
    jobs: int = option(None, "Number of audits at a time. Default: 1, or 2 with --quick.", type=positive)
    timeout: float = option(0.0, "Most seconds for one audit.")
    cell_timeout: float = option(0.0, "Most seconds for one notebook cell.")
    junit: Path = option(None, "Writes JUnit XML, one case for each op, shape, dtype and relation.", metavar="FILE")
    summary: Path = option(None, "Appends a Markdown summary, for $GITHUB_STEP_SUMMARY.", metavar="FILE")
    digests: Path = option(None, "Warns where bits differ from those that `bi-audit digest` recorded.", metavar="FILE")
    fail_on: str = option(
        "needs-fix",
        "What makes the exit status 1. drift: bits that differ, atomics, missed controls, audits that stopped. "
        "needs-fix (default): also accuracy and the contract. warning: also digests.",
        choices=LEVELS,
    )


@dataclass
class Bench:
    """Times the ops next to their peers.

    GROUP is gemm, drawn, gradients, attention, decode, rows, lm_head or calls. Default: all of them. Needs a checkout,
    and a CUDA GPU that does nothing else. A missed goal is shown and fails nothing. Exit status: 0 everything was
    measured; 1 a case was not, or the stopwatch is wrong; 2 the command was wrong.
    """

    groups: tuple = some("GROUP")
    device: str = option("auto", "auto (default) or cuda.")
    seed: int = option(0, "Seed of the random shapes and of the numbers. Default: 0.")
    tiny: bool = option(False, "Times a few small cases of each group.")
    out: Path = option(None, "Folder of the report. Default: a folder in runs/.")
    publish: bool = publish()


@dataclass
class Locate:
    """Names the first op that drifts.

    Compares two layouts or modes of a model, or two recorded runs. build() returns (model, batch) or (model, batch,
    loss), see docs/locate.md. Exit status: 0 nothing drifts; 1 something does; 2 the command was wrong, the model
    raised, or its output could not be compared.
    """

    candidate: str = option(
        None, "file.py:build or package.module:build; build() returns (model, batch).", required=True
    )
    layouts: str = option("", "Layouts to compare. Default: batch,singles. One layout with --record or --against.")
    modes: str = option("", "Modes to compare in one layout, as train,eval or call:1,call:40; see docs/locate.md.")
    forward: bool = option(False, "Leaves out the backward.")
    out: Path = option(None, "Folder for scripts, one for each cause.")
    record: Path = option(None, "Records one layout's run in DIR.", metavar="DIR")
    against: Path = option(None, "Compares one layout's run with the run recorded in DIR.", metavar="DIR")
    device: str = option("auto", "auto (default), cpu or cuda, for a build() that asks.")
    seed: int = option(0, "Default: 0.")


@dataclass
class Certify:
    """Compares the logprobs of a rollout and of training.

    ROLLOUT and TRAINING are captures of the same tokens: .safetensors, .parquet or .jsonl with the columns sample,
    position, token, logprob and, optionally, batch_size; see docs/certify.md. Needs no GPU. Exit status: 0 all bits are
    equal; 1 something differs; 2 the command or a file was wrong.
    """

    rollout: Path = option(None, "What the engine recorded.", flags=(), metavar="ROLLOUT")
    training: Path = option(None, "What the trainer recorded.", flags=(), metavar="TRAINING")
    out: Path = option(None, "Folder for a page with two figures.")


@dataclass
class Mutate:
    """Counts the planted bugs that audits catch.

    Breaks our own kernels, launchers, batch_invariant_mode and apply, one place at a time. Needs a checkout. An
    interrupted run continues when it is called again. Exit status: 0 what was judged meets the goal, and every
    equivalent holds; 1 otherwise; 2 the command was wrong.
    """

    names: tuple = some("AUDIT")
    sample: int = option(None, "Number of mutants, hand-made ones first. Default: all.", type=positive)
    files: str = option("", "Files to break, below the package, as 'ops/gemm/*,mode/*'. Default: all.")
    seed: int = option(0, "Seed of the sample. Default: 0.")
    seeds: int = option(3, "Seeds of inputs, each of which must show a bug. Default: 3.", type=positive)
    device: str = option("auto", "auto (default), cpu or cuda.")
    jobs: int = option(2, "Number of mutants at a time. Default: 2.", type=positive)
    minutes: int = option(None, "Stops after so many; the same command resumes. Default: never.", type=positive)
    out: Path = option(None, "Folder of the report. Default: runs/DEVICE-mutants/mutants.")
    publish: bool = publish("mutants.json and its page")
    equivalents: Path = option(
        None, "TOML file of mutants that change nothing promised. Default: mutation/equivalents.toml."
    )


@dataclass
class Digest(Audited):
    """Records digests of a candidate's bits.

    FILE gets a SHA-256 of each output and the versions that made it. `bi-audit run --digests FILE` warns where bits
    differ, and names the versions that changed. One FILE holds any number of candidates and architectures.
    """

    file: Path = option(None, flags=(), metavar="FILE")
    check: bool = option(False, "Compares only, and fails if a digest differs or is missing.")


@dataclass
class Report:
    """Writes reports and their index anew.

    Rewrites each report in DIR (default: audits) that still has its executed notebook, those on mutants, and
    DIR/README.md. Published reports have none and are left alone. Verdicts, notebooks and provenance stay as they are.
    """

    place: Path = option(Path("audits"), flags=(), nargs="?", metavar="DIR")


COMMANDS = {kind.__name__.lower(): kind for kind in (List, Run, Bench, Locate, Certify, Mutate, Digest, Report)}
