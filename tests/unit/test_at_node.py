"""What runs on a node of a hung step, against real processes: gloo ranks that hang, stopped ones, py-spy, a pipe, a RAS port."""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from krea_runner.diagnose.flight_recorder import analyse_flight_recorder
from krea_runner.diagnose.nccl_ras import analyse_ras
from krea_runner.diagnose.stacks import stacks_line, states_line
from krea_runner.supervise import at_node
from krea_runner.supervise.collect import LAUNCHER
from krea_runner.supervise.collected import Collected, evidence_lines, read_collected

SOURCE = Path(at_node.__file__).read_text()
ATTEMPT = "5.r0"
SPY = Path(sys.executable).with_name("py-spy")
needs_spy = pytest.mark.skipif(not SPY.exists(), reason="py-spy is not installed: pip install 'krea-runner[stacks]'")

HUNG_GLOO = """
import datetime, os, threading, time
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d

def dump_on_a_byte():  # as ProcessGroupNCCL does, torch 2.13
    path = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    while True:
        time.sleep(0.1)
        if os.read(pipe, 128):
            with open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + os.environ["RANK"], "wb") as file:
                file.write(c10d._dump_fr_trace())

def next_batch():
    while True:
        time.sleep(1)

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
tensor = torch.ones(4)
dist.all_reduce(tensor)
threading.Thread(target=dump_on_a_byte, daemon=True).start()
print("ready", flush=True)
if dist.get_rank() == 1:
    next_batch()
dist.all_reduce(tensor)
"""
WAITS = """
import sys, time
def all_reduce():
    while True:
        time.sleep(1)
print("ready", flush=True)
all_reduce()
"""


@dataclass
class Node:
    """This machine as a node of the attempt, and what its collector is told."""

    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def incident(self) -> Path:
        return self.run_dir / "incidents" / ATTEMPT

    def start(self, code: str, **environ: str) -> subprocess.Popen[str]:
        mine = {
            "KREA_ATTEMPT": ATTEMPT,
            "KREA_RUN_DIR": str(self.run_dir),
            "SLURMD_NODENAME": "n1",
            "SLURM_STEP_ID": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, **mine, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def ready(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def collect(self, **more: object) -> Collected:
        order = {
            "seconds": 15, "attempt": ATTEMPT, "run_dir": str(self.run_dir), "folder": str(self.incident),
            "heartbeats": str(self.run_dir / "heartbeats" / ATTEMPT), "py_spy": "", "py_spy_maybe": [str(SPY)], "local": True,
            "ras_nodes": 2, **more,
        }  # fmt: skip
        argv = ["sh", "-c", LAUNCHER, "krea-evidence", SOURCE, json.dumps(order), sys.executable]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) < 1024  # what srun 22.05 keeps whole
        return read_collected(done.stdout)

    def heartbeat(self, *slots: tuple[int, int]) -> None:
        """(rank, pid) of ranks on n1."""
        folder = self.run_dir / "heartbeats" / ATTEMPT
        folder.mkdir(parents=True)
        lines = [f"khb1 rank={rank} local={rank} attempt={ATTEMPT} beat=1 flush=1 step=1 phase=step budget=- pid={pid} at=1.000 "
                 for rank, pid in slots]  # fmt: skip
        (folder / "n1.hb").write_text("".join(line.ljust(242) + " crc=00000000\n" for line in lines))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    node.incident.mkdir(parents=True)
    try:
        yield node
    finally:
        for process in node.processes:
            process.kill()
            process.wait()


def lines_of(found: Collected, world_size: int) -> dict[str, str]:
    lines = evidence_lines(found, asked=(), left_out=(), world_size=world_size, took_s=1.0, failure="")
    return dict(line.split(": ", 1) for line in lines[1:])


@needs_spy
@pytest.mark.torch
def test_of_a_hung_gloo_job_it_says_who_waits_where_and_has_its_flight_recorder_dump(node: Node) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'krea-runner[torch]'")
    dumps = node.incident / "flight_recorder"
    dumps.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(node.folder / "fr-"), "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(dumps / "fr_rank_"),
    }  # fmt: skip
    for rank in range(3):
        node.start(HUNG_GLOO, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
    node.ready()
    deadline = time.monotonic() + 30
    while stacks_line(node.collect().states, 3).count("in ") < 2:  # each has come to where it hangs
        assert time.monotonic() < deadline
    found = node.collect()

    told = lines_of(found, 3)
    assert told["stacks"] == "2 of 3 ranks wait in all_reduce (<string>:27); rank 1 in next_batch (<string>:18)"
    assert told["flight recorder"] == "dumps of 3 ranks in flight_recorder/"
    verdict = analyse_flight_recorder([dumps])
    assert verdict.suspects == (1,), verdict.reason
    assert all(process.poll() is None for process in node.processes)  # nobody was disturbed
    assert "next_batch" in (node.incident / "stacks" / f"{socket.gethostname().split('.')[0]}.txt").read_text()


@needs_spy
def test_a_stopped_a_dead_and_a_vanished_process_are_told_apart(node: Node) -> None:
    running, stopped, zombie = (node.start(WAITS, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(3))
    node.ready()
    deadline = time.monotonic() + 30
    while {at_node.state_of(process.pid)[0] for process in node.processes} != {"S"}:
        assert time.monotonic() < deadline
    stopped.send_signal(signal.SIGSTOP)
    zombie.kill()  # and nobody waits for it
    gone = subprocess.Popen(["true"])
    gone.wait()
    node.heartbeat((0, running.pid), (1, stopped.pid), (2, zombie.pid), (3, gone.pid))
    found = node.collect()
    assert states_line(found.states) == (
        "rank 1 on n1 stopped (SIGSTOP or a debugger); rank 2 on n1 dead, not yet reaped; rank 3 on n1 gone: no such process"
    )
    # A stopped process is read without being paused once more.
    assert stacks_line(found.states, 4).startswith("2 of 4 ranks wait in all_reduce (<string>:5)")
    stopped.send_signal(signal.SIGCONT)


@needs_spy
def test_the_training_process_is_the_one_that_beats_and_not_the_agent_or_a_worker(node: Node) -> None:
    worker = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    agent = node.start("import time\nprint('ready', flush=True)\ntime.sleep(60)", SLURM_PROCID="0")
    rank = node.start(worker + WAITS, SLURM_PROCID="0", RANK="4", LOCAL_RANK="0")
    other = node.start(WAITS, SLURM_PROCID="0", RANK="4", LOCAL_RANK="0", KREA_ATTEMPT="4.r0")  # of another attempt
    node.ready()
    (state,) = node.collect().states
    assert (state.rank, state.frames[0][0]) == (4, "all_reduce")
    assert {agent.poll(), rank.poll(), other.poll()} == {None}


def test_without_py_spy_it_says_so_and_gives_the_rest(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(sys.modules[__name__], "SPY", Path("/nowhere/py-spy"))
    (node.folder / "bin").mkdir()
    (node.folder / "bin" / "python3").symlink_to(sys.executable)
    process = node.start("import time\nprint('ready', flush=True)\ntime.sleep(60)", RANK="0")
    node.ready()
    process.send_signal(signal.SIGSTOP)
    found = node.collect(py_spy="/nowhere/else")
    beside = Path(os.readlink(f"/proc/{process.pid}/exe")).with_name("py-spy")
    if beside.exists():
        pytest.skip(f"{beside} is there for everybody")
    told = lines_of(found, 1)
    assert told["stacks"].startswith("none, py-spy is not on the nodes: pip install 'krea-runner[stacks]'")
    assert told["processes"] == "rank 0 on n1 stopped (SIGSTOP or a debugger)"
    assert told["flight recorder"] == "no TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


@pytest.fixture
def ras_server() -> tuple[int, list[bytes]]:
    """NCCL's RAS port as it answers one client, with a recorded report; what it was told."""
    recording = {
        "nccl_version": "2.30.7", "communicators_count": 1, "ras": {"collection_time_sec": 0.1, "timeouts_count": 0},
        "communicators": [{
            "hash": "0x1", "size": 2, "ranks_count": 1, "missing_ranks_count": 1,
            "ranks": [{"rank": 0, "host": "n1", "pid": 7, "cuda_dev": 0, "status": {"init_state": 0, "async_error": 0},
                       "collective_counts": {"AllReduce": 101}}],
            "missing_ranks": [{"rank": 1, "host": "n2", "pid": 8, "cuda_dev": 0, "status": {"unresponsive": True}}],
        }],
    }  # fmt: skip
    told: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server:
            talk, _ = server.accept()
            with talk:
                talk.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
                while b"STATUS" not in b"".join(told):
                    told.append(talk.recv(4096))
                talk.sendall(json.dumps(recording, indent=1).encode())

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1], told


def test_ras_is_asked_at_the_ranks_own_port_and_its_report_can_be_analysed(node: Node, ras_server) -> None:
    port, told = ras_server
    node.start(WAITS, RANK="0", NCCL_RAS_ADDR=f"localhost:{port}")
    node.ready()
    assert lines_of(node.collect(), 1)["NCCL RAS"].startswith("status of the whole job in ras/")
    assert b"".join(told).split(b"\n")[:4] == [
        b"CLIENT PROTOCOL 2",
        b"TIMEOUT 5",
        b"SET FORMAT json",
        b"VERBOSE STATUS",
    ]
    (report,) = (node.incident / "ras").iterdir()
    assert analyse_ras(report.read_text()).suspect_ranks == (1,)


def test_a_port_that_never_answers_takes_no_more_than_the_time_there_is(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node.start(WAITS, RANK="0", NCCL_RAS_ADDR=f"localhost:{server.getsockname()[1]}")
        node.ready()
        began = time.monotonic()
        found = node.collect(seconds=7)
    assert time.monotonic() - began < 7 + 2
    told = lines_of(found, 1)
    assert told["NCCL RAS"].startswith("localhost:")
    assert found.states[0].rank == 0


def test_a_pipe_that_nobody_reads_and_one_that_is_not_there_are_findings(node: Node) -> None:
    prefix = str(node.folder / "fr-")
    os.mkfifo(prefix + "0.pipe")
    (node.folder / "fr-2.pipe").write_text("")
    for rank in range(3):
        node.start(
            WAITS, RANK=str(rank), TORCH_NCCL_DEBUG_INFO_PIPE_FILE=prefix, TORCH_NCCL_DEBUG_INFO_TEMP_FILE=prefix + "d"
        )
    node.ready()
    told = lines_of(node.collect(), 3)
    assert told["flight recorder"] == "no pipe (rank 1); nobody reads the pipe (rank 0); not a pipe (rank 2)"
    assert (node.folder / "fr-2.pipe").read_text() == ""


def test_where_files_cannot_be_written_the_lines_come_all_the_same(node: Node) -> None:
    node.incident.rmdir()
    node.incident.write_text("in the way")
    node.start(WAITS, RANK="0")
    node.ready()
    found = node.collect()
    lines = evidence_lines(found, asked=(), left_out=(), world_size=1, took_s=1.0, failure="")
    assert (
        "files of some nodes not written: Not a directory" in lines
        or "files of some nodes not written: File exists" in lines
    )
    assert found.states[0].rank == 0


def test_a_node_without_ranks_says_so(node: Node) -> None:
    found = node.collect()
    assert (found.states, len(found.nodes)) == ([], 1)
    assert lines_of(found, 2)["NCCL RAS"] == "no rank here"


def test_it_is_written_for_the_python_of_old_compute_nodes() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 6))
    names = [alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names]
    names += [one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
    assert len(SOURCE.encode()) < 100_000  # of one word of a command line Linux takes 128 KiB
