"""What a failed attempt left behind decides with the supervisor: cause, suspects, restart or not. And never in its way."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from krea_runner.diagnose import logs as diagnose_logs
from krea_runner.model import AttemptKey, DecisionKind, Diagnosis, Finding, Incident, JobState, RunState
from krea_runner.supervise import diagnosis as supervise_diagnosis
from tests.cases.stories import status, steps, trace, watchdog

from .conftest import make_config
from .test_tick import RUNNING, Desk, desk, ended

__all__ = ["desk"]
KEY = AttemptKey("7")
MiB = 1 << 20


def write_logs(desk: Desk, *by_node: str, key: AttemptKey = KEY) -> list[Path]:
    folder = desk.run_dir.attempt_logs(key)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"node-{number}.log" for number in range(len(by_node))]
    for path, text in zip(paths, by_node, strict=True):
        path.write_text(text)
    return paths


def each_rank(error: str, ranks: Sequence[int]) -> str:
    return "".join(trace(error, f"{rank}: ") for rank in ranks)


def told(desk: Desk) -> tuple[Incident, Diagnosis]:
    incident = desk.incident()
    assert incident.finding.diagnosis is not None
    return incident, incident.finding.diagnosis


def test_the_same_exception_on_every_rank_is_held_with_its_first_line(desk: Desk) -> None:
    write_logs(desk, steps() + each_rank("KeyError: 'x'", [0, 1]), each_rank("KeyError: 'x'", [2, 3]))
    report = desk.tick(ended(JobState.FAILED, exit_code=1))
    incident, diagnosis = told(desk)
    assert (incident.finding.symptom, incident.finding.cause) == ("crash", "exit_code")
    assert (diagnosis.cause, diagnosis.policy, diagnosis.is_sure) == ("user_exception", "stop_for_human", True)
    assert diagnosis.first == "logs/7.r0/node-0.log:10: 0: KeyError: 'x'"
    assert (incident.decision.kind, desk.state, desk.says.asked) == (DecisionKind.HOLD, RunState.HELD, [])
    assert incident.decision.reason.startswith("every rank says the same")
    assert "the training code raised an exception: logs/7.r0/node-0.log:10" in report.lines[0].text
    kept = json.loads((desk.run_dir.incident(KEY) / "diagnosis.json").read_text())
    assert (kept["cause"], kept["first_evidence"]["line"], kept["schema_version"]) == ("user_exception", 10, 1)


def test_one_ranks_exception_is_tried_again_and_held_when_it_comes_back_at_the_same_step(desk: Desk) -> None:
    for restart in (0, 1):
        write_logs(desk, steps() + each_rank("KeyError: 'x'", [1]), key=AttemptKey("7", restart))
        desk.beat(5, flush=1, restart=restart)
        desk.tick(dataclasses.replace(RUNNING, restart_count=restart))
        desk.tick(ended(JobState.FAILED, exit_code=1, restart_count=restart))
    first, second = desk.history.incidents()
    assert (first.decision.kind, second.decision.kind) == (DecisionKind.REQUEUE, DecisionKind.HOLD)
    assert second.decision.reason.startswith("for the second time, the training code raised an exception")


@pytest.mark.parametrize(
    "error",
    [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "data.service.StoreTimeout: no answer in 30 s",
        "OSError: [Errno 14] Bad address",
        "RuntimeError: store: lost the connection to 10.0.0.1",
        "ValueError: the token server is temporarily overloaded",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: [enforce fail at inline_container.cc:595] . PytorchStreamWriter failed writing file data/193: x",
    ],
)
def test_what_something_outside_may_have_done_to_every_rank_is_restarted(desk: Desk, error: str) -> None:
    write_logs(desk, steps() + each_rank(error, range(4)))
    desk.tick(ended(JobState.FAILED, exit_code=1))
    assert desk.incident().decision.kind is DecisionKind.REQUEUE


def test_a_rank_that_reports_no_timeout_is_the_incidents_suspect_and_the_run_goes_on(desk: Desk) -> None:
    waiting = "".join(watchdog(rank, 9) + status(rank, 9, 9) for rank in (0, 1, 3))
    write_logs(desk, steps() + waiting)
    desk.tick(ended(JobState.FAILED, exit_code=134))
    incident, diagnosis = told(desk)
    assert (diagnosis.cause, diagnosis.ranks, diagnosis.confidence) == ("nccl_timeout", (2,), "medium")
    assert [(one.kind, one.name) for one in incident.finding.suspects] == [("rank", "2")]
    assert incident.decision.kind is DecisionKind.REQUEUE


def kernel_log(desk: Desk, node: str, text: str) -> None:
    folder = desk.run_dir.incident(KEY) / "dmesg"
    folder.mkdir(parents=True)
    (folder / f"{node}.txt").write_text(text)


XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, name=python3, GPU has fallen off the bus.\n"


def at(seconds: float) -> str:
    """As `dmesg -T` tells a time on this host."""
    import time

    return time.strftime("[%a %b %e %H:%M:%S %Y] ", time.localtime(seconds))


def test_a_nodes_kernel_log_beside_the_incident_makes_the_node_a_suspect(desk: Desk) -> None:
    write_logs(desk, steps() + "srun: error: n1: task 0: Exited with exit code 1\n")
    kernel_log(desk, "n2", at(1_800_000_050) + XID)
    desk.tick(RUNNING)
    desk.tick(ended(JobState.FAILED, exit_code=1))
    incident, diagnosis = told(desk)
    assert (diagnosis.cause, diagnosis.nodes, diagnosis.is_sure) == ("gpu_fell_off_bus", ("n2",), True)
    assert ("node", "n2") in [(one.kind, one.name) for one in incident.finding.suspects]
    assert (incident.finding.blamed_node, incident.decision.kind) == ("n2", DecisionKind.REQUEUE)


def test_an_xid_from_before_the_attempt_is_not_the_incidents(desk: Desk) -> None:
    write_logs(desk, steps() + "srun: error: n1: task 0: Exited with exit code 1\n")
    kernel_log(desk, "n2", (at(1_799_990_000) + XID) * 100)
    desk.tick(RUNNING)
    desk.tick(ended(JobState.FAILED, exit_code=1))
    incident, diagnosis = told(desk)
    assert (diagnosis.cause, incident.finding.suspects, incident.finding.known_cause) == (
        "unknown_failure",
        (),
        "exit_code",
    )


def dump(rank: int, last: int) -> bytes:
    """A Flight Recorder dump of a rank whose last collective has this number."""
    entry = {
        "pg_id": 0, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce", "is_p2p": False,
        "input_sizes": ((4,),), "output_sizes": ((4,),), "input_dtypes": ["Float"], "output_dtypes": ["Float"], "p2p_seq_id": 0,
        "frames": [], "time_created_ns": 1, "timeout_ms": 600000,
    }  # fmt: skip
    entries = [
        {**entry, "record_id": n, "op_id": n, "collective_seq_id": n, "state": "completed" if n < 4 else "scheduled",
         "retired": n < 4} for n in range(1, last + 1)
    ]  # fmt: skip
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return pickle.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}, 2)


def test_flight_recorder_dumps_beside_a_hang_name_the_rank_that_was_missing(desk: Desk) -> None:
    write_logs(desk, steps())
    folder = desk.run_dir.incident(KEY) / "flight_recorder"
    folder.mkdir(parents=True)
    for rank in range(4):
        (folder / f"fr_rank_{rank}").write_bytes(dump(rank, 3 if rank == 1 else 4))
    desk.beat(70, flush=1)
    desk.tick()
    desk.beat(70, flush=11, stopped=(2,))
    desk.tick()
    incident, diagnosis = told(desk)
    assert (incident.finding.symptom, incident.finding.cause) == ("hang", "rank_stopped")
    assert (diagnosis.cause, diagnosis.ranks) == ("nccl_timeout", (1,)), diagnosis
    assert diagnosis.why.startswith("flight recorder:")


def test_what_is_collected_after_a_hang_was_recorded_names_it_once_the_attempt_is_over(desk: Desk) -> None:
    (log,) = write_logs(desk, steps())
    desk.beat(70, flush=1)
    desk.tick()
    desk.beat(70, flush=11, stopped=(2,))
    desk.tick()  # the hang is recorded, the job requeued
    before, diagnosis = told(desk)
    assert not diagnosis.names_cause
    folder = desk.run_dir.incident(KEY) / "flight_recorder"
    folder.mkdir(parents=True)
    for rank in range(4):
        (folder / f"fr_rank_{rank}").write_bytes(dump(rank, 3 if rank == 1 else 4))
    with log.open("a") as file:
        file.write(each_rank("KeyError: 'said by what our SIGTERM ended'", range(4)))
    desk.tick()
    after, diagnosis = told(desk)
    assert (diagnosis.cause, diagnosis.ranks) == ("nccl_timeout", (1,)), diagnosis
    assert ("rank", "1") in [(one.kind, one.name) for one in after.finding.suspects]
    assert (after.decision, after.finding.cause, after.noticed_at) == (
        before.decision,
        "rank_stopped",
        before.noticed_at,
    )
    kept = json.loads((desk.run_dir.incident(KEY) / "diagnosis.json").read_text())
    assert (kept["cause"], kept["suspects"]["ranks"]) == ("nccl_timeout", [1])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"read": 3}', '{"read": [{"file": 3, "end": "x"}]}'])
def test_a_damaged_document_beside_an_incident_changes_nothing(desk: Desk, text: str) -> None:
    write_logs(desk, steps())
    desk.beat(70, flush=1)
    desk.tick()
    desk.beat(70, flush=11, stopped=(2,))
    desk.tick()
    (desk.run_dir.incident(KEY) / "dmesg").mkdir()
    (desk.run_dir.incident(KEY) / "dmesg" / "n1.log").write_text(at(1_800_000_005) + XID)
    (desk.run_dir.incident(KEY) / "diagnosis.json").write_text(text)
    before = desk.incident()
    desk.tick()
    assert desk.incident().finding == before.finding


# ------------------------------------------------------------------------------------------------------------- in bounds


def test_of_a_log_of_many_gigabytes_the_end_is_read_and_that_is_said(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write_logs(desk, "")
    tail = b"\n" + (steps() + each_rank("KeyError: 'x'", range(4))).encode()
    with path.open("wb") as file:
        file.truncate(10 << 30)
        file.seek(0, os.SEEK_END)
        file.write(tail)
    read = 0
    plain = diagnose_logs.read_log

    def counted(*args, **kwargs):
        nonlocal read
        log = plain(*args, **kwargs)
        read += log.bytes_read
        return log

    monkeypatch.setattr(diagnose_logs, "read_log", counted)
    desk.tick(ended(JobState.FAILED, exit_code=1))
    _, diagnosis = told(desk)
    assert diagnosis.cause == "user_exception"
    assert 0 < read <= 64 * MiB
    assert diagnosis.problems[0].endswith("only its last 64 MiB of 10 GiB; its lines are counted from there")
    assert diagnosis.problems[0].startswith("log not read whole: ")


def test_when_the_time_is_up_the_rest_is_not_read_and_the_run_restarts_all_the_same(desk: Desk) -> None:
    write_logs(desk, "step 1\n" * 200_000, "step 1\n", "step 1\n" + each_rank("KeyError: 'x'", range(4)))
    mono = desk.clock.mono
    desk.clock.mono = lambda: (desk.clock.sleep(1.0), mono())[1]  # each question takes a second
    desk.tick(ended(JobState.FAILED, exit_code=1))
    incident, diagnosis = told(desk)
    assert any(text.startswith("log not read whole, there was no time: ") for text in diagnosis.problems)
    assert incident.decision.kind is DecisionKind.REQUEUE


def test_runs_that_fail_together_share_the_ticks_time(desk: Desk) -> None:
    write_logs(desk, each_rank("KeyError: 'x'", range(4)))
    supervisor = desk.supervisor()
    supervisor.diagnosis_left_s = 0.0
    from krea_runner.model import Attempt, Snapshot, Symptom

    snapshot = Snapshot(desk.history.run(desk.run_id), 0.0, 0.0, attempt=Attempt(1, desk.run_id, KEY, 0.0))
    finding, document = supervise_diagnosis.diagnosed(
        supervisor, snapshot, Finding(Symptom.CRASH, "exit_code", "crash")
    )
    assert document is None
    assert finding.line == "crash; its logs do not say why (logs not read: this tick's time for that is spent)"


def test_a_fault_of_our_own_in_it_is_a_line_and_stops_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args, **_kwargs):
        raise RecursionError("too deep")

    monkeypatch.setattr(diagnose_logs, "tell", fails)
    write_logs(desk, each_rank("KeyError: 'x'", range(4)))
    desk.tick(ended(JobState.FAILED, exit_code=1))
    incident, diagnosis = told(desk)
    assert "a fault of krea-runner itself: RecursionError: too deep" in diagnosis.problems[0]
    assert (incident.decision.kind, desk.says.asked) == (DecisionKind.REQUEUE, ["requeue", "start_now"])


def test_what_is_no_plain_file_among_the_logs_blocks_nobody(desk: Desk) -> None:
    (path,) = write_logs(desk, "step 1\n")
    os.mkfifo(path.with_name("node-1.log"))
    path.with_name("node-2.log").symlink_to("/dev/zero")
    desk.tick(ended(JobState.FAILED, exit_code=1))
    assert desk.incident().decision.kind is DecisionKind.REQUEUE


def test_nothing_of_a_log_reaches_a_line_unescaped(desk: Desk) -> None:
    write_logs(desk, each_rank("KeyError: '\x1b]0;owned\x07\u202e'", range(4)))
    report = desk.tick(ended(JobState.FAILED, exit_code=1))
    assert "KeyError" in report.lines[0].text
    assert not {"\x1b", "\x07", "\u202e"} & set(report.lines[0].text)


def test_a_wrong_site_toml_is_said_and_the_built_in_signatures_are_used(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site.toml").write_text("signature = []\n")
    monkeypatch.setenv("KREA_RUNNER_SITE", str(tmp_path / "site.toml"))
    write_logs(desk, each_rank("KeyError: 'x'", range(4)))
    desk.tick(ended(JobState.FAILED, exit_code=1))
    _, diagnosis = told(desk)
    assert diagnosis.cause == "user_exception"
    assert diagnosis.problems == ("site.toml is not used: unknown key 'signature'; did you mean signatures?",)


def test_the_sites_own_signature_decides(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.toml").write_text(
        '[cause.licence]\npolicy = "stop_for_human"\ntitle = "no licence"\n'
        '[[signatures]]\nid = "licence"\ncause = "licence"\nliteral = ["licence lost"]\npattern = "solver: licence lost"\n'
    )
    monkeypatch.setenv("KREA_RUNNER_SITE", str(tmp_path / "site.toml"))
    write_logs(desk, "0: solver: licence lost\n")
    desk.tick(ended(JobState.FAILED, exit_code=1))
    assert desk.incident().decision == dataclasses.replace(
        desk.incident().decision, kind=DecisionKind.HOLD, reason="no licence"
    )


def test_a_dry_run_reads_the_logs_and_writes_nothing(desk: Desk) -> None:
    desk.dry_run = True
    write_logs(desk, each_rank("KeyError: 'x'", range(4)))
    report = desk.tick(ended(JobState.FAILED, exit_code=1))
    assert "→ HOLD: every rank says the same" in report.lines[0].text
    assert not desk.run_dir.incident(KEY).exists()


# ------------------------------------------------------------------------------------------------- whose log, which attempt


def test_of_the_log_that_all_attempts_share_only_this_ones_part_counts(desk: Desk) -> None:
    batch = desk.run_dir.batch_log("7")
    batch.parent.mkdir(parents=True)
    earlier = "krea_runner: attempt 7.r0 on n[1-2]\nsrun: error: n1: task 0: Segmentation fault (core dumped)\n"
    batch.write_text(earlier + "krea_runner: attempt 7.r1 on n[1-2]\nsrun: error: n2: task 3: Bus error\n")
    desk.tick(dataclasses.replace(RUNNING, restart_count=1))
    desk.tick(ended(JobState.FAILED, exit_code=1, restart_count=1))
    second = desk.history.incidents()[-1].finding.diagnosis
    assert second is not None
    assert second.first == "logs/batch-7.log:4: srun: error: n2: task 3: Bus error"


def test_a_log_that_nothing_divides_is_never_sure_of_a_restart(desk: Desk, tmp_path: Path) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text(each_rank("KeyError: 'x'", range(4)))
    config = make_config(tmp_path, scheduler="slurm", run_dir=tmp_path / "adopted", job_log=log)
    run = desk.history.create_run(config, user="alice", tag="t2", now=desk.clock.wall())
    desk.history.set_run_state(desk.run_id, RunState.DONE, "", now=0)
    desk.history.set_submitted(run.run_id, "7", now=desk.clock.wall())
    desk.tick(dataclasses.replace(RUNNING, restart_count=1))
    desk.tick(ended(JobState.FAILED, exit_code=1, restart_count=1))
    incident = desk.history.incidents(run_id=run.run_id)[-1]
    assert incident.finding.diagnosis is not None
    assert (incident.finding.diagnosis.cause, incident.finding.diagnosis.confidence) == ("user_exception", "medium")
    assert incident.decision.kind is DecisionKind.REQUEUE


def test_the_ranks_that_miss_one_that_was_killed_are_not_the_beginning(desk: Desk) -> None:
    batch = desk.run_dir.batch_log("7")
    batch.parent.mkdir(parents=True)
    batch.write_text(
        "krea_runner: attempt 7.r0 on n[1-2]\nsrun: error: n2: task 3: Killed\nsrun: error: n1: task 0: Exited with exit code 1\n"
    )
    write_logs(desk, each_rank("gang.GangBroken: a peer is gone", [0, 1, 2]))
    desk.tick(ended(JobState.FAILED, exit_code=137))
    _, diagnosis = told(desk)
    assert (diagnosis.cause, diagnosis.ranks, diagnosis.nodes) == ("process_signal_crash", (3,), ("n2",))


def test_a_quiet_tick_loads_nothing_that_diagnoses_logs(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from tests.unit.conftest import FakeClock, make_config
from tests.unit.test_tick import Says, ended
from krea_runner.history.store import open_history
from krea_runner.model import JobState
from krea_runner.supervise.supervisor import Supervisor
from krea_runner.supervise.tick import tick
clock, says, folder = FakeClock(), Says(), Path({str(tmp_path)!r})
history = open_history(folder / "state")
(folder / "run").mkdir()
run = history.create_run(make_config(folder, scheduler="slurm"), user="alice", tag="t", now=clock.wall())
history.set_submitted(run.run_id, "7", now=clock.wall())
supervisor = Supervisor(history, lambda _: says, clock, "alice", "login1:1:1")
def loaded():
    return [name for name in ("hyperscan", *(f"krea_runner.diagnose.{{part}}" for part in ("logs", "signatures", "scan", "site")))
            if name in sys.modules]
tick(supervisor)
print(len(history.incidents()), *loaded())
says.record = ended(JobState.FAILED, exit_code=1)
(folder / "run" / "logs" / "7.r0").mkdir(parents=True)
(folder / "run" / "logs" / "7.r0" / "node-0.log").write_text("step 1")
tick(supervisor)
print(len(history.incidents()), "krea_runner.diagnose.logs" in loaded())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["0", "1 True"], done.stdout + done.stderr
