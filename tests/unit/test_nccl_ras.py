"""Reports of NCCL's RAS port, in the words of the printf calls of src/ras/client_support.cc (tags v2.24.3-1, v2.26.2-1,
v2.30.7-1).

The real reports behind `STRAGGLERS` and `GARBAGE` are in NVIDIA/nccl issues 1911 (2.26.2) and 1762 (2.27.3).
"""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.diagnose.dumps import with_ras
from krea_runner.diagnose.layout import Layout
from krea_runner.diagnose.nccl_ras import RasError, analyse_ras, progressed
from krea_runner.diagnose.verdict import Verdict

HASH = "fa93daea854b060b"


def text(errors: str = "", warnings: str = "", *, version: str = "2.26.2", seconds: str = "0.00") -> str:
    return (
        f"NCCL version {version} compiled with CUDA 12.6\nCUDA runtime version 12060, driver version 12060\n\n"
        "Job summary\n===========\n\n"
        "  Nodes  Processes         GPUs  Processes     GPUs\n(total)   per node  per process    (total)  (total)\n"
        f"      4          8            1         32       32\n\nCommunicators... ({seconds}s)\n=============\n\n"
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        "    #  in group  per comm  per node  per comm  in group\n"
        f"    0         1         4         8        32        32   RUNNING  {'MISMATCH' if warnings else 'OK'}\n\n"
        f"Errors\n======\n\n{errors}Warnings\n========\n\n{warnings}"
    )


def rank(number: int, pid: int = 4000, node: str = "n1", gpu: str = "3") -> str:
    return f"Rank {number} -- GPU {gpu} managed by process {pid} on node {node}"


STRAGGLERS = (
    f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different AllGather operation counts\n"
    "  30 ranks have launched up to operation 640\n  2 ranks have launched up to operation 641\n"
    f"  {rank(12, 323032)}\n  {rank(13, 323033)}\n\n"
)
ONE_BEHIND = (
    f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different {{what}} operation counts\n"
    "  31 ranks have launched up to operation 641\n"
    "  Rank 9 has launched up to operation 640 -- GPU 1 (NVML 5) managed by process 812 on node n2\n\n"
)
NOT_BEGUN = (
    f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
    "  31 ranks have launched up to operation 1\n"
    "  Rank 9 has not launched any operations -- GPU 1 managed by process 812 on node n2\n\n"
)
DEAD_AND_MISSING = (
    "INCOMPLETE\n  Missing communicator data from 2 job processes\n"
    "  Process 811 on node n2 managing GPU 0\n  Process 812 on node n2 managing GPUs 1,2 (NVML 5,6)\n\n"
    "DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
    "  Process 811 on node n2 managing GPU 0\n\n"
    f"#0-0 ({HASH}) INCOMPLETE\n  Missing communicator data from 2 ranks\n  {rank(8, 811, 'n2', '0')}\n  {rank(9, 812, 'n2')}\n\n"
)
ASYNC = (
    f"#0-0 ({HASH}) ERROR\n  Asynchronous error on 1 rank\n"
    "  Rank 5 reported Remote process exited or there was a network error -- GPU 5 managed by process 9 on node n1\n\n"
)
STATUS = (
    f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different status\n  31 ranks have status RUNNING\n"
    "  Rank 3 has status ABORT -- GPU 3 managed by process 4 on node n1\n\n"
)
TIMEOUT = "TIMEOUT\n  Encountered 1 communication timeout while gathering communicator data\n\n"
LISTED_2_24 = f"#0-0 ({HASH}) INCOMPLETE\n  Missing communicator data from 2 ranks\n  The missing ranks: 8,9\n\n"
GARBAGE = (
    "#2-0 (93d7000200000001) INCOMPLETE\n  Missing communicator data from 255 ranks\n"
    "  Rank 1057455228 -- [process information not found]\n\n"
)


@pytest.mark.parametrize(
    ("version", "errors", "warnings", "kind", "ranks", "hosts"),
    [
        ("2.24.3", "", ONE_BEHIND.format(what="collective"), "behind", (9,), ("n2",)),
        ("2.26.2", "", ONE_BEHIND.format(what="AllReduce"), "behind", (9,), ("n2",)),
        ("2.30.7", "", ONE_BEHIND.format(what="ReduceScatter"), "behind", (9,), ("n2",)),
        ("2.26.2", "", NOT_BEGUN, "behind", (9,), ("n2",)),
        # Those that are named are ahead; those that are behind are too many to be named, and nobody is accused.
        ("2.26.2", "", STRAGGLERS, "behind", (), ()),
        ("2.24.3", LISTED_2_24, "", "missing", (8, 9), ()),
        ("2.27.3", DEAD_AND_MISSING, "", "dead", (), ("n2",)),
        ("2.30.7", ASYNC, "", "error", (5,), ("n1",)),
        ("2.26.2", "", STATUS, "status", (3,), ("n1",)),
        ("2.26.2", "", TIMEOUT, "timeout", (), ()),
        # A missing process explains the counts that differ and the rank that saw its connection break.
        ("2.26.2", LISTED_2_24 + ASYNC, ONE_BEHIND.format(what="AllReduce"), "missing", (8, 9), ()),
        ("2.27.3", GARBAGE, "", "missing", (), ()),
    ],
)
def test_the_text_report_names_what_the_others_wait_for(
    version: str, errors: str, warnings: str, kind: str, ranks: tuple[int, ...], hosts: tuple[str, ...]
) -> None:
    verdict = analyse_ras(text(errors, warnings, version=version, seconds="0.003" if version > "2.3" else "0.00"))
    assert not verdict.healthy
    assert (verdict.form, verdict.nccl_version) == ("text", version)
    assert (verdict.findings[0].kind, verdict.suspect_ranks, verdict.suspect_hosts) == (kind, ranks, hosts)


def test_a_report_without_complaint_is_healthy_and_says_nothing_of_progress() -> None:
    verdict = analyse_ras(text())
    assert (verdict.healthy, verdict.findings) == (True, ())
    assert progressed(verdict, verdict) is None


@pytest.mark.parametrize(
    "handshake",
    [
        "",
        "SERVER PROTOCOL 2\nOK\n",
        # NCCL before 2.28.7, asked for JSON.
        "SERVER PROTOCOL 2\nOK\nERROR: Unknown command SET FORMAT json\n",
    ],
)
def test_replies_of_the_handshake_are_passed_over(handshake: str) -> None:
    assert analyse_ras(handshake + text(DEAD_AND_MISSING)).findings[0].kind == "dead"
    assert analyse_ras(handshake + report(job())).healthy


def test_a_text_report_that_was_cut_short_is_no_healthy_one() -> None:
    whole = text(DEAD_AND_MISSING, ONE_BEHIND.format(what="AllReduce"))
    for end in range(0, whole.index("Warnings\n========"), 7):
        with pytest.raises(RasError):
            analyse_ras(whole[:end])


# ------------------------------------------------------------------------------------------------ JSON (since 2.28.7)


def job(size: int = 4, **counts: int) -> dict[str, Any]:
    """As `rasOutAppend` writes it in 2.30.7; two GPUs a node."""
    operations = {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 101} | counts
    ranks = [
        {
            "rank": number, "host": f"n{number // 2}", "pid": 1000 + number, "cuda_dev": number % 2, "nvml_dev": number % 2,
            "status": {
                "init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False
            },
            "collective_counts": dict(operations),
        }
        for number in range(size)
    ]  # fmt: skip
    return {
        "nccl_version": "2.30.7", "cuda_runtime_version": 12080, "cuda_driver_version": 12080,
        "timestamp": "2026-01-01 00:00:00", "communicators_count": 1,
        "communicators": [
            {
                "hash": f"0x{HASH}", "secondary_hash": "0x1:0x1", "size": size, "ranks_count": size, "missing_ranks_count": 0,
                "ranks": ranks, "missing_ranks": [],
            }
        ],
        "ras": {"collection_time_sec": 0.012, "timeouts_count": 0},
    }  # fmt: skip


def report(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def without(document: dict[str, Any], number: int, **status: bool) -> dict[str, Any]:
    comm = document["communicators"][0]
    gone = comm["ranks"].pop(number)
    comm["missing_ranks"].append(
        {key: gone[key] for key in ("rank", "host", "pid", "cuda_dev", "nvml_dev")} | {"status": status}
    )
    return document


@pytest.mark.parametrize(
    ("status", "kind", "confidence"),
    [
        ({"unresponsive": True, "considered_dead": False}, "missing", "medium"),
        ({"unresponsive": True, "considered_dead": True}, "dead", "high"),
        ({"unresponsive": False, "considered_dead": False}, "status", "medium"),
    ],
)
def test_a_rank_that_does_not_answer_is_named_by_what_ras_thinks_of_it(
    status: dict[str, bool], kind: str, confidence: str
) -> None:
    verdict = analyse_ras(report(without(job(), 3, **status)))
    assert (verdict.findings[0].kind, verdict.confidence) == (kind, confidence)
    assert (verdict.suspect_ranks, verdict.suspect_hosts) == ((3,), ("n1",))


def test_the_rank_with_the_lower_count_has_not_come_to_the_call() -> None:
    document = job()
    document["communicators"][0]["ranks"][2]["collective_counts"]["AllReduce"] = 100
    verdict = analyse_ras(report(document))
    assert (verdict.findings[0].kind, verdict.suspect_ranks, verdict.confidence) == ("behind", (2,), "high")
    assert "AllReduce launched 100 times, others 101" in verdict.reason


def test_where_one_ran_ahead_those_behind_are_named_without_certainty() -> None:
    document = job()
    document["communicators"][0]["ranks"][2]["collective_counts"]["AllReduce"] = 102
    verdict = analyse_ras(report(document))
    assert (verdict.suspect_ranks, verdict.confidence) == ((0, 1, 3), "low")


def test_an_aborted_rank_and_an_error_are_told() -> None:
    document = job()
    document["communicators"][0]["ranks"][1]["status"] |= {"async_error": 6, "abort_flag": True}
    verdict = analyse_ras(report(document))
    assert [(found.kind, [who.rank for who in found.suspects]) for found in verdict.findings] == [
        ("status", [1]),
        ("error", [1]),
    ]
    assert "remote error" in verdict.findings[1].reason


def test_two_reports_tell_a_slow_run_from_a_stuck_one() -> None:
    first = analyse_ras(report(job()))
    assert progressed(first, analyse_ras(report(job()))) is False
    assert progressed(first, analyse_ras(report(job(AllReduce=102)))) is True
    assert progressed(first, analyse_ras(text())) is None


def test_a_json_report_that_was_cut_short_is_an_error() -> None:
    whole = report(job())
    for end in range(0, len(whole) - 3, 13):
        with pytest.raises(RasError):
            analyse_ras(whole[:end])


# ------------------------------------------------------------------------------------------------ beside a verdict


def timed_out() -> Verdict:
    return Verdict(
        "nccl_timeout", "restart", "A collective timed out", "", symptom="hang", confidence="medium", why="log"
    )


def test_ranks_of_a_communicator_smaller_than_the_job_are_not_taken_for_the_job_s() -> None:
    document = job()
    document["communicators"][0]["ranks"][2]["collective_counts"]["AllReduce"] = 100
    small = with_ras(timed_out(), report(document), Layout(nodes=["n0", "n1", "n2"], gpus_per_node=2, world_size=6))
    assert (small.suspects.ranks, small.suspects.nodes) == ((), ("n1",))
    whole = with_ras(timed_out(), report(document), Layout(nodes=["n0", "n1"], gpus_per_node=2, world_size=4))
    assert (whole.suspects.ranks, whole.suspects.nodes) == ((2,), ("n1",))


@given(
    st.integers(0, 10_000),
    st.sampled_from(["0", "-1", "null", '"x"', "[]", "{}", "1e9", "true", "9" * 400, "\x1b[31m"]),
)
def test_damage_gives_a_verdict_or_our_own_error(at: int, piece: str) -> None:
    for whole in (text(DEAD_AND_MISSING + ASYNC, STRAGGLERS + STATUS), report(without(job(), 3, unresponsive=True))):
        numbers = [found.span() for found in re.finditer(r"\d+|true|false|\{|\[", whole)]
        begin, end = numbers[at % len(numbers)]
        try:
            verdict = analyse_ras(whole[:begin] + piece + whole[end:])
        except RasError:
            continue
        assert len(verdict.reason) < 2000
