"""SlurmCli with commands on PATH that replay what real ones said (tests/recordings)."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from krea_runner.errors import JobNotFound, RequeueDisabled, SchedulerError, SchedulerOutputError, SchedulerUnavailable
from krea_runner.model import JobState
from krea_runner.schedulers.slurm_cli import (
    SlurmCli,
    ask,
    cancel_argv,
    checked_id,
    my_jobs_argv,
    requeue_argv,
    sacct_argv,
    sbatch_argv,
    squeue_argv,
    start_now_argv,
)
from tests.recordings import Recording, recording

Replay = Callable[..., Recording]


# A recorded row ends as all do; this one as it was asked for, with the mark of the moment.
PRINT = r"""
for last; do :; done
end=$(printf '\036')
case $last in *"$end"*) mark=${last##*"$end"} ;; *) mark= ;; esac
/bin/sed "s/$end\$/&$mark/" """


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """`replay("squeue-jobs")` makes a `squeue` that says what was recorded; nothing else is on PATH."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    monkeypatch.setenv("PATH", str(bin_dir))

    def install(case: str, name: str = "") -> Recording:
        recorded = recording(case)
        path = bin_dir / (name or case.partition("-")[0])
        for suffix, text in ((".out", recorded.stdout), (".err", recorded.stderr)):
            path.with_suffix(suffix).write_text(text)
        command(bin_dir, path.name, f'{PRINT} "$0.out"; /bin/cat "$0.err" >&2; exit {recorded.returncode}')
        return recorded

    return install


def command(bin_dir: Path, name: str, body: str) -> None:
    path = bin_dir / name
    path.write_text(f'#!/bin/sh\n/usr/bin/env >"$0.env"\nprintf "%s\\n" "$@" >"$0.argv"\n{body}\n')
    path.chmod(0o755)


# --------------------------------------------------------------------------------------------------------------- reads


def test_jobs_are_read_by_the_ids_asked_for(replay: Replay) -> None:
    jobs = replay("squeue-jobs").jobs
    found = SlurmCli().jobs([jobs["failed"], jobs["running"], jobs["het"]])
    assert set(found) == {jobs["failed"], jobs["running"], jobs["het"]}
    assert found[jobs["failed"]].exit_code == 7


def test_nothing_is_asked_for_no_jobs(replay: Replay) -> None:
    assert SlurmCli().jobs([]) == {}


def test_unknown_job_is_absent_where_there_is_no_accounting(replay: Replay) -> None:
    replay("squeue-unknown")
    assert SlurmCli().jobs(["99999"]) == {}  # no sacct at all
    replay("sacct-disabled")
    assert SlurmCli().jobs(["99999"]) == {}


def test_job_missing_from_squeue_is_looked_up_in_accounting(replay: Replay) -> None:
    replay("squeue-unknown")
    jobs = replay("sacct-jobs").jobs
    job = SlurmCli().jobs([jobs["restarted"]])[jobs["restarted"]]
    assert (job.state, job.restart_count) == (JobState.FAILED, 2)


def test_accounting_that_does_not_answer_is_unavailable(replay: Replay) -> None:
    replay("squeue-unknown")
    replay("sacct-slurmdbd_down")
    with pytest.raises(SchedulerUnavailable) as caught:
        SlurmCli().jobs(["5"])
    assert "Connection refused" in str(caught.value)
    assert "slurmdbd" in (caught.value.hint or "")


def test_accounting_that_does_not_answer_hides_no_job_that_squeue_knows(replay: Replay) -> None:
    jobs = replay("squeue-jobs").jobs
    replay("sacct-slurmdbd_down")
    found = SlurmCli().jobs([jobs["running"], "99999"])
    assert found[jobs["running"]].state is JobState.RUNNING
    assert found["99999"].state is JobState.UNKNOWN
    assert "accounting" in found["99999"].raw_state


@pytest.mark.parametrize("case", ["squeue-controller_down", "squeue-controller_stopped", "squeue-no_munge"])
def test_squeue_without_an_answer_is_unavailable(replay: Replay, case: str) -> None:
    recorded = replay(case)
    with pytest.raises(SchedulerUnavailable) as caught:
        SlurmCli().jobs(["5"])
    assert (caught.value.returncode, caught.value.stderr) == (1, recorded.stderr)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    with pytest.raises(SchedulerUnavailable):
        SlurmCli().find_by_tag("tag")


@pytest.mark.parametrize("case", ["squeue-bad_format", "squeue-bad_format_no_jobs"])
def test_refused_format_is_not_an_empty_queue(replay: Replay, case: str) -> None:
    replay(case)
    with pytest.raises(SchedulerOutputError):
        SlurmCli().jobs(["5"])
    with pytest.raises(SchedulerOutputError):
        SlurmCli().find_by_tag("tag")


def test_no_squeue_on_path_is_unavailable(replay: Replay) -> None:
    with pytest.raises(SchedulerUnavailable) as caught:
        SlurmCli().jobs(["5"])
    assert "squeue" in str(caught.value)
    assert "module load" in (caught.value.hint or "")


def test_hanging_squeue_is_unavailable_and_nothing_of_it_is_left(replay: Replay, tmp_path: Path) -> None:
    command(tmp_path / "bin", "squeue", '/bin/sleep 600 & echo $! >"$0.child"; echo $$ >"$0.own"; wait')
    with pytest.raises(SchedulerUnavailable, match="no answer in 2 s"):
        ask(squeue_argv(["5"]), doing="asking for jobs", timeout_s=2.0)
    for name in ("squeue.child", "squeue.own"):
        pid = int((tmp_path / "bin" / name).read_text())
        deadline = time.monotonic() + 30
        while is_running(pid):
            assert time.monotonic() < deadline, f"{name} {pid} lives on"
            time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_killed_squeue_is_unavailable(replay: Replay, tmp_path: Path) -> None:
    command(tmp_path / "bin", "squeue", f"kill -{signal.SIGKILL} $$")
    with pytest.raises(SchedulerUnavailable, match="killed by signal 9"):
        SlurmCli().jobs(["5"])


def test_readers_are_asked_in_our_format_whatever_the_user_prefers(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = {
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_STATES": "RUNNING",
        "SLURM_TIME_FORMAT": "relative",
        "SACCT_FORMAT": "JobID",
        "SLURM_CLUSTERS": "moon",
        "LC_ALL": "de_DE.UTF-8",
        "TZ": "Asia/Kolkata",
    }
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    replay("squeue-jobs")
    SlurmCli().jobs(["5"])
    seen = dict(line.split("=", 1) for line in (tmp_path / "bin/squeue.env").read_text().splitlines() if "=" in line)
    assert {name: seen.get(name) for name in hostile} == dict.fromkeys(hostile) | {
        "SLURM_TIME_FORMAT": "%s",
        "LC_ALL": "C",
        "TZ": "UTC0",
    }
    assert seen["SLURM_CONF"] == "/etc/slurm/slurm.conf"


def test_job_is_found_by_its_tag(replay: Replay) -> None:
    recorded = replay("squeue-mine", "squeue")
    found = SlurmCli().find_by_tag("krea_runner/0123456789abcdef")
    assert [job.job_id for job in found] == [recorded.jobs["held"]]
    assert SlurmCli().find_by_tag("krea_runner/0123") == []


# -------------------------------------------------------------------------------------------------------------- submit


def test_submitted_job_gets_the_users_environment_and_none_of_slurms(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_CPU_BIND": "x", "SBATCH_ARRAY": "1-9", "MY_TOKEN_PATH": "t", "LC_ALL": "de"}.items():
        monkeypatch.setenv(name, value)
    job_id = replay("sbatch-accepted").stdout.strip()
    assert SlurmCli().submit(tmp_path / "job.sbatch", tag="a | tag") == job_id
    seen = (tmp_path / "bin/sbatch.env").read_text().splitlines()
    assert {"MY_TOKEN_PATH=t", "LC_ALL=de"} <= set(seen)
    assert not [line for line in seen if line.startswith(("SLURM_", "SBATCH_"))]
    argv = (tmp_path / "bin/sbatch.argv").read_text().splitlines()
    assert argv == ["--parsable", "--comment=a | tag", str(tmp_path / "job.sbatch")]


@pytest.mark.parametrize(
    ("case", "said", "hint"),
    [
        ("sbatch-bad_partition", "Invalid partition name specified", "sinfo"),
        ("sbatch-bad_option", "unrecognized option '--nope'", "--test-only"),
        ("sbatch-bad_gres", "Invalid generic resource", "sinfo"),
    ],
)
def test_refused_submission_says_what_sbatch_said(replay: Replay, case: str, said: str, hint: str) -> None:
    recorded = replay(case)
    with pytest.raises(SchedulerError) as caught:
        SlurmCli().submit(Path("/runs/a/job.sbatch"), tag="tag")
    assert type(caught.value) is SchedulerError
    assert "/runs/a/job.sbatch" in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hint in (caught.value.hint or "")
    assert caught.value.returncode == recorded.returncode


@pytest.mark.parametrize("case", ["sbatch-controller_down", "sbatch-controller_stopped", "sbatch-no_munge"])
def test_submission_without_an_answer_is_unavailable(replay: Replay, case: str) -> None:
    replay(case)
    with pytest.raises(SchedulerUnavailable):
        SlurmCli().submit(Path("/runs/a/job.sbatch"), tag="tag")


def test_accepted_submission_without_a_readable_id_may_exist(replay: Replay) -> None:
    replay("squeue-unknown", name="sbatch")  # exit 0 and not a word
    with pytest.raises(SchedulerUnavailable, match="accepted"):
        SlurmCli().submit(Path("/runs/a/job.sbatch"), tag="tag")


def test_without_sbatch_a_submission_is_refused_for_sure(replay: Replay) -> None:
    with pytest.raises(SchedulerError) as caught:
        SlurmCli().submit(Path("/runs/a/job.sbatch"), tag="tag")
    assert type(caught.value) is SchedulerError
    assert "module load" in (caught.value.hint or "")


# -------------------------------------------------------------------------------------------------------- other writes


@pytest.mark.parametrize(
    ("case", "kind", "hint"),
    [
        ("scontrol-requeue_unknown", JobNotFound, "squeue"),
        ("scontrol-requeue_pending", SchedulerError, "queue already"),
        ("scontrol-requeue_disabled", RequeueDisabled, "requeue=1"),
        ("scontrol-requeue_denied", SchedulerError, "owner"),
        ("scontrol-requeue_controller_down", SchedulerUnavailable, "ping"),
    ],
)
def test_requeue_that_did_not_work_says_why(replay: Replay, case: str, kind: type, hint: str) -> None:
    replay(case)
    with pytest.raises(SchedulerError) as caught:
        SlurmCli().requeue("26")
    assert type(caught.value) is kind
    assert "requeueing job 26" in str(caught.value)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("scontrol-update_unknown", JobNotFound),
        ("scontrol-update_denied", SchedulerError),
        ("scontrol-update_controller_down", SchedulerUnavailable),
    ],
)
def test_start_time_that_was_not_lifted_says_why(replay: Replay, case: str, kind: type) -> None:
    replay(case)
    with pytest.raises(SchedulerError) as caught:
        SlurmCli().start_now("26")
    assert type(caught.value) is kind


def test_cancel_of_an_unknown_job_is_no_error(replay: Replay) -> None:
    replay("scancel-unknown")
    SlurmCli().cancel("99999")
    replay("scontrol-requeue_unknown", name="scancel")  # a version that says so
    SlurmCli().cancel("99999")


@pytest.mark.parametrize(
    ("case", "kind", "code"),
    [
        ("scancel-denied", SchedulerError, 210),
        ("scancel-controller_down", SchedulerUnavailable, 8),
        ("scancel-controller_stopped", SchedulerUnavailable, 140),
    ],
)
def test_cancel_that_did_not_work_says_why(replay: Replay, case: str, kind: type, code: int) -> None:
    replay(case)
    with pytest.raises(SchedulerError) as caught:
        SlurmCli().cancel("26")
    assert (type(caught.value), caught.value.returncode) == (kind, code)


# ------------------------------------------------------------------------------------------------------- command lines


def test_command_lines_are_lists_of_whole_words() -> None:
    assert requeue_argv("12_3") == ["scontrol", "requeue", "12_3"]
    assert start_now_argv("12") == ["scontrol", "update", "jobid=12", "StartTime=now"]
    assert cancel_argv("12+1") == ["scancel", "12+1"]
    assert sbatch_argv(Path("/a b/$(x).sbatch"), "t\n") == ["sbatch", "--parsable", "--comment=t\n", "/a b/$(x).sbatch"]


def test_a_single_job_is_asked_for_twice() -> None:
    argv = squeue_argv(["77"])
    assert argv[argv.index("-j") + 1] == "77,77"


def test_every_start_is_asked_of_accounting() -> None:
    assert {"-D", "-X", "-P", "-n"} <= set(sacct_argv(["77"]))


@pytest.mark.parametrize("job_id", ["", "--me", "-u root", "1,2", "1_[2-3]", "1 2", "１２", "1\n", "1;2", "12.batch"])
@pytest.mark.parametrize("build", [cancel_argv, requeue_argv, start_now_argv, checked_id])
def test_what_is_no_id_of_one_job_never_reaches_a_command_line(job_id: str, build: Callable[[str], object]) -> None:
    with pytest.raises(JobNotFound):
        build(job_id)
    with pytest.raises(JobNotFound):
        squeue_argv(["1", job_id])
    with pytest.raises(JobNotFound):
        sacct_argv([job_id])


# -------------------------------------------------------------------------------------------------------------- checks


def cluster(replay: Replay, tmp_path: Path, config: str) -> None:
    for case in ("sbatch-accepted", "squeue-unknown", "scancel-unknown", "sinfo-partitions", "sacct-disabled"):
        replay(case)
    (tmp_path / "bin/scontrol.ping").write_text(recording("scontrol-ping_up").stdout)
    (tmp_path / "bin/scontrol.show").write_text(config)
    command(tmp_path / "bin", "scontrol", '/bin/cat "$0.$1"')


def test_checks_of_a_healthy_cluster_are_all_ok(replay: Replay, tmp_path: Path) -> None:
    cluster(replay, tmp_path, recording("scontrol-config").stdout)
    found = {check.name: check for check in SlurmCli().checks()}
    assert [check for check in found.values() if not check.ok or check.hint] == []
    assert "22.05.8" in found["controller"].detail
    assert "train up" in found["partitions"].detail
    assert "JobRequeue=1" in found["requeue"].detail
    assert "PreemptMode=OFF" in found["preemption"].detail
    assert "off" in found["accounting"].detail


def test_checks_warn_of_what_loses_jobs(replay: Replay, tmp_path: Path) -> None:
    config = recording("scontrol-config").stdout
    config = config.replace("= 300 sec", "= 5 sec").replace("PreemptMode             = OFF", "PreemptMode = CANCEL")
    cluster(replay, tmp_path, config)
    found = {check.name: check for check in SlurmCli().checks()}
    assert "5 sec" in found["accounting"].hint
    assert found["preemption"].hint


def test_checks_without_slurm_name_what_is_missing(replay: Replay) -> None:
    (check,) = SlurmCli().checks()
    assert not check.ok
    assert "sbatch, squeue, scontrol, scancel" in check.detail
    assert check.hint


def test_checks_without_a_controller_stop_at_it(replay: Replay) -> None:
    for case in ("sbatch-accepted", "squeue-controller_down", "scontrol-ping_controller_down", "scancel-unknown"):
        replay(case)
    commands, controller = SlurmCli().checks()
    assert commands.ok
    assert not controller.ok
    assert "is DOWN" in controller.detail
    assert controller.hint


def test_recorded_command_lines_are_still_ours() -> None:
    """A command line that was changed needs new recordings."""
    for case, build in {"squeue-jobs": squeue_argv, "sacct-jobs": sacct_argv}.items():
        recorded = recording(case)
        assert recorded.argv == build(list(recorded.jobs.values()))
    assert recording("squeue-mine").argv == my_jobs_argv(everybody=False)
