"""krea-runner resume"""

from typing import Annotated

import typer

from krea_runner.errors import KreaRunnerError


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or #ID.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")] = False,
) -> None:
    """Let a held run go on.

    Its job is requeued from the last checkpoint, with a new restart budget.

    Example: krea-runner resume llm-7b
    """
    from krea_runner.cli import context
    from krea_runner.clock import SystemClock
    from krea_runner.model import RunState
    from krea_runner.supervise.lease import own_holder

    history, clock = context.history(), SystemClock()
    found = history.find_run(run, user=context.current_user())
    if found.state is not RunState.HELD or found.job_id is None:
        raise KreaRunnerError(
            f"{found.name!r} is {found.state}, not HELD",
            hint="a stopped or finished run is started again with: krea-runner submit RUN.TOML",
        )
    if dry_run:
        typer.echo(f"would requeue job {found.job_id} of {found.name!r}")
        return
    history.resume_run(found, reason=f"resumed by {context.current_user()}", by=own_holder(), now=clock.wall())
    typer.echo(f"resumed {found.name!r}: the next tick requeues job {found.job_id}")
