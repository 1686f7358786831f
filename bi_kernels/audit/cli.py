"""The command line `bi-audit`. Help is shown without torch."""

import argparse
import importlib
import inspect
import os
import signal
import sys
import traceback
from dataclasses import fields

from bi_kernels.audit import executor
from bi_kernels.audit.faults import UsageError
from bi_kernels.audit.options import COMMANDS
from bi_kernels.extras import extra


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(message)


def parser(name: str) -> Parser:
    """Returns the parser of a command's arguments, made of its dataclass."""
    kind = COMMANDS[name]
    raw = argparse.RawDescriptionHelpFormatter
    made = Parser(f"bi-audit {name}", description=inspect.getdoc(kind), formatter_class=raw, allow_abbrev=False)
    positional = lambda f: f.metadata.get("flags") == () and f.name != "file"
    for f in sorted(fields(kind), key=positional):  # what is one argument comes before those that are any number
        how = {**f.metadata, "default": [] if f.default == () else f.default}
        flags = how.pop("flags", [f"--{f.name.replace('_', '-')}"])
        if f.type is bool:
            how["action"] = "store_true"
        elif f.type is not tuple:
            how.setdefault("type", f.type)
        made.add_argument(*(flags or [f.name]), **how, **{"dest": f.name} if flags else {})
    return made


def usage() -> str:
    """Returns the commands, a line each."""
    lines = (f"  {name:8} {inspect.getdoc(kind).splitlines()[0]}" for name, kind in COMMANDS.items())
    what = "Finds out whether an op's result for a token depends on what else is in the batch."
    return "\n".join(["usage: bi-audit COMMAND [-h] ...", "", what, "", *lines])


def run(arguments: list[str]) -> None:
    """Runs a command; most end with SystemExit. Raises UsageError."""
    name, *rest = arguments or ["-h"]
    if name in ("-h", "--help"):
        print(usage())
        return
    if name not in COMMANDS:
        raise UsageError(f"no such command {name!r}, expected one of {', '.join(COMMANDS)}")
    given = COMMANDS[name](**vars(parser(name).parse_intermixed_args(rest)))
    if name in ("run", "digest"):
        executor.SHARED.start()  # torch takes two seconds to load, there and here at the same time
    module, function = ("runs.runner", "show") if name == "list" else ("commands", name)
    with extra("audit"):
        commands = importlib.import_module(f"bi_kernels.audit.{module}")
    getattr(commands, function)(given)


def main() -> None:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # how a CI's timeout ends a job
    status, said = 2, ""
    try:
        run(sys.argv[1:])
        status = 0
    except (UsageError, ModuleNotFoundError) as error:
        said = str(error)
    except KeyboardInterrupt:
        status, said = 130, "interrupted; finished documents are whole"
        said += ", and --resume does not make them again" * (sys.argv[1:2] == ["run"])
    except OSError as error:  # a full disk, a folder that went away
        where = f"{error.filename}: " if error.filename else ""
        said = f"{where}{error.strerror or error}; finished documents are whole"
    except Exception:
        traceback.print_exc()
        said = "this is a mistake in bi-audit itself, and no verdict"
    if said:
        print(f"bi-audit: {said}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
