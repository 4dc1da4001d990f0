"""Signatures against their own examples, and logs of every awkward form."""

import gzip
import lzma
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from krea_runner.cli.diagnose import lines
from krea_runner.diagnose.document import document
from krea_runner.diagnose.layout import Layout, bus_key
from krea_runner.diagnose.lines import read_line
from krea_runner.diagnose.logs import diagnose
from krea_runner.diagnose.reading import LINE_BYTES, LogUnreadable, blocks
from krea_runner.diagnose.scan import Search
from krea_runner.diagnose.signatures import Signature, load_catalog, match
from krea_runner.errors import NotFound

CATALOG = load_catalog()
FAILURE = b"[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.mark.parametrize("signature", CATALOG.signatures, ids=lambda signature: signature.name)
def test_a_signature_matches_its_examples_and_not_its_near_misses(signature: Signature) -> None:
    assert signature.examples
    assert signature.near_misses
    assert signature.source
    assert signature.versions
    assert not signature.cause or signature.cause in {*CATALOG.causes, "xid"}
    for example in signature.examples:
        assert signature.pattern.match(example), example
        assert any(literal.rstrip("\n") in example for literal in signature.literals), (
            f"{example}: the search misses it"
        )
    for text in signature.near_misses:
        assert not signature.pattern.match(text), text
    assert any(literal.rstrip("\n") in text for text in signature.near_misses for literal in signature.literals), (
        "no near miss ever reaches the pattern"
    )


@pytest.mark.parametrize("signature", CATALOG.signatures, ids=lambda signature: signature.name)
def test_the_table_finds_a_signature_s_own_example_first(signature: Signature) -> None:
    every = range(len(CATALOG.signatures))
    wrong = {}
    for example in signature.examples:
        found = match(CATALOG, every, example)
        if found is None or found[0].cause != signature.cause:
            wrong[example] = found and found[0].name
    assert wrong == {}


def whole(path: Path) -> tuple[str, int | None]:
    verdict = diagnose([str(path)])
    return verdict.cause, verdict.first_evidence and verdict.first_evidence.line


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_compressed_log_is_read_directly(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"a.log{suffix}"
    path.write_bytes(pack(b"step 1\n" * 100 + FAILURE))
    assert whole(path) == ("gpu_ecc", 101)


def test_a_zstandard_log_is_read_directly(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.log.zst"
    path.write_bytes(zstandard.compress(b"step 1\n" * 100 + FAILURE))
    assert whole(path) == ("gpu_ecc", 101)
    path.write_bytes(b"not zstandard at all")
    with pytest.raises(LogUnreadable):
        diagnose([str(path)])


def test_a_fifo_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b"step 1\n" * 70_000 + FAILURE))
    writer.start()
    assert whole(path) == ("gpu_ecc", 70_001)
    writer.join()


def test_a_file_is_read_only_as_far_as_it_went_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x\n" * 300_000)
    size = 0
    for block in blocks(str(path)):
        size += len(block.data)
        with path.open("ab") as file:
            file.write(b"y\n" * 300_000)
    assert size == 600_000


def test_a_line_of_any_length_keeps_its_head_and_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"start\n" + b"z" * 20_000_000 + b"\n" + FAILURE + FAILURE.rstrip() + b" " * 5_000_000)
    assert whole(path) == ("gpu_ecc", 3)
    assert max(len(block.data) for block in blocks(str(path))) < 1 << 20
    assert max(len(row) for block in blocks(str(path)) for row in block.data.split(b"\n")) <= LINE_BYTES + (256 << 10)


def test_nuls_colours_progress_bars_and_bytes_that_are_no_text_do_not_hide_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for line in (
        b"\x00\x00\x1b[31m[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\x1b[0m\r\n",
        b"\r  2%|#   | 270/10000 [00:09<5:24, 1.87s/it, loss=2.8]" + FAILURE,
        b"\xff\xfe\n[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered \xc3\x28\n",
        b" 3: [rank3]: RuntimeError: CUDA err\n 3: or: uncorrectable ECC error encountered\n",
    ):
        path.write_bytes(b"step 1\n" + line)
        assert whole(path)[0] == "gpu_ecc", line


def test_a_directory_is_the_logs_of_one_attempt(tmp_path: Path) -> None:
    (tmp_path / "n2.log").write_bytes(FAILURE)
    (tmp_path / "n1.log").write_bytes(b"step 1\n")
    (tmp_path / "core").write_bytes(b"\x7fELF")
    assert diagnose([str(tmp_path)]).cause == "gpu_ecc"
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="holds no log"):
        diagnose([str(tmp_path / "empty")])


def test_a_storm_of_near_matches_takes_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    evil = [
        b"Error: " * 500,
        b"[rank1]:[E ProcessGroupNCCL.cpp:1] [PG " + b"(" * 3000,
        b"A." * 2000 + b"Error: nan",
        b"1%|" * 1000,
        b"CUDA error: " * 300,
    ]
    path.write_bytes(b"\n".join(evil * 200) + b"\n")
    diagnose([str(path)])  # pytest-timeout is the judge


@pytest.mark.parametrize("with_hyperscan", [True, False])
def test_both_searches_find_the_same_lines(with_hyperscan: bool) -> None:
    pytest.importorskip("hyperscan")
    block = b"aa\nNCCL WARN x out of memory\nKeyError\n" + FAILURE * 3 + b"NVRM: Xid\nno end: Error: "
    found = [
        (start, end, sorted(ids)) for start, end, ids in Search(CATALOG.literals, hyperscan=with_hyperscan).lines(block)
    ]
    texts = [block[start:end] for start, end, _ in found]
    assert texts == [line for line in block.split(b"\n") if any(lit.rstrip(b"\n") in line for lit in CATALOG.literals)]
    assert all(any(CATALOG.literals[i].rstrip(b"\n") in block[start:end] for i in ids) for start, end, ids in found)


def test_the_old_entries_of_a_kernel_log_are_not_this_incident_s(tmp_path: Path) -> None:
    log, kernel = tmp_path / "a.log", tmp_path / "dmesg"
    log.write_text("==> start Wed Aug 02 20:40:00 2023\nsrun: error: n1: task 0: Exited with exit code 1\n")
    kernel.write_text("[Wed Aug  2 18:40:00 2023] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n")
    assert diagnose([str(log)], dmesg={"n1": str(kernel)}).cause == "unknown_failure"
    kernel.write_text("[Wed Aug  2 20:45:00 2023] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n")
    assert diagnose([str(log)], dmesg={"n1": str(kernel)}).cause == "gpu_fell_off_bus"


def test_a_log_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        with pytest.raises(LogUnreadable, match="cannot read"):
            diagnose([str(path)])


def test_the_same_event_of_two_thousand_ranks_is_one_line_of_fallout(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(
        "ValueError: x\n"
        + "".join(f"[rank{r}]: torch.distributed.DistBackendError: NCCL error in: x\n" for r in range(2000))
    )
    verdict = diagnose([str(path)])
    assert [(item.signature, item.count) for item in verdict.fallout] == [("nccl-exception", 2000)]


def test_the_fault_behind_a_storm_of_its_kind_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    storm = "".join(f"bad record {n} Error: skipped\nstep {n} | loss 2.1\n" for n in range(30_000))
    path.write_text(storm + "[rank3]: KeyError: 'x'\n[rank4]: KeyError: 'x'\n")
    verdict = diagnose([str(path)])
    assert (verdict.cause, verdict.first_evidence and verdict.first_evidence.line) == ("user_exception", 60_001)


def test_log_times_of_all_glog_forms_are_understood() -> None:
    assert (
        read_line(b"[rank3]:[E1119 13:21:12.5 ProcessGroupNCCL.cpp:616] x", 2024).at
        == read_line(b"E1119 13:21:12.500000 7 a/b.py:1] x", 2024).at
    )
    march = read_line(b"[rank3]:[E321 13:21:12.5 ProcessGroupNCCL.cpp:616] [PG 0 (default_pg) Rank 1] x", 2024)
    assert (march.rank, march.group, march.group_rank, march.message) == (3, "PG 0 (default_pg)", 1, "x")
    assert bus_key("0000:9D:00.0") == bus_key("9d000") == bus_key("PCI:0000:9d:00".removeprefix("PCI:"))
    assert Layout(nodes=["n1"]).short("n1-ib.cluster.local") == "n1"


PIECES = [literal.decode() for literal in CATALOG.literals] + [e for s in CATALOG.signatures for e in s.examples]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    data=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from(PIECES).map(str.encode),
            st.sampled_from(
                [
                    b"\n",
                    b"\r",
                    b"\x1b[31m",
                    b"\x00",
                    b" 3: ",
                    b"[rank3]: ",
                    b"[PG 0 Rank 1] ",
                    b"n1:1:2 [0] NCCL WARN ",
                    b"step 3 | loss\n",
                ]
            ),
        ),
        max_size=60,
    ).map(b"".join)
)
def test_any_bytes_give_a_verdict(tmp_path: Path, data: bytes) -> None:
    path, kernel = tmp_path / "a.log", tmp_path / "dmesg"
    path.write_bytes(data)
    kernel.write_bytes(data)
    layout = Layout(nodes=["n1", "n2"], gpus_per_node=4, world_size=8, launcher="srun")
    verdict = diagnose([str(path)], layout=layout, dmesg={"n1": str(kernel)})
    shown = lines(verdict)
    assert verdict.cause in CATALOG.causes
    assert len(shown) <= 12
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", "".join(shown))
    document(verdict)


RAISED = [
    "Traceback (most recent call last):",
    '  File "/x/train.py", line 5, in <module>',
    '    {}["mmlu"]',
    "KeyError: 'mmlu'",
]


@pytest.mark.parametrize(
    ("after", "is_survived"),
    [
        (["0: step 10 | loss 2.7", "1: step 10 | loss 2.7", "2: step 10 | loss 2.7", "0: step 11 | loss 2.7"], False),
        (["step 10 | loss 2.7"] * 4, False),
        (["3: step 10 | loss 2.7", "3: step 11 | loss 2.7", "3: step 12 | loss 2.7"], True),
        (["[rank0]: step 10", "[rank1]: step 10", "[rank0]: step 11", "[rank1]: step 11", "[rank0]: step 12"], True),
        (["step 10 | loss 2.7", "step 11 | loss 2.7", "step 12 | loss 2.7"], True),
        ([" 10%|#         | 1/10", " 20%|##        | 2/10", " 30%|###       | 3/10"], True),
    ],
)
def test_an_exception_is_survived_by_steps_of_one_rank_not_by_one_step_of_many(
    tmp_path: Path, after: list[str], is_survived: bool
) -> None:
    """Four ranks print as fast as their node lets them: the first one's exception may stand before the others' last step."""
    log = tmp_path / "log.txt"
    log.write_text("\n".join([*(f"3: {line}" for line in RAISED), *after]) + "\n")
    job = Layout(nodes=["n1"], world_size=4, gpus_per_node=4)
    assert (diagnose([str(log)], layout=job, catalog=CATALOG).cause == "healthy_running") is is_survived
