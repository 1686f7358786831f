"""Opens the workbench in JupyterLab in a headless Chromium, runs it, stops inside a kernel, looks at its tiles and
goes on.

    .venv/bin/pip install playwright jupyterlab   # and Chromium, as from Debian's package `chromium`
    .venv/bin/python tools/lab_debugger.py [FOLDER for screenshots]

Exit status 0 if the debugger stopped on the breakpoint's line once for every row of both programs, showed each time
the tiles of that row, and what it showed is what the cell went on to print; 1 if not, and then FOLDER holds
failure.png as well. It looks at JupyterLab from outside except for the cells and the table of variables, which are
asked of its widgets (checked with JupyterLab 4.6). One to two minutes; not part of CI.
"""

import itertools
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Error, Locator, Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
NOTEBOOK, KERNEL = "workbench.ipynb", "_by_program_kernel"
LINE, STEP = "total += upstream * normed", "_by_program_kernel[(2,)]"  # in the kernel; in the cell that launches it
PROGRAMS, ROWS = 2, 3  # as that cell does
TILE = "upstream"
NUMBER = re.compile(r"[-+]?\d+\.\d*(?:e[-+]?\d+)?")
WIDGETS = "window.jupyterapp.shell.currentWidget.content.widgets"
VARIABLES = """(() => {
    const panel = [...window.jupyterapp.shell.widgets('right')].find(w => w.id === 'jp-debugger-sidebar');
    const locals = panel.variables._table.model.scopes.find(s => s.name === 'Locals');
    return locals ? Object.fromEntries(locals.variables.map(v => [v.name, v.value])) : {};
})()"""


def wait(page: Page, condition: str, what: str, seconds: float, given=None) -> None:
    try:
        page.wait_for_function(condition, arg=given, timeout=1000 * seconds)
    except Error as error:
        raise AssertionError(f"{what}: {error.message.splitlines()[0]}") from error


def start(page: Page, command: str) -> None:
    page.evaluate(
        """command => {
        window.outcome = undefined;
        window.jupyterapp.commands.execute(command).then(
            done => { window.outcome = done ?? true }, error => { window.outcome = `${error}` });
    }""",
        command,
    )


def finish(page: Page, what: str, seconds: float) -> None:
    wait(page, "() => window.outcome !== undefined", what, seconds)
    errors = page.evaluate(f"""() => {WIDGETS}.filter(c => c.model.type === 'code').flatMap(
        c => c.model.outputs.toJSON().filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue))""")
    assert not errors and page.evaluate("() => window.outcome") is True, (
        f"{what}: {errors or page.evaluate('window.outcome')}"
    )


def show_cell(page: Page, text: str) -> tuple[Locator, str]:
    """Makes the first code cell that holds a text the active one; the cell and its source."""
    found = page.evaluate(
        f"""text => {{
        const book = window.jupyterapp.shell.currentWidget.content;
        const holds = c => c.model.type === 'code' && c.model.sharedModel.getSource().includes(text);
        const i = book.widgets.findIndex(holds);
        if (i >= 0) {{ book.activeCellIndex = i; book.scrollToItem(i, 'center') }}
        return [i, i < 0 ? '' : {WIDGETS}[i].model.sharedModel.getSource()];
    }}""",
        text,
    )
    assert found[0] >= 0, f"{NOTEBOOK} has no code cell with {text!r}"
    cell = page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{found[0]}"]')
    expect(cell, f"the cell with {text!r}").to_be_in_viewport(timeout=10_000)
    return cell, found[1]


def drag(page: Page, x: float, y: float, to_x: float, to_y: float) -> None:
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(to_x, to_y, steps=5)
    page.mouse.up()


def make_room(page: Page) -> None:
    """Half of the window for the debugger, most of that for its variables, as a table."""
    if page.locator("#jp-left-stack").is_visible():
        start(page, "application:toggle-left-area")
    expect(page.locator("#jp-left-stack"), "the file browser").to_be_hidden(timeout=10_000)
    panel = page.locator("#jp-right-stack")
    expect(panel, "the debugger's panel").to_be_visible(timeout=10_000)
    x = panel.bounding_box()["x"]
    drag(page, x - 0.5, 500, page.viewport_size["width"] * 0.55, 500)
    wait(
        page,
        "x => document.querySelector('#jp-right-stack').getBoundingClientRect().x < x",
        "a wider panel",
        10,
        x - 100,
    )
    heads = page.locator("#jp-right-stack .lm-AccordionPanel-title")
    heads.filter(has_text="Kernel Sources").locator(".lm-AccordionPanel-titleCollapser").click()
    head = heads.filter(has_text="Callstack").bounding_box()
    drag(page, head["x"] + 150, head["y"] - 2, head["x"] + 150, head["y"] + 350)
    page.locator(".jp-TableView-Button").click()


def center(line: Locator) -> None:
    line.evaluate("line => { line.scrollIntoView({block: 'center'}); line.closest('.cm-scroller').scrollLeft = 0 }")


def numbers(text: str) -> list[float]:
    return [float(n) for n in NUMBER.findall(text)]


def story(page: Page, url: str, shot) -> None:
    page.goto(url)
    expect(page.locator(".jp-Notebook .jp-Cell").first, "the notebook").to_be_visible(timeout=60_000)
    wait(
        page,
        "() => window.jupyterapp.shell.currentWidget?.context?.sessionContext?.session?.kernel?.status === 'idle'",
        "the kernel's start",
        60,
    )
    start(page, "notebook:run-all-cells")
    finish(page, "running all cells", 300)
    shot("run_all")

    page.locator(".jp-DebuggerBugButton").first.click()
    expect(page.locator(".jp-DebuggerBugButton[aria-pressed=true]").first, "the debugger").to_be_visible(timeout=30_000)
    make_room(page)
    cell, source = show_cell(page, LINE)
    line = next(i for i, text in enumerate(source.splitlines()) if LINE in text)
    gutter = cell.locator(".cm-gutter.cm-breakpoint-gutter")
    expect(gutter, "the margin for breakpoints").to_be_visible(timeout=10_000)
    y = gutter.evaluate(
        """(gutter, i) => {
        const line = gutter.closest('.cm-editor').querySelectorAll('.cm-line')[i].getBoundingClientRect();
        return line.y + line.height / 2 - gutter.getBoundingClientRect().y;
    }""",
        line,
    )
    gutter.click(position={"x": 5, "y": y})
    breakpoint_ = page.locator(".jp-DebuggerBreakpoints-body .jp-DebuggerBreakpoint")
    expect(breakpoint_, "one breakpoint").to_have_count(1, timeout=10_000)
    expect(breakpoint_, "the breakpoint's line").to_contain_text(str(line + 1))
    shot("breakpoint")

    show_cell(page, STEP)
    start(page, "notebook:run-cell")
    frame, rendered = page.locator(".jp-DebuggerCallstackFrame").first, page.locator(".jp-VariableRendererPanel")
    highlight, seen, sums = cell.locator(".jp-DebuggerEditor-highlight"), [], []
    for stop in range(PROGRAMS * ROWS):
        program, row = divmod(stop, ROWS)
        wait(
            page,
            f"at => {{ const v = {VARIABLES}; return v.row === at[1] && v.program?.startsWith(at[0]) }}",
            f"the stop in program {program} at row {stop}",
            30,
            [f"array([{program}]", str(stop)],
        )
        expect(frame, "the function it stopped in").to_contain_text(KERNEL)
        expect(frame, "the line it stopped at").to_contain_text(f":{line + 1}")
        expect(highlight, "the highlighted line").to_contain_text(LINE)
        variables = page.evaluate(VARIABLES)
        tiles = {name: numbers(variables[name]) for name in (TILE, "normed", "total")}
        assert row or not any(tiles["total"]), (
            f"total is {variables['total']} before the first row of program {program}"
        )
        if stop == 0:
            center(highlight)
            shot("stopped")
            page.locator(".jp-TreeView-Button").click()
            page.locator(".jp-DebuggerVariables-name").get_by_text(TILE, exact=True).click(button="right")
            page.locator(".lm-Menu-item").get_by_text("Render Variable").click()
            page.locator(".jp-TableView-Button").click()
        expect(rendered, f"the whole of {TILE}").to_contain_text(NUMBER.search(variables[TILE]).group(), timeout=10_000)
        whole = numbers(rendered.inner_text())
        assert len(whole) == int(variables["BLOCK_H"]), (
            f"{len(whole)} numbers of {TILE}, expected {variables['BLOCK_H']}"
        )
        assert whole not in seen, f"{TILE} is at stop {stop} what it was at another"
        seen.append(whole)
        if row == 0 or stop == 1:
            center(highlight)
            shot(f"program_{program}_row_{stop}")
        if row == ROWS - 1:
            four = (np.array(tile[:4], dtype=np.float32) for tile in (tiles["total"], whole, tiles["normed"]))
            sums.append(", ".join(f"{t + u * n:.4f}" for t, u, n in zip(*four)))
        page.locator("#jp-right-stack").get_by_title("Continue (F9)").click()

    finish(page, "the rest of the cell", 60)
    page.locator(".lm-TabBar-tab").filter(has_text=TILE).locator(".lm-TabBar-tabCloseIcon").click()
    last = show_cell(page, STEP)[0].locator(".jp-OutputArea-output td:last-child")
    expect(last, "a line of output for each program").to_have_count(PROGRAMS, timeout=10_000)
    for program, text in enumerate(last.all_inner_texts()):
        assert text.strip() == sums[program], (
            f"program {program} printed {text}, and the debugger showed {sums[program]}"
        )
    shot("finished")


def serve(folder: Path, port: int, token: str) -> subprocess.Popen:
    """JupyterLab on a copy of the notebook, with settings of its own, once it answers."""
    notebooks, settings = folder / "notebooks", folder / "lab/user-settings/@jupyterlab/apputils-extension"
    for made in (notebooks, settings):
        made.mkdir(parents=True)
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, notebooks)
    (settings / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jupyter",
                "lab",
                "--no-browser",
                f"--port={port}",
                "--ServerApp.port_retries=0",
                f"--ServerApp.root_dir={notebooks}",
                "--ServerApp.allow_root=True",
                "--LabApp.expose_app_in_browser=True",
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(folder), "JUPYTER_TOKEN": token},
            stdout=log,
            stderr=log,
        )
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("localhost", port), timeout=1).close()
            return server
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                server.kill()
                raise AssertionError(f"JupyterLab does not answer:\n{(folder / 'log').read_text()[-2000:]}") from None
            time.sleep(0.2)


def run(shots: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    token, taken = secrets.token_hex(), itertools.count(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, sync_playwright() as play:
        server = serve(Path(folder), port, token)
        try:
            browser = play.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1800, "height": 1200})

            def shot(name: str) -> None:
                page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
                page.screenshot(path=shots / f"{next(taken)}_{name}.png")

            try:
                story(page, f"http://localhost:{port}/lab/tree/{NOTEBOOK}?token={token}", shot)
            except (AssertionError, Error):
                page.screenshot(path=shots / "failure.png")
                raise
            finally:
                browser.close()
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def main() -> int:
    shots = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    shots.mkdir(parents=True, exist_ok=True)
    for old in shots.glob("[1-9f]*.png"):
        old.unlink()
    try:
        run(shots)
    except (AssertionError, Error) as error:
        print(f"failed: {error}\nscreenshots in {shots}", file=sys.stderr)
        return 1
    print(f"stopped {PROGRAMS * ROWS} times, once for every row of {PROGRAMS} programs; screenshots in {shots}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
