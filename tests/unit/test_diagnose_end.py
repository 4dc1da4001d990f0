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
        (JobState.FAILED, Symptom.CRASH, "unknown"),
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
    assert word == "9:0; the script itself ended with 137"


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
