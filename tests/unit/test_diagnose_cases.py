"""`diagnose` on whole failure cases: our own stories, and a folder of cases where one stands beside the checkout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from krea_runner.cli.diagnose import lines
from krea_runner.diagnose.document import document
from krea_runner.diagnose.layout import from_job
from krea_runner.diagnose.logs import diagnose
from krea_runner.diagnose.signatures import load_catalog
from tests.cases.stories import STORIES, Story, write

SHARED = Path(__file__).parents[3] / "shared" / "cases"
GOALS = {"cause": 0.97, "policy": 0.98, "nodes": 0.95, "ranks": 0.90, "line": 0.90}


def answer(case: Path) -> dict[str, Any]:
    job = json.loads((case / "job.json").read_text())
    dmesg = {path.name[6:-4]: str(path) for path in sorted(case.glob("dmesg.*.txt"))}
    verdict = diagnose([str(path) for path in sorted(case.glob("log*.txt"))], layout=from_job(job), dmesg=dmesg)
    assert len(lines(verdict)) <= 12
    return document(verdict)


def score(case: Path) -> dict[str, bool]:
    """Which measures a case passes; the rules of the cases' own scorer."""
    want, job, got = (
        json.loads((case / "expected.json").read_text()),
        json.loads((case / "job.json").read_text()),
        answer(case),
    )
    other = got["cause"] != want["cause"] and got["cause"] in want.get("alt_causes", [])
    nodes, ranks = set(got["suspects"]["nodes"]), set(got["suspects"]["ranks"])
    need, victims = set(want["suspect_nodes"]), set(want.get("victim_nodes", []))
    hosts = {job["nodes"][r // job["gpus_per_node"]] for r in want["suspect_ranks"]}
    wanted = set(want["suspect_ranks"])
    passed = {
        "cause": got["cause"] == want["cause"] or other,
        "policy": got["policy"] == want["policy"] or other,
        "nodes": need <= nodes <= need | hosts and not nodes & (victims - need),
        "ranks": bool(ranks) and ranks <= wanted if wanted else not ranks & set(want.get("victim_ranks", [])),
    }
    if want["first_error_line"]:
        first = got["first_evidence"] or {"file": "", "line": -99}
        name, line = Path(first["file"]).name, first["line"]
        passed["line"] = (name == want["first_error_file"] and abs(line - want["first_error_line"]) <= 3) or (
            name.startswith("log") and abs(line - (want.get("first_log_error_line") or -999)) <= 3
        )
    return passed


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_story_has_its_cause_suspects_and_first_line(story: Story, tmp_path: Path) -> None:
    write(story, tmp_path / "case")
    failed = [measure for measure, ok in score(tmp_path / "case").items() if not ok]
    assert failed == [], answer(tmp_path / "case")


def test_each_cause_has_a_story() -> None:
    assert {story.cause for story in STORIES} == set(load_catalog().causes)


@pytest.mark.parametrize("story", STORIES[::12], ids=lambda story: story.name)
def test_the_command_prints_the_document_that_the_scorer_reads(story: Story, tmp_path: Path) -> None:
    case = tmp_path / "case"
    write(story, case)
    dmesg = [word for node in story.dmesg for word in ("--dmesg", f"{node}={case / f'dmesg.{node}.txt'}")]
    done = run("diagnose", "--json", "--job", str(case / "job.json"), *dmesg, str(case / "log.txt"))
    assert json.loads(done.stdout) == answer(case)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder of cases beside the checkout")
def test_the_cases_beside_the_checkout_reach_the_goals() -> None:
    results = [score(case) for case in sorted(SHARED.iterdir()) if (case / "expected.json").exists()]
    shares = {goal: sum(r[goal] for r in results if goal in r) / sum(goal in r for r in results) for goal in GOALS}
    assert {name: share for name, share in shares.items() if share < GOALS[name]} == {}


def run(*argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    code = "from krea_runner.cli.app import main; main()"
    return subprocess.run([sys.executable, "-c", code, *argv], input=stdin, capture_output=True, check=False)


def test_the_command_prints_an_answer_from_standard_input_and_escapes_the_log() -> None:
    log = b"[rank3]: Traceback (most recent call last):\n[rank3]: ValueError: \x1b]0;owned\x07bad \xe2\x80\xae\x9b2J\n"
    done = run("diagnose", "-", stdin=log)
    assert done.returncode == 0, done.stderr
    assert b"user_exception" in done.stdout
    assert b"ValueError" in done.stdout
    assert not {0x1B, 0x07} & set(done.stdout)
    assert "\u202e" not in done.stdout.decode()


def test_the_command_loads_no_history() -> None:
    code = (
        "import sys; sys.argv = ['krea-runner', 'diagnose', '-']\n"
        "from krea_runner.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=b"step 1\n", capture_output=True, check=True)
    loaded = done.stdout.decode().split("LOADED")[1].split()
    assert "hyperscan" in loaded or "krea_runner" in loaded
    assert not {"sqlalchemy", "alembic", "jinja2", "rich", "torch"} & set(loaded)


def test_a_job_json_may_have_slurms_form_of_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"nodes": "n[1-2]", "gpus_per_node": 4, "launcher": "srun"}')
    done = run("diagnose", "-", "--job", str(tmp_path / "job.json"), "--json", stdin=b"6: KeyError: 'x'\n")
    first = json.loads(done.stdout)["first_evidence"]
    assert (first["rank"], first["node"]) == (6, "n2")


def test_a_log_that_is_not_there_is_said_with_a_hint() -> None:
    done = run("diagnose", "/no/such/log")
    assert done.returncode == 3
    assert b"there is no log /no/such/log" in done.stderr


def test_signatures_test_tells_which_match_where(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("step 1\nsrun: error: n5: task 9: Segmentation fault (core dumped)\n")
    own = tmp_path / "own.toml"
    own.write_text('[[signature]]\nid = "own"\ncause = "storage_full"\nliteral = ["step 1"]\npattern = "step 1"\n')
    rows = run("signatures", "test", str(log), "--signatures", str(own)).stdout.decode().splitlines()
    assert [row.split("\t")[1] for row in rows] == ["own", "srun-task-signal"]
    matches = json.loads(run("signatures", "test", "--json", str(log)).stdout)["matches"]
    assert [(m["line"], m["cause"]) for m in matches] == [(2, "process_signal_crash")]


def test_a_wrong_table_of_signatures_names_its_entry(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[[signature]]\nid = "bad"\nliteral = ["abcd"]\npattern = "("\n')
    done = run("diagnose", "-", "--signatures", str(own))
    assert done.returncode == 78
    assert b"bad" in done.stderr
