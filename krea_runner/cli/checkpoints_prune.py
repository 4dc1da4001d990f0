"""krea-runner checkpoints prune, and resume: what changes something in a directory of checkpoints"""

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(prune)
    app.command()(resume)


Where = Annotated[
    str, typer.Argument(metavar="RUN|DIR", help="Name of a run, or a directory of checkpoints (with a / in it, or ./).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]


def prune(
    where: Where,
    keep_last: Annotated[int, typer.Option(min=0, metavar="N", help="Keep the N newest whole ones.")] = 0,
    keep_every: Annotated[int, typer.Option(min=0, metavar="STEPS", help="Keep those whose step STEPS divides.")] = 0,
    keep_best: Annotated[int, typer.Option(min=0, metavar="N", help="Keep the N with the lowest --metric.")] = 0,
    metric: Annotated[str, typer.Option(help="As it stands in the name (val_loss=0.1) or in HF Trainer's log.")] = "",
    highest: Annotated[bool, typer.Option("--highest", help="The best is the highest.")] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also half-written ones that were given up.")
    ] = False,
    really: Annotated[bool, typer.Option("--delete/--dry-run", help="Without --delete nothing is changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints that no rule keeps. Says what would go; deletes with --delete.

    Never the newest whole one nor the one before it, none in progress or broken, none that a live attempt has loaded or that a
    pointer file names, none whose step is not known. Each is renamed first, then deleted.

    Example: krea-runner checkpoints prune llm-7b --keep-last 3 --keep-every 10000
    """
    from krea_runner.cli import context
    from krea_runner.cli.checkpoints import look, place_of
    from krea_runner.cli.output import print_json
    from krea_runner.decide.retention import Candidate, Kept, retention
    from krea_runner.errors import KreaRunnerError
    from krea_runner.report.words import one_line
    from krea_runner.supervise.prune import delete, left_names, metric_of, protected_steps, runs_with, sweep

    if bool(keep_best) != bool(metric):
        raise typer.BadParameter("--keep-best and --metric go together, e.g. --keep-best 2 --metric val_loss")
    if not (keep_last or keep_every or keep_best or unfinished):
        raise typer.BadParameter("no rule is given, so nothing may go; e.g. --keep-last 3 --keep-every 10000")
    directory = place_of(where).directory
    listed = look(where, most=None, headers=True)
    if listed.could_not_see:
        raise KreaRunnerError(f"could not see {directory}: {listed.could_not_see}; nothing is deleted")
    history, user = context.history_if_any(), context.current_user()
    live = runs_with(history, directory, user=user)
    needed = protected_steps(history, live, directory, listed.found)
    candidates = [
        Candidate(one.name, one.step, one.state, metric_of(one, metric) if metric else None) for one in listed.found
    ]
    rules = Kept(last=keep_last, every=keep_every, best=keep_best, highest=highest, unfinished=not unfinished)
    itself = {one.name: "it is the directory itself" for one in listed.found if one.path == directory}
    fates = retention(candidates, rules, protected=itself, needed=needed, left=left_names(live, listed.found))
    going = {fate.name for fate in fates if fate.goes}
    freed = sum(one.size_bytes for one in listed.found if one.name in going)
    if really:
        sweep(directory)
        for one in listed.found:
            if one.name in going:
                delete(one.path)
    if as_json:
        rows = [{"name": fate.name, "goes": fate.goes, "why": fate.why} for fate in fates]
        print_json({"directory": str(directory), "deleted": really, "freed_bytes": freed, "checkpoints": rows})
        return
    for fate in fates:
        word = ("deleted" if really else "would delete") if fate.goes else "keeps"
        typer.echo(f"{word:12}  {one_line(fate.name)}: {fate.why}")
    typer.echo(_sum(len(going), freed, really))


def _sum(count: int, freed: int, really: bool) -> str:
    from krea_runner.report.checkpoints import size_words

    if not count:
        return "nothing to delete"
    text = f"{count} checkpoint{'s' * (count != 1)}, {size_words(freed)}"
    return f"deleted {text}" if really else f"would delete {text}; do it with --delete"


def resume(
    where: Where,
    fix: Annotated[
        bool, typer.Option("--fix/--dry-run", help="Make the pointer file name the newest whole one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say from which checkpoint the next start resumes, and whether the framework's pointer file agrees.

    DeepSpeed reads `latest`, Megatron-LM `latest_checkpointed_iteration.txt`: after a crash in the middle of a save they may
    name one that is not whole. --fix changes the file in one rename and keeps the old value in `NAME.before-krea`.
    Exit code 1: nothing is whole, or the pointer names another and --fix was not given.

    Example: krea-runner checkpoints resume llm-7b --fix
    """
    from krea_runner.cli.checkpoints import CANNOT_SEE, look, place_of
    from krea_runner.cli.output import print_json
    from krea_runner.report.checkpoints import checkpoint_document, newest_whole
    from krea_runner.report.words import one_line
    from krea_runner.supervise.pointers import judge_pointer, set_pointer
    from krea_runner.supervise.prune import left_names

    place = place_of(where)
    listed = look(where, most=None, headers=True)
    left = left_names([place.run] if place.run else [], listed.found)
    newest = newest_whole([one for one in listed.found if one.name not in left])
    pointer = judge_pointer(place.directory, listed.found, newest)
    fixed = fix and pointer is not None and pointer.wanted is not None
    if fixed and pointer is not None:
        set_pointer(place.directory, pointer)
    if as_json:
        print_json(
            {
                "newest_whole": None if newest is None else checkpoint_document(newest),
                "pointer": None if pointer is None else {"file": pointer.name, "says": pointer.says, "wanted": pointer.wanted},
                "fixed": fixed,
                "could_not_see": listed.could_not_see or None,
            }
        )  # fmt: skip
    else:
        said = listed.could_not_see and f"could not see: {listed.could_not_see}"
        typer.echo(
            said or (f"newest whole: {one_line(str(newest.path))}" if newest else "nothing whole to resume from")
        )
        if pointer is not None:
            now = f"now {pointer.wanted!r}" if fixed else pointer.why
            typer.echo(one_line(f"{pointer.name} says {pointer.says!r}: {now}"))
    if listed.could_not_see:
        raise typer.Exit(CANNOT_SEE)
    if newest is None or (pointer is not None and pointer.wanted is not None and not fixed):
        raise typer.Exit(1)
