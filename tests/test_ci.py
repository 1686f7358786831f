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
from conftest import wait_for

from bi_kernels.audit import cli
from bi_kernels.audit.digests import file as digests
from bi_kernels.audit.digests.candidate import compute
from bi_kernels.audit.faults import UsageError
from bi_kernels.audit.findings import Row, write_rows
from bi_kernels.audit.runs import ci
from bi_kernels.audit.runs.runner import stopped
from bi_kernels.audit.runs.summary import summary

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
CALL = WORKFLOW[True]["workflow_call"]["inputs"]  # YAML 1.1 reads the key `on` as true
DOCUMENT = (ROOT / "docs" / "ci.md").read_text()
BLOCKS = re.findall(r'^```(\w+)(?: title="([^"\n]*)")?\n(.*?)^```$', DOCUMENT, re.M | re.S)

PASS = Row(
    "gemm",
    "linear",
    "o",
    "mine.py:linear",
    "bf16",
    "interpreter",
    "invariance",
    "decode",
    "packed",
    "normal",
    9,
    "pass",
    mismatches=0,
    elements=100,
)
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
    first_failing_op="linear",
    repro="python repro/linear-o-bf16.py",
)
WORSE = replace(DRIFT, rows=8, max_ulp=12)
INACCURATE = replace(DRIFT, relation="accuracy", max_ulp=None, threshold_share=1.5, repro="bi-audit run gemm")
REFUSED = replace(PASS, dtype="fp16", verdict="unsupported", mismatches=None, elements=None, detail="TypeError: fp16")
CAUGHT = replace(DRIFT, candidate="split of K", control=True, caught=True)
MISSED = replace(CAUGHT, candidate="blind spot", relation="determinism", verdict="pass", caught=False)
OUT = Path("out")


def rows(*given: Row) -> list[dict]:
    return [r.json() for r in given]


def parsed(text: str) -> dict[tuple[str, str], ET.Element]:
    """{(class name, name): test case} of JUnit XML, whose shape is checked."""
    root = ET.fromstring(text)
    assert root.tag == "testsuites" and set(root.attrib) == {"name", "tests", "failures", "errors", "time"}
    for suite in root:
        cases = suite.findall("testcase")
        assert suite.tag == "testsuite" and {c.tag for c in suite} <= {"properties", "testcase"}
        assert set(suite.attrib) == {"name", "time", "tests", "failures", "errors", "skipped"}
        counted = {"tests": len(cases)} | {
            a: len(suite.findall(f"testcase/{t}"))
            for a, t in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
        }
        assert {k: int(suite.get(k)) for k in counted} == counted
        for c in cases:
            assert set(c.attrib) == {"classname", "name", "time"} and len(c) <= 1
            assert all(o.tag in ("failure", "error", "skipped") and set(o.attrib) == {"message", "type"} for o in c)
    for k in ("tests", "failures", "errors"):
        assert int(root.get(k)) == sum(int(s.get(k)) for s in root)
    found = {(c.get("classname"), c.get("name")): c for c in root.iter("testcase")}
    assert len(found) == int(root.get("tests")), "every case has a name of its own"
    return found


def test_junit_says_which_op_and_relation_how_far_and_how_to_reproduce():
    text = ci.junit(rows(PASS, WORSE, DRIFT, INACCURATE, REFUSED, CAUGHT, MISSED), OUT, {"gemm": 2.5}, ["gemm"])
    found = parsed(text)
    assert list(found) == [
        ("gemm", "runs to its end"),
        ("gemm.linear[o]", "invariance bf16"),
        ("gemm.linear[o]", "accuracy bf16"),
        ("gemm.linear[o]", "invariance fp16"),
        ("gemm.controls", "split of K (linear[o] bf16, invariance)"),
        ("gemm.controls", "blind spot (linear[o] bf16, determinism)"),
    ]
    failure = found["gemm.linear[o]", "invariance bf16"].find("failure")
    said = "a row's result depends on how many rows are in the call, by at most 12 ULP: calls of 1 and 8 rows differ"
    said += " from the largest call; 2 of 3 checks need a fix, at most 12 ULP: M = 1, 8"
    assert failure.get("message") == said
    assert failure.text.startswith("rows against 300 rows, M = 1, normal: 7 of 100 elements of out differ, max abs 0.5")
    assert "first at index [0, 3], first failing op linear" in failure.text
    assert failure.text.endswith("Reproduce with\n    python out/gemm/repro/linear-o-bf16.py")
    assert "1.5 × the bound" in found["gemm.linear[o]", "accuracy bf16"].find("failure").get("message")
    assert found["gemm.linear[o]", "invariance fp16"].find("skipped").get("message") == "TypeError: fp16"
    assert [len(c) for name, c in found.items() if name[0] == "gemm.controls"] == [0, 1], (
        "only the missed control fails"
    )


def test_junit_holds_what_xml_cannot():
    found = parsed(ci.junit(rows(replace(DRIFT, detail="\x1b[31m<b>&\ud800")), OUT, {"gemm": 1}, ["gemm"]))
    assert "�[31m<b>&�" in found["gemm.linear[o]", "invariance bf16"].find("failure").text


def test_thousands_of_rows_stay_readable():
    text = ci.junit(rows(*[replace(DRIFT, rows=m) for m in range(1, 3000)]), OUT, {"gemm": 1}, ["gemm"])
    failure = parsed(text)["gemm.linear[o]", "invariance bf16"].find("failure")
    assert len(failure.text.splitlines()) == ci.SHOWN + 3 and "2996 more in out/gemm/verdicts.json" in failure.text


def test_a_pass_has_no_failure_and_a_stopped_audit_is_an_error():
    assert not any(len(c) for c in parsed(ci.junit(rows(PASS, CAUGHT), OUT, {"gemm": 1}, ["gemm"], [])).values())
    end = parsed(ci.junit([stopped("gemm", "it died")], OUT, {}, ["gemm"]))["gemm", "runs to its end"]
    assert end.find("error").get("message") == "it died"


@pytest.mark.parametrize(
    "name, row, warnings, levels",
    [
        ("pass", PASS, [], []),
        ("unsupported", REFUSED, [], []),
        ("control caught", CAUGHT, [], []),
        ("drift", DRIFT, [], ["drift", "needs-fix", "warning"]),
        *[
            (r, replace(DRIFT, relation=r), [], ["drift", "needs-fix", "warning"])
            for r in (
                "gradient invariance",
                "determinism",
                "parity",
                "weights after training",
                "localiser",
                "atomics-free",
            )
        ],
        ("control missed", MISSED, [], ["drift", "needs-fix", "warning"]),
        ("stopped", Row(**stopped("gemm", "it died")), [], ["drift", "needs-fix", "warning"]),
        ("accuracy", INACCURATE, [], ["needs-fix", "warning"]),
        ("gradient accuracy", replace(INACCURATE, relation="gradient accuracy"), [], ["needs-fix", "warning"]),
        ("contract", replace(INACCURATE, relation="contract"), [], ["needs-fix", "warning"]),
        ("digest", PASS, ["linear: other bits"], ["warning"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_levels(name, row, warnings, levels):
    assert [level for level in ci.LEVELS if ci.fails(rows(PASS, row), warnings, level)] == levels


def test_summary_gives_the_verdict_first_and_what_needs_a_fix(tmp_path, monkeypatch):
    for variable in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "out" / "gemm").mkdir(parents=True)
    (tmp_path / "out" / "gemm" / "README.md").touch()
    odd = replace(INACCURATE, op="", relation="", elements=None, detail="a | b")
    text = summary(
        rows(PASS, DRIFT, WORSE, CAUGHT, MISSED, odd),
        tmp_path / "out",
        tmp_path / "s.md",
        ["gemm"],
        ["linear: other bits"],
        "never",
    )
    lines = text.splitlines()
    assert lines[0] == "## ❌ bi-audit: needs-fix"
    assert lines[2].startswith(
        "- linear o bf16: a row's result depends on how many rows are in the call, by at most 12 ULP: calls of 1 and 8"
    )
    assert "no statement about a GPU" in lines[4] and "controls caught: 1 of 2" in lines[4]
    assert "does not fail at `--fail-on never`" in lines[4]
    fix = lines[lines.index("### What needs a fix") :]
    assert any("| invariance" in x and "M = 1, 8" in x and "12 ULP" in x and "repro/linear-o-bf16.py" in x for x in fix)
    assert any("control missed: blind spot" in x for x in fix) and any(r"a \| b" in x for x in fix)
    assert "- ⚠️ linear: other bits" in fix and "- [gemm](out/gemm/README.md)" in fix
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "me/mine")
    monkeypatch.setenv("GITHUB_RUN_ID", "7")
    text = summary(rows(PASS, CAUGHT), tmp_path / "out", tmp_path / "s.md", ["gemm"], [], "needs-fix")
    assert text.startswith("## ✅ bi-audit: pass") and "https://github.com/me/mine/actions/runs/7#artifacts" in text
    assert "needs a fix" not in text


CRASHES = """
import os
import signal


def scale(x, factor):
    os.kill(os.getpid(), signal.SIGKILL)
"""
WAITS = "import time\n\n\ndef scale(x, factor):\n    time.sleep(600)\n"


ARGUMENTS = [
    "run",
    "dtype",
    "--candidate",
    "mine.py:scale",
    "-p",
    "op",
    "scale",
    "--dtype",
    "bf16",
    "--out",
    "out",
    "--junit",
    "ci/junit.xml",
    "--summary",
    "ci/summary.md",
]


def stale(folder: Path) -> None:
    """A document of an earlier run, which passed."""
    (folder / "out" / "dtype").mkdir(parents=True)
    write_rows(folder / "out" / "dtype" / "verdicts.json", rows(replace(PASS, audit="dtype")))


@pytest.mark.slow
def test_a_crashed_audit_leaves_both_files(tmp_path, monkeypatch):
    stale(tmp_path)
    (tmp_path / "mine.py").write_text(CRASHES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.run([*ARGUMENTS, "--fail-on", "drift"])
    assert end.value.code == 1
    end = parsed((tmp_path / "ci" / "junit.xml").read_text())["dtype", "runs to its end"]
    assert "status -9" in end.find("error").get("message")
    said = (tmp_path / "ci" / "summary.md").read_text()
    assert said.startswith("## ❌ bi-audit: needs-fix") and "did not run to its end" in said
    document = (tmp_path / "out" / "dtype" / "README.md").read_text()
    assert "stopped here" in document and "| device " in document, "it holds what was there by then"


def test_an_interrupted_run_leaves_both_files(tmp_path):
    stale(tmp_path)
    (tmp_path / "mine.py").write_text(WAITS)
    child = subprocess.Popen(
        [sys.executable, "-m", "bi_kernels.audit.cli", *ARGUMENTS],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(tmp_path / "out" / f".dtype.{child.pid}.partial" / "provenance.json", child)
        child.send_signal(signal.SIGTERM)
        errors = child.communicate(timeout=60)[1]
    finally:
        if child.poll() is None:
            child.kill()
    assert child.returncode == 130 and "Traceback" not in errors, errors
    end = parsed((tmp_path / "ci" / "junit.xml").read_text())["dtype", "runs to its end"]
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


@pytest.mark.parametrize("seed", [0, 1])
def test_digests_see_another_order_of_a_sum(seed, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import bi_kernels\n\n\ndef linear(x, weight):\n    return bi_kernels.linear(x, weight)\n"
    )
    monkeypatch.chdir(tmp_path)
    one = compute(["gemm"], {"candidate": "mine.py:linear", "dtype": "bf16", "seed": seed})[0]
    (tmp_path / "mine.py").write_text(
        "import bi_kernels\n\n\ndef linear(x, weight):\n    return bi_kernels.linear(x.flip(-1), weight.flip(-1))\n"
    )
    other = compute(["gemm"], {"candidate": "mine.py:linear", "dtype": "bf16", "seed": seed})[0]
    forward = [(a["case"], a["sha256"] == b["sha256"]) for a, b in zip(one, other) if a["what"] == "forward"]
    assert len(forward) == 5 and not any(same for _, same in forward), forward
    assert all("linear: " in w and "candidate's code" in w for w in digests.changes(one, other, [], FILE))


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


CPU = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
OURS = ["--constraint", f"https://forge/owner/name/raw/{'0' * 40}/constraints.txt"]
THIS = f"bi-kernels @ git+https://forge/owner/name@{'0' * 40}"


@pytest.mark.parametrize(
    "given, arguments",
    [
        ({}, [*CPU, *OURS, THIS]),
        ({"DEVICE": "cuda"}, [THIS]),
        ({"CONSTRAINTS": "my own.txt"}, [*CPU, "--constraint", "my own.txt", THIS]),
        ({"CONSTRAINTS": "mine.txt", "DEVICE": "cuda"}, ["--constraint", "mine.txt", THIS]),
        ({"BI_KERNELS": "bi-kernels==0.1.0"}, [*CPU, "bi-kernels==0.1.0"]),
        ({"BI_KERNELS": "./a b", "CONSTRAINTS": "c.txt"}, [*CPU, "--constraint", "c.txt", "./a b"]),
        ({"REQUIREMENTS": "r.txt"}, [*CPU, *OURS, THIS, "-r", "r.txt"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_the_workflow_installs_its_own_commit_and_its_versions(given, arguments, tmp_path):
    (install, _), environment = steps({"candidate": "mine.py:scale"}, tmp_path)
    folder = tmp_path / "repository"
    folder.mkdir()
    assert pip_of(install, folder, **environment | given) == ["install", "--quiet", *arguments]


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
    recorded = [
        dict.fromkeys((*digests.KEY, *digests.VERSIONS), "")
        | {
            "architecture": "interpreter",
            "candidate": "mine.py:scale",
            "shapes": "tiny",
            "op": "scale",
            "case": "",
            "dtype": "bf16",
            "what": "forward",
            "seed": 0,
            "sha256": "0" * 64,
            "Triton": "3.0.0",
        }
    ]
    write_rows(repository / "digests.json", recorded)
    (install, audit), environment = steps(
        {"candidate": "mine.py:scale", "audit": "elementwise", "op": "scale", "digests": "digests.json"}, tmp_path
    )
    (tmp_path / "summary.md").write_text("before\n")
    assert pip_of(install, repository, **environment)
    assert (tmp_path / "path").read_text() == f"{tmp_path}/temp/bi-audit/bin\n"
    done = shell(audit, repository, **environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert (
        "::warning title=bi-audit::scale: other bits on interpreter" in done.stdout and "Triton 3.0.0 → " in done.stdout
    )
    found = parsed((repository / "bi-audit" / "junit.xml").read_text())
    failure = found["elementwise.scale", "invariance bf16"].find("failure")
    assert (
        "M = 1, 2" in failure.get("message")
        and "chunked:7" in failure.get("message")
        and "of 64 elements" in failure.text
    )
    script = failure.text.splitlines()[-1].split()[-1]
    shown = shell(f"python {script}", repository)
    assert shown.returncode == 1 and "elements differ" in shown.stdout, shown.stderr
    (repository / "mine.py").write_text(DRIFTS.replace("> 16", ">= 0"))
    mended = shell(f"python {script}", repository)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    every = json.loads((repository / "bi-audit" / "verdicts.json").read_text())
    drift = [r for r in every if r["verdict"] == "needs-fix" and not r["control"] and r["relation"] == "invariance"]
    assert {r["rows"] for r in drift if r["layout"] == "rows"} <= set(range(1, 17))
    assert all(r["candidate"] == "mine.py:scale" and r["first_failing_op"] == "scale" for r in drift)
    assert any(r["repro"].endswith(Path(script).name) for r in drift)
    body = (repository / "bi-audit" / "elementwise" / "README.md").read_text()
    assert "needs-fix" in body and str(tmp_path) not in body
    assert found["digests", "scale"].find("skipped") is not None
    assert {name[0] for name, c in found.items() if c.find("failure") is not None} == {"elementwise.scale"}
    said = (tmp_path / "summary.md").read_text()
    assert said.startswith("before\n## ❌ bi-audit: needs-fix") and script in said and "### Warnings" in said


def test_parameters_reach_the_command_line_as_they_are(tmp_path):
    (_, audit), environment = steps(
        {
            "candidate": "a b.py:f",
            "audit": "gemm dtype",
            "op": "linear",
            "parameters": "\nseed 3\ninputs x=bf16[4,8] $(touch hurt) \\ *\n",
        },
        tmp_path,
    )
    show = "bi-audit() { printf '%s\\n' \"$@\"; }\n"
    said = shell(show + audit, tmp_path, **environment).stdout.splitlines()
    assert said[:13] == [
        "run",
        "gemm",
        "dtype",
        "--candidate",
        "a b.py:f",
        "-p",
        "op",
        "linear",
        "-p",
        "seed",
        "3",
        "-p",
        "inputs",
    ]
    assert said[13:16] == ["x=bf16[4,8] $(touch hurt) \\ *", "--dtype", "bf16"] and "--digests" not in said
    assert not (tmp_path / "hurt").exists()


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


def test_the_workflow_of_tests_makes_what_the_makefile_has():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    job = jobs["make"]
    made = re.findall(r'\["audit", "([\w-]+)"\]', job["strategy"]["matrix"]["target"])
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert made == ["test-all", "test"] and {"audit", *made} <= {*targets}
    assert (ROOT / ".ci" / "run").read_text().endswith("make test\n")


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
    assert not any(len(c) for c in parsed((repository / "bi-audit" / "junit.xml").read_text()).values())
    assert (repository / "bi-audit" / "summary.md").read_text().startswith("## ✅ bi-audit: pass")
    assert json.loads((repository / "digests.json").read_text()) and (repository / "swiglu.ipynb").exists()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", DOCUMENT, re.M)) >= {"--fail-on", *ci.LEVELS}
