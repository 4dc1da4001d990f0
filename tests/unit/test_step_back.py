"""Going on from an older checkpoint: only when asked, only on the same evidence twice, recorded and told."""

import dataclasses
import json
import os
import subprocess
import zipfile

import pytest

from krea_runner.decide.step_back import Death, step_to_leave
from krea_runner.launch.render import render
from krea_runner.model import (
    Attempt,
    AttemptKey,
    CheckpointReading,
    CheckpointSpec,
    Decision,
    DecisionKind,
    Finding,
    Incident,
    Snapshot,
    Symptom,
)
from krea_runner.observe.resumed import left_mark, read_left, resumed_step
from krea_runner.rundir import RunDir
from krea_runner.supervise.start_from import start_of
from krea_runner.supervise.step_back import stepped_back
from tests.unit.conftest import make_config, make_run

NOW = 1_800_000_000.0
REQUEUE = Decision(DecisionKind.REQUEUE, "from step 30, same job; restart 2 of 20")


@pytest.mark.parametrize(
    ("deaths", "step"),
    [
        ([(30, 90), (30, 90)], 30),
        ([(20, 90), (30, 90), (30, 90)], 30),
        ([(30, 90)], None),
        ([(20, 90), (30, 90)], None),
        ([(30, 9000), (30, 90)], None),
        ([(30, None), (30, 90)], None),
        ([(None, 90), (None, 90)], None),
        ([], None),
    ],
)
def test_two_deaths_soon_after_loading_the_same_one_speak_against_it(deaths, step) -> None:
    assert step_to_leave([Death(*one) for one in deaths]) == step


@pytest.fixture
def case(tmp_path):
    """Two attempts that loaded step 30 and died within 90 s; step 20 is whole too."""
    directory = tmp_path / "ckpt"
    for step in (20, 30):
        (directory / f"step_{step}").mkdir(parents=True)
        (directory / f"step_{step}" / "COMPLETE").touch()
    spec = CheckpointSpec(directory=directory, step_back=True)
    config = make_config(tmp_path, checkpoint=spec)
    run_dir = RunDir(config.run_dir)
    run_dir.events.mkdir(parents=True)
    attempts = []
    for count in range(2):
        key = AttemptKey("7", count)
        event = {"event": "attempt_start", "attempt": str(key), "at": NOW, "resume_step": 30}
        run_dir.script_events(key).write_text(json.dumps(event) + "\n")
        attempts.append(Attempt(count + 1, 1, key, NOW, started_at=NOW, ended_at=NOW + 90))
    finding = Finding(Symptom.CRASH, "exit_code", "x")
    earlier = [Incident(1, 1, "llm", AttemptKey("7", 0), finding, NOW + 90, 30, REQUEUE)]

    def judge(spec=spec, decision=REQUEUE, **more):
        run = make_run(dataclasses.replace(config, checkpoint=spec))
        snapshot = Snapshot(run=run, wall_at=NOW + 300, mono=0.0, attempt=attempts[-1])
        start = start_of(run.config, CheckpointReading(), now=NOW, **more)
        return stepped_back(snapshot, attempts[-1], finding, decision, earlier, attempts, start, **more)

    return config, run_dir, spec, judge


def test_it_steps_back_and_says_so_in_the_decision(case) -> None:
    _, run_dir, spec, judge = case
    said = judge().reason
    assert (
        said
        == "died 2 times soon after loading step 30: stepping back to step 20; from step 20, same job; restart 2 of 20"
    )
    assert read_left(run_dir) == {left_mark(spec, spec.directory / "step_30")}


def test_it_is_not_done_unless_asked_for(case) -> None:
    _, run_dir, spec, judge = case
    assert judge(dataclasses.replace(spec, step_back=False)) == REQUEUE
    assert read_left(run_dir) == frozenset()


def test_a_dry_run_and_a_hold_leave_everything_as_it_is(case) -> None:
    _, run_dir, _, judge = case
    assert "stepping back" in judge(dry_run=True).reason
    hold = Decision(DecisionKind.HOLD, "x")
    assert judge(decision=hold) == hold
    assert read_left(run_dir) == frozenset()


def test_the_only_whole_one_is_never_left(case) -> None:
    _, run_dir, spec, judge = case
    (spec.directory / "step_20" / "COMPLETE").unlink()
    assert judge() == REQUEUE
    assert read_left(run_dir) == frozenset()


def test_what_cannot_be_written_is_said(case) -> None:
    _, run_dir, _, judge = case
    run_dir.left_checkpoints.mkdir()
    assert "could not step back from step_30" in judge().reason


def resumed(config, tmp_path) -> tuple[str, int | None]:
    """What the real batch script exports to its ranks, run by bash with a srun of ours."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    srun = tmp_path / "bin" / "srun"
    log = f"{config.run_dir}/logs/7.r5/node-"
    srun.write_text(f'#!/bin/sh\nprintf %s "$KREA_RESUME_FROM" >{tmp_path}/from\ntouch {log}0.log {log}1.log\n')
    srun.chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(render(config))
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "5"}
    RunDir(config.run_dir).script_events(AttemptKey("7", 5)).unlink(missing_ok=True)
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return (tmp_path / "from").read_text(), resumed_step(RunDir(config.run_dir), AttemptKey("7", 5))


def test_the_batch_script_names_the_newest_whole_one_that_was_not_left(case, tmp_path) -> None:
    config, run_dir, spec, _ = case
    (spec.directory / "step_40").mkdir()  # half-written
    (spec.directory / "step_9").mkdir()
    (spec.directory / "step_9" / "COMPLETE").touch()  # by number, not by name
    assert resumed(config, tmp_path) == (str(spec.directory / "step_30"), 30)
    run_dir.left_checkpoints.write_text(left_mark(spec, spec.directory / "step_30") + "\n")
    assert resumed(config, tmp_path) == (str(spec.directory / "step_20"), 20)
    os.utime(spec.directory / "step_30" / "COMPLETE", (NOW, NOW))  # written again
    assert resumed(config, tmp_path) == (str(spec.directory / "step_30"), 30)


def torch_file(path, *, whole=True) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    if not whole:
        path.write_bytes(path.read_bytes()[:-30])


def test_one_that_says_it_is_whole_and_is_not_is_not_loaded_and_that_is_said(case, tmp_path) -> None:
    config, run_dir, spec, _ = case
    for step in (20, 30):
        torch_file(spec.directory / f"step_{step}" / "model.pt", whole=step == 20)
    start = start_of(config, CheckpointReading(), now=NOW)
    assert (start.step, start.note.partition(":")[0]) == (20, "step_30 is broken, not loaded")
    assert resumed(config, tmp_path) == (str(spec.directory / "step_20"), 20)
    torch_file(spec.directory / "step_30" / "model.pt")  # mended
    assert start_of(config, CheckpointReading(), now=NOW).step == 30
    assert run_dir.broken_checkpoints.read_text() == ""
    assert resumed(config, tmp_path) == (str(spec.directory / "step_30"), 30)


def test_where_no_checkpoint_looks_whole_the_users_own_rule_is_trusted(case, tmp_path) -> None:
    config, run_dir, spec, _ = case
    for step in (20, 30):
        (spec.directory / f"step_{step}" / "model.pt").write_bytes(
            b"a form of their own, that only has the same ending"
        )
    assert start_of(config, CheckpointReading(), now=NOW).step == 30
    assert not run_dir.broken_checkpoints.exists()
    assert resumed(config, tmp_path) == (str(spec.directory / "step_30"), 30)


def test_a_dry_run_writes_nothing_of_broken_ones_either(case) -> None:
    config, run_dir, spec, _ = case
    torch_file(spec.directory / "step_20" / "model.pt")
    torch_file(spec.directory / "step_30" / "model.pt", whole=False)
    assert start_of(config, CheckpointReading(), now=NOW, dry_run=True).step == 20
    assert not run_dir.broken_checkpoints.exists()


@pytest.mark.parametrize("pattern", ['it\'s {step} "x"', "a*b?[{step}]", "$(touch CANARY){step}", "{step}"])
def test_any_pattern_is_text_to_the_batch_script(case, tmp_path, pattern) -> None:
    config, _, spec, _ = case
    for step in (5, 12):
        name = pattern.replace("{step}", str(step))
        (spec.directory / name).mkdir()
        (spec.directory / name / "COMPLETE").touch()
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(spec, pattern=pattern))
    assert resumed(config, tmp_path) == (str(spec.directory / pattern.replace("{step}", "12")), 12)
    assert not list(tmp_path.rglob("CANARY"))


def test_without_a_checkpoint_the_variable_is_empty(case, tmp_path) -> None:
    config, _, spec, _ = case
    empty = dataclasses.replace(spec, directory=tmp_path / "none")
    assert resumed(dataclasses.replace(config, checkpoint=empty), tmp_path) == ("", None)
