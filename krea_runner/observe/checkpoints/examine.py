"""Each checkpoint of a directory as one answer: whose, which step, how large, whole or not and why."""

import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from krea_runner.errors import NotFound
from krea_runner.model import CheckpointSpec
from krea_runner.observe.checkpoints.contents import read_json, read_torch_values
from krea_runner.observe.checkpoints.formats import (
    TORCH_FILE,
    UNFINISHED_NAME,
    Format,
    Trouble,
    header_checks,
    recognise,
    structure,
)
from krea_runner.observe.checkpoints.newest import step_regex
from krea_runner.observe.checkpoints.tree import AT_ONCE, CheckpointError, Tree, walk

# A save that has not been finished and that nobody has written to for this long was given up.
GIVEN_UP_S = 900.0
MOST_REASONS = 5
# What `checkpoints prune` has renamed and not deleted yet.
DELETED = ".krea-deleted."
# How frameworks write the step into a name; the first that matches counts. Without one, a number at its end.
_STEP = re.compile(r"(?:checkpoint-|global_step|iter_|step[=_-]?)(\d{1,18})(?!\d)|^(\d{1,18})$")
_LAST_NUMBER = re.compile(r"[-_.](\d{1,18})$")


class State(StrEnum):
    WHOLE = "whole"
    IN_PROGRESS = "in progress"
    UNFINISHED = "unfinished"
    """Begun, and given up: never to be resumed from."""
    BROKEN = "broken"
    """Says that it is finished, and is not what it should be."""
    UNSEEN = "could not see"


@dataclass(frozen=True, slots=True)
class Examined:
    """`whys`: what is wrong, worst first, a few. `written_from`, `written_to`: when its first and its last file were
    finished, by the file server's clock."""

    name: str
    path: Path
    format: str
    step: int | None
    state: State
    whys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    size_bytes: int = 0
    files: int = 0
    written_from: float | None = None
    written_to: float | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """What one directory holds, newest first. `left_out`: candidates that were not looked into, `why_not`: why nothing at
    all could be seen."""

    directory: Path
    found: tuple[Examined, ...] = ()
    left_out: int = 0
    could_not_see: str = ""


def examine_directory(
    directory: Path, *, now: float, spec: CheckpointSpec | None = None, most: int | None = None, headers: bool = False,
    given_up_s: float = GIVEN_UP_S,
) -> Listed:  # fmt: skip
    """The checkpoints in `directory`, or `directory` itself where it is one; of many, the `most` with the highest steps.

    Raises: NotFound where there is nothing of that name.
    """
    try:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            return Listed(directory, (examine(directory, now=now, headers=headers, given_up_s=given_up_s),))
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if _may_be_one(entry)]
    except FileNotFoundError:
        raise NotFound(f"there is no {str(directory)!r}", hint="name a directory of checkpoints, or a run") from None
    except OSError as error:
        return Listed(directory, could_not_see=f"{error.strerror}")
    pattern = step_regex(spec.pattern) if spec is not None else None
    names.sort(key=lambda name: (step_of(name, pattern) is not None, step_of(name, pattern) or 0, name), reverse=True)
    found: list[Examined] = []
    looked = 0
    for name in names:
        if most is not None and len(found) >= most:
            break
        looked += 1
        one = examine(directory / name, now=now, spec=spec, headers=headers, given_up_s=given_up_s)
        if one.format:
            found.append(one)
    if not found:
        own = examine(directory, now=now, headers=headers, given_up_s=given_up_s)
        return Listed(directory, (own,) if own.format else ())
    return Listed(directory, tuple(_by_pointer(directory, found, now, given_up_s)), left_out=len(names) - looked)


def _may_be_one(entry: os.DirEntry[str]) -> bool:
    """By its name and kind only: a link inside the directory is another name of what is there."""
    if entry.is_symlink() or entry.name.startswith(DELETED):
        return False
    if entry.is_dir(follow_symlinks=False):
        return True
    return TORCH_FILE.search(entry.name) is not None or entry.name.endswith(".safetensors")


def examine(
    path: Path, *, now: float, spec: CheckpointSpec | None = None, headers: bool = False, given_up_s: float = GIVEN_UP_S
) -> Examined:
    """One checkpoint; its `format` is empty where it is none. `spec`: the user's own rule, for names that match it."""
    tree = walk(path)
    by_rule = spec is not None and step_regex(spec.pattern).fullmatch(path.name) is not None
    form = recognise(tree)
    name = form.name if form is not None else ("pattern" if by_rule else "")
    written = tree.written
    result = Examined(
        name=path.name, path=path, format=name, step=_step(tree, form, spec if by_rule else None), state=State.WHOLE,
        size_bytes=tree.size_bytes, files=len(tree.files), written_from=written[0] if written else None,
        written_to=written[1] if written else None, notes=_notes(tree),
    )  # fmt: skip
    if not name and not tree.unseen:
        return result
    unfinished = _unfinished(tree, form, spec if by_rule and spec is not None else None)
    troubles = list(structure(tree)) + ([*_headers(tree)] if headers else [])
    has_sign = bool(by_rule and spec is not None and spec.complete) or (form is not None and form.has_sign)
    return replace(_judge(result, tree, troubles, unfinished, has_sign, now, given_up_s), format=name or "?")


def _judge(
    result: Examined,
    tree: Tree,
    troubles: Sequence[Trouble],
    unfinished: str,
    has_sign: bool,
    now: float,
    given_up_s: float,
) -> Examined:
    unseen = [one.text for one in troubles if one.kind == "unseen"] + tree.unseen
    begun = [one.text for one in troubles if one.kind == "begun"]
    wrong = [one.text for one in troubles if one.kind in {"missing", "damaged"}]
    whys = tuple(dict.fromkeys(([unfinished] if unfinished else []) + begun + wrong + unseen))
    more = (f"and {len(whys) - MOST_REASONS} more",) if len(whys) > MOST_REASONS else ()
    result = replace(result, whys=whys[:MOST_REASONS] + more)
    recent = result.written_to is not None and now - result.written_to < given_up_s
    if tree.vanished:
        gone = f"{tree.vanished} file(s) vanished while it was looked at"
        return replace(result, state=State.IN_PROGRESS, whys=(*result.whys, f"{gone}: it is being written or deleted"))
    if tree.truncated:
        return replace(
            result, state=State.UNSEEN, whys=(*result.whys, f"more than {result.files} files: not looked at all")
        )
    if unfinished or begun or (wrong and not (has_sign and _sign_is_apart(tree))):
        return replace(result, state=State.IN_PROGRESS if recent else State.UNFINISHED)
    if wrong:
        return replace(result, state=State.BROKEN)
    return replace(result, state=State.UNSEEN) if unseen else result


def _sign_is_apart(tree: Tree) -> bool:
    """Whether what shows the end of a save is another file than those that are wrong: then they should have been there."""
    return not tree.is_file


def _unfinished(tree: Tree, form: Format | None, spec: CheckpointSpec | None) -> str:
    if UNFINISHED_NAME.search(tree.root.name):
        return "its name is that of a save which has not been renamed into place"
    if spec is not None and spec.complete:
        return "" if spec.complete in tree.files else f"no {spec.complete}"
    return form.unfinished(tree) if form is not None else ""


def _headers(tree: Tree) -> list[Trouble]:
    def run(item: tuple[str, object]) -> Trouble | None:
        name, check = item
        try:
            check()  # type: ignore[operator]
        except CheckpointError as error:
            return Trouble("damaged", f"{name or tree.root.name} {error}")
        return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [one for one in pool.map(run, header_checks(tree)) if one is not None]


def _notes(tree: Tree) -> tuple[str, ...]:
    holes = [name for name, file in tree.files.items() if file.size_bytes > 1 << 20 and file.on_disk_bytes == 0]
    notes = [f"{len(holes)} file(s) are all hole: nothing was written into them"] if holes else []
    return (*notes, *([f"{len(tree.links)} symbolic link(s), not followed"] if tree.links else []))


# --------------------------------------------------------------------------------------------------------------- steps


def step_of(name: str, pattern: "re.Pattern[str] | None" = None) -> int | None:
    if pattern is not None and (match := pattern.fullmatch(name)):
        return int(match[1])
    match = _STEP.search(name) or _LAST_NUMBER.search(re.sub(r"\.[a-z]+$", "", name))
    return int(next(part for part in match.groups() if part)) if match else None


def _step(tree: Tree, form: Format | None, spec: CheckpointSpec | None) -> int | None:
    """From its name; where that has none, from what is written inside."""
    step = step_of(tree.root.name, step_regex(spec.pattern) if spec is not None else None)
    if step is not None or form is None:
        return step
    try:
        if "trainer_state.json" in tree.files:
            inside: object = read_json(tree, "trainer_state.json").get("global_step")
        elif tree.is_file and TORCH_FILE.search(tree.root.name):
            values = read_torch_values(tree, "")
            inside = next((values[key] for key in ("global_step", "iteration", "step") if key in values), None)
        else:
            return None
    except CheckpointError:
        return None
    return inside if type(inside) is int else None


# ------------------------------------------------------------------------------------------------------------ pointers

# A file beside the checkpoints that names the newest: written once a save is over, and read at the next start.
POINTERS = {"latest": "deepspeed", "latest_checkpointed_iteration.txt": "megatron"}


def read_pointer(directory: Path, name: str) -> str | None:
    """What it says, one short line; None where there is none. Raises: CheckpointError."""
    tree = walk(directory / name)
    if "" not in tree.files:
        return None
    text = tree.read("", 4096).decode(errors="replace").strip()
    if len(text) > 255 or "\n" in text or "/" in text:
        raise CheckpointError(f"{name} does not hold one name")
    return text


def pointed_at(directory: Path) -> tuple[str, int | None] | None:
    """The pointer file's name and the step that it names."""
    for name in POINTERS:
        try:
            text = read_pointer(directory, name)
        except CheckpointError:
            return name, None
        if text is not None:
            return name, step_of(text)
    return None


def _by_pointer(directory: Path, found: Sequence[Examined], now: float, given_up_s: float) -> list[Examined]:
    """DeepSpeed and Megatron's legacy form have no sign of their own: what is newer than the pointer is not over yet."""
    pointer = pointed_at(directory)
    if pointer is None or pointer[1] is None:
        return list(found)
    name, step = pointer[0], pointer[1]
    why = f"{name} still names step {step}: it is written last"

    def judged(one: Examined) -> Examined:
        signless = one.format in {"deepspeed", "megatron-legacy"} and one.state in {State.WHOLE, State.BROKEN}
        if not signless or one.step is None or one.step <= step:
            return one
        recent = one.written_to is not None and now - one.written_to < given_up_s
        return replace(one, state=State.IN_PROGRESS if recent else State.UNFINISHED, whys=(why, *one.whys))

    return [judged(one) for one in found]
