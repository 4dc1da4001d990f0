"""Flight Recorder dumps for tests: recorded ones of gloo, and the same in the form that NCCL's recorder gives them.

gloo's (torch 2.13) name no members of a group, and no state but "scheduled"; nothing else in the form differs, as both come
from one writer (c10d/FlightRecorderDetail.hpp). `play` runs a program of blocking collectives on paper and writes what each rank
would have recorded when it stopped: there the right answer is known.
"""

import copy
import itertools
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recordings" / "flight-recorder-torch2.13"
WORLD = 4
DEFAULT = ("0", "default_pg")
GROUPS: dict[tuple[str, str], tuple[int, ...]] = {
    DEFAULT: (0, 1, 2, 3),
    ("1", "pipeline"): (0, 1),
    ("2", "tensor"): (1, 2),
    ("3", "data"): (2, 3),
}
"""Of every recorded scenario (record_flight_recorder.py)."""
Dumps = dict[int, dict[str, Any]]


def recorded(scenario: str) -> Dumps:
    return {rank: pickle.loads((RECORDED / scenario / f"fr_rank_{rank}").read_bytes()) for rank in range(WORLD)}


def as_nccl(dumps: Dumps) -> Dumps:
    changed = copy.deepcopy(dumps)
    for dump in changed.values():
        dump["pg_config"] = _config(GROUPS)
        for entry in dump["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
            entry["state"] = "completed" if entry["retired"] else "started"
    return changed


def _config(groups: Mapping[tuple[str, str], Sequence[int]]) -> dict[str, dict[str, str]]:
    return {name: {"name": name, "desc": desc, "ranks": str(list(ranks))} for (name, desc), ranks in groups.items()}


@dataclass(frozen=True)
class Asked:
    op: str = "all_reduce"
    sizes: tuple[int, ...] = (4,)
    dtype: str = "Float"


@dataclass(frozen=True)
class Fault:
    """At step `at` of the program `rank` does `asks` instead of what the others do; None: it never comes."""

    rank: int
    at: int
    asks: Asked | None = None


Step = tuple[tuple[str, str], Asked]


@dataclass
class Rank:
    entries: list[dict[str, Any]]
    seqs: dict[tuple[str, str], int]
    blocked: bool = False


def play(
    groups: Mapping[tuple[str, str], Sequence[int]], program: Iterable[Step], fault: Fault | None, world: int
) -> Dumps:
    ranks = {rank: Rank([], dict.fromkeys(groups, 0)) for rank in range(world)}
    clock = itertools.count(1_000_000_000, 1000)
    for number, (group, asked) in enumerate(program):
        here = fault if fault is not None and fault.at == number else None
        joined: dict[int, dict[str, Any]] = {}
        for rank in groups[group]:
            if ranks[rank].blocked:
                continue
            asks = here.asks if here is not None and here.rank == rank else asked
            if asks is None:
                ranks[rank].blocked = True
            else:
                joined[rank] = _enqueue(ranks[rank], group, asks, next(clock))
        asked_for = {
            (entry["profiling_name"], str(entry["input_sizes"]), str(entry["input_dtypes"]))
            for entry in joined.values()
        }
        if len(joined) == len(groups[group]) and len(asked_for) == 1:
            for entry in joined.values():
                entry |= {"state": "completed", "retired": True}
        else:
            for rank in joined:
                ranks[rank].blocked = True
    return {rank: _document(ranks[rank], groups) for rank in range(world)}


_TEMPLATE = recorded("healthy")[0]


def _enqueue(rank: Rank, group: tuple[str, str], asked: Asked, now: int) -> dict[str, Any]:
    rank.seqs[group] += 1
    entry: dict[str, Any] = copy.deepcopy(_TEMPLATE["entries"][0]) | {
        "record_id": len(rank.entries), "pg_id": int(group[0]), "process_group": group, "time_created_ns": now,
        "collective_seq_id": rank.seqs[group], "op_id": rank.seqs[group], "profiling_name": f"nccl:{asked.op}",
        "input_sizes": [list(asked.sizes)], "output_sizes": [list(asked.sizes)],
        "input_dtypes": [asked.dtype], "output_dtypes": [asked.dtype], "state": "started", "retired": False,
    }  # fmt: skip
    assert entry.keys() == _TEMPLATE["entries"][0].keys()
    rank.entries.append(entry)
    return entry


def _document(rank: Rank, groups: Mapping[tuple[str, str], Sequence[int]]) -> dict[str, Any]:
    status = {}
    for name, seq in rank.seqs.items():
        done = [e["collective_seq_id"] for e in rank.entries if e["process_group"] == name and e["retired"]]
        status[name[0]] = {
            "last_enqueued_collective": seq or -1, "last_started_collective": seq or -1,
            "last_completed_collective": max(done, default=-1),
        }  # fmt: skip
    return _TEMPLATE | {"entries": rank.entries, "pg_config": _config(groups), "pg_status": status}


def send_or_receive(rank: int, kind: str, peer: int, size: int, done: bool, seq: int = 1) -> dict[str, Any]:
    """An entry of a point-to-point call as ProcessGroupNCCL names it: `send 0->1`, `recv 1<-0`, ranks of the group."""
    arrow = "->" if kind == "send" else "<-"
    entry = _enqueue(Rank([], {DEFAULT: 0}), DEFAULT, Asked(f"{kind} {rank}{arrow}{peer}", (size,)), 1_000_000_000)
    return entry | {
        "is_p2p": True, "p2p_seq_id": seq, "collective_seq_id": 0, "record_id": seq - 1,
        "retired": done, "state": "completed" if done else "started",
    }  # fmt: skip


def overflowed(dumps: Dumps, most: int) -> Dumps:
    """As a ring buffer of `most` entries would have kept it."""
    return {rank: dump | {"entries": dump["entries"][-most:]} for rank, dump in dumps.items()}


def write(dumps: Dumps, folder: Path) -> Path:
    """Pickles that stock pickle and ours both read; the recorder itself writes protocol 2."""
    for rank, dump in dumps.items():
        (folder / f"fr_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return folder


def of_first_release(dumps: Dumps, *, bare: bool) -> Dumps:
    """Version "1.1" (torch 2.2): `seq_id`, no record_id, no names of groups, no types, no pg_config. Before it: the bare list."""
    kept = ("pg_id", "profiling_name", "input_sizes", "output_sizes", "time_created_ns", "frames", "state", "retired")
    old: Dumps = {}
    for rank, dump in dumps.items():
        entries: Any = [
            {key: entry[key] for key in kept} | {"seq_id": entry["collective_seq_id"]} for entry in dump["entries"]
        ]
        old[rank] = entries if bare else {"version": "1.1", "entries": entries}
    return old
