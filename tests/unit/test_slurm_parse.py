"""Against what real Slurm commands printed (tests/recordings)."""

import pytest

from krea_runner.errors import JobNotFound, RequeueDisabled, SchedulerError, SchedulerOutputError, SchedulerUnavailable
from krea_runner.model import JobRecord, JobState
from krea_runner.schedulers.slurm_parse import (
    ROW_END,
    TEXT_END,
    answers,
    job_state,
    parse_config,
    parse_sacct,
    parse_sacct_starts,
    parse_squeue,
    parse_submitted,
    printable,
    read_refusal,
)
from tests.recordings import FOLDER, recording

VERSIONS = sorted(path.parent.name for path in FOLDER.glob("slurm-*/squeue-jobs.json"))


def played(version: str) -> dict[str, JobRecord]:
    """The recorded jobs by the part that each of them plays."""
    recorded = recording("squeue-jobs", version)
    found = answers(recorded.jobs.values(), parse_squeue(recorded.stdout))
    return {part: found[job_id] for part, job_id in recorded.jobs.items()}


SQUEUE_JOBS = [  # part, state, reason, restart count, exit code, signal, may be requeued
    ("completed", JobState.COMPLETED, "None", 0, 0, 0, True),
    ("failed", JobState.FAILED, "NonZeroExitCode", 0, 7, 0, True),
    ("killed", JobState.FAILED, "", 0, 0, 9, True),
    ("cancelled", JobState.CANCELLED, "None", 0, 0, 15, True),
    ("running", JobState.RUNNING, "None", 0, None, None, True),
    ("requeued", JobState.PENDING, "BeginTime", 1, None, None, True),
    ("held", JobState.PENDING, "JobHeldUser", 0, None, None, True),
    ("no_requeue", JobState.RUNNING, "None", 0, None, None, False),
    ("het", JobState.RUNNING, "None", 0, None, None, True),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("part", "state", "reason", "restarts", "code", "signal", "requeue"), SQUEUE_JOBS)
def test_squeue_row_is_read(version, part, state, reason, restarts, code, signal, requeue) -> None:
    job = played(version)[part]
    assert (job.state, job.raw_state, job.restart_count) == (state, state.value, restarts)
    ends = (
        {(code, signal), (143, 0)} if part == "cancelled" else {(code, signal)}
    )  # who dies first, the shell or its child
    assert (job.exit_code, job.signal) in ends
    assert job.requeue_allowed == requeue
    assert job.reason == reason or part == "killed"  # JobLaunchFailure; from 24.11 on RaisedSignal:9(Killed)


@pytest.mark.parametrize("version", VERSIONS)
def test_times_are_epochs_and_only_an_ended_job_has_an_end(version) -> None:
    jobs = played(version)
    failed, running, requeued = jobs["failed"], jobs["running"], jobs["requeued"]
    assert failed.submitted_at <= failed.started_at <= failed.ended_at
    assert running.started_at is not None
    assert running.ended_at is None
    assert 119 <= requeued.started_at - requeued.submitted_at <= 123
    assert jobs["held"].started_at is None


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_are_named_only_where_there_are_any(version) -> None:
    jobs = played(version)
    assert (jobs["running"].nodelist, jobs["running"].batch_node) == ("n1", "n1")
    assert (jobs["requeued"].nodelist, jobs["requeued"].batch_node) == ("", "")


@pytest.mark.parametrize("version", VERSIONS)
def test_whole_array_is_unknown_and_its_tasks_are_not(version) -> None:
    recorded = recording("squeue-jobs", version)
    array = recorded.jobs["array"]
    records = parse_squeue(recorded.stdout)
    found = answers([array, f"{array}_1", f"{array}_3"], records)
    assert (found[array].state, found[array].raw_state) == (JobState.UNKNOWN, "an array of 3 tasks")
    assert (found[f"{array}_1"].state, found[f"{array}_3"].state) == (JobState.RUNNING, JobState.PENDING)


@pytest.mark.parametrize("version", VERSIONS)
def test_comments_keep_bars_and_line_breaks(version) -> None:
    recorded = recording("squeue-mine", version)
    comments = {job.job_id: job.comment for job in parse_squeue(recorded.stdout)}
    assert comments[recorded.jobs["held"]] == "krea_runner/0123456789abcdef"
    assert comments[recorded.jobs["no_requeue"]] == "bars | and\nline breaks"
    assert comments[recorded.jobs["running"]] == ""
    assert recorded.jobs["het"] in comments


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", ["squeue-bad_format", "squeue-bad_format_no_jobs"])
def test_refused_format_with_exit_code_0_is_not_an_empty_queue(version, case) -> None:
    recorded = recording(case, version)
    assert recorded.returncode == 0
    with pytest.raises(SchedulerOutputError):
        parse_squeue(recorded.stdout, recorded.stderr)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_output_is_no_jobs(version) -> None:
    recorded = recording("squeue-unknown", version)
    assert parse_squeue(recorded.stdout, recorded.stderr) == []
    assert parse_squeue("", "squeue: a plugin's greeting\n") == []


GOOD = f"7|RUNNING|0|0|1796136529|1796136529|NONE|n1|n1|1|alice|None{TEXT_END}llm{TEXT_END}(null){ROW_END}\n"


@pytest.mark.parametrize(
    "damaged",
    [
        GOOD.replace(ROW_END, ""),
        GOOD[:-1],
        GOOD + GOOD[:20],
        "slurm_load_jobs: hello\n" + ROW_END + "\n",
        GOOD.replace(TEXT_END, ""),
        GOOD.replace("|n1|n1", ""),
        GOOD.replace("1796136529", "2026-12-01T14:00:00"),
        GOOD.replace("|0|0|", "|many|0|"),
    ],
    ids=["no-end", "no-newline", "cut-row", "greeting", "no-reason", "two-fields-short", "local-time", "restart-count"],
)
def test_squeue_row_that_cannot_be_read_is_an_error_that_keeps_it(damaged) -> None:
    with pytest.raises(SchedulerOutputError) as caught:
        parse_squeue(damaged)
    assert caught.value.line.strip()
    assert caught.value.line in damaged.replace(f"{ROW_END}\n", "") or caught.value.line in damaged


def test_reason_may_hold_bars_and_line_breaks() -> None:
    text = GOOD.replace("|None", "|(a | b\nc)")
    assert parse_squeue(text + GOOD)[0].reason == "(a | b\nc)"


def test_a_comment_may_hold_what_ends_a_row_and_another_row_after_it() -> None:
    comment = f"a|b{TEXT_END}c{ROW_END}\n{GOOD.replace('7|RUNNING', '8|FAILED', 1)}"
    asked = f"{ROW_END}mark"
    rows = GOOD.replace(ROW_END, asked).replace("(null)", comment) + GOOD.replace(ROW_END, asked).replace("7|", "8|", 1)
    first, second = parse_squeue(rows, row_end=asked)
    assert (first.job_id, first.comment, second.job_id, second.state) == ("7", comment, "8", JobState.RUNNING)


# ---------------------------------------------------------------------------------------------------------------- sacct


SACCT_JOBS = [  # part, state, restart count, exit code, signal
    ("completed", JobState.COMPLETED, 0, 0, 0),
    ("failed", JobState.FAILED, 0, 7, 0),
    ("code_137", JobState.FAILED, 0, 9, 0),  # cut to seven bits, until 24.11
    ("killed", JobState.FAILED, 0, 0, 9),
    ("cancelled", JobState.CANCELLED, 0, 0, None),
    ("restarted", JobState.FAILED, 2, 9, 0),
    ("het", JobState.COMPLETED, 0, 0, 0),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("part", "state", "restarts", "code", "signal"), SACCT_JOBS)
def test_accounting_row_is_read(version, part, state, restarts, code, signal) -> None:
    recorded = recording("sacct-jobs", version)
    job = answers(recorded.jobs.values(), parse_sacct(recorded.stdout))[recorded.jobs[part]]
    if part == "code_137" and version == "slurm-26.05.5":
        code = 137
    assert (job.state, job.restart_count, job.exit_code) == (state, restarts, code)
    assert signal is None or job.signal == signal  # of a cancelled job it is 0 or 15, depending on when it is asked
    assert job.submitted_at <= job.started_at <= job.ended_at
    assert job.nodelist == "n1"


@pytest.mark.parametrize("version", VERSIONS)
def test_job_that_only_accounting_calls_running_is_unknown(version) -> None:
    recorded = recording("sacct-jobs", version)
    job = answers([recorded.jobs["running"]], parse_sacct(recorded.stdout))[recorded.jobs["running"]]
    assert (job.state, job.raw_state) == (JobState.UNKNOWN, "RUNNING (sacct, not in squeue)")


def test_job_that_lost_a_node_did_not_start_twice() -> None:
    rows = ["5|RESIZING|0:0|10|11|12|n[1-2]|None", "5|REQUEUED|0:0|10|12|13|n1|None", "5|FAILED|1:0|14|15|16|n1|None"]
    assert parse_sacct("\n".join(rows))[0].restart_count == 1


@pytest.mark.parametrize("first", ["5|PENDING|0:0|10|Unknown|Unknown|None|None", "5|RUNNING|0:0|10|11|Unknown|n1|None"])
def test_two_rows_of_one_start_are_one(first: str) -> None:
    (record,) = parse_sacct(f"{first}\n5|CANCELLED by 7|0:0|10|11|16|n1|None")
    assert (record.restart_count, record.state) == (0, JobState.CANCELLED)


def test_accounting_has_a_row_for_each_start_in_order() -> None:
    recorded = recording("sacct-jobs")
    starts = parse_sacct_starts(recorded.stdout)[recorded.jobs["restarted"]]
    assert [start.restart_count for start in starts] == [0, 1, 2]
    assert [start.state for start in starts] == [JobState.REQUEUED, JobState.REQUEUED, JobState.FAILED]


@pytest.mark.parametrize("version", VERSIONS)
def test_accounting_that_knows_none_is_empty(version) -> None:
    assert parse_sacct(recording("sacct-unknown", version).stdout) == []


@pytest.mark.parametrize("line", ["5|FAILED|1:0", "5|FAILED|one|1|2|3|n1|None", "5|FAILED|1:0|soon|2|3|n1|None", ""])
def test_accounting_row_that_cannot_be_read_is_an_error_that_keeps_it(line) -> None:
    with pytest.raises(SchedulerOutputError) as caught:
        parse_sacct(line + "\n")
    assert caught.value.line == line


# --------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("NODE_FAIL", JobState.NODE_FAIL),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("CANCELLED by 1001", JobState.CANCELLED),
        ("COMPLETING", JobState.COMPLETING),
        ("REQUEUE_HOLD", JobState.REQUEUE_HOLD),
        ("running", JobState.UNKNOWN),
        ("RUNNING,COMPLETING", JobState.UNKNOWN),
        ("CANCELLED+", JobState.UNKNOWN),
        ("EXPEDITING", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_only_words_that_are_known_are_states(word, state) -> None:
    assert job_state(word) is state


def test_state_never_seen_before_is_kept_as_it_was() -> None:
    job = parse_squeue(GOOD.replace("RUNNING", "TELEPORTING"))[0]
    assert (job.state, job.raw_state) == (JobState.UNKNOWN, "TELEPORTING")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("squeue-controller_down", SchedulerUnavailable),
        ("squeue-controller_stopped", SchedulerUnavailable),
        ("squeue-no_munge", SchedulerUnavailable),
        ("squeue-unknown_alone", JobNotFound),
        ("sacct-slurmdbd_down", SchedulerUnavailable),
        ("sacct-disabled", SchedulerError),
        ("sbatch-controller_down", SchedulerUnavailable),
        ("sbatch-controller_stopped", SchedulerUnavailable),
        ("sbatch-no_munge", SchedulerUnavailable),
        ("sbatch-bad_partition", SchedulerError),
        ("sbatch-bad_option", SchedulerError),
        ("sbatch-bad_gres", SchedulerError),
        ("scontrol-ping_controller_down", SchedulerUnavailable),
        ("scontrol-requeue_controller_down", SchedulerUnavailable),
        ("scontrol-requeue_controller_stopped", SchedulerUnavailable),
        ("scontrol-requeue_unknown", JobNotFound),
        ("scontrol-requeue_pending", SchedulerError),
        ("scontrol-requeue_disabled", RequeueDisabled),
        ("scontrol-requeue_denied", SchedulerError),
        ("scontrol-update_controller_down", SchedulerUnavailable),
        ("scontrol-update_controller_stopped", SchedulerUnavailable),
        ("scontrol-update_unknown", JobNotFound),
        ("scontrol-update_denied", SchedulerError),
        ("scancel-controller_down", SchedulerUnavailable),
        ("scancel-controller_stopped", SchedulerUnavailable),
        ("scancel-denied", SchedulerError),
    ],
)
def test_refusal_says_whether_anything_is_known(version, case, kind) -> None:
    recorded = recording(case, version)
    assert recorded.returncode != 0
    assert read_refusal(recorded.stderr or recorded.stdout)[0] is kind


def test_words_never_seen_before_are_a_plain_refusal() -> None:
    assert read_refusal("sbatch: error: the moon is in the wrong phase") == (SchedulerError, "")


# -------------------------------------------------------------------------------------------------- sbatch and scontrol


@pytest.mark.parametrize(
    ("text", "job_id"), [("25\n", "25"), ("25;krea\n", "25"), ("Welcome to the cluster!\nproject 7 is low\n25\n", "25")]
)
def test_job_id_is_read(text, job_id) -> None:
    assert parse_submitted(text) == job_id


@pytest.mark.parametrize("text", ["", "Submitted batch job 25\n", "25 26\n"])
def test_no_job_id_is_an_error(text) -> None:
    with pytest.raises(SchedulerOutputError):
        parse_submitted(text)


@pytest.mark.parametrize("version", VERSIONS)
def test_accepted_job_was_given_an_id(version) -> None:
    assert parse_submitted(recording("sbatch-accepted", version).stdout).isdigit()


@pytest.mark.parametrize("version", VERSIONS)
def test_configuration_is_read(version) -> None:
    config = parse_config(recording("scontrol-config", version).stdout)
    assert version == f"slurm-{config['SLURM_VERSION']}"
    assert (config["JobRequeue"], config["MinJobAge"]) == ("1", "300 sec")


def test_what_a_command_said_becomes_one_printable_line() -> None:
    said = "sbatch: error: first \x1b[31mred\nsbatch: error: second\n*****\n"
    assert printable(said) == "first ?[31mred; second"
    assert len(printable("x" * 100_000)) == 500
