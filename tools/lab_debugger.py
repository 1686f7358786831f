"""Opens the workbench in JupyterLab in a headless Chromium, runs it, stops inside a kernel, looks at its variables and goes on.

    .venv/bin/pip install playwright jupyterlab   # and Chromium, as from Debian's package `chromium`
    .venv/bin/python tools/lab_debugger.py [FOLDER for screenshots]

Exit status 0 if the debugger stopped on the breakpoint's line once for every row of both programs, the tiles were among the
variables, and the notebook went on to its end. About two minutes; not part of CI.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
NOTEBOOK, LINE, PORT = "workbench.ipynb", "total += upstream * normed", 8931
STEP = "_by_program_kernel[(2, )]"  # the cell that launches two programs of three rows
STOPS = 6


def command(page: Page, name: str) -> None:
    page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)


def idle(page: Page, seconds: float) -> None:
    """Waits until the kernel has nothing to do for a second."""
    end, quiet = time.monotonic() + seconds, 0
    while quiet < 4:
        if time.monotonic() > end:
            raise TimeoutError(f"the kernel is busy after {seconds:.0f} s")
        status = page.evaluate("() => window.jupyterapp.shell.currentWidget?.context?.sessionContext?.session?.kernel?.status")
        quiet = quiet + 1 if status == "idle" else 0
        page.wait_for_timeout(250)


def cell(page: Page, text: str) -> int:
    """The number of the first code cell that holds a text."""
    return page.evaluate("""text => window.jupyterapp.shell.currentWidget.content.widgets.findIndex(
        c => c.model.type === 'code' && c.model.sharedModel.getSource().includes(text))""", text)


def activate(page: Page, index: int) -> None:
    page.evaluate("""i => { const n = window.jupyterapp.shell.currentWidget.content; n.activeCellIndex = i; n.scrollToItem(i, 'center') }""",
                  index)
    page.wait_for_timeout(800)


def failures(page: Page) -> list[str]:
    return page.evaluate("""() => window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code').flatMap(
        c => c.model.outputs.toJSON().filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue))""")


def story(page: Page, shots: Path) -> None:
    shot = lambda name: page.screenshot(path=shots / f"{name}.png")
    page.goto(f"http://localhost:{PORT}/lab/tree/{NOTEBOOK}")
    expect(page.locator(".jp-Notebook .jp-Cell").first).to_be_visible(timeout=60_000)
    page.add_style_tag(content=".Toastify, .jp-Dialog { display: none !important }")  # news, and the like
    idle(page, 60)
    command(page, "notebook:run-all-cells")
    page.wait_for_timeout(2000)
    idle(page, 300)
    assert not failures(page), failures(page)
    shot("1_run_all")

    page.locator(".jp-DebuggerBugButton").first.click()
    expect(page.locator(".jp-DebuggerBugButton[aria-pressed=true]").first).to_be_visible(timeout=20_000)
    kernel = cell(page, LINE)
    activate(page, kernel)
    source = page.evaluate("i => window.jupyterapp.shell.currentWidget.content.widgets[i].model.sharedModel.getSource()", kernel)
    line = next(i for i, text in enumerate(source.splitlines()) if LINE in text)
    node = page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{kernel}"]')
    place = node.locator(".cm-line").nth(line).bounding_box()
    gutter = node.locator(".cm-gutter.cm-breakpoint-gutter").bounding_box()
    page.mouse.click(gutter["x"] + gutter["width"] / 2, place["y"] + place["height"] / 2)
    expect(page.locator(".jp-DebuggerBreakpoints-body .jp-DebuggerBreakpoint")).to_have_count(1, timeout=10_000)
    shot("2_breakpoint")

    activate(page, cell(page, STEP))
    command(page, "notebook:run-cell")
    stops = []
    for stop in range(STOPS):
        frame = page.locator(".jp-DebuggerCallstackFrame").first
        expect(frame).to_contain_text("_by_program_kernel", timeout=30_000)
        expect(frame).to_contain_text(f":{line + 1}")
        variables = page.locator(".jp-DebuggerVariables")
        for name in ("normed", "upstream", "total", "row", "program"):
            expect(variables).to_contain_text(name, timeout=10_000)
        for name in ("upstream", "handle", "data"):  # the tile, as the array that it is
            variables.get_by_text(name, exact=False).last.click()
            page.wait_for_timeout(400)
        seen = variables.inner_text()
        assert "array(" in seen or "float32" in seen or "ndarray" in seen, seen
        stops.append(seen)
        if stop in (0, 3):
            shot(f"{3 + stop // 3}_stop_{stop + 1}")
        command(page, "debugger:continue")
        page.wait_for_timeout(1200)
    assert len(set(stops)) == STOPS, "the variables did not change from stop to stop"
    idle(page, 60)
    assert not failures(page), failures(page)
    shot("5_finished")


def main() -> None:
    shots = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "notebooks" / NOTEBOOK, folder)
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", "--no-browser", f"--port={PORT}", f"--ServerApp.root_dir={folder}",
             "--IdentityProvider.token=", "--ServerApp.allow_root=True", "--LabApp.expose_app_in_browser=True",
             "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with sync_playwright() as play:
                browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=[
                    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--no-first-run",
                    "--disable-component-update", "--disable-sync"])
                page = browser.new_page(viewport={"width": 1500, "height": 1000})
                for _ in range(60):
                    try:
                        page.goto(f"http://localhost:{PORT}/api")
                        break
                    except Exception:
                        time.sleep(1)
                try:
                    story(page, shots)
                finally:
                    page.screenshot(path=shots / "last.png")
                    browser.close()
        finally:
            server.terminate()
            server.wait()
    print(f"stopped {STOPS} times, once a row of two programs; screenshots in {shots.name}/")


if __name__ == "__main__":
    main()
