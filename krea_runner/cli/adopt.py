"""krea-runner adopt"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from krea_runner.errors import KreaRunnerError

if TYPE_CHECKING:
    from krea_runner.launch.adopt import Given, Question
    from krea_runner.model import JobRecord, RunConfig


def adopt(
    job_id: Annotated[
        str, typer.Argument(metavar="JOBID", help="A running or pending job; 123_4 for an array's task.")
    ],
    run_dir: Annotated[
        Path | None, typer.Option(help="Where incidents are kept. Default: WORKDIR/runs/NAME", show_default=False)
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Its log, where Slurm does not name it; /dev/null: none.", show_default=False)
    ] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option(help="Where its checkpoints are; '' when it has none.", show_default=False)
    ] = None,
    checkpoint_pattern: Annotated[
        str | None, typer.Option(help="Name of one checkpoint. Default: step_{step}", show_default=False)
    ] = None,
    checkpoint_complete: Annotated[
        str | None,
        typer.Option(help="File inside it once it is whole; '': none. Default: COMPLETE", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What to call the run. Default: the job's name", show_default=False)
    ] = None,
    progress: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET|REGEX",
            help="What its log says at each step: megatron, hf, ..., or an expression.",
            show_default=False,
        ),
    ] = None,
    progress_budget: Annotated[
        str | None, typer.Option(help="Longest time between two of these. Default: 30m", show_default=False)
    ] = None,
    mode: Annotated[str | None, typer.Option(help="`act` or `observe`.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be recorded; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Put a Slurm job under supervision, whoever submitted it and with what.

    What Slurm knows is read from it, the rest is asked for. The job itself is not touched.

    Example: krea-runner adopt 123456 --checkpoint-dir ckpt --progress megatron
    """
    from krea_runner.cli import context
    from krea_runner.clock import SystemClock
    from krea_runner.launch import adopt as adopting
    from krea_runner.report.words import one_line, reference
    from krea_runner.schedulers.slurm_describe import describe

    user = context.current_user()
    job = describe(job_id)
    record = context.scheduler("slurm").jobs([job.job_id])[job.job_id]
    history = context.history_if_any()
    known = None if history is None else adopting.known_run(history, job.job_id, user)
    if known is not None:
        text = f"job {job.job_id} is looked after already: run {one_line(known.name)!r}, {known.state}"
        _say(text, as_json, known.config, job.job_id, known.run_id, [])
        return
    adopting.refuse(record, user, is_root=user == "root", has_script=job.has_script)
    given = adopting.Given(name, run_dir, log, checkpoint_dir, checkpoint_pattern, checkpoint_complete, mode)
    given = replace(given, progress=progress, progress_budget=progress_budget)
    given = _answered(given, adopting.questions(job, record, given, record.user), job.job_id)
    config = adopting.config_of(job, record, given, record.user)
    notes = _notes(record, config)
    if dry_run:
        _say(f"would adopt job {job.job_id} as {one_line(config.name)!r}", as_json, config, job.job_id, None, notes)
        return
    run = adopting.adopt(config, job.job_id, history=context.history(), user=user, clock=SystemClock())
    _say(f"adopted job {job.job_id} as {one_line(config.name)!r}", as_json, config, job.job_id, run.run_id, notes)
    if not as_json:
        typer.echo(
            f"  keep it going:  krea-runner supervise --every 10s      see it:  krea-runner status {reference(run)}"
        )


def _answered(given: "Given", asked: list["Question"], job_id: str) -> "Given":
    """Asked on a terminal; in a pipe the flags to type are named, all at once."""
    if not asked:
        return given
    if not sys.stdin.isatty():
        flags = " ".join(f"{question.flag} ..." for question in asked)
        error = KreaRunnerError(
            "Slurm does not know: " + "; ".join(f"{question.text} ({question.flag})" for question in asked),
            hint=f"krea-runner adopt {job_id} {flags}",
        )
        error.exit_code = 2  # usage
        raise error
    answers: dict[str, Any] = {}
    for question in asked:
        said = typer.prompt(question.text, default="", show_default=False)
        answers[question.field] = Path(said or "/dev/null") if question.field == "log" else said
    return replace(given, **answers)


def _notes(record: "JobRecord", config: "RunConfig") -> list[str]:
    notes = []
    if not config.progress.pattern:
        notes.append("hangs cannot be seen: it has no heartbeats; give --progress what its log says at each step")
    elif config.job_log is None or str(config.job_log) == "/dev/null":
        notes.append("hangs cannot be seen: it has no log for --progress")
    if record.requeue_allowed is False:
        notes.append(
            f"Slurm may not requeue it (--no-requeue): scontrol update jobid={record.job_id} requeue=1, or a crash holds the run"
        )
    if config.checkpoint.directory is None:
        notes.append("no checkpoints are known: lost steps are not counted, only the restart budget ends a crash loop")
    return notes


def _say(text: str, as_json: bool, config: "RunConfig", job_id: str, run_id: int | None, notes: list[str]) -> None:
    from krea_runner.cli.output import print_json
    from krea_runner.report.words import one_line

    facts = {
        "run_dir": str(config.run_dir),
        "workdir": str(config.workdir),
        "command": config.command if isinstance(config.command, str) else " ".join(config.command),
        "log": str(config.job_log) if config.job_log else None,
        "checkpoint_dir": str(config.checkpoint.directory) if config.checkpoint.directory else None,
        "nodes": config.gang.nodes,
        "ranks": config.gang.world_size,
    }
    if as_json:
        print_json({"run": config.name, "run_id": run_id, "job_id": job_id, "message": text, **facts, "notes": notes})
        return
    typer.echo(text)
    for key, value in facts.items():
        typer.echo(f"  {key.replace('_', ' ') + ':':16}{one_line(str(value)) if value is not None else '-'}")
    for note in notes:
        typer.echo(f"  note: {note}")
