"""Ends a notebook whose cell, or whose audit, has run for too long; what it had recorded stays."""

import os
import signal
import threading
import time
from typing import TextIO

LOOK = 0.2  # seconds between two looks at the clock
GRACE = 10  # seconds that an interrupted cell has to end


class Limits:
    """Watches the notebook that this process runs. cell, audit: how many seconds each may take, 0 for any number.
    tell: gets a line that says which limit was exceeded."""

    def __init__(self, cell: float, audit: float, tell: TextIO):
        self.cell, self.audit, self.tell = cell, audit, tell
        self.over = False  # the notebook ended
        self.began = time.monotonic()  # of the cell that runs
        self.exceeded = ""  # which limit was, in a sentence
        if cell or audit:
            threading.Thread(target=self._watch, daemon=True).start()

    def next_cell(self) -> None:
        """Says that a cell begins."""
        self.began = time.monotonic()

    def _watch(self) -> None:
        opened = time.monotonic()
        while not self.exceeded:
            time.sleep(LOOK)
            if self.over:
                return
            now = time.monotonic()
            if self.audit and now - opened > self.audit:
                self.exceeded = f"the audit took longer than the {self.audit:g} s of --timeout"
            elif self.cell and now - self.began > self.cell:
                self.exceeded = f"a cell took longer than the {self.cell:g} s of --cell-timeout"
        self.tell.write(f"late {self.exceeded}\n")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        deadline = time.monotonic() + GRACE
        while not self.over and time.monotonic() < deadline:
            time.sleep(LOOK)
        if not self.over:  # it does not end by itself
            os._exit(1)
