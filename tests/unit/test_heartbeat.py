"""The heartbeat as training code uses it: each case is a process of its own, read back with the runner's own reader."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from krea_runner import heartbeat
from krea_runner.heartbeat import MAX_LOCAL_RANKS, SLOT
from krea_runner.model import RankBeat
from krea_runner.observe.heartbeats import read_heartbeats

SOURCE = Path(heartbeat.__file__)
ATTEMPT = "41.r2"
VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]
BEGIN = "import os, sys, time\nfrom heartbeat import Heartbeat\nhb = Heartbeat()\n"


class Rank:
    """Starts training scripts that see only a copy of heartbeat.py: what a container has."""

    def __init__(self, tmp_path: Path) -> None:
        self.place = tmp_path / "container"
        self.place.mkdir()
        shutil.copy(SOURCE, self.place)
        self.directory = tmp_path / "heartbeats" / ATTEMPT

    def popen(
        self, script: str, python: str = sys.executable, *, begin: str = BEGIN, **env: str
    ) -> "subprocess.Popen[str]":
        base = {
            "PATH": os.environ["PATH"],
            "KREA_HEARTBEAT_DIR": str(self.directory),
            "KREA_ATTEMPT": ATTEMPT,
            "SLURMD_NODENAME": "n1",
            "RANK": "5",
            "LOCAL_RANK": "1",
        }
        merged = {key: value for key, value in {**base, **env}.items() if value}
        return subprocess.Popen(
            [python, "-c", begin + script],
            cwd=self.place,
            env=merged,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, python: str = sys.executable, **env: str) -> "subprocess.CompletedProcess[str]":
        process = self.popen(script, python, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def beats(self) -> tuple[RankBeat, ...]:
        reading = read_heartbeats(self.directory, ATTEMPT)
        assert reading.problems == ()
        return reading.ranks

    def beat(self) -> RankBeat:
        (only,) = self.beats()
        return only

    def wait_for(self, condition, process: "subprocess.Popen[str]", patience_s: float = 60) -> RankBeat:
        """The first record of the running process that satisfies `condition`."""
        deadline = time.monotonic() + patience_s
        while True:
            found = read_heartbeats(self.directory, ATTEMPT).ranks
            if found and condition(found[0]):
                return found[0]
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"waited {patience_s} s; seen: {found}"
            time.sleep(0.02)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def warnings(done: "subprocess.CompletedProcess[str]") -> list[str]:
    return [line for line in done.stderr.splitlines() if line]


# --------------------------------------------------------------------------------------------------- who writes where


def test_a_record_says_who_wrote_it_and_where_it_stands(rank) -> None:
    process = rank.popen("hb.step(7)\nprint(os.getpid(), flush=True)\nsys.stdin.read()")
    beat = rank.wait_for(lambda beat: beat.step == 7, process)
    pid = int(process.stdout.readline())
    assert (beat.rank, beat.local_rank, beat.node, beat.pid) == (5, 1, "n1", pid)
    assert (beat.phase, beat.phase_budget_s) == ("step", None)
    process.communicate("")


def test_slurm_names_the_rank_where_torchrun_does_not(rank) -> None:
    assert rank.run("", RANK="", LOCAL_RANK="", SLURM_PROCID="9", SLURM_LOCALID="3").returncode == 0
    assert (rank.beat().rank, rank.beat().local_rank) == (9, 3)


def test_torchruns_rank_wins_over_slurms(rank) -> None:
    assert rank.run("", SLURM_PROCID="0", SLURM_LOCALID="0").returncode == 0
    assert (rank.beat().rank, rank.beat().local_rank) == (5, 1)


def test_an_empty_rank_variable_counts_as_unset(rank) -> None:
    begin = "import os\nos.environ.update(RANK='', LOCAL_RANK='')\n" + BEGIN
    process = rank.popen("", begin=begin, SLURM_PROCID="9", SLURM_LOCALID="3")
    assert process.communicate(timeout=60)[1] == ""
    assert (rank.beat().rank, rank.beat().local_rank) == (9, 3)


def test_two_local_ranks_share_one_file(rank) -> None:
    first = rank.popen("hb.step(1)\nsys.stdin.read()", RANK="4", LOCAL_RANK="0")
    second = rank.popen("hb.step(2)\nsys.stdin.read()", RANK="5", LOCAL_RANK="1")
    for process in (first, second):
        assert process.communicate("", timeout=60)[1] == ""
    assert [(beat.rank, beat.step, beat.phase) for beat in rank.beats()] == [(4, 1, "done"), (5, 2, "done")]
    assert [path.name for path in rank.directory.iterdir()] == ["n1.hb"]


def test_a_slot_is_one_line_of_printable_ascii_of_the_fixed_size(rank) -> None:
    script = (
        'with hb.phase("ph\\x1bäse " * 9, budget=1e8):\n    hb.beat()\n    os._exit(0) if hb._write() is None else 0'
    )
    rank.run(script, LOCAL_RANK="2", RANK="999999999", KREA_ATTEMPT="1" * 64, SLURMD_NODENAME="n\n/" * 40)
    (path,) = rank.directory.iterdir()
    data = path.read_bytes()
    assert "/" not in path.name
    assert path.name.isprintable()
    assert len(data) == 3 * SLOT
    assert data[: 2 * SLOT] == bytes(2 * SLOT)
    slot = data[2 * SLOT :].decode("ascii")
    assert slot.endswith("\n")
    assert slot[:-1].isprintable()
    assert read_heartbeats(rank.directory, "1" * 64).problems == ()


def test_a_local_rank_that_has_no_slot_is_said_and_not_written(rank) -> None:
    done = rank.run("hb.step(1)\nprint('trained')", LOCAL_RANK=str(MAX_LOCAL_RANKS))
    assert done.stdout == "trained\n"
    assert len(warnings(done)) == 1
    assert not rank.directory.exists()


# ------------------------------------------------------------------------------------------------------ steps, phases


def test_before_the_first_step_the_phase_is_startup(rank) -> None:
    process = rank.popen("sys.stdin.read()")
    beat = rank.wait_for(lambda beat: True, process)
    assert (beat.step, beat.phase) == (-1, "startup")
    process.communicate("")


def test_the_first_step_reaches_the_file_while_training_goes_on(rank) -> None:
    process = rank.popen("hb.step(0)\nsys.stdin.read()")
    beat = rank.wait_for(lambda beat: beat.step >= 0, process)
    assert (beat.step, beat.phase) == (0, "step")
    process.communicate("")


def test_the_first_step_wakes_the_flusher(rank) -> None:
    script = "print('ready', flush=True)\nsys.stdin.readline()\nhb.step(3)\nsys.stdin.read()"
    begin = "import os, sys, time, heartbeat\nheartbeat.FLUSH_S = 1e6\nhb = heartbeat.Heartbeat()\n"
    process = rank.popen(script, begin=begin)
    assert process.stdout.readline() == "ready\n"
    rank.wait_for(lambda beat: beat.phase == "startup", process)
    process.stdin.write("go\n")
    process.stdin.flush()
    assert rank.wait_for(lambda beat: beat.step >= 0, process).step == 3
    process.communicate("")


def test_the_flusher_shows_a_living_process_whose_loop_stands_still(rank) -> None:
    process = rank.popen("hb.step(1)\nsys.stdin.read()")
    before = rank.wait_for(lambda beat: beat.step == 1, process)
    after = rank.wait_for(lambda beat: beat.flush > before.flush, process)
    assert after.beat == before.beat
    process.communicate("")


def test_every_step_and_beat_moves_the_beat(rank) -> None:
    done = rank.run("hb.step(1); hb.step(2); hb.beat(); print(hb._beat)")
    assert done.stdout == "3\n"
    assert rank.beat().beat == 4  # and the close


PHASES = """
def show(): print(*hb._line().decode().split(" phase=")[1].split()[:2])
with hb.phase("load"): show()
show()
hb.step(1)
with hb.phase("evaluation", budget="15m"):
    show()
    with hb.phase("checkpoint", budget=90): show()
    show()
show()
try:
    with hb.phase("bad"): raise ValueError
except ValueError: show()
"""


def test_phases_nest_and_the_outer_one_comes_back(rank) -> None:
    assert rank.run(PHASES).stdout.splitlines() == [
        "load budget=-",
        "startup budget=-",
        "evaluation budget=900",
        "checkpoint budget=90",
        "evaluation budget=900",
        "step budget=-",
        "step budget=-",
    ]


def test_after_steps_inside_a_phase_startup_does_not_come_back(rank) -> None:
    done = rank.run('with hb.phase("warmup"):\n    hb.step(1)\nprint(hb._phase[0])')
    assert done.stdout == "step\n"


def test_a_phase_is_read_back_with_its_budget(rank) -> None:
    process = rank.popen('with hb.phase("check point", budget="2h"):\n    sys.stdin.read()')
    beat = rank.wait_for(lambda beat: beat.phase != "startup", process)
    assert (beat.phase, beat.phase_budget_s) == ("check_point", 7200.0)
    process.communicate("")


@pytest.mark.parametrize("call", ['hb.phase("")', 'hb.phase("x", budget=1e-5)', 'hb.phase("x", budget=999999999)'])
def test_an_odd_phase_is_still_a_readable_record(rank, call) -> None:
    process = rank.popen(f"with {call}:\n    sys.stdin.read()")
    assert rank.wait_for(lambda beat: beat.phase != "startup", process).rank == 5
    process.communicate("")


@pytest.mark.parametrize(
    ("budget", "seconds"),
    [("'15m'", 900.0), ("90", 90.0), ("'90'", 90.0), ("'1.5h'", 5400.0), ("' 2d '", 172800.0), ("0.5", 0.5)],
)
def test_budgets_are_seconds_or_a_number_with_its_unit(rank, budget, seconds) -> None:
    done = rank.run(f"with hb.phase('x', budget={budget}): print(hb._phase[1])")
    assert (float(done.stdout), done.stderr) == (seconds, "")


@pytest.mark.parametrize("budget", ["'soon'", "''", "'m'", "0", "-5", "'inf'", "float('nan')", "True", "[1]", "(1, 2)"])
def test_a_budget_that_is_none_is_said_once_and_the_run_goes_on(rank, budget) -> None:
    done = rank.run(f"for n in 1, 2:\n    with hb.phase('x', budget={budget}): print(hb._phase[1])")
    assert (done.returncode, done.stdout) == (0, "None\nNone\n")
    (line,) = warnings(done)
    assert line.startswith("krea_runner heartbeat, rank 5: budget ")


@pytest.mark.parametrize("number", ["None", "'seven'", "float('nan')", "float('inf')", "[]"])
def test_a_step_that_is_no_number_neither_raises_nor_ends_the_heartbeat(rank, number) -> None:
    done = rank.run(f"hb.step(3)\nhb.step({number})\nhb.step({number})\nprint('trained')")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (line,) = warnings(done)
    assert "step" in line
    assert (rank.beat().step, rank.beat().phase) == (3, "done")


# --------------------------------------------------------------------------------------------------------------- ends


def test_close_says_done(rank) -> None:
    process = rank.popen("hb.step(1)\nhb.close()\nhb.step(2)\nprint('closed', flush=True)\nsys.stdin.read()")
    assert process.stdout.readline() == "closed\n"
    beat = rank.wait_for(lambda beat: beat.phase == "done", process)
    assert beat.step == 1
    process.communicate("")


def test_a_normal_exit_says_done(rank) -> None:
    assert rank.run("hb.step(12)").returncode == 0
    assert (rank.beat().step, rank.beat().phase) == (12, "done")


def test_an_uncaught_exception_leaves_the_last_phase(rank) -> None:
    process = rank.popen("hb.step(12)\nsys.stdin.read()\nraise RuntimeError('NCCL')")
    rank.wait_for(lambda beat: beat.step == 12, process)
    process.communicate("")
    assert process.returncode == 1
    assert (rank.beat().step, rank.beat().phase) == (12, "step")


def test_a_kill_leaves_the_last_phase(rank) -> None:
    process = rank.popen("hb.step(12)\nwith hb.phase('checkpoint'):\n    sys.stdin.read()")
    rank.wait_for(lambda beat: beat.phase == "checkpoint", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (rank.beat().step, rank.beat().phase) == (12, "checkpoint")


FORK = """
hb.step(1)
child = os.fork()
if child == 0:
    hb.step(99)
    hb.close()
    print(hb._thread, len(__import__("threading").enumerate()), flush=True)
    sys.exit(0)
os.waitpid(child, 0)
hb._write()
sys.stdin.read()
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_does_not_write_its_parents_slot(rank) -> None:
    process = rank.popen(FORK, PYTHONWARNINGS="ignore")
    assert process.stdout.readline() == "None 1\n"
    beat = rank.wait_for(lambda beat: beat.flush > 1, process)
    assert (beat.step, beat.phase, beat.pid) == (1, "step", process.pid)
    out, err = process.communicate("")
    assert (process.returncode, out, err) == (0, "", "")
    assert (rank.beat().step, rank.beat().phase) == (1, "done")


# --------------------------------------------------------------------------------------------- nowhere to write


def test_a_missing_directory_is_made(rank) -> None:
    assert not rank.directory.parent.exists()
    done = rank.run("hb.step(1)")
    assert (done.returncode, done.stderr, rank.beat().step) == (0, "", 1)


def in_the_way(rank: Rank) -> str:
    rank.directory.parent.write_text("a file where a directory should be")
    return str(rank.directory)


def full_disk(rank: Rank) -> str:
    rank.directory.mkdir(parents=True)
    (rank.directory / "n1.hb").symlink_to("/dev/full")
    return str(rank.directory)


@pytest.mark.parametrize("place", [in_the_way, full_disk, lambda rank: "/proc/no-place/to-write"])
def test_a_place_that_cannot_be_written_is_said_once_and_training_goes_on(rank, place) -> None:
    done = rank.run(
        "for n in range(50):\n    hb.step(n); hb._write()\nprint('trained')", KREA_HEARTBEAT_DIR=place(rank)
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (line,) = warnings(done)
    assert line.startswith("krea_runner heartbeat, rank 5: cannot write ")


def test_training_goes_on_without_a_standard_error(rank) -> None:
    in_the_way(rank)
    script = "sys.stderr = None\nhb._write(); hb.step(1); hb._warn('x')\nprint('trained')"
    assert rank.run(script).stdout == "trained\n"


@pytest.mark.parametrize("missing", ["KREA_HEARTBEAT_DIR", "KREA_ATTEMPT"])
def test_without_its_environment_the_heartbeat_does_nothing(rank, missing) -> None:
    script = (
        "import threading\nhb.step(1)\nwith hb.phase('x', budget='1m'): hb.beat()\n"
        "print(len(threading.enumerate()))\nhb.close()"
    )
    done = rank.run(script, **{missing: ""})
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert not rank.directory.parent.exists()


# --------------------------------------------------------------------------------------------------- copied by itself


def test_the_file_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(SOURCE.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "." * node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def python_of(version: str) -> str | None:
    """A working interpreter of that version on PATH or among pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [
        shutil.which(f"python{version}"),
        *sorted(map(str, root.glob(f"versions/{version}.*/bin/python{version}"))),
    ]
    check = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for python in filter(None, found):
        # A shim of pyenv is on PATH also for versions that are not chosen there.
        if subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_the_file_alone_works_on_every_python(rank, version) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"no python{version} on PATH or under $PYENV_ROOT/versions: heartbeat.py is NOT tested on it")
    script = (
        "hb.step(1)\nwith hb.phase('checkpoint', budget='15m'):\n    print('%d.%d' % sys.version_info[:2])\nhb.step(2)"
    )
    done = rank.run(script, python)
    assert (done.returncode, done.stdout, done.stderr) == (0, version + "\n", "")
    assert (rank.beat().step, rank.beat().phase) == (2, "done")


MAIN = """
int main(int argc, char **argv) {
  return argc != 2 || write_heartbeat(argv[1], "41.r2", 5, 1, 812, 340, 790, "checkpoint") != 0;
}
"""


def test_the_c_of_the_reference_page_writes_what_the_reader_reads(tmp_path) -> None:
    page = (SOURCE.parents[1] / "docs" / "reference" / "heartbeat.md").read_text()
    (code,) = re.findall(r"```c\n(.*?)```", page, re.DOTALL)
    source, program = tmp_path / "beat.c", tmp_path / "beat"
    probe = ["cc", "-E", "-xc", "-include", "zlib.h", "/dev/null"]
    if shutil.which("cc") is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("no C compiler with zlib here: the C of docs/reference/heartbeat.md is NOT tested")
    source.write_text(code + MAIN)
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", "-o", program, source, "-lz"], check=True)
    subprocess.run([program, tmp_path / "n1.hb"], check=True)
    reading = read_heartbeats(tmp_path, ATTEMPT)
    assert reading.problems == ()
    (beat,) = reading.ranks
    assert (beat.rank, beat.local_rank, beat.beat, beat.flush, beat.step) == (5, 1, 812, 340, 790)
    assert (beat.phase, beat.phase_budget_s) == ("checkpoint", None)


def test_the_ranks_stack_may_be_read_where_yama_would_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes
    from unittest.mock import MagicMock

    libc = MagicMock()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    heartbeat._allow_stacks()
    option, who, *rest = libc.prctl.call_args.args
    assert (option.value, who.value, rest) == (0x59616D61, 2**64 - 1, [0, 0, 0])  # linux/prctl.h: PR_SET_PTRACER, _ANY


def test_a_python_without_ctypes_beats_all_the_same(rank: Rank) -> None:
    begin = "import sys\nsys.modules['ctypes'] = None\n" + BEGIN
    assert rank.popen("hb.step(3); hb.close()", begin=begin).wait(20) == 0
    (beat,) = read_heartbeats(rank.directory, ATTEMPT).ranks
    assert beat.step == 3
