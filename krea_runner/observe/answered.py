"""Reads with a deadline. A file system whose server is gone (NFS, Lustre, FUSE) keeps whoever asks it waiting for ever, and no
signal ends that: the asking is left to a thread, and the thread is given up.

A directory whose thread is still stuck is not asked again. What several runs wait for is bounded too, in one round (a tick, a
look, one command): beside a stuck directory of the same mount, and once WAITS full waits were in vain, only a moment more.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from krea_runner.clock import SystemClock
from krea_runner.errors import ConfigError, FilesUnavailable
from krea_runner.model import RunConfig

T = TypeVar("T")

# Before it, nobody looks how long may be waited: what is healthy never comes to that.
FIRST_S = 0.5
SAME_MOUNT_S = 1.0
WAITS = 3
MOMENT_S = 0.1
# As many waits may one directory take that does answer, but slowly.
AT_MOST = 4
_CLOCK = SystemClock()


@dataclass(slots=True)
class _Round:
    in_vain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stuck:
    thread: threading.Thread
    since: float


_round = _Round()
_stuck: dict[str, _Stuck] = {}


def begin_round() -> None:
    _round.in_vain_s = 0.0


def answered(config: RunConfig, directory: Path, read: Callable[[], T]) -> T:
    """`read()`, which touches files of `directory` and nothing else that a later call could see half done.

    Raises: FilesUnavailable, when it does not come to its end in time; what `read` raises.
    """
    if config.files == "sftp":  # a copy of ours; the way to it has its own timeouts
        return read()
    name = os.fspath(directory)
    known = _stuck.get(name)
    if known is not None and known.thread.is_alive():
        raise _silent(name, _CLOCK.mono() - known.since)
    _stuck.pop(name, None)
    result: list[T] = []
    failure: list[BaseException] = []

    def ask() -> None:
        try:
            result.append(read())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            failure.append(error)

    thread, since = threading.Thread(target=ask, name=f"files of {name}", daemon=True), _CLOCK.mono()
    thread.start()
    thread.join(FIRST_S)
    if thread.is_alive():
        _wait_on(thread, name, since)
    if failure:
        raise failure[0]
    return result[0]


def _wait_on(thread: threading.Thread, name: str, since: float) -> None:
    from krea_runner.config.site_toml import ANSWER_S, answer_within_s

    try:
        longest, problem = answer_within_s(), ""
    except ConfigError as error:
        longest, problem = ANSWER_S, f"; {error}"
    wait = longest
    if any(one.thread.is_alive() and _mount(other) == _mount(name) for other, one in _stuck.items()):
        wait = min(longest, SAME_MOUNT_S)
    if _round.in_vain_s >= WAITS * longest:
        wait = MOMENT_S
    signs, seen_at = _signs(thread), since
    while thread.is_alive() and (now := _CLOCK.mono()) - seen_at < wait and now - since < AT_MOST * longest:
        thread.join(FIRST_S)
        before, signs = signs, _signs(thread)
        seen_at = _CLOCK.mono() if signs != before else seen_at
    if thread.is_alive():
        waited = _CLOCK.mono() - since
        _stuck[name] = _Stuck(thread, since)
        _round.in_vain_s += waited
        raise _silent(name, waited, problem)


def _signs(thread: threading.Thread) -> list[str]:
    """How often the thread went to sleep and woke up again. One that many slow answers keep busy does so all the time, one that
    waits for an answer that never comes does not."""
    try:
        lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    except OSError:
        return []
    return [line for line in lines if "ctxt_switches" in line]


def _silent(name: str, waited_s: float, problem: str = "") -> FilesUnavailable:
    text = f"file system does not answer ({name}), for {waited_s:.0f} s{problem}"
    return FilesUnavailable(text, hint=f"look: timeout -s KILL 5 ls {name}")


def _mount(name: str) -> str:
    """The mount point that `name` is below, by its name alone: asking the file system is what cannot be done."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "/"
    points = [line.split(" ")[4].encode().decode("unicode_escape") for line in lines]
    above = [point for point in points if f"{name}/".startswith(point.rstrip("/") + "/")]
    return max(above, key=len, default="/")
