"""The file by which a framework finds its newest checkpoint: does it name one that is whole, and what should it say."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from krea_runner.errors import KreaRunnerError
from krea_runner.observe.checkpoints.examine import POINTERS, Examined, State, read_pointer, step_of
from krea_runner.observe.checkpoints.tree import CheckpointError

KEPT = ".before-krea"


@dataclass(frozen=True, slots=True)
class Pointer:
    """`wanted` is None where it is as it should be, or where nothing is whole to name."""

    name: str
    says: str
    why: str
    wanted: str | None


def judge_pointer(directory: Path, found: Sequence[Examined], newest: Examined | None) -> Pointer | None:
    """None where there is no such file."""
    for name in POINTERS:
        try:
            says = read_pointer(directory, name)
        except CheckpointError as error:
            says, trouble = "", str(error)
        else:
            trouble = ""
        if says is None:
            continue
        step = None if trouble else step_of(says)
        if newest is None or newest.step is None:
            return Pointer(name, says, trouble or "nothing whole to name instead", None)
        if step == newest.step:
            return Pointer(name, says, "the newest whole one", None)
        named = next((one for one in found if one.step == step and step is not None), None)
        state = trouble or ("there is no such checkpoint" if named is None else f"that one is {_state(named)}")
        wanted = newest.name if POINTERS[name] == "deepspeed" else str(newest.step)
        return Pointer(name, says, f"{state}; --fix makes it {wanted!r}", wanted)
    return None


def _state(one: Examined) -> str:
    return "whole, but not the newest" if one.state is State.WHOLE else str(one.state)


def set_pointer(directory: Path, pointer: Pointer) -> None:
    """In one rename, the old value kept beside it. Raises: KreaRunnerError."""
    path = directory / pointer.name
    try:
        _replace(path.with_name(path.name + KEPT), pointer.says)
        _replace(path, pointer.wanted or "")
    except OSError as error:
        raise KreaRunnerError(f"changing {path}: {error.strerror}", hint="is the directory yours to write?") from error


def _replace(path: Path, text: str) -> None:
    """A symbolic link in its place is replaced, not followed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    partial.replace(path)
