"""Where the ranks of a hung gang are: stacks that are alike put together, so that the few that are elsewhere show. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NAMED_RANKS, NAMED_PLACES = 4, 3
# Where a library waits says little; where the training code called it says a lot.
_LIBRARY = re.compile(
    r"(^|/)(site-packages|dist-packages)/|(^|/)lib(64)?/python3|^<frozen|^\?|(^|/)torch/(distributed|nn|utils|autograd)/"
)
# What a Python shows of a process that waits: its own wrappers around it are no place.
_WRAPPER = re.compile(r"^(wrapper|decorate_context|_fn|inner|__call__|_call_impl|_wrapped_call_impl)$")

Frame = tuple[str, str, int]
"""Function, file, line; innermost first in a stack."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank as it was found. `state` in the collector's words: running, sleeping, uninterruptible, stopped, traced, zombie,
    gone, ...; `frames` are the main thread's, empty where `error` says why."""

    rank: int
    node: str
    state: str
    wchan: str = ""
    frames: tuple[Frame, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks whose main threads are at the same place; `frames` are those of the first of them."""

    name: str
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]


def places(states: Iterable[RankState]) -> list[Place]:
    """The place with most ranks first."""
    found: dict[str, list[RankState]] = {}
    for state in states:
        if state.frames:
            found.setdefault(place_of(state.frames), []).append(state)
    listed = [Place(name, tuple(sorted(one.rank for one in at)), at[0].frames) for name, at in found.items()]
    return sorted(listed, key=lambda place: (-len(place.ranks), place.ranks))


def place_of(frames: Sequence[Frame]) -> str:
    """`all_reduce (train.py:120)`: what it waits in, and the innermost line that is no library's."""
    inner = next((frame[0] for frame in frames if not _WRAPPER.match(frame[0].rpartition(".")[2])), frames[0][0])
    own = next((frame for frame in frames if not _LIBRARY.search(frame[1])), frames[0])
    return shown(f"{inner} ({own[1].rsplit('/', 1)[-1]}:{own[2]})", 120)


def stacks_line(states: Sequence[RankState], total: int) -> str:
    """`7 of 8 ranks wait in all_reduce (train.py:120); rank 3 in next (loader.py:44)`; why not, where there are none. `total`
    is how many ranks the gang has."""
    found = places(states)
    why = next((shown(state.error, 200) for state in states if state.error), "")
    if not found:
        return f"of none of {total} ranks" + (f": {why}" if why else "")
    parts: list[str] = []
    for place in found[:NAMED_PLACES]:
        if not parts and len(place.ranks) > 1:
            parts.append(f"{len(place.ranks)} of {total} ranks wait in {place.name}")
        else:
            parts.append(f"{named(place.ranks)} in {place.name}")
    if len(found) > NAMED_PLACES:
        parts.append(
            f"{sum(len(place.ranks) for place in found[NAMED_PLACES:])} ranks in {len(found) - NAMED_PLACES} other places"
        )
    unseen = sorted(state.rank for state in states if not state.frames)
    if unseen:
        parts.append(f"none of {named(unseen)}" + (f" ({why})" if why else ""))
    return "; ".join(parts)


_WORDS = {
    "stopped": "stopped (SIGSTOP or a debugger)",
    "traced": "held by a debugger",
    "zombie": "dead, not yet reaped",
    "dead": "dead",
    "gone": "gone: no such process",
    "uninterruptible": "in the kernel, cannot be killed (D)",
}


def states_line(states: Sequence[RankState]) -> str:
    """Ranks whose process neither runs nor sleeps, in words; empty when there is none."""
    found: dict[str, list[RankState]] = {}
    for state in states:
        if state.state in _WORDS:
            where = f" in {shown(state.wchan, 60)}" if state.state == "uninterruptible" and state.wchan else ""
            found.setdefault(_WORDS[state.state] + where, []).append(state)
    return "; ".join(
        f"{named(sorted(one.rank for one in alike))} on {_nodes(alike)} {word}" for word, alike in found.items()
    )


def stacks_text(states: Sequence[RankState], total: int) -> str:
    """The page a person reads first: each place with its ranks and one of their stacks."""
    parts = [stacks_line(states, total), states_line(states)]
    for place in places(states):
        lines = [f"  {shown(name, 200)} ({shown(file, 200)}:{line})" for name, file, line in place.frames]
        parts.append("\n".join([f"{named(place.ranks, most=4096)} in {place.name}:", *lines]))
    return "\n\n".join(filter(None, parts)) + "\n"


def named(ranks: Sequence[int], most: int = NAMED_RANKS) -> str:
    shown = ",".join(map(str, ranks[:most])) + (f",… ({len(ranks)})" if len(ranks) > most else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _nodes(states: Sequence[RankState]) -> str:
    nodes = sorted({shown(state.node, 64) for state in states})
    return ",".join(nodes[:NAMED_RANKS]) + (f",… ({len(nodes)})" if len(nodes) > NAMED_RANKS else "")


def shown(text: str, most: int) -> str:
    """`text` of a job on one line of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)[:most]
