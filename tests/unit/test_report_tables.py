import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from krea_runner.model import (
    Action,
    ActionKind,
    ActionStage,
    AttemptKey,
    Checkpoint,
    CheckpointReading,
    Decision,
    DecisionKind,
    Diagnosis,
    Finding,
    HeartbeatReading,
    Incident,
    JobRecord,
    JobState,
    Run,
    RunState,
    Symptom,
)
from krea_runner.report.status import view_run
from krea_runner.report.tables import Sheet, history_sheet, plain_lines, run_block, status_sheet, terminal_sheet
from krea_runner.report.words import ago, one_line, phases, reference, seconds, utc_time

from .conftest import FakeClock, Gang4, make_config, make_run

NOW = 1_800_000_000.0


def make_incident(**changes: Any) -> Incident:
    finding = Finding(
        symptom=Symptom.HANG, cause="rank_stopped", summary="hang: rank 3 on n2 stopped: neither beats nor flushes",
        node="n2", step=128, last_progress_at=NOW - 110.0,
    )  # fmt: skip
    base = Incident(
        incident_id=1, run_id=1, run_name="llm", attempt=AttemptKey("4711", 2), finding=finding, noticed_at=NOW - 100.0,
        checkpoint_step=120, decision=Decision(DecisionKind.REQUEUE, "from step 120, same job; restart 1 of 20"),
        restarted_at=NOW - 98.0, resumed_at=NOW - 59.0, resumed_step=121,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def on_terminal(sheet: Sheet, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, highlight=False)
    console.print(terminal_sheet(sheet, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


# ------------------------------------------------------------------------------------------------------------ history


def test_incident_in_a_pipe_is_one_line_with_every_column() -> None:
    header, line = plain_lines(history_sheet([make_incident()], now=NOW))
    assert header.split() == ("when run attempt step symptom cause node lost noticed resumed decision why what".split())
    assert [cell.strip() for cell in line.split("  ") if cell.strip()] == [
        "2027-01-15T07:58:20Z", "llm", "4711.r2", "128", "hang", "rank_stopped", "n2", "8", "10.0s", "41.0s", "REQUEUE",
        "from step 120, same job; restart 1 of 20", "hang: rank 3 on n2 stopped: neither beats nor flushes",
    ]  # fmt: skip


def test_what_the_logs_say_takes_the_place_of_how_it_showed() -> None:
    told = Diagnosis(
        "gpu_fell_off_bus", "restart_and_exclude_node", "a GPU fell off the bus", confidence="high", nodes=("n7",),
        first="logs/4711.r2/node-0.log:9: CUDA error",
    )  # fmt: skip
    finding = dataclasses.replace(make_incident().finding, diagnosis=told)
    sheet = history_sheet([make_incident(finding=finding)], now=NOW)
    _, line = plain_lines(sheet)
    assert line.split()[5:7] == ["gpu_fell_off_bus", "n7"]
    why = "a GPU fell off the bus, suspect node n7: logs/4711.r2/node-0.log:9: CUDA error"
    assert line.endswith(f"{finding.summary}; {why}")
    assert " ".join(" ".join(on_terminal(sheet)).split()).count(why) == 1
    unsure = dataclasses.replace(told, confidence="medium")
    _, line = plain_lines(
        history_sheet([make_incident(finding=dataclasses.replace(finding, diagnosis=unsure))], now=NOW)
    )
    assert line.split()[5:7] == ["gpu_fell_off_bus", "n2"]
    assert "a GPU fell off the bus (medium confidence)" in line
    silent = dataclasses.replace(finding, diagnosis=Diagnosis("unknown_failure"))
    assert silent.line == finding.summary


def test_what_is_not_known_is_a_dash() -> None:
    unknown = make_incident(
        finding=Finding(Symptom.REQUEUED_ELSEWHERE, "unknown", "requeued by Slurm or a person, not by us"),
        restarted_at=None, resumed_at=None, resumed_step=None,
    )  # fmt: skip
    line = plain_lines(history_sheet([unknown], now=NOW))[1]
    assert line.split()[2:10] == ["4711.r2", "-", "requeued_elsewhere", "unknown", "-", "-", "-", "-"]


def test_long_text_is_whole_in_a_pipe_and_columns_stay_aligned() -> None:
    reason = "why " * 200
    incidents = [make_incident(decision=Decision(DecisionKind.HOLD, reason)), make_incident(run_name="数据集-训练")]
    header, first, second = plain_lines(history_sheet(incidents, now=NOW))
    assert reason.strip() in first
    assert header.index("attempt") == first.index("4711.r2")
    # Each of the five ideographs is two columns wide.
    assert second.index("4711.r2") == first.index("4711.r2") - 5


@pytest.mark.parametrize("width", [80, 60, 200])
def test_terminal_never_needs_more_than_its_width(width: int) -> None:
    incidents = [make_incident(run_name="a-very-long-name-of-a-run-" * 5), make_incident(run_name="数据集-训练")]
    lines = on_terminal(history_sheet(incidents, now=NOW), width)
    assert max(len(line) for line in lines) <= width
    text = " ".join(" ".join(lines).split())
    assert "→ REQUEUE: from step 120, same job; restart 1 of 20" in text
    assert "hang: rank 3 on n2 stopped: neither beats nor flushes (attempt 4711.r2)" in text


def test_terminal_times_say_what_they_are_local_to() -> None:
    assert on_terminal(history_sheet([make_incident()], now=NOW))[0].split()[1][0] in "+-"


def test_markup_and_escapes_in_names_are_shown_and_not_obeyed() -> None:
    hostile = make_incident(run_name="[red]x[/red] \x1b[31m\nnext")
    for lines in (plain_lines(history_sheet([hostile], now=NOW)), on_terminal(history_sheet([hostile], now=NOW), 200)):
        text = "\n".join(lines)
        assert "[red]x[/red] ?[31m\\nnext" in text
        assert "\x1b[31m" not in text


# ------------------------------------------------------------------------------------------------------------- status


def view_of(gang: Gang4, memory: Any = None, incidents: Any = (), action: Any = None, **changes: Any) -> Any:
    snapshot = dataclasses.replace(gang.look(), **changes)
    return view_run(
        snapshot, memory, attempts=[snapshot.attempt] if snapshot.attempt else [], incidents=incidents, action=action,
        epoch_id=gang.clock.epoch_id(),
    )  # fmt: skip


def test_first_look_does_not_claim_that_ranks_move(gang: Gang4) -> None:
    view = view_of(gang, memory=None)
    assert view.beat_age_s is None
    assert view.judgement == "seen for the first time: the next look tells whether it moves"


def test_moving_gang_is_in_progress(gang: Gang4) -> None:
    gang.pass_time(5, beating={0, 1, 2, 3})
    memory = gang.watch
    gang.clock.sleep(1)
    gang.change(0, beat=99)
    view = view_of(gang, memory)
    assert view.judgement == "in progress, last beat 0 s ago"
    assert (view.beat_age_s, view.is_failing) == (0.0, False)


def test_hang_that_no_supervisor_has_acted_on_is_shown_as_failing(gang: Gang4) -> None:
    gang.pass_time(30, flushing={0, 1, 2})
    view = view_of(gang, gang.watch)
    assert view.is_failing
    assert view.judgement.startswith("hung: frozen 30 s")
    assert view.beat_age_s == pytest.approx(30, abs=1)


def test_memory_of_another_host_is_not_judged_but_dated(gang: Gang4) -> None:
    gang.pass_time(30)
    memory = gang.watch
    gang.clock.host, gang.clock.steady = "login2/boot", 5.0
    view = view_of(gang, memory)
    assert view.judgement == "watched from login1: a beat was last seen to move 30 s ago"
    assert not view.is_failing


def test_scheduler_that_was_not_asked_leaves_the_rest_visible(gang: Gang4) -> None:
    view = view_of(gang, None, job=None, blind="could not see: no answer")
    lines = plain_lines(status_sheet([view], now=NOW))
    assert "could not see: no answer" in lines[1]
    assert view.step == 5
    assert view.blind


def test_job_that_ended_before_the_supervisor_looked_is_failing(gang: Gang4) -> None:
    view = view_of(gang, None, job=JobRecord("7", JobState.FAILED, "FAILED", exit_code=1))
    assert view.judgement.startswith("crash: job 7 ended FAILED (1:0)")
    assert view.is_failing


def test_job_unknown_to_the_scheduler_is_not_called_ended(gang: Gang4) -> None:
    view = view_of(gang, None, job=None)
    assert view.judgement == "could not see: job 7 is not known to the scheduler any more"
    assert not view.is_failing


@pytest.mark.parametrize(
    ("name", "typed"), [("llm", "llm"), ("my run", "'my run'"), ("-x", "1"), ("a\nb", "1"), ("$(rm)", "'$(rm)'")]
)
def test_held_run_says_why_and_what_to_type(tmp_path: Any, clock: FakeClock, name: str, typed: str) -> None:
    run = make_run(make_config(tmp_path, name=name), name=name, state=RunState.HELD, state_reason="budget spent")
    held = view_of(Gang4(run, clock))
    for text in (
        plain_lines(status_sheet([held], now=NOW))[1],
        *[t for _, t, _ in run_block(held, now=NOW, when=utc_time) if "go on" in t],
    ):
        assert f"o go on: krea-runner resume {typed}" in text
    assert "HELD: budget spent." in plain_lines(status_sheet([held], now=NOW))[1]


def test_problems_checkpoints_action_and_incident_are_noted(gang: Gang4, run: Run) -> None:
    view = view_of(
        gang,
        gang.watch,
        incidents=[make_incident()],
        action=Action(1, 1, 1, ActionKind.REQUEUE, ActionStage.REQUESTED, "7", 0, "", NOW, NOW),
        heartbeats=HeartbeatReading(gang.look().heartbeats.ranks, problems=("n1.hb slot 0: torn, or not a heartbeat",)),
        checkpoints=CheckpointReading(Checkpoint(120, run.config.run_dir / "step_120"), incomplete=("step_128",)),
    )
    text = plain_lines(status_sheet([view], now=NOW))[1]
    for said in (
        "could not see: n1.hb slot 0: torn, or not a heartbeat",
        "checkpoint not whole: step_128",
        "requeue of job 7 under way: requested",
        "last incident",
        " 120 ",
        " 1/3 ",
    ):
        assert said in text
    block = "\n".join(f"{label} {text}" for label, text, _ in run_block(view, now=NOW, when=utc_time))
    for said in (
        "saved step 120, ",
        "not whole: step_128",
        "restarts 1 of 3 in 1d00h",
        "action requeue of job 7 requested",
    ):
        assert said in block


def test_status_fits_80_columns(gang: Gang4) -> None:
    view = view_of(gang, incidents=[make_incident()])
    lines = on_terminal(status_sheet([view], now=NOW, caption="supervisor last looked 4 s ago on login1"))
    assert max(len(line) for line in lines) <= 80
    assert lines[0].split() == "run state job slurm att step saved beat used".split()
    assert lines[-1] == "supervisor last looked 4 s ago on login1"


# -------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0.0s"), (59.94, "59.9s"), (59.97, "1m00s"), (190, "3m10s"), (7500, "2h05m"), (97200, "1d03h")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.4, "just now"),
        (-3, "just now"),
        (119, "119 s ago"),
        (180, "3 min ago"),
        (7200, "2 h ago"),
        (259200, "3 days ago"),
    ],
)
def test_ago(value: float, text: str) -> None:
    assert ago(value) == text


def test_one_line_keeps_text_and_disarms_the_rest() -> None:
    assert one_line("a\tb\nc\r\x1b[2J\u202eé数") == "a b\\nc\\r?[2J?é数"


def test_phases() -> None:
    assert phases([]) == ""
    assert phases(["step"] * 4) == "step"
    assert phases(["step", "step", "checkpoint"]) == "2 step, 1 checkpoint"


def test_reference_of_a_name_with_blanks_at_its_ends_is_the_id(run: Run) -> None:
    assert reference(dataclasses.replace(run, name=" x ")) == "1"
