"""A papermill engine that runs a notebook's cells in this process, by IPython's shell: a Jupyter kernel would load all
that it needs again, in a process beside this one."""

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from IPython.core.displayhook import CapturingDisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbformat import NotebookNode
from nbformat.v4 import new_output
from papermill.engines import Engine, NotebookExecutionManager, papermill_engines
from traitlets.config import Config

NAME = "in_process"


class Shell(InteractiveShell):
    """IPython's shell, which keeps what a cell raised instead of printing it."""

    raised: NotebookNode | None = None

    def _showtraceback(self, etype, evalue, stb) -> None:
        self.raised = new_output("error", ename=etype.__name__, evalue=str(evalue), traceback=stb)

    def enable_gui(self, gui=None) -> None:
        """Does nothing: figures are part of the notebook."""

    def run(self, source: str) -> list[NotebookNode]:
        """Runs a cell; returns its outputs: what it printed, then what it showed, then what it raised."""
        self.raised, printed, shown = None, StringIO(), CapturingDisplayPublisher()
        self.display_pub, self.display_trap.hook = shown, CapturingDisplayHook(shell=self, outputs=shown.outputs)
        with redirect_stdout(printed), redirect_stderr(StringIO()):  # a document has nothing of stderr
            self.run_cell(source, store_history=True)
        outputs = [new_output("stream", name="stdout", text=printed.getvalue())] * bool(printed.getvalue())
        outputs += [new_output("display_data", data=o["data"], metadata=o["metadata"] or {}) for o in shown.outputs]
        return [*outputs, *[self.raised] * (self.raised is not None)]


class InProcess(Engine):
    """Runs a notebook in this process."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: NotebookExecutionManager, kernel_name: str, started: Callable[[list, int], object], **_
    ) -> None:
        """Runs the cells up to the first that raises. started: is called with all and the number of each before it
        runs."""
        os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (as long as this process)
        shell = Shell.instance(config=Config(HistoryManager={"enabled": False}))
        shell.display_formatter.active_types = shell.display_formatter.format_types  # not text alone, as in a terminal
        for index, cell in enumerate(nb_man.nb.cells):
            nb_man.cell_start(cell, index)
            started(nb_man.nb.cells, index)
            if cell.cell_type == "code":
                cell.outputs = shell.run(cell.source)
                cell.execution_count = index + 1
                if shell.raised is not None:
                    nb_man.cell_exception(cell, index)
            nb_man.cell_complete(cell, index)
            if shell.raised is not None:
                break


papermill_engines.register(NAME, InProcess)
