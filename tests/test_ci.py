"""What a CI sees: JUnit XML, summary, levels, digests; the reusable workflow and docs/ci.md, executed."""

import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import ROW, wait_for
from test_runs import WAITS, started

from bi_kernels.audit import cli
from bi_kernels.audit.digests import file as digests
from bi_kernels.audit.digests.candidate import compute
from bi_kernels.audit.faults import UsageError
from bi_kernels.audit.findings import Row, write_rows
from bi_kernels.audit.runs import ci
from bi_kernels.audit.runs.folder import stopped
from bi_kernels.audit.runs.summary import summary

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
CALL = WORKFLOW[True]["workflow_call"]["inputs"]  # YAML 1.1 reads the key `on` as true
DOCUMENT = (ROOT / "docs" / "ci.md").read_text()
BLOCKS = re.findall(r'^```(\w+)(?: title="([^"\n]*)")?\n(.*?)^```$', DOCUMENT, re.M | re.S)

PASS = replace(ROW, candidate="mine.py:linear", layout="decode", against="packed")
DRIFT = replace(
    PASS,
    layout="rows",
    against="300 rows",
    rows=1,
    verdict="needs-fix",
    mismatches=7,
    max_abs=0.5,
    max_rel=0.25,
    max_ulp=3,
    first_index=[0, 3],
    repro="python repro/linear-o-bf16.py",
    axes=["number of rows"],
)
WORSE = replace(DRIFT, rows=8, max_ulp=12)
INACCURATE = replace(DRIFT, relation="accuracy", max_ulp=None, threshold_share=1.5, repro="bi-audit run gemm")
REFUSED = replace(PASS, dtype="fp16", verdict="unsupported", mismatches=None, elements=None, detail="TypeError: fp16")
CAUGHT = replace(DRIFT, candidate="split of K", control=True, caught=True)
MISSED = replace(CAUGHT, candidate="blind spot", relation="determinism", verdict="pass", caught=False)
OUT = Path("out")


def rows(*given: Row) -> list[dict]:
    return [r.json() for r in given]


def parsed(text: str | bytes) -> dict[tuple[str, str], ET.Element]:
    """{(class name, name): test case} of JUnit XML."""
    root = ET.fromstring(text)
    found = {(c.get("classname"), c.get("name")): c for c in root.iter("testcase")}
    assert len(found) == int(root.get("tests")), "every case has a name of its own"
    return found


def test_junit_says_which_op_and_relation_how_far_and_how_to_reproduce():
    every = rows(PASS, WORSE, DRIFT, INACCURATE, REFUSED, CAUGHT, MISSED)
    found = parsed(ci.junit(every, OUT, {"gemm": 2.5}, ["gemm"]).tostring())
    assert {name: [part.tag for part in case] for name, case in found.items()} == {
        ("gemm", "runs to its end"): [],
        ("gemm.linear[o]", "invariance bf16"): ["failure"],
        ("gemm.linear[o]", "accuracy bf16"): ["failure"],
        ("gemm.linear[o]", "invariance fp16"): ["skipped"],
        ("gemm.controls", "split of K (linear[o] bf16, invariance)"): [],
        ("gemm.controls", "blind spot (linear[o] bf16, determinism)"): ["failure"],
    }
    failure = found["gemm.linear[o]", "invariance bf16"][0]
    assert "12 ULP" in failure.get("message") and "M = 1, 8" in failure.get("message")
    assert "7 of 100" in failure.text and "[0, 3]" in failure.text
    assert failure.text.endswith("python out/gemm/repro/linear-o-bf16.py")
    assert "1.5 × the bound" in found["gemm.linear[o]", "accuracy bf16"][0].get("message")
    assert found["gemm.linear[o]", "invariance fp16"][0].get("message") == "TypeError: fp16"


def test_junit_holds_what_xml_cannot_and_thousands_of_rows_stay_readable():
    drifts = [replace(DRIFT, detail="\x1b[31m<b>&\ud800", rows=m) for m in range(1, 3000)]
    found = parsed(ci.junit(rows(*drifts), OUT, {"gemm": 1}, ["gemm"]).tostring())
    failure = found["gemm.linear[o]", "invariance bf16"][0]
    assert "[31m<b>&�" in failure.text and len(failure.text.splitlines()) < 10


def test_a_pass_has_no_failure_and_a_stopped_audit_is_an_error():
    assert not any(len(c) for c in parsed(ci.junit(rows(PASS, CAUGHT), OUT, {}, ["gemm"], []).tostring()).values())
    (end,) = parsed(ci.junit([stopped("gemm", "it died")], OUT, {}, ["gemm"]).tostring()).values()
    assert end.find("error").get("message") == "it died"


BITS = "gradient invariance", "determinism", "parity", "weights after training", "localiser", "atomics-free"


@pytest.mark.parametrize(
    "row, warnings, least",
    [
        (PASS, [], None),
        (REFUSED, [], None),
        (CAUGHT, [], None),
        (DRIFT, [], "drift"),
        *[(replace(DRIFT, relation=r), [], "drift") for r in BITS],
        (MISSED, [], "drift"),
        (Row(**stopped("gemm", "it died")), [], "drift"),
        *[(replace(INACCURATE, relation=r), [], "needs-fix") for r in ("accuracy", "gradient accuracy", "contract")],
        (PASS, ["linear: other bits"], "warning"),
    ],
)
def test_levels(row, warnings, least):
    levels = ci.LEVELS[ci.LEVELS.index(least) :] if least else ()
    assert tuple(level for level in ci.LEVELS if ci.fails(rows(PASS, row), warnings, level)) == levels


def test_summary_gives_the_verdict_first_and_what_needs_a_fix(tmp_path, monkeypatch):
    (tmp_path / "out" / "gemm").mkdir(parents=True)
    (tmp_path / "out" / "gemm" / "README.md").touch()
    for variable in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    odd = replace(INACCURATE, op="", relation="", elements=None, detail="a | b")
    told = tmp_path / "out", tmp_path / "s.md", ["gemm"]
    text = summary(rows(PASS, DRIFT, WORSE, CAUGHT, MISSED, odd), *told, ["linear: other bits"], "never")
    assert text.startswith("## ❌ bi-audit: needs-fix\n\n- linear o bf16: ") and "`--fail-on never`" in text
    assert "linear: other bits" in text and "- [gemm](out/gemm/README.md)" in text
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert any(
        "| invariance" in x and "M = 1, 8" in x and "12 ULP" in x and "repro/linear-o-bf16.py" in x for x in table
    )
    assert any("blind spot" in x for x in table) and any(r"a \| b" in x for x in table)
    for variable, value in (("SERVER_URL", "https://github.com"), ("REPOSITORY", "me/mine"), ("RUN_ID", "7")):
        monkeypatch.setenv(f"GITHUB_{variable}", value)
    text = summary(rows(PASS, CAUGHT), *told, [], "needs-fix")
    assert text.startswith("## ✅ bi-audit: pass") and "https://github.com/me/mine/actions/runs/7#artifacts" in text
    assert "###" not in text.partition("### Reports")[0]


CRASHES = """
import os
import signal


def scale(x, factor):
    os.kill(os.getpid(), signal.SIGKILL)
"""
ARGUMENTS = ["run", "dtype", "--candidate", "mine.py:scale", "-p", "op", "scale", "--dtype", "bf16", "--out", "out"]
ARGUMENTS += ["--junit", "ci/junit.xml", "--summary", "ci/summary.md"]


def stale(folder: Path) -> None:
    """A document of an earlier run, which passed."""
    (folder / "out" / "dtype").mkdir(parents=True)
    write_rows(folder / "out" / "dtype" / "verdicts.json", rows(replace(PASS, audit="dtype")))


@pytest.mark.slow
def test_a_crashed_audit_leaves_both_files(tmp_path, monkeypatch, bi_audit):
    stale(tmp_path)
    (tmp_path / "mine.py").write_text(CRASHES)
    monkeypatch.chdir(tmp_path)
    assert bi_audit(*ARGUMENTS, "--fail-on", "drift").returncode == 1
    end = parsed((tmp_path / "ci" / "junit.xml").read_bytes())["dtype", "runs to its end"]
    assert "status -9" in end.find("error").get("message")
    assert (tmp_path / "ci" / "summary.md").read_text().startswith("## ❌ bi-audit: needs-fix")
    document = (tmp_path / "out" / "dtype" / "README.md").read_text()
    assert "status -9" in document and "| device " in document, "it holds what was there by then"


@pytest.mark.slow
def test_an_interrupted_run_leaves_both_files(tmp_path):
    stale(tmp_path)
    (tmp_path / "mine.py").write_text(WAITS)
    child = started(*ARGUMENTS, cwd=tmp_path)
    try:
        wait_for(tmp_path / "out" / f".dtype.{child.pid}.partial" / "provenance.json", child)
        child.send_signal(signal.SIGTERM)
        errors = child.communicate(timeout=60)[1]
    finally:
        if child.poll() is None:
            child.kill()
    assert child.returncode == 130 and "Traceback" not in errors, errors
    end = parsed((tmp_path / "ci" / "junit.xml").read_bytes())["dtype", "runs to its end"]
    assert "interrupted" in end.find("error").get("message")
    assert "## ❌" in (tmp_path / "ci" / "summary.md").read_text()


SCALE = {"candidate": "bi_kernels", "op": "scale", "dtype": "bf16"}
FILE = Path("digests.json")


def test_digests_name_the_op_and_the_version_that_changed():
    found, problems = compute(["elementwise", "dtype"], SCALE)
    assert [(r["op"], r["what"]) for r in found] == [("scale", "forward"), ("scale", "gradient")] and not problems
    assert digests.changes(found, *compute(["elementwise"], SCALE), FILE) == []
    recorded = [r | {"sha256": "0" * 64, "Triton": "3.6.0"} for r in found[:1]] + found[1:]
    (warning,) = digests.changes(recorded, found, [], FILE)
    assert warning.startswith(
        "scale: other bits on interpreter than digests.json holds (bf16 forward); changed since: "
    )
    assert f"Triton 3.6.0 → {found[0]['Triton']}" in warning and "torch" not in warning
    same = [r | {"sha256": "0" * 64} for r in found]
    assert "no version that is recorded" in digests.changes(same, found, [], FILE)[0]
    (missing,) = digests.changes(found[:1], found, [], FILE)
    assert "holds 1 of 2" in missing and "scale bf16 gradient of bi_kernels on interpreter" in missing
    assert digests.merged(recorded, found) == found


FOLDS = "import bi_kernels\n\n\ndef linear(x, weight):\n    return bi_kernels.linear({}, {})\n"


@pytest.mark.parametrize("seed", [0, 1])
def test_digests_see_another_order_of_a_sum(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = []
    for operands in (("x", "weight"), ("x.flip(-1)", "weight.flip(-1)")):
        (tmp_path / "mine.py").write_text(FOLDS.format(*operands))
        made.append(compute(["gemm"], {"candidate": "mine.py:linear", "dtype": "bf16", "seed": seed})[0])
    forward = [(a["case"], a["sha256"] == b["sha256"]) for a, b in zip(*made) if a["what"] == "forward"]
    assert len(forward) == 5 and not any(same for _, same in forward), forward
    assert all("linear: " in warning for warning in digests.changes(*made, [], FILE))


def test_what_gives_other_bits_each_time_has_no_digest(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import torch\n\n\ndef scale(x, factor):\n    return torch.rand_like(x)\n")
    monkeypatch.chdir(tmp_path)
    found, problems = compute(["elementwise"], SCALE | {"candidate": "mine.py:scale"})
    assert not found and "other bits when called again" in problems[0]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"op": "scale"}]'])
def test_a_file_without_digests_is_one_sentence(text, tmp_path):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(ValueError, match="d.json' holds no digests, expected a file that `bi-audit digest` wrote"):
        digests.read(tmp_path / "d.json")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "dtype", "--digests", "nowhere.json"], "'nowhere.json' holds no digests"),
        (["run", "dtype", "--junit", "file/junit.xml"], "--junit is 'file/junit.xml', which cannot be written"),
        (["run", "dtype", "--fail-on", "drfit"], "'drfit' (choose from"),
        (["digest", "d.json", "nonsense"], "unknown audit 'nonsense'"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_a_wrong_option_is_one_sentence(arguments, words, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        cli.run(arguments)
    assert words in str(error.value)
    assert not (tmp_path / "audits" / "interpreter-tiny" / "dtype").exists(), "nothing was run"


def steps(with_: dict, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The workflow's shell steps, in order, and their environment for a call with these inputs."""
    values = {k: v.get("default", "") for k, v in CALL.items()} | with_
    fill = lambda text: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: str(values[m[1]]), text)
    job = WORKFLOW["jobs"]["audit"]
    environment = {k: fill(v) for k, v in job["env"].items()}
    assert not any("${{" in v for v in environment.values()), "every variable of the job is an input"
    runner = {
        "RUNNER_TEMP": folder / "temp",
        "GITHUB_PATH": folder / "path",
        "GITHUB_STEP_SUMMARY": folder / "summary.md",
        "GITHUB_ACTIONS": "true",
    }
    return [s["run"] for s in job["steps"] if "run" in s], environment | {k: str(v) for k, v in runner.items()}


def shell(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """As GitHub runs it, with an empty command in the place of `pip install`; nothing here may reach a network."""
    stub = folder.parent / "bin"
    if not stub.exists():
        stub.mkdir()
        (stub / "pip").symlink_to("/bin/true")
    path = os.pathsep.join((str(stub), str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PATH": path} | variables,
    )


def pip_of(install: str, folder: Path, **variables: str) -> list[str]:
    """The arguments that the install step gives pip, in an environment that is there."""
    stand_in = install.replace("python -m venv", "true")
    stand_in = stand_in.replace('"$RUNNER_TEMP/bi-audit/bin/python" -m pip', "printf '%s\\n'")
    context = {"REPOSITORY": "https://forge/owner/name", "COMMIT": "0" * 40, "BI_KERNELS": "", "CONSTRAINTS": ""}
    done = shell(stand_in, folder, **context | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


CPU = "--extra-index-url https://download.pytorch.org/whl/cpu "
OURS = f"--constraint https://forge/owner/name/raw/{'0' * 40}/constraints.txt "
THIS = f"bi-kernels[audit] @ git+https://forge/owner/name@{'0' * 40}"


@pytest.mark.parametrize(
    "given, arguments",
    [
        ({}, CPU + OURS + THIS),
        ({"CONSTRAINTS": "my own.txt", "DEVICE": "cuda"}, f"--constraint my own.txt {THIS}"),
        ({"BI_KERNELS": "./a b", "CONSTRAINTS": "c.txt"}, f"{CPU}--constraint c.txt ./a b"),
        ({"REQUIREMENTS": "r.txt"}, f"{CPU}{OURS}{THIS} -r r.txt"),
    ],
)
def test_the_workflow_installs_its_own_commit_and_its_versions(given, arguments, tmp_path):
    (install, _), environment = steps({"candidate": "mine.py:scale"}, tmp_path)
    folder = tmp_path / "repository"
    folder.mkdir()
    assert " ".join(pip_of(install, folder, **environment | given)) == f"install --quiet {arguments}"


def test_every_action_is_pinned_to_a_commit():
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        used = re.findall(r"^.*\buses:.*$", path.read_text(), re.M)
        assert used and all(re.fullmatch(r"\s*- uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", u) for u in used), used


DRIFTS = """
def scale(x, factor):
    y = x * factor
    return y if x.shape[:-1].numel() > 16 else (x.float() * factor * (1 + 2**-7)).to(x.dtype)
"""


@pytest.mark.slow
def test_the_workflow_audits_a_candidate_of_the_calling_repository(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "mine.py").write_text(DRIFTS)
    recorded = dict.fromkeys((*digests.KEY, *digests.VERSIONS), "") | {"architecture": "interpreter", "seed": 0}
    recorded |= {"candidate": "mine.py:scale", "shapes": "tiny", "op": "scale", "dtype": "bf16", "what": "forward"}
    write_rows(repository / "digests.json", [recorded | {"sha256": "0" * 64, "Triton": "3.0.0"}])
    told = {"candidate": "mine.py:scale", "audit": "elementwise", "op": "scale", "digests": "digests.json"}
    (install, audit), environment = steps(told, tmp_path)
    (tmp_path / "summary.md").write_text("before\n")
    assert pip_of(install, repository, **environment)
    assert (tmp_path / "path").read_text() == f"{tmp_path}/temp/bi-audit/bin\n"
    done = shell(audit, repository, **environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "::warning title=bi-audit::scale: " in done.stdout and "Triton 3.0.0 → " in done.stdout
    found = parsed((repository / "bi-audit" / "junit.xml").read_bytes())
    failure = found["elementwise.scale", "invariance bf16"].find("failure")
    assert "M = 1, 2" in failure.get("message") and "first at [0, 0]" in failure.text
    script = failure.text.splitlines()[-1].split()[-1]
    shown = shell(f"python {script}", repository)
    assert shown.returncode == 1 and "elements differ" in shown.stdout, shown.stderr
    (repository / "mine.py").write_text(DRIFTS.replace("> 16", ">= 0"))
    mended = shell(f"python {script}", repository)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    every = json.loads((repository / "bi-audit" / "verdicts.json").read_text())
    drift = [r for r in every if r["verdict"] == "needs-fix" and not r["control"] and r["relation"] == "invariance"]
    assert {r["rows"] for r in drift if r["layout"] == "rows"} <= set(range(1, 17))
    assert all(r["candidate"] == "mine.py:scale" for r in drift) and any(Path(script).name in r["repro"] for r in drift)
    assert str(tmp_path) not in (repository / "bi-audit" / "elementwise" / "README.md").read_text()
    assert found["digests", "scale"].find("skipped") is not None
    assert {name[0] for name, c in found.items() if c.find("failure") is not None} == {"elementwise.scale"}
    said = (tmp_path / "summary.md").read_text()
    assert said.startswith("before\n## ❌ bi-audit: needs-fix") and script in said and "Triton 3.0.0" in said


def test_parameters_reach_the_command_line_as_they_are(tmp_path):
    given = {"candidate": "a b.py:f", "audit": "gemm dtype", "op": "linear"}
    given["parameters"] = "\nseed 3\ninputs x=bf16[4,8] $(touch hurt) \\ *\n"
    (_, audit), environment = steps(given, tmp_path)
    said = shell("bi-audit() { printf '%s\n' \"$@\"; }\n" + audit, tmp_path, **environment).stdout
    told = "run|gemm|dtype|--candidate|a b.py:f|-p|op|linear|-p|seed|3|-p|inputs|x=bf16[4,8] $(touch hurt) \\ *|--dtype"
    assert said.replace("\n", "|").startswith(told) and "--digests" not in said and not (tmp_path / "hurt").exists()


def test_the_workflow_reads_every_input_and_runs_no_input_as_a_script():
    text = (ROOT / ".github" / "workflows" / "audit.yml").read_text()
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(CALL)
    job = WORKFLOW["jobs"]["audit"]
    assert not any("${{" in s.get("run", "") for s in job["steps"])
    assert WORKFLOW["permissions"] == {"contents": "read"}
    upload = job["steps"][-1]
    assert upload["if"] == "always()" and upload["with"]["path"] == "bi-audit/"
    job_context = [k for k, v in job["env"].items() if "job." in v]
    assert not job_context, "GitHub knows the job context in steps only"


@pytest.mark.parametrize("name", [title for kind, title, _ in BLOCKS if kind == "yaml"])
def test_the_documented_callers_fit_the_workflow(name):
    caller = yaml.safe_load(next(text for _, title, text in BLOCKS if title == name))
    call = caller["jobs"]["audit"]
    assert call["uses"] == "REPOSITORY/.github/workflows/audit.yml@COMMIT", "what stands there, the document says"
    assert "`REPOSITORY`" in DOCUMENT and "`COMMIT`" in DOCUMENT
    assert {k for k, v in CALL.items() if v.get("required")} <= set(call["with"]) <= set(CALL)
    assert caller["permissions"] == WORKFLOW["permissions"], "a called workflow has no more than its caller"


@pytest.mark.slow
def test_the_document_is_true(tmp_path):
    repository = tmp_path / "repository"
    scripts = [text for kind, _, text in BLOCKS if kind == "bash"]
    for kind, title, text in BLOCKS:
        assert kind == "bash" or title, "a block is a script or a file"
        if kind != "bash":
            (repository / title).parent.mkdir(parents=True, exist_ok=True)
            (repository / title).write_text(text)

    def run(group: list[str]) -> None:
        for script in group:
            done = shell(script, repository)
            assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"

    shell("true", repository)  # makes the stub
    with ThreadPoolExecutor() as pool:  # only the digests build on each other
        list(pool.map(run, ([scripts[0]], [scripts[1]], scripts[2:])))
    assert not any(len(c) for c in parsed((repository / "bi-audit" / "junit.xml").read_bytes()).values())
    assert (repository / "bi-audit" / "summary.md").read_text().startswith("## ✅ bi-audit: pass")
    assert json.loads((repository / "digests.json").read_text()) and (repository / "swiglu.ipynb").exists()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", DOCUMENT, re.M)) >= {"--fail-on", *ci.LEVELS}
