"""What is read of a job that another script submitted, and what its being adopted changes in judging it."""

from dataclasses import replace
from pathlib import Path

import pytest

from krea_runner.cli import adopt as cli
from krea_runner.config import config_from_json, config_to_json
from krea_runner.diagnose.hang import judge_hang
from krea_runner.errors import ConfigError, SchedulerError, SchedulerOutputError
from krea_runner.launch import adopt
from krea_runner.launch.adopt import Given
from krea_runner.model import Attempt, AttemptKey, JobRecord, JobState, Snapshot
from krea_runner.observe.logs import read_logs
from krea_runner.observe.watch import advance_watch
from krea_runner.rundir import RunDir
from krea_runner.schedulers import slurm_describe
from krea_runner.schedulers.slurm_describe import JobDescription, log_patterns, parse_descriptions
from tests.unit.conftest import FakeClock, make_config, make_run

# squeue 22.05.8: a job called "a b|c<newline>d", and two tasks of an array
REAL = (
    "1\x1f1\x1ftrain\x1f1\x1f1\x1f365-00:00:00\x1fn1\x1f1\x1fa b|c\nd\x1f/w\x1f/w/j.sh\x1f/w/o-%x-%j-%N.out\x1e\n"
    "2_1\x1f4\x1ftrain\x1f1\x1f1\x1f30:00\x1fn1\x1f1\x1fj.sh\x1f/w\x1f/w/j.sh\x1f/w/slurm-4.out\x1e\n"
    "2_2\x1f2\x1ftrain\x1f1\x1f1\x1f30:00\x1fn1\x1f1\x1fj.sh\x1f/w\x1f(null)\x1f/w/slurm-2.out\x1e\n"
)


def job(**changes) -> JobDescription:
    base = JobDescription(
        "41", "41", "train", 2, 4, "1:00:00", "n1", True, "llm", "/w", "/w/train.sh", "/w/slurm-41.out"
    )
    return replace(base, **changes)


def record(**changes) -> JobRecord:
    return replace(JobRecord("41", JobState.RUNNING, "RUNNING", user="alice", nodelist="n[1-2]"), **changes)


@pytest.mark.parametrize(("text", "number"), [("4", 4), ("2-4", 2), ("1K", 1024), ("2K-4K", 2048)])
def test_counts_are_read_as_squeue_writes_them(text: str, number: int) -> None:
    (found,) = parse_descriptions(REAL.split("\x1e\n")[1].replace("train\x1f1\x1f", f"train\x1f{text}\x1f") + "\x1e\n")
    assert (found.nodes, found.has_script) == (number, True)


def test_any_characters_in_a_name_are_read() -> None:
    first, task, last = parse_descriptions(REAL)
    assert (first.name, first.stdout, task.job_id, task.raw_id) == ("a b|c\nd", "/w/o-%x-%j-%N.out", "2_1", "4")
    assert last.command == ""


@pytest.mark.parametrize("text", [REAL[:-1], REAL.replace("j.sh", "j\x1f.sh"), "squeue: error\n"])
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(SchedulerOutputError):
        parse_descriptions(text)


def test_the_id_of_an_array_names_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Said:
        stdout = REAL

    monkeypatch.setattr(slurm_describe, "ask", lambda *_, **__: Said)
    with pytest.raises(SchedulerError) as refused:
        slurm_describe.describe("2")
    assert refused.value.hint == "name one of: 2_1 2_2"
    assert slurm_describe.describe("4").job_id == "2_1"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["/w/slurm-41.out"]),
        ({"stdout": "log/%x-%j.%%"}, ["/w/log/llm-41.%"]),
        ({"stdout": "/l/%5j-%u-%t-%n-%s"}, ["/l/00041-alice-0-0-batch"]),
        ({"stdout": "/l/%N.log"}, ["/l/n1.log", "/l/*.log"]),
        ({"stdout": "/l/\\%j.log"}, ["/l/%j.log"]),
        ({"stdout": ""}, ["/w/slurm-41.out"]),
        (
            {"job_id": "40_3", "stdout": "/w/slurm-41.out"},
            ["/w/slurm-40_3.out", "/w/slurm-41.out"],
        ),
        ({"job_id": "40_3", "stdout": "/l/%A.%2a"}, ["/l/40.03"]),
    ],
)
def test_a_file_name_pattern_is_expanded_as_slurm_does(changes, expected) -> None:
    assert log_patterns(job(**changes), "alice") == expected


def test_only_what_slurm_does_not_know_is_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "out"
    there = job(stdout=str(log))
    flags = lambda given: [asked.flag for asked in adopt.questions(there, record(), given, "alice")]  # noqa: E731
    assert flags(Given()) == ["--log", "--checkpoint-dir"]
    assert flags(Given(log=Path("/dev/null"), checkpoint_dir="")) == []
    log.touch()
    assert flags(Given()) == ["--checkpoint-dir"]
    waiting = record(state=JobState.PENDING)
    assert adopt.log_of(job(stdout=str(tmp_path / "later")), waiting, "alice") == tmp_path / "later"
    assert adopt.log_of(job(stdout="/dev/null"), waiting, "alice") is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"user": "bob"}, "bob's"),
        ({"state": JobState.FAILED, "raw_state": "FAILED"}, "has ended already"),
        ({"state": JobState.UNKNOWN, "raw_state": "NEW"}, "says nothing we know"),
        ({"comment": "krea_runner/1"}, "looked after from another place"),
    ],
)
def test_a_job_that_cannot_be_looked_after_is_refused(changes, said: str) -> None:
    adopt.refuse(record(), "alice", is_root=False)
    with pytest.raises(SchedulerError, match=said) as refused:
        adopt.refuse(record(**changes), "alice", is_root=False)
    with pytest.raises(SchedulerError, match="no batch script"):
        adopt.refuse(record(), "alice", is_root=False, has_script=False)
    if "user" in changes:
        adopt.refuse(record(**changes), "root", is_root=True)
    else:
        assert refused.value.exit_code == 69


def test_the_run_of_a_job_survives_the_history(tmp_path: Path) -> None:
    given = Given(checkpoint_dir="ckpt", checkpoint_complete="", mode="observe", log=tmp_path / "x")
    config = adopt.config_of(job(workdir=str(tmp_path)), record(), given, "alice")
    assert (config.name, config.gang.world_size, config.run_dir) == ("llm", 4, tmp_path / "runs" / "llm")
    assert (config.checkpoint.directory, config.checkpoint.complete) == (tmp_path / "ckpt", "")
    assert (config.policy.mode, config.job_log) == ("observe", tmp_path / "x")
    assert config_from_json(config_to_json(config)) == config


def test_a_name_that_no_terminal_should_see_is_not_used(tmp_path: Path) -> None:
    config = adopt.config_of(job(name="a\nb", workdir=str(tmp_path)), record(), Given(log=tmp_path), "alice")
    assert config.name == "job-41"


def test_the_log_of_an_adopted_job_blames_only_its_first_start(tmp_path: Path) -> None:
    log = tmp_path / "out"
    log.write_bytes(b"srun: error: n1: task 3: Killed\n\x1b[2J")
    first = read_logs(RunDir(tmp_path), AttemptKey("41"), log)
    assert (first.size_bytes, first.tail) == (36, "srun: error: n1: task 3: Killed\n?[2J")
    assert read_logs(RunDir(tmp_path), AttemptKey("41", 1), log).tail == ""
    assert read_logs(RunDir(tmp_path), AttemptKey("41"), Path("/dev/null")).problems == ()
    assert read_logs(RunDir(tmp_path), AttemptKey("41"), tmp_path).problems != ()


def test_an_adopted_job_without_heartbeats_is_no_hang_and_no_blindness(tmp_path: Path, clock: FakeClock) -> None:
    config = make_config(tmp_path, job_log=tmp_path / "out")
    watch = None
    for _ in range(240):  # one look counts no more than it can have seen
        reading = Snapshot(make_run(config), clock.wall(), clock.mono()).heartbeats
        watch = advance_watch(
            watch, reading, attempt="41.r0", log_size_bytes=5, epoch_id="h", mono=clock.mono(), wall=clock.wall()
        )
        clock.sleep(60)
    snapshot = Snapshot(
        make_run(config),
        clock.wall(),
        clock.mono(),
        job=record(),
        attempt=Attempt(1, 1, AttemptKey("41"), 0.0),
        watch=watch,
    )
    judged = judge_hang(snapshot)
    assert (judged.finding, judged.blind) == (None, False)
    assert judged.line == "adopted, no heartbeats: hangs cannot be seen; its log is silent for 14400 s"


def test_on_a_terminal_what_is_missing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"log": "", "checkpoints": "ckpt"}
    asked = adopt.questions(job(stdout="/dev/null"), record(), Given(), "alice")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda text, **_: next(said[word] for word in said if word in text))
    given = cli._answered(Given(name="x"), asked, "41")
    assert given == Given(name="x", log=Path("/dev/null"), checkpoint_dir="ckpt")


def test_what_its_log_says_at_each_step_makes_an_adopted_jobs_hangs_visible() -> None:
    given = Given(log=Path("/w/o"), checkpoint_dir="", progress="megatron", progress_budget="10m")
    config = adopt.config_of(job(), record(), given, "alice")
    assert (config.progress.pattern, config.progress.budget_s) == ("megatron", 600.0)
    assert config_from_json(config_to_json(config)) == config
    assert not any("hangs" in note for note in cli._notes(record(), config))
    nowhere = replace(config, job_log=Path("/dev/null"))
    assert any("it has no log for --progress" in note for note in cli._notes(record(), nowhere))


def test_an_expression_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        adopt.config_of(job(), record(), Given(log=Path("/w/o"), progress="megatrn"), "alice")
    assert "did you mean 'megatron'?" in str(error.value.problems)
