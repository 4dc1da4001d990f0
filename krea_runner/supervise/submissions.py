"""Submissions whose answer was lost: the job that is the run's is found by its tag, any other is ended."""

from collections.abc import Container, Mapping

from krea_runner.model import JobRecord, JobState, Run, RunState
from krea_runner.schedulers import Scheduler
from krea_runner.supervise.supervisor import RunLine, Supervisor

# Looked for this long before a person is asked, and before a stopped run is no more looked after.
LOST_SUBMISSION_S = 600.0
_LOOKING = "submitted, no job id yet"
TAG_PREFIX = "krea_runner/"


def find_submission(supervisor: Supervisor, run: Run, jobs: Mapping[str, JobRecord]) -> RunLine:
    """The answer to the submission was lost: the job carries our tag, if it exists."""
    found = [job for job in jobs.values() if job.comment == run.tag]
    now = supervisor.clock.wall()
    if found:
        newest = max(found, key=lambda job: job.submitted_at or 0.0)
        if not supervisor.dry_run and not supervisor.history.set_submitted(run.run_id, newest.job_id, now=now):
            return RunLine(run, "stopped while its job was looked for")  # which the next tick ends
        return RunLine(run, f"found its job {newest.job_id} by its tag", news=True)
    looking = RunLine(run, f"{_LOOKING}: looking for its tag", blind=True)
    if run.state_reason != _LOOKING:  # the time counts from the first answer without it: before, nobody could see
        if not supervisor.dry_run:
            supervisor.history.set_run_state(run.run_id, run.state, _LOOKING, now=now, was=run.state)
        return looking
    if now - run.updated_at < LOST_SUBMISSION_S:
        return looking
    why = "its submission never reached the scheduler"
    if not supervisor.dry_run:
        supervisor.history.set_run_state(run.run_id, RunState.STOPPED, why, now=now, was=run.state)
    return RunLine(run, f"{why}; submit it again", news=True)


def end_ghosts(
    supervisor: Supervisor, scheduler: Scheduler, jobs: Mapping[str, JobRecord], *, just_replaced: Container[str]
) -> list[RunLine]:
    """Never two live attempts of one run: a submission whose answer was lost may be carried out much later, when the run has
    long been submitted again (a stopped controller does that, 22.05.8)."""
    lines = []
    for job in jobs.values():
        over = job.state.is_ended or job.state is JobState.UNKNOWN or job.job_id in just_replaced
        if over or not job.comment.startswith(TAG_PREFIX):
            continue
        run = supervisor.history.run_tagged(job.comment.partition(".")[0])
        if run is None or run.job_id == job.job_id or supervisor.history.open_action(run.run_id) is not None:
            continue
        if run.job_id is None and run.state is not RunState.STOPPED:  # it is being submitted
            continue
        if not supervisor.dry_run:
            scheduler.cancel(job.job_id)
        lines.append(
            RunLine(run, f"job {job.job_id} is not the job of this run (it has {run.job_id}): cancelled", news=True)
        )
    return lines
