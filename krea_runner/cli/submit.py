"""krea-runner submit"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def submit(
    run_toml: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run's configuration.")],
    scheduler: Annotated[
        str | None,
        typer.Option(help="`slurm` or `local`, instead of what the file says.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Submit also what `krea-runner check` calls an error.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Submit a run and record it.

    One gang, all nodes or none; from then on `supervise` keeps it going. What `krea-runner check` finds is said first,
    and an error there is not submitted.

    Example: krea-runner submit run.toml --dry-run
    """
    from krea_runner.cli import context
    from krea_runner.cli.check import check_before_submit
    from krea_runner.cli.output import print_json
    from krea_runner.clock import SystemClock
    from krea_runner.config import load_run
    from krea_runner.launch.render import render
    from krea_runner.launch.submit import submit as submit_run
    from krea_runner.model import SCHEDULERS
    from krea_runner.report.words import reference

    config = load_run(run_toml)
    if scheduler not in {None, *SCHEDULERS}:
        raise typer.BadParameter(f"{scheduler!r} is none of: {', '.join(SCHEDULERS)}", param_hint="--scheduler")
    if scheduler is not None:
        config = replace(config, scheduler=scheduler, transport=config.transport if scheduler == "slurm" else "local")
    if dry_run:
        if as_json:
            print_json({"run": config.name, "run_dir": str(config.run_dir), "script": render(config)})
        else:
            typer.echo(render(config), nl=False)
        return
    off: list[str] = []
    check_before_submit(run_toml, config, refuse_errors=not no_check)
    run = submit_run(
        config,
        run_toml,
        history=context.history(),
        scheduler=context.scheduler(config.endpoint),
        user=context.current_user(),
        clock=SystemClock(),
        tell=off.append,
    )
    if as_json:
        facts = {"run_id": run.run_id, "job_id": run.job_id, "run_dir": str(config.run_dir), "exclusions": off}
        print_json({"run": config.name, **facts})
        return
    said = ", ".join([f"{config.gang.nodes} nodes", *off])
    typer.echo(f"submitted {config.name!r} as job {run.job_id} ({config.endpoint}), {said}")
    typer.echo(f"  keep it going:  krea-runner supervise --every 10s      see it:  krea-runner status {reference(run)}")
