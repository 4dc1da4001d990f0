"""What the nodes print of a hung step → lines of an incident; the stacks of many ranks → a few places."""

import base64
import json
import zlib

import pytest

from krea_runner.diagnose.stacks import Frame, RankState, places, stacks_line, stacks_text, states_line
from krea_runner.supervise.collected import evidence_lines, read_collected

LIBRARY: tuple[Frame, ...] = (
    ("all_reduce", "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252),
    ("_exception_logger.<locals>.wrapper", "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 83),
)
WAITS = (*LIBRARY, ("train", "/home/a/train.py", 120), ("<module>", "/home/a/train.py", 300))
LOADS: tuple[Frame, ...] = (
    ("DataLoader.next", "/home/a/loader.py", 44),
    ("train", "/home/a/train.py", 100),
)


def state(rank: int, frames: tuple[Frame, ...] = WAITS, word: str = "sleeping", **more: str) -> RankState:
    return RankState(rank, f"n{rank // 2 + 1}", word, frames=frames, **more)


def test_the_majority_waits_here_and_the_odd_rank_is_there() -> None:
    states = [state(rank, LOADS if rank == 3 else WAITS) for rank in range(8)]
    assert (
        stacks_line(states, 8)
        == "7 of 8 ranks wait in all_reduce (train.py:120); rank 3 in DataLoader.next (loader.py:44)"
    )
    page = stacks_text(states, 8)
    assert "ranks 0,1,2,4,5,6,7 in all_reduce (train.py:120):\n  all_reduce (/env/" in page
    assert "rank 3 in DataLoader.next (loader.py:44):\n  DataLoader.next (/home/a/loader.py:44)\n  train (" in page


def test_the_same_call_from_two_lines_of_the_script_is_two_places() -> None:
    other = (*LIBRARY, ("validate", "/home/a/train.py", 77))
    found = places([state(0), state(1), state(2, other)])
    assert [(place.name, place.ranks) for place in found] == [
        ("all_reduce (train.py:120)", (0, 1)),
        ("all_reduce (train.py:77)", (2,)),
    ]


def test_many_places_and_many_ranks_stay_one_line() -> None:
    odd = [state(rank, (("f", "/home/a/x.py", rank),)) for rank in range(100, 120)]
    line = stacks_line([*(state(rank) for rank in range(100)), *odd], 16384)
    assert line.startswith(
        "100 of 16384 ranks wait in all_reduce (train.py:120); rank 100 in f (x.py:100); rank 101 in f"
    )
    assert line.endswith("18 ranks in 18 other places")


def test_a_rank_whose_stack_is_not_to_be_had_is_named_with_the_reason() -> None:
    states = [state(0), state(1), state(2, (), error="py-spy may not look into it (kernel.yama.ptrace_scope is 1)")]
    assert stacks_line(states, 4) == (
        "2 of 4 ranks wait in all_reduce (train.py:120); none of rank 2 (py-spy may not look into it "
        "(kernel.yama.ptrace_scope is 1))"
    )
    assert stacks_line(states[2:], 4).startswith("of none of 4 ranks: py-spy may not")


def test_states_that_no_healthy_rank_has_are_said_in_words() -> None:
    states = [
        state(0),
        state(1, (), "uninterruptible", wchan="nfs_wait_bit_killable"),
        state(2, (), "zombie"),
        state(3, (), "gone"),
        state(4, WAITS, "stopped"),
    ]
    assert states_line(states) == (
        "rank 1 on n1 in the kernel, cannot be killed (D) in nfs_wait_bit_killable; rank 2 on n2 dead, not yet reaped; "
        "rank 3 on n2 gone: no such process; rank 4 on n3 stopped (SIGSTOP or a debugger)"
    )
    assert states_line([state(0), state(1)]) == ""


def printed(node: str, *documents: object, size: int = 60) -> list[str]:
    lines = []
    for number, document in enumerate(documents):
        data = base64.b64encode(zlib.compress(json.dumps(document).encode())).decode()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        lines += [f"KE1 {node} {number} {at} {len(parts)} {part}" for at, part in enumerate(parts)]
    return lines


def of_node(node: str, ranks: range, frames: tuple[Frame, ...] = WAITS, **notes: object) -> list[str]:
    return printed(
        node,
        {"kind": "ranks", "ranks": [{"rank": r, "node": node, "state": "sleeping", "wchan": ""} for r in ranks]},
        *({"kind": "stack", "node": node, "rank": r, "frames": frames} for r in ranks),
        {
            "kind": "end",
            "seconds": 0.4,
            "notes": {"kernel_log": "read", "files": "written", "ras": "asked elsewhere", **notes},
        },
    )


ASKED = ("n1", "n2")


def told(text: str, **more: object) -> list[str]:
    values = {"asked": ASKED, "left_out": (), "world_size": 4, "took_s": 1.44, "failure": "", **more}
    return evidence_lines(read_collected(text), **values)  # type: ignore[arg-type]


def test_lines_of_many_nodes_may_come_in_any_order() -> None:
    lines = of_node("n1", range(2)) + of_node("n2", range(2, 4), ras="answered")
    expected = told("\n".join(lines))
    assert expected[:2] == [
        "collected in 1.4 s from 2 of 2 nodes",
        "stacks: 4 of 4 ranks wait in all_reduce (train.py:120)",
    ]
    assert "NCCL RAS: status of the whole job in ras/n2.*" in expected
    assert "kernel log: of 2 nodes" in expected
    by_node = {node: [line for line in lines if f" {node} " in line] for node in ASKED}
    mixed = [line for pair in zip(by_node["n1"], by_node["n2"], strict=False) for line in pair]
    rest = [line for line in lines if line not in mixed]
    assert told("\n".join([*mixed, *rest])) == expected


def test_half_of_it_is_kept_and_it_is_said_which_half() -> None:
    whole = of_node("n2", range(2, 4))
    text = "\n".join([*of_node("n1", range(2)), *whole[: len(whole) // 2]])
    lines = told(text, asked=(*ASKED, "n3"), left_out=("n4",), world_size=8, failure="not over after 20 s")
    assert lines[0] == (
        "collected in 1.4 s from 2 of 4 nodes; n3 did not answer; n4 not asked, Slurm says it is out (not over after 20 s)"
    )
    assert lines[1].startswith("stacks: ")
    assert "of 8 ranks wait in all_reduce (train.py:120)" in lines[1]


def test_nothing_at_all_is_one_line_with_the_reason() -> None:
    assert told("", failure="srun: No such file or directory") == [
        "collected nothing in 1.4 s (srun: No such file or directory)"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "KE1 n1 0 0 1 !!!",
        "KE1 n1 0 0 x y",
        "KE1 n1",
        "KE1 n1 0 0 1 " + base64.b64encode(b"no zlib").decode(),
        "KE1 n1 0 0 1 " + base64.b64encode(zlib.compress(b"[1]")).decode(),
        "KE1 n1 0 0 1 " + base64.b64encode(zlib.compress(b"0" * (40 << 20))).decode(),
        *printed("n1", {"kind": "ranks", "ranks": [{"rank": "x"}]}, size=9999),
        *printed("n1", {"kind": "stack", "rank": 9, "frames": [["f", "x.py", 1]]}, size=9999),
        *printed("n1", {"kind": "stack", "rank": 0, "frames": [["f"]]}, size=9999),
        *printed("n1", {"kind": "end", "notes": 3}, size=9999),
    ],
)
def test_a_line_that_is_none_is_counted_and_harms_no_other(line: str) -> None:
    found = read_collected("\n".join(["srun: job 7 queued", *of_node("n2", range(2, 4)), line]))
    assert (found.damaged, [one.rank for one in found.states]) == (1, [2, 3])


def test_nothing_of_a_job_reaches_a_terminal_as_it_is() -> None:
    evil: tuple[Frame, ...] = (("f\x1b]0;owned\x07", "/home/a/\x1b[2Jx.py", 1),)
    text = "\n".join(of_node("n1", range(2), evil, kernel_log="\x1b[31mred", nvidia_smi="a\nb"))
    found = read_collected(text)
    lines = [*told(text), stacks_text(found.states, 2).replace("\n", "")]
    assert all(line.isprintable() for line in lines), lines
