"""Slurm through its own commands, as any user of a login node may call them: nothing to install, 22.05 to 26.05."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from krea_runner.errors import JobNotFound, MayNotDrain, SchedulerError, SchedulerOutputError, SchedulerUnavailable
from krea_runner.model import JobRecord, JobState
from krea_runner.proc import Completed
from krea_runner.schedulers import (
    DRAIN_PREFIX,
    Check,
    NodeRecord,
    Placement,
    environment_for,
    refuse_others_drains,
    slurm_nodes,
)
from krea_runner.schedulers.nodelist import fold
from krea_runner.schedulers.slurm_beside import end_beside, run_beside
from krea_runner.schedulers.slurm_parse import (
    ACCOUNTING_OFF,
    JOB_FORMAT,
    ROW_END,
    SACCT_FIELDS,
    answers,
    parse_sacct,
    parse_sacct_starts,
    parse_squeue,
    parse_submitted,
    printable,
    read_refusal,
)
from krea_runner.transport import HERE, Transport

# Without a controller a command takes 9 to 10 s to say so (22.05.8, MessageTimeout=10): longer than this is a hang.
TIMEOUT_S = 20.0
# sbatch itself tries again for a while when the controller is too busy; one that is cut short may still be carried out.
SUBMIT_TIMEOUT_S = 60.0

# ------------------------------------------------------------------------------------------------------ command lines


def squeue_argv(job_ids: Sequence[str]) -> list[str]:
    # A single id that is not known is an error, two are an empty answer, even the same one twice (22.05.8).
    asked = ",".join([checked_id(job_id) for job_id in (*job_ids, job_ids[0])])
    return [*_SQUEUE, "-j", asked, "-O", JOB_FORMAT]


def my_jobs_argv(*, everybody: bool) -> list[str]:
    """`everybody`: for root, who may look after the jobs of others."""
    return [*_SQUEUE, *([] if everybody else ["--me"]), "-O", JOB_FORMAT]


_SQUEUE = ("squeue", "-a", "-r", "-h", "-t", "all")


def sacct_argv(job_ids: Sequence[str]) -> list[str]:
    asked = ",".join(checked_id(job_id) for job_id in job_ids)
    # The second of January: the first is before the epoch in half of the world's time zones.
    fields = ",".join(SACCT_FIELDS)
    return ["sacct", "-D", "-X", "-P", "-n", "-S", "1970-01-02", "-j", asked, f"--format={fields}"]


def sbatch_argv(script: Path, tag: str, excluded: Sequence[str] = ()) -> list[str]:
    nodes = [f"--exclude={fold(excluded)}"] if excluded else []
    return ["sbatch", "--parsable", f"--comment={tag}", *nodes, str(script)]


def requeue_argv(job_id: str) -> list[str]:
    return ["scontrol", "requeue", checked_id(job_id)]


def release_argv(job_id: str) -> list[str]:
    return ["scontrol", "release", checked_id(job_id)]


def start_now_argv(job_id: str, excluded: Sequence[str] | None = None) -> list[str]:
    nodes = [] if excluded is None else [f"ExcNodeList={','.join(excluded)}"]
    return ["scontrol", "update", f"jobid={checked_id(job_id)}", *nodes, "StartTime=now"]


def cancel_argv(job_id: str) -> list[str]:
    return ["scancel", checked_id(job_id)]


def checked_id(job_id: str) -> str:
    """The id of one job, array task (`123_4`) or component (`123+1`), so that no id is ever read as an option
    (`scancel --me`) or as a list.

    Raises: JobNotFound.
    """
    if not re.fullmatch(r"[0-9]+([_+][0-9]+)?", job_id):
        raise JobNotFound(f"no job can be called {printable(job_id, 40)!r}", hint="your jobs: squeue --me")
    return job_id


# -------------------------------------------------------------------------------------------------------- the scheduler


class SlurmCli:
    name = "slurm"
    whole_second_starts = True

    def __init__(self, interface: Check | None = None, transport: Transport = HERE) -> None:
        """`interface` is what `checks` says of why it is the commands that are used."""
        self._interface, self.transport = interface, transport

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        """A job that squeue has forgotten (MinJobAge, by default 300 s after its end) is looked up in accounting, where
        the cluster has any. When accounting cannot be asked, such a job is UNKNOWN beside those that squeue does know;
        when it is all that was asked for, SchedulerUnavailable."""
        if not job_ids:
            return {}
        found = answers(job_ids, self._squeue(squeue_argv(job_ids), doing="asking for jobs"))
        return found | self._forgotten(job_ids, found)

    def my_jobs(self, known: Sequence[str]) -> dict[str, JobRecord]:
        everybody = not self.transport.host and os.geteuid() == 0
        records = self._squeue(my_jobs_argv(everybody=everybody), doing="asking for your jobs")
        found = {record.job_id: record for record in records} | answers(known, records)
        return found | self._forgotten(known, found)

    def find_by_tag(self, tag: str) -> list[JobRecord]:
        tagged = [job for job in self.my_jobs([]).values() if job.comment == tag]
        return sorted(tagged, key=lambda job: job.submitted_at or 0.0, reverse=True)

    def starts(self, job_ids: Sequence[str]) -> dict[str, list[JobRecord]]:
        found = self._accounting(job_ids) if job_ids else {}
        return {job_id: [self._with_name(start) for start in starts] for job_id, starts in found.items()}

    def submit(self, script: Path, *, tag: str, excluded: Sequence[str] = ()) -> str:
        doing = f"submitting {script}"
        # The failures to ask that are a definite no: nothing was sent.
        try:
            found = self.transport.has("sbatch")
        except SchedulerUnavailable as error:
            raise SchedulerError(f"{doing}: {error}", hint=error.hint) from error
        if not found:
            raise SchedulerError(f"{doing}: sbatch is not on PATH", hint=_NOT_ON_PATH)
        argv = sbatch_argv(script, tag, excluded)
        # On another host the job has that host's own, and the script is a path over there.
        environment = {} if self.transport.host else environment_for(script)
        try:
            done = self._ask(argv, doing=doing, timeout_s=SUBMIT_TIMEOUT_S, users_env=environment)
        except SchedulerError as error:
            error.hint = error.hint or f"try it by hand: sbatch --test-only {script}"
            raise
        try:
            return parse_submitted(done.stdout)
        except SchedulerOutputError as error:  # it was accepted, so there is a job to look for
            raise SchedulerUnavailable(
                f"{doing}: accepted, but {error}", argv=argv, returncode=0, stderr=done.stderr
            ) from error

    def requeue(self, job_id: str) -> None:
        self._ask(requeue_argv(job_id), doing=f"requeueing job {job_id}")

    def release(self, job_id: str) -> None:
        self._ask(release_argv(job_id), doing=f"releasing job {job_id}")

    def start_now(self, job_id: str, excluded: Sequence[str] | None = None) -> None:
        self._ask(start_now_argv(job_id, excluded), doing=f"lifting the start time of job {job_id}")

    def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeRecord]:
        return slurm_nodes.parse_nodes(self._ask(slurm_nodes.NODES_ARGV, doing="asking for nodes").stdout, names)

    def placements(self, job_ids: Sequence[str]) -> dict[str, Placement]:
        if not job_ids:
            return {}
        argv = slurm_nodes.placements_argv([checked_id(job_id) for job_id in job_ids])
        return slurm_nodes.parse_placements(self._ask(argv, doing="asking for the nodes of jobs").stdout)

    def exclude(self, job_id: str, names: Sequence[str]) -> None:
        placement = self.placements([job_id]).get(job_id)
        if placement is None:
            raise JobNotFound(
                f"excluding nodes from job {job_id}: Slurm does not know it", hint="your jobs: squeue --me"
            )
        excluded = dict.fromkeys((*placement.excluded, *names))
        argv = ["scontrol", "update", f"jobid={checked_id(job_id)}", f"ExcNodeList={','.join(excluded)}"]
        self._ask(argv, doing=f"excluding nodes from job {job_id}")

    def drain(self, names: Sequence[str], reason: str) -> None:
        doing = f"draining {fold(names)}"
        refuse_others_drains(self.nodes(names), names, doing)
        values = "state=drain", f"reason={DRAIN_PREFIX}{reason.removeprefix(DRAIN_PREFIX)}"
        instead = "keep your own runs off it: krea-runner nodes exclude NODE --all --reason ..."
        self._set_nodes(names, doing, *values, instead=instead)

    def undrain(self, names: Sequence[str]) -> None:
        doing = f"resuming {fold(names)}"
        refuse_others_drains(self.nodes(names), names, doing, lifting=True)
        self._set_nodes(names, doing, "state=resume", instead="ask an operator, or whoever drained it: sinfo -R")

    def _set_nodes(self, names: Sequence[str], doing: str, *values: str, instead: str) -> None:
        try:
            self._ask(["scontrol", "update", f"nodename={fold(names)}", *values], doing=doing)
        except SchedulerError as error:
            if "Invalid user id" not in error.stderr and "permission denied" not in error.stderr:
                raise
            raise MayNotDrain(
                f"{doing}: you may not; that is for Slurm's operators",
                argv=error.argv,
                returncode=error.returncode,
                stderr=error.stderr,
                hint=instead,
            ) from error

    def cancel(self, job_id: str) -> None:
        try:
            self._ask(cancel_argv(job_id), doing=f"cancelling job {job_id}")
        except JobNotFound:
            return

    def run_beside(
        self, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float, user: str = ""
    ) -> Completed:
        return run_beside(self.transport, checked_id(job_id), nodes, argv, timeout_s=timeout_s, user=user)

    def end_beside(self, job_id: str) -> None:
        end_beside(self.transport, checked_id(job_id))

    def checks(self) -> list[Check]:
        from krea_runner.schedulers.slurm_checks import checks

        return [*checks(self.transport), *([self._interface] if self._interface else [])]

    def _ask(
        self,
        argv: Sequence[str],
        *,
        doing: str,
        timeout_s: float = TIMEOUT_S,
        users_env: Mapping[str, str] | None = None,
    ) -> Completed:
        return ask(argv, doing=doing, timeout_s=timeout_s, users_env=users_env, transport=self.transport)

    def _squeue(self, argv: Sequence[str], *, doing: str) -> list[JobRecord]:
        """Of an answer whose rows end as nobody can know: root asks for everybody's jobs, and in a name or a comment somebody
        could have written the row of another's job."""
        mark = secrets.token_hex(8)
        done = self._ask([*argv[:-1], argv[-1] + mark], doing=doing)
        return parse_squeue(done.stdout, done.stderr, row_end=ROW_END + mark)

    def _with_name(self, record: JobRecord) -> JobRecord:
        """`CANCELLED by alice`, where sacct has `CANCELLED by 1001`."""
        word, by, uid = record.raw_state.partition(" by ")
        if not by or not uid.isdigit():
            return record
        done = self.transport.run(["id", "-nu", uid], timeout_s=TIMEOUT_S)
        name = done.stdout.strip() if done.returncode == 0 else f"uid {uid}"
        return replace(record, raw_state=f"{word}{by}{printable(name, 40)}")

    def _forgotten(self, asked: Sequence[str], found: Mapping[str, JobRecord]) -> dict[str, JobRecord]:
        """Those of `asked` that squeue does not know, as accounting has them."""
        gone = [job_id for job_id in asked if job_id not in found]
        if not gone:
            return {}
        try:
            return answers(gone, [starts[-1] for starts in self._accounting(gone, last=True).values()])
        except SchedulerError:  # a refusal too: the other jobs have been seen
            if not found:
                raise
            unseen = "not in squeue, and accounting does not answer"
            return {job_id: JobRecord(job_id, JobState.UNKNOWN, unseen) for job_id in gone}

    def _accounting(self, job_ids: Sequence[str], *, last: bool = False) -> dict[str, list[JobRecord]]:
        """What accounting remembers; nothing on a cluster without it, or where sacct is not installed. With `last`, one
        record a job, and UNKNOWN when it has not ended there."""
        if not self.transport.has("sacct"):
            return {}
        try:
            done = self._ask(sacct_argv(job_ids), doing="asking accounting for jobs")
        except SchedulerError as error:
            if ACCOUNTING_OFF in error.stderr:
                return {}
            raise
        if last:
            return {record.job_id: [record] for record in parse_sacct(done.stdout)}
        return parse_sacct_starts(done.stdout)


_NOT_ON_PATH = "is this a login node of the cluster? Slurm's commands must be on PATH, e.g. module load slurm"


def ask(
    argv: Sequence[str],
    *,
    doing: str,
    timeout_s: float = TIMEOUT_S,
    users_env: Mapping[str, str] | None = None,
    transport: Transport = HERE,
) -> Completed:
    """The answer of a command that exited 0 on the host that `transport` leads to.

    Raises: what its words mean (slurm_parse); SchedulerUnavailable when it could not be run, was killed, or gave no
    answer in time.
    """
    try:
        done = transport.run(argv, timeout_s=timeout_s, users_env=users_env)
    except OSError as error:
        raise SchedulerUnavailable(
            f"{doing}: cannot run {argv[0]}: {error.strerror}", argv=argv, hint=_NOT_ON_PATH
        ) from error
    if done.timed_out or done.returncode < 0:
        end = f"no answer in {timeout_s:g} s" if done.timed_out else f"killed by signal {-done.returncode}"
        raise SchedulerUnavailable(
            f"{doing}: {argv[0]}: {end}",
            argv=argv,
            returncode=done.returncode,
            stderr=done.stderr,
            hint="ask the controller: scontrol ping",
        )
    if done.returncode == 0:
        return done
    said = done.stderr if done.stderr.strip() else done.stdout
    kind, hint = read_refusal(said)
    raise kind(
        f"{doing}: {printable(said) or 'not a word'} ({argv[0]} exit {done.returncode})",
        argv=argv,
        returncode=done.returncode,
        stderr=done.stderr,
        hint=hint or None,
    )
