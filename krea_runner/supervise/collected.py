"""What the nodes printed of a hung step (at_node.py) → who is where, and the lines that an incident carries. Pure.

All of it comes from over there: bounded, checked by type, and without control characters before anybody sees it."""

import base64
import binascii
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from krea_runner.diagnose.stacks import Frame, RankState, named, shown, stacks_line, states_line

MARK = "KE1 "
DOCUMENT_BYTES = 16 << 20
NAMED_NODES = 4
COLLECTED = "collected "
"""What the first line begins with: an incident that has one is not looked at again."""


@dataclass(slots=True)
class Collected:
    states: list[RankState] = field(default_factory=list)
    """In the order of ranks."""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Nodes that said anything → what each had to say at its end; empty where it did not come to that."""
    damaged: int = 0


def read_collected(text: str) -> Collected:
    found = Collected()
    states: dict[int, RankState] = {}
    for node, document in _documents(text, found):
        notes = found.nodes.setdefault(node, {})
        try:
            if document["kind"] == "ranks":
                for raw in document["ranks"]:
                    state = RankState(int(raw["rank"]), _text(raw["node"]), _text(raw["state"]), _text(raw["wchan"]))
                    states.setdefault(state.rank, state)
            elif document["kind"] == "stack":
                number = int(document["rank"])
                frames = tuple(_frame(raw) for raw in document.get("frames", ()))
                error = _text(document.get("error") or ("" if frames else "no Python code in it"))
                states[number] = replace(states[number], frames=frames, error=error)
            elif document["kind"] == "end":
                notes |= dict(document["notes"]) | {"seconds": float(document["seconds"])}
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            found.damaged += 1
    found.states = [states[number] for number in sorted(states)]
    return found


def _documents(text: str, found: Collected) -> Iterator[tuple[str, dict[str, Any]]]:
    """Put together from their lines, in the order in which they became whole."""
    parts: dict[tuple[str, str], dict[int, str]] = {}
    for line in text.splitlines():
        if not line.startswith(MARK):
            continue
        try:
            _, node, number, at, count, data = line.split(" ")
            mine = parts.setdefault((node, number), {})
            mine[int(at)] = data
            if len(mine) < int(count):
                continue
            unpack = zlib.decompressobj()
            raw = unpack.decompress(base64.b64decode("".join(mine[key] for key in sorted(mine))), DOCUMENT_BYTES)
            document = json.loads(raw)
            if not isinstance(document, dict):
                raise ValueError("not a table")
            yield _text(node)[:64], document
        except (ValueError, binascii.Error, zlib.error, RecursionError):
            found.damaged += 1


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("text is wanted")
    return shown(value, 300)


def _frame(raw: Sequence[object]) -> Frame:
    name, file, line = raw
    return _text(name), _text(file), int(line)  # type: ignore[call-overload]


# ---------------------------------------------------------------------------------------------------------------- lines


def evidence_lines(
    found: Collected, *, asked: Sequence[str], left_out: Sequence[str], world_size: int, took_s: float, failure: str
) -> list[str]:
    """`asked`: the nodes on which it was tried; empty where all are one machine. `failure`: why nothing, or not all, came."""
    total = max(world_size, len(found.states))
    lines = [_collected_line(found, asked, left_out, took_s, failure)]
    if not found.nodes:
        return lines
    without_spy = all(state.error == "" for state in found.states) and not any(state.frames for state in found.states)
    if without_spy and any(notes.get("stacks") == "py-spy is not there" for notes in found.nodes.values()):
        lines.append(
            "stacks: none, py-spy is not on the nodes: pip install 'krea-runner[stacks]', or [evidence] py_spy"
        )
    else:
        lines.append(f"stacks: {stacks_line(found.states, total)}")
        if "may not look into it" in lines[-1]:
            lines[-1] += "; krea_runner.Heartbeat in the training script allows it"
    if states := states_line(found.states):
        lines.append(f"processes: {states}")
    lines += [f"flight recorder: {_dumps_line(found)}", f"NCCL RAS: {_ras_line(found)}"]
    for key, name in (("kernel_log", "kernel log"), ("nvidia_smi", "nvidia-smi")):
        lines.append(f"{name}: {_told(found, key)}")
    unwritten = {str(notes.get("files")) for notes in found.nodes.values()} - {"written", "None"}
    return lines + [f"files of some nodes {shown(why, 200)}" for why in sorted(unwritten)[:1]]


def _collected_line(
    found: Collected, asked: Sequence[str], left_out: Sequence[str], took_s: float, failure: str
) -> str:
    because = f" ({shown(failure, 300)})" if failure else ""
    if not found.nodes:
        return f"{COLLECTED}nothing in {took_s:.1f} s{because}"
    if not asked:
        return f"{COLLECTED}in {took_s:.1f} s{because}"
    silent = [node for node in asked if node not in found.nodes]
    whole = f"{len(found.nodes)} of {len(asked) + len(left_out)} nodes"
    without = (silent, "did not answer"), (left_out, "not asked, Slurm says it is out")
    missing = "".join(f"; {_nodes(nodes)} {word}" for nodes, word in without if nodes)
    return f"{COLLECTED}in {took_s:.1f} s from {whole}{missing}{because if silent else ''}"


def _dumps_line(found: Collected) -> str:
    dumped, late = [], []
    why: dict[str, list[int]] = {}
    for notes in found.nodes.values():
        told = notes.get("flight_recorder")
        if not isinstance(told, dict):
            continue
        dumped += _numbers(told.get("dumped"))
        late += _numbers(told.get("late"))
        not_asked = told.get("not_asked")
        for word, ranks in not_asked.items() if isinstance(not_asked, dict) else ():
            why.setdefault(shown(str(word), 100), []).extend(_numbers(ranks))
    parts = [f"dumps of {len(dumped)} ranks in flight_recorder/"] if dumped else []
    parts += [f"no dump in time of {named(sorted(late))}"] if late else []
    parts += [f"{word}" + (f" ({named(sorted(ranks))})" if ranks else "") for word, ranks in sorted(why.items())[:3]]
    return "; ".join(parts) or "none"


def _numbers(value: object) -> list[int]:
    return [number for number in value if isinstance(number, int)] if isinstance(value, list) else []


def _ras_line(found: Collected) -> str:
    told = {node: str(notes.get("ras")) for node, notes in sorted(found.nodes.items()) if notes.get("ras")}
    answered = [node for node, word in told.items() if word == "answered"]
    if answered:
        return f"status of the whole job in ras/{answered[0]}.*"
    return next((shown(word, 200) for word in told.values() if word != "asked elsewhere"), "nobody was asked")


def _told(found: Collected, key: str) -> str:
    """`of 4 nodes`, or the most usual reason why not."""
    words = [str(notes[key]) for notes in found.nodes.values() if key in notes]
    count = words.count("read")
    others = [word for word in words if word != "read"]
    parts = [f"of {count} node" + ("s" if count > 1 else "")] if count else []
    if others:
        parts.append(shown(max(sorted(set(others)), key=others.count), 200))
    return "; ".join(parts) or "none"


def _nodes(names: Sequence[str]) -> str:
    return ",".join(names[:NAMED_NODES]) + (f",… ({len(names)})" if len(names) > NAMED_NODES else "")
