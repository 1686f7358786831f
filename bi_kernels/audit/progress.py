"""What an audit of a callable says while it runs: its plan, how far it is, and the first finding of each kind."""

import os
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from bi_kernels.audit.axes import Kind, by_kind
from bi_kernels.audit.findings import Row, needs_fix
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.sizes import in_words

LONGEST = 160  # characters of what a candidate raised
OFTEN, SELDOM = 0.2, 10.0  # seconds between two lines of progress for bi-audit, and for a log
WIDTH = 100  # columns of a line


def shell():
    """Returns the interactive shell of a notebook, None outside of one."""
    ipython = sys.modules.get("IPython")
    return ipython and ipython.get_ipython()


class Voice:
    """Says lines: to `bi-audit`, where that runs the audit; on stderr; in a notebook in its output. quiet: none."""

    def __init__(self, name: str, total: int, quiet: bool):
        self.name, self.total, self.quiet, self.known = name, total, quiet, set()
        self.began = self.told = time.monotonic()
        self.teller = os.environ.get("BI_AUDIT_TELL")
        self.out = sys.stdout if hasattr(shell(), "kernel") else sys.stderr

    def say(self, text: str) -> None:
        """Says one line."""
        text = escape.line(text)
        if self.quiet:
            return
        if self.teller:
            self._tell(f"say {text}")
        else:
            lines = textwrap.fill(text, WIDTH, subsequent_indent="    ", break_long_words=False)
            print(lines, file=self.out, flush=True)

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # whoever listened is gone
            os.write(int(self.teller), f"{line}\n".encode())

    def steps(self, steps: Iterable) -> Iterator:
        """Yields steps, and says how many are done."""
        for done, step in enumerate(steps, 1):
            yield step
            now = time.monotonic()
            if self.quiet or now - self.told < (OFTEN if self.teller else SELDOM):
                continue
            self.told = now
            if self.teller:
                self._tell(f"asked {done} {self.total}")
            else:
                self.say(f"  {done} of {self.total} steps after {now - self.began:.0f} s")

    def found(self, rows: Iterable[Row]) -> None:
        """Says the first finding of each kind among rows that came."""
        for at, mine in by_kind(rows).items():
            if at not in self.known and (bad := needs_fix(mine)):
                self.known.add(at)
                self.say(finding(bad[0], *at))


def finding(r: dict, whose: str, what: str) -> str:
    """Says in a line what differs, where and how much."""
    place = ", ".join(filter(None, (r["layout"], f"{r['inputs']} inputs" * bool(r["inputs"]))))
    if what in (Kind.ERROR, Kind.ATOMICS) or r["mismatches"] is None:
        return f"  found: {place}: {textwrap.shorten(r['detail'], LONGEST, placeholder=' …')}"
    of = f"{r['mismatches']:,} of {r['elements']:,} elements of {r['tensor']}"
    verb = "exceed the bound" if r["threshold_share"] is not None else "differ"
    return f"  found: {whose}, {what}: {place}: {of} {verb}{in_words([r])}"
