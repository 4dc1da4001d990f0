"""krea-runner checkpoints advise"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from krea_runner.model import Run
    from krea_runner.report.advice import Advice, Choice, Value


def register(app: typer.Typer) -> None:
    app.command()(advise)


def advise(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or #ID.")],
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures, if you know better.")
    ] = None,
    restart: Annotated[str | None, typer.Option(metavar="TIME", help="From a failure to the first new step.")] = None,
    stall: Annotated[str | None, typer.Option(metavar="TIME", help="For how long a save stops the training.")] = None,
    interval: Annotated[str | None, typer.Option(metavar="TIME", help="Between two saves, now.")] = None,
    faster: Annotated[float, typer.Option(min=1.0, help="How much faster a better file system would be.")] = 4.0,
    gpu_hour: Annotated[float | None, typer.Option(min=0.0, metavar="PRICE", help="What a GPU costs an hour.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Say how often this run should save, and what that and other changes would bring.

    From the run's own failures, restarts and checkpoints, as far as they are on record; each number says where it is from.

    Example: krea-runner checkpoints advise llm-7b --gpu-hour 2.50
    """
    from krea_runner.cli import context
    from krea_runner.cli.output import print_json
    from krea_runner.clock import SystemClock
    from krea_runner.config.durations import parse_duration
    from krea_runner.errors import NotFound
    from krea_runner.report.advice import Value, measured_mtbf, measured_restart
    from krea_runner.report.advice import advise as work_out

    try:
        given = {
            name: None if text is None else parse_duration(text)
            for name, text in (("mtbf", mtbf), ("restart", restart), ("stall", stall), ("interval", interval))
        }
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    history = context.history_if_any()
    if history is None:
        raise NotFound(f"no run is called {run!r}: nothing was ever submitted", hint="krea-runner submit RUN.TOML")
    found = history.find_run(run, user=context.current_user())
    incidents = history.incidents(run_id=found.run_id)
    measured_stall, measured_interval = _measured(found)

    def value(name: str, measured: "Value | None") -> "Value | None":
        seconds = given[name]
        return measured if seconds is None else Value(seconds, "given")

    advice = work_out(
        failures=measured_mtbf(history.attempts(found.run_id), incidents, now=SystemClock().wall()),
        nodes=found.config.gang.nodes, gpus=found.config.gang.world_size, mtbf_s=given["mtbf"],
        restart=value("restart", measured_restart(incidents)), stall=value("stall", measured_stall),
        interval=value("interval", measured_interval), faster=faster,
    )  # fmt: skip
    if as_json:
        print_json({"run": found.name, **_document(advice, gpu_hour)})
    else:
        typer.echo("\n".join(_lines(advice, gpu_hour)))


def _measured(run: "Run") -> "tuple[Value | None, Value | None]":
    """How long a save takes and how far apart they are, from the newest whole checkpoints on disk. The first is what can be
    seen of it: from the first file's end to the last one's."""
    from itertools import pairwise
    from statistics import median

    from krea_runner.clock import SystemClock
    from krea_runner.observe.checkpoints.examine import State, examine_directory
    from krea_runner.report.advice import Value
    from krea_runner.report.checkpoints import took_s

    spec = run.config.checkpoint
    if spec.directory is None or run.config.files == "sftp" or not spec.directory.is_dir():
        return None, None
    listed = examine_directory(spec.directory, now=SystemClock().wall(), spec=spec, most=9)
    whole = [one for one in listed.found if one.state is State.WHOLE and one.written_to is not None]
    tooks = [took for one in whole if (took := took_s(one)) is not None and took >= 1.0]
    gaps = [later - earlier for later, earlier in pairwise([one.written_to or 0.0 for one in whole]) if later > earlier]
    return (
        Value(median(tooks), f"measured: median of {len(tooks)} saves, from first file to last") if tooks else None,
        Value(median(gaps), f"measured: median between {len(gaps) + 1} checkpoints") if len(gaps) > 1 else None,
    )


def _lines(advice: "Advice", gpu_hour: float | None) -> list[str]:
    from krea_runner.report.words import seconds

    def known(value: "Value | None") -> str:
        return "not known (give --interval)" if value is None else f"{seconds(value.seconds)} ({value.source})"

    bounds = "" if advice.mtbf_bounds_s is None else f"; 95 %: {' to '.join(map(seconds, advice.mtbf_bounds_s))}"
    lines = [
        f"a failure every   {known(advice.mtbf)}{bounds}",
        f"back in           {known(advice.restart)}",
        f"a save stalls     {known(advice.stall)}",
        f"saves every       {known(advice.interval)}",
        "",
        f"{'':36}  {'interval':>8}  {'effective':>9}  in 30 days" + (" against now" if advice.now else ""),
    ]
    for one in [*([advice.now] if advice.now else []), advice.best, *advice.choices]:
        gained = "" if one is advice.now else _gained(one, gpu_hour)
        lines.append(f"{one.what:36}  {seconds(one.interval_s):>8}  {one.ettr:9.1%}  {gained}".rstrip())
    if advice.best_bounds_s is not None:
        lines.append(f"\nthe best interval lies between {' and '.join(map(seconds, sorted(advice.best_bounds_s)))}")
    return lines


def _gained(one: "Choice", gpu_hour: float | None) -> str:
    hours = one.gained_gpu_s / 3600
    money = "" if gpu_hour is None else f" = {hours * gpu_hour:+,.0f} at {gpu_hour:g} an hour"
    return f"{hours:+,.0f} GPU-h{money}"


def _document(advice: "Advice", gpu_hour: float | None) -> dict[str, Any]:
    from dataclasses import asdict

    document = asdict(advice)
    for one in [document["now"], document["best"], *document["choices"]]:
        if one is not None and gpu_hour is not None:
            one["gained_money"] = one["gained_gpu_s"] / 3600 * gpu_hour
    return document
