"""krea-runner stop"""

from typing import Annotated

import typer

from krea_runner.errors import SchedulerError


def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or #ID.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """End a run for good.

    Its job is cancelled and it is never restarted.

    The intent is recorded first: should the scheduler not answer now, the next tick cancels the job.

    Example: krea-runner stop llm-7b
    """
    from krea_runner.cli import context
    from krea_runner.clock import SystemClock
    from krea_runner.model import RunState
    from krea_runner.supervise.act import Work, carry_out
    from krea_runner.supervise.lease import own_holder, take_leases

    history, clock = context.history(), SystemClock()
    found = history.find_run(run, user=context.current_user())
    if found.state in {RunState.DONE, RunState.STOPPED}:
        _say(
            f"{found.name!r} is {found.state} already: {found.state_reason}",
            found.run_id,
            found.state,
            as_json,
        )
        return
    if dry_run:
        text = f"would stop {found.name!r} and cancel job {found.job_id or '(none yet)'}"
        _say(text, found.run_id, found.state, as_json)
        return
    reason = f"stopped by {context.current_user()} with krea-runner stop"
    history.stop_run(found, reason=reason, by=own_holder(), now=clock.wall())
    lease = take_leases(history, [found.run_id], own_holder(), clock.wall()).get(found.run_id)
    action = history.open_action(found.run_id)
    if action is not None and lease is not None:
        try:
            work = Work(found, context.scheduler(found.config.endpoint), lease, action)
            carry_out([work], history, clock, deadline=clock.mono() + 15.0)
            action = work.action
        except SchedulerError as error:
            if error.transient:
                error.hint = (
                    "the stop is on record: the next `krea-runner supervise` cancels the job, and nothing restarts it"
                )
            raise
        finally:
            history.drop_leases([lease])
    state = (
        ""
        if action is None
        else f", job {action.job_id} " + ("is " + action.detail if not action.stage.is_open else "is still ending")
    )
    _say(f"stopped {found.name!r}{state}", found.run_id, RunState.STOPPED, as_json)


def _say(text: str, run_id: int, state: str, as_json: bool) -> None:
    from krea_runner.cli.output import print_json

    if as_json:
        print_json({"run_id": run_id, "state": state, "message": text})
    else:
        typer.echo(text)
