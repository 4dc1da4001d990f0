"""Slurm through its own commands, as any user on a login node may call them. Works from 22.05 on; nothing to install."""

import os
from collections.abc import Sequence
from pathlib import Path

from krea_runner.errors import JobNotFound, SchedulerError, SchedulerOutputError, SchedulerUnavailable
from krea_runner.model import JobRecord
from krea_runner.proc import Completed, clean_environment, run
from krea_runner.schedulers import Check
from krea_runner.schedulers.slurm_parse import (
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    parse_sacct,
    parse_squeue,
    parse_submitted,
    parse_tagged,
)

# Without a controller a command takes 9 to 10 s to say so, scontrol twice that (22.05.8): longer than that is a hang.
TIMEOUT_S = 25.0

# What Slurm's commands say on stderr, what it means, what to type next. First match wins; texts of 22.05 to 26.05.
_SAYS: tuple[tuple[str, type[SchedulerError], str], ...] = (
    ("Invalid job id", JobNotFound, "see your jobs: squeue --me"),
    ("Unable to contact slurm controller", SchedulerUnavailable, "ask the controller: scontrol ping"),
    ("Socket timed out", SchedulerUnavailable, "ask the controller: scontrol ping"),
    ("Unexpected message received", SchedulerUnavailable, "ask the controller: scontrol ping"),
    ("backup controller", SchedulerUnavailable, "ask the controller: scontrol ping"),
    ("Connection refused", SchedulerUnavailable, "ask the controller: scontrol ping"),
    ("Munge", SchedulerUnavailable, "is munged running on this host? munge -n | unmunge"),
    ("authentication", SchedulerUnavailable, "is munged running on this host? munge -n | unmunge"),
    ("Transport endpoint", SchedulerUnavailable, "ask the controller: scontrol ping"),
    ("Could not establish a configuration source", SchedulerUnavailable, "where is slurm.conf? echo $SLURM_CONF"),
    (
        "presently disabled",
        SchedulerError,
        "the job was submitted with --no-requeue: scontrol update jobid=JOB requeue=1",
    ),
    ("pending execution", SchedulerError, "it waits in the queue already: squeue --me"),
    ("Access/permission denied", SchedulerError, "only the job's owner or an operator may do that"),
    ("Invalid user id", SchedulerError, "only the job's owner or an operator may do that"),
)


class SlurmCli:
    name = "slurm"
    whole_second_starts = True

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        if not job_ids:
            return {}
        found = {record.job_id: record for record in self._squeue(job_ids)}
        gone = [job_id for job_id in job_ids if job_id not in found]
        return found | (self._sacct(gone) if gone else {})

    def find_by_tag(self, tag: str) -> list[JobRecord]:
        argv = ("squeue", "--me", "-a", "-t", "all", "-h", "-O", _squeue_format("Comment"))
        tagged = parse_tagged(_asked(argv).stdout, argv)
        return sorted(
            (job for job, comment in tagged if comment == tag), key=lambda job: job.submitted_at or 0, reverse=True
        )

    def submit(self, script: Path, *, tag: str) -> str:
        argv = ("sbatch", "--parsable", "--comment", tag, str(script))
        # sbatch's environment becomes the job's: cleaned of what would leak, and otherwise the user's own.
        return parse_submitted(_asked(argv, clean_environment(os.environ)).stdout, argv)

    def requeue(self, job_id: str) -> None:
        _asked(("scontrol", "requeue", job_id))

    def start_now(self, job_id: str) -> None:
        _asked(("scontrol", "update", f"jobid={job_id}", "StartTime=now"))

    def cancel(self, job_id: str) -> None:
        try:
            _asked(("scancel", job_id))
        except JobNotFound:
            return

    def checks(self) -> list[Check]:
        return [_check(name, argv, hint) for name, argv, hint in _CHECKS]

    def _squeue(self, job_ids: Sequence[str]) -> list[JobRecord]:
        # One unknown id alone is an error, two are an empty answer (22.05.8): ask for the first one twice.
        argv = ("squeue", "-a", "-t", "all", "-h", "-j", ",".join([job_ids[0], *job_ids]), "-O", _squeue_format())
        try:
            done = _asked(argv)
        except JobNotFound:
            return []
        records = parse_squeue(done.stdout, argv)
        if not records and done.stderr.strip():
            # An unknown format field: exit 0, an empty line, the complaint on stderr (22.05.8). Not "no jobs".
            raise SchedulerOutputError(f"squeue: {_first_line(done.stderr)}", line=done.stderr, argv=argv)
        return records

    def _sacct(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        """What accounting remembers of jobs that the controller has forgotten; nothing on a cluster without it."""
        argv = (
            "sacct", "-D", "-X", "-P", "-n", "-j", ",".join(job_ids), "-S", "1970-01-01",
            "-o", ",".join(SACCT_FIELDS),
        )  # fmt: skip
        try:
            return parse_sacct(_asked(argv).stdout, argv)
        except SchedulerUnavailable:
            raise
        except SchedulerError as error:
            if "accounting storage is disabled" in error.stderr:
                return {}
            raise


def _squeue_format(*more: str) -> str:
    return ",".join(f"{field}:|" for field in (*SQUEUE_FIELDS, *more))


def _asked(argv: tuple[str, ...], env: dict[str, str] | None = None) -> Completed:
    """The answer to a command that worked. Raises what its refusal means."""
    try:
        done = run(argv, timeout_s=TIMEOUT_S, env=env)
    except OSError as error:
        raise SchedulerUnavailable(
            f"running {argv[0]}: {error.strerror}",
            argv=argv,
            hint="is this a login node of the cluster? Put Slurm's commands on PATH, e.g. module load slurm",
        ) from error
    if done.timed_out:
        raise SchedulerUnavailable(
            f"{argv[0]} gave no answer in {TIMEOUT_S:.0f} s", argv=argv, hint="ask the controller: scontrol ping"
        )
    if done.returncode == 0:
        return done
    said = _first_line(done.stderr) or f"exit code {done.returncode}, no message"
    for text, kind, hint in _SAYS:
        if text in done.stderr:
            break
    else:
        kind, hint = SchedulerError, ""
    what = " ".join(word for word in argv[:2] if not word.startswith("-"))
    raise kind(f"{what}: {said}", argv=argv, returncode=done.returncode, stderr=done.stderr, hint=hint or None)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


_CHECKS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("sbatch", ("sbatch", "--version"), "put Slurm's commands on PATH, e.g. module load slurm"),
    ("controller", ("scontrol", "ping"), "nothing can be supervised until it answers; ask your operators"),
    ("queue", ("squeue", "--me", "-h", "-O", "JobID:|"), "see what it says: squeue --me"),
    ("nodes", ("sinfo", "-h", "-o", "%D nodes %T in %P"), "see what it says: sinfo"),
    ("settings", ("scontrol", "show", "config"), "see what it says: scontrol show config"),
    ("accounting", ("sacct", "-n", "-X", "-S", "now"), "optional: without it, jobs older than MinJobAge are forgotten"),
)
_SETTINGS = ("JobRequeue", "PreemptMode", "KillWait", "MinJobAge", "SlurmdTimeout")


def _check(name: str, argv: tuple[str, ...], hint: str) -> Check:
    try:
        done = _asked(argv)
    except SchedulerError as error:
        if "accounting storage is disabled" in error.stderr:
            return Check(name, True, "no accounting on this cluster: jobs older than MinJobAge are forgotten")
        return Check(name, False, str(error), hint)
    if name == "settings":
        return _settings(done.stdout)
    detail = "; ".join(line.strip() for line in done.stdout.splitlines()[:4] if line.strip())
    if name == "queue":
        detail = f"{len([line for line in done.stdout.splitlines() if line.strip()])} jobs of yours"
    return Check(name, "DOWN" not in detail or name != "controller", detail or "ok", hint)


def _settings(config: str) -> Check:
    pairs = dict(line.replace(" ", "").split("=", 1) for line in config.splitlines() if "=" in line)
    detail = ", ".join(f"{key}={pairs[key]}" for key in _SETTINGS if key in pairs)
    cancels = pairs.get("PreemptMode", "") == "CANCEL"
    return Check(
        "settings",
        not cancels,
        detail,
        "PreemptMode=CANCEL: a preempted job is ended, not requeued by Slurm" if cancels else "",
    )
