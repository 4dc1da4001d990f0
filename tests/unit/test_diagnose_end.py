import dataclasses

import pytest

from krea_runner.diagnose.end import diagnose_end, exit_codes, exit_word
from krea_runner.model import JobRecord, JobState, LogReading, ScriptEnd, Symptom

# As srun 22.05.8 printed it with -K when rank 3 exited with 5.
SRUN_EXIT = """krea_runner: attempt 7.r0 on n[1-4]
srun: error: n2: task 3: Exited with exit code 5
srun: launch/slurm: _step_signal: Terminating StepId=5.0
srun: error: n2: task 2: Terminated
srun: error: n4: tasks 6-7: Terminated
srun: Force Terminated StepId=5.0
"""
SRUN_KILLED = """srun: error: n4: tasks 6-7: Terminated
srun: error: n2: task 3: Killed
"""


def ended(gang, state: JobState, **job):
    snapshot = gang.look()
    tail, end = job.pop("tail", ""), job.pop("script_end", None)
    return dataclasses.replace(
        snapshot,
        job=JobRecord("7", state, str(state), ended_at=1_800_000_100.0, **job),
        log=LogReading(tail=tail),
        script_end=end,
    )


@pytest.mark.parametrize(
    ("state", "symptom", "cause"),
    [
        (JobState.FAILED, Symptom.CRASH, "exit_code"),
        (JobState.OUT_OF_MEMORY, Symptom.CRASH, "out_of_memory"),
        (JobState.NODE_FAIL, Symptom.NODE_FAIL, "node_fail"),
        (JobState.TIMEOUT, Symptom.TIME_LIMIT, "time_limit"),
        (JobState.PREEMPTED, Symptom.PREEMPTED, "preempted"),
        (JobState.CANCELLED, Symptom.CANCELLED, "cancelled"),
    ],
)
def test_each_end_state_has_its_symptom(gang, state, symptom, cause) -> None:
    finding = diagnose_end(ended(gang, state))
    assert finding is not None
    assert (finding.symptom, finding.cause) == (symptom, cause)
    assert finding.last_progress_at == 1_800_000_100.0


@pytest.mark.parametrize("state", [state for state in JobState if not state.is_ended] + [JobState.COMPLETED])
def test_what_has_not_ended_badly_is_no_finding(gang, state) -> None:
    assert diagnose_end(ended(gang, state)) is None


def test_every_ended_state_but_completed_is_an_end(gang) -> None:
    for state in JobState:
        if state.is_ended and state is not JobState.COMPLETED:
            assert diagnose_end(ended(gang, state)) is not None


def test_the_first_rank_to_fail_is_named_and_its_own_exit_code_kept(gang) -> None:
    snapshot = ended(gang, JobState.FAILED, exit_code=143, tail=SRUN_EXIT, script_end=ScriptEnd(143, 0.0))
    finding = diagnose_end(snapshot)
    assert finding is not None
    assert finding.summary == "crash: rank 3 on n2 exited with exit code 5, at step 5"
    assert (finding.cause, finding.node) == ("rank_failed", "n2")
    assert exit_codes(snapshot) == {143, 5}


def test_a_killed_rank_is_told_from_the_ranks_that_srun_ended(gang) -> None:
    finding = diagnose_end(ended(gang, JobState.FAILED, exit_code=137, tail=SRUN_KILLED))
    assert finding is not None
    assert (finding.cause, finding.node) == ("rank_killed", "n2")
    assert "rank 3 on n2 died of SIGKILL" in finding.summary


def test_the_exit_word_is_slurms_with_the_signals_name(gang) -> None:
    assert exit_word(ended(gang, JobState.FAILED, exit_code=0, signal=9)) == "0:9 SIGKILL"
    assert exit_word(ended(gang, JobState.FAILED, exit_code=7)) == "7:0"
    word = exit_word(ended(gang, JobState.FAILED, exit_code=9, script_end=ScriptEnd(137, 0.0)))
    assert word == "137:0"  # accounting cuts exit codes to seven bits; the script's own is whole


def test_a_rank_that_died_of_a_signal_comes_before_those_that_lost_it(gang) -> None:
    tail = "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n3: task 5: Killed\n"
    finding = diagnose_end(ended(gang, JobState.FAILED, exit_code=137, tail=tail))
    assert finding is not None
    assert (finding.cause, finding.node) == ("rank_killed", "n3")


def test_ranks_that_srun_had_to_kill_do_not_hide_the_one_that_failed(gang) -> None:
    killed = "srun: error: n2: tasks 2-3: Killed\nsrun: error: n3: task 5: Killed\n"
    tail = "srun: error: n1: task 0: Exited with exit code 5\n" + killed
    finding = diagnose_end(ended(gang, JobState.FAILED, exit_code=137, tail=tail))
    assert finding is not None
    assert (finding.cause, finding.node) == ("rank_failed", "n1")


# ------------------------------------------------------------------ starts that are over, as Slurm 22.05.8 left them behind

TOLD = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-12-02T13:27:56{why} ***\n"
NODE_FAILURE = " DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"
NEXT = JobRecord("7", JobState.PENDING, "PENDING", "BeginTime", 1)


def past(gang, *, job: JobRecord | None = NEXT, tail: str = "", **more):
    """A start that is no longer the job's present one, or whose job Slurm has forgotten."""
    snapshot = dataclasses.replace(gang.look(), job=job, log=LogReading(tail=tail), watch=None, **more)
    attempt = dataclasses.replace(snapshot.attempt, started_at=1_800_000_000.0)
    return dataclasses.replace(snapshot, attempt=attempt)


def accounted(state: JobState, word: str = "", **more) -> JobRecord:
    return JobRecord("7", state, word or str(state), ended_at=1_800_000_100.0, **more)


@pytest.mark.parametrize(
    ("why", "symptom", "by"),
    [
        (NODE_FAILURE, Symptom.NODE_FAIL, "slurm"),
        (" DUE TO PREEMPTION", Symptom.PREEMPTED, "slurm"),
        (" DUE TO TIME LIMIT", Symptom.TIME_LIMIT, "slurm"),
        (" DUE TO JOB REQUEUE", Symptom.REQUEUED_ELSEWHERE, ""),
    ],
)
def test_without_accounting_slurms_notice_in_the_log_says_who_ended_a_past_start(gang, why, symptom, by) -> None:
    finding = diagnose_end(past(gang, tail=TOLD.format(why=why), script_end=ScriptEnd(143, 0.0)))
    assert finding is not None
    assert (finding.symptom, finding.by) == (symptom, by)


def test_accounting_comes_before_the_log(gang) -> None:
    tail = TOLD.format(why=" DUE TO JOB REQUEUE")
    finding = diagnose_end(past(gang, tail=tail, accounted=accounted(JobState.NODE_FAIL), down_nodes=("n3",)))
    assert finding is not None
    assert (finding.symptom, finding.node) == (Symptom.NODE_FAIL, "n3")


def test_the_node_that_failed_is_the_one_srun_names(gang) -> None:
    tail = "srun: error: Node failure on n3\n" + TOLD.format(why=NODE_FAILURE)
    finding = diagnose_end(past(gang, tail=tail))
    assert finding is not None
    assert finding.node == "n3"
    assert "n3 of job 7 went down" in finding.summary


def test_a_script_that_failed_by_itself_and_was_then_requeued_is_a_crash(gang) -> None:
    finding = diagnose_end(past(gang, script_end=ScriptEnd(7, 0.0)))
    assert finding is not None
    assert (finding.symptom, finding.cause, finding.by) == (Symptom.CRASH, "exit_code", "job")


def test_accounting_says_who_cancelled(gang) -> None:
    snapshot = ended(gang, JobState.CANCELLED, signal=15)
    by_root = dataclasses.replace(snapshot, accounted=accounted(JobState.CANCELLED, "CANCELLED by root"))
    assert diagnose_end(by_root).by == "root"
    assert "by root" in diagnose_end(by_root).summary
    assert diagnose_end(snapshot).by == ""
    assert "Slurm does not say" in diagnose_end(snapshot).summary


def test_of_a_forgotten_job_the_log_still_knows_a_cancel(gang) -> None:
    finding = diagnose_end(past(gang, job=None, tail=TOLD.format(why=""), script_end=ScriptEnd(143, 0.0)))
    assert finding is not None
    assert finding.symptom is Symptom.CANCELLED


@pytest.mark.parametrize("left", [{}, {"tail": TOLD.format(why=" DUE TO JOB REQUEUE")}])
def test_a_job_that_vanished_from_the_queue_is_for_a_person(gang, left) -> None:
    snapshot = past(gang, job=None, **left)
    if not left:
        snapshot = dataclasses.replace(snapshot, attempt=dataclasses.replace(snapshot.attempt, started_at=None))
    assert diagnose_end(snapshot).cause == "vanished"


def test_a_forgotten_job_that_ran_and_left_no_word_is_a_crash(gang) -> None:
    finding = diagnose_end(past(gang, job=None))
    assert (finding.symptom, finding.cause, finding.by) == (Symptom.CRASH, "record_purged", "")


def test_a_failed_launch_is_told_from_a_requeuehold(gang) -> None:
    held = dataclasses.replace(NEXT, reason="launch failed requeued held")
    assert diagnose_end(past(gang, job=held, tail=TOLD.format(why=" DUE TO JOB REQUEUE"))).cause == "launch_failed"
    held = dataclasses.replace(NEXT, reason="job requeued in held state")
    finding = diagnose_end(past(gang, job=held, tail=TOLD.format(why=" DUE TO JOB REQUEUE")))
    assert (finding.symptom, finding.cause) == (Symptom.REQUEUED_ELSEWHERE, "requeue_hold")


# As srun and slurmstepd 22.05.8 wrote with memory confined by task/cgroup.
OOM = (
    "srun: error: n2: task 1: Out Of Memory\n"
    "slurmstepd-n2: error: Detected 1 oom-kill event(s) in StepId=2.0. Some of your processes may have been killed by the "
    "cgroup out-of-memory handler.\n"
    "srun: error: n1: task 0: Terminated\n"
)


def test_a_rank_killed_for_want_of_memory_is_named_with_its_node(gang) -> None:
    finding = diagnose_end(ended(gang, JobState.FAILED, exit_code=1, tail=OOM))
    assert (finding.cause, finding.node) == ("out_of_memory", "n2")
    assert "rank 1 on n2 was killed for want of memory" in finding.summary


def test_a_script_whose_output_cannot_be_opened_is_told_from_one_that_was_killed(gang) -> None:
    unwritable = diagnose_end(ended(gang, JobState.FAILED, exit_code=0, signal=53, batch_node="n1"))
    assert (unwritable.cause, unwritable.node) == ("output_unwritable", "n1")
    killed = diagnose_end(ended(gang, JobState.FAILED, exit_code=0, signal=9))
    assert killed.cause == "script_killed"


def test_completed_is_not_believed_of_a_script_that_hides_its_steps_end(gang) -> None:
    hidden = diagnose_end(ended(gang, JobState.COMPLETED, tail="srun: error: n3: task 2: Segmentation fault\n"))
    assert (hidden.cause, hidden.node) == ("hidden_failure", "n3")
    in_tmp = "slurmstepd-n1: error: couldn't chdir to `/gone': No such file or directory: going to /tmp instead\n"
    assert diagnose_end(ended(gang, JobState.COMPLETED, tail=in_tmp)).cause == "ran_in_tmp"
    ours = ended(gang, JobState.COMPLETED, tail="srun: error: n3: task 2: Killed\n", script_end=ScriptEnd(0, 0.0))
    assert diagnose_end(ours) is None
