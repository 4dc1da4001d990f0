"""krea-runner checkpoints"""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from krea_runner.cli import checkpoints_advise, checkpoints_prune

if TYPE_CHECKING:
    from krea_runner.model import CheckpointSpec, Run
    from krea_runner.observe.checkpoints.examine import Examined, Listed

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
FEW = 20  # checkpoints of a directory that are looked into, unless all are asked for
CANNOT_SEE = 75

Where = Annotated[
    str, typer.Argument(metavar="RUN|DIR", help="Name of a run, or a directory of checkpoints (with a / in it, or ./).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
All = Annotated[bool, typer.Option("--all", "-a", help=f"Not only the {FEW} with the highest steps.")]


class Depth(StrEnum):
    STRUCTURE = "structure"
    HEADERS = "headers"
    FULL = "full"


@app.callback()
def checkpoints() -> None:
    """List, verify and prune checkpoints; advise on the interval.

    Example: krea-runner checkpoints ls llm-7b
    """


@app.command()
def ls(where: Where, show_all: All = False, as_json: AsJson = False) -> None:
    """List checkpoints: step, size, whole or not and why.

    Looks at names, sizes and the index of each. Exit code 75: the directory could not be read.

    Example: krea-runner checkpoints ls llm-7b
    """
    listed = look(where, most=None if show_all else FEW)
    _print(listed, as_json=as_json)


@app.command()
def verify(
    where: Where,
    depth: Annotated[Depth, typer.Option(help="structure: names and sizes. headers: also what each file begins and ends "
                                         "with. full: also every byte, against the first time it was seen whole.")]
    = Depth.HEADERS,
    show_all: All = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Check that checkpoints are what they should be; nothing in them is run.

    Exit code 0: none is broken, and at least one is whole. 1: one is broken, or none is whole. 75: could not see.
    One that is still being written is "in progress"; one that was given up half-way is "unfinished": neither is an error.

    Example: krea-runner checkpoints verify llm-7b --depth full
    """
    from krea_runner.observe.checkpoints.examine import State

    listed = look(where, most=None if show_all else FEW, headers=depth is not Depth.STRUCTURE)
    if depth is Depth.FULL:
        listed = replace(listed, found=tuple(map(_with_checksums, listed.found)))
    _print(listed, as_json=as_json)
    states = {one.state for one in listed.found}
    if State.BROKEN in states or State.WHOLE not in states:
        raise typer.Exit(CANNOT_SEE if State.BROKEN not in states and State.UNSEEN in states else 1)


checkpoints_prune.register(app)
checkpoints_advise.register(app)


# ------------------------------------------------------------------------------------------------------------- inside


@dataclass(frozen=True, slots=True)
class Place:
    directory: Path
    spec: "CheckpointSpec | None" = None
    given_up_s: float | None = None
    run: "Run | None" = None


def place_of(where: str) -> Place:
    """Raises: NotFound; ConfigError where the run has no checkpoint directory, or it is on another host."""
    from krea_runner.cli import context
    from krea_runner.errors import ConfigError, NotFound

    if "/" in where or where in {".", ".."}:
        return Place(Path(where))
    history = context.history_if_any()
    if history is None:
        hint = f"a directory is named with a slash: krea-runner checkpoints ls ./{where}"
        raise NotFound(f"no run is called {where!r}: nothing was ever submitted", hint=hint)
    run = history.find_run(where, user=context.current_user())
    spec = run.config.checkpoint
    if spec.directory is None:
        raise ConfigError(f"run {run.name!r} has no [checkpoint] dir", hint="name the directory itself")
    if run.config.files == "sftp":
        raise ConfigError(
            f"the checkpoints of {run.name!r} are on {run.config.ssh_host}",
            hint=f"there: krea-runner checkpoints ls {spec.directory}",
        )
    return Place(spec.directory, spec, run.config.budgets.checkpoint_s, run)


def look(where: str, *, most: int | None, headers: bool = False) -> "Listed":
    from krea_runner.clock import SystemClock
    from krea_runner.observe.checkpoints.examine import GIVEN_UP_S, examine_directory

    place = place_of(where)
    return examine_directory(
        place.directory, now=SystemClock().wall(), spec=place.spec, most=most, headers=headers,
        given_up_s=place.given_up_s or GIVEN_UP_S,
    )  # fmt: skip


def _with_checksums(one: "Examined") -> "Examined":
    from krea_runner.clock import SystemClock
    from krea_runner.observe.checkpoints.checksums import compare
    from krea_runner.observe.checkpoints.examine import State
    from krea_runner.observe.checkpoints.tree import walk

    if one.state is not State.WHOLE:
        return one
    told = compare(walk(one.path), now=SystemClock().wall())
    if told.unread:
        return replace(one, state=State.UNSEEN, whys=(*one.whys, *told.unread[:5]))
    damage = [f"{name or one.name}: its content is not what was first seen, its time is" for name in told.changed]
    damage += [f"{name or one.name} was there when it was first seen" for name in told.gone]
    if damage:
        return replace(one, state=State.BROKEN, whys=(*one.whys, *damage[:5]))
    news = "checksums recorded" if told.recorded else "checksums match"
    if told.rewritten:
        news = f"{len(told.rewritten)} file(s) were written again since they were first seen: recorded anew"
    return replace(one, notes=(*one.notes, news))


def _print(listed: "Listed", *, as_json: bool) -> None:
    from krea_runner.cli.output import print_json, print_sheet
    from krea_runner.clock import SystemClock
    from krea_runner.report.checkpoints import checkpoint_sheet, listed_document

    if as_json:
        print_json(listed_document(listed))
    else:
        print_sheet(checkpoint_sheet(listed, now=SystemClock().wall()))
    if listed.could_not_see:
        raise typer.Exit(CANNOT_SEE)
