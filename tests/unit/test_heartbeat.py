"""The heartbeat as training code uses it: each case is a process of its own, read back with the runner's own reader."""

import ast
import re
import shutil
import signal
import subprocess
import sys

import pytest

from krea_runner import heartbeat
from krea_runner.heartbeat import SLOT
from krea_runner.observe.heartbeats import read_heartbeats
from tests.training_rank import ATTEMPT, BEGIN, SOURCE, VERSIONS, python_of, warnings

# --------------------------------------------------------------------------------------------------- who writes where


def test_a_record_says_who_wrote_it_and_where_it_stands(rank) -> None:
    process = rank.popen("hb.step(7)\nprint(os.getpid(), flush=True)\nsys.stdin.read()")
    beat = rank.wait_for(lambda beat: beat.step == 7, process)
    pid = int(process.stdout.readline())
    assert (beat.rank, beat.local_rank, beat.node, beat.pid) == (5, 1, "n1", pid)
    assert (beat.phase, beat.phase_budget_s) == ("step", None)
    process.communicate("")


def test_two_local_ranks_share_one_file(rank) -> None:
    first = rank.popen("hb.step(1)\nsys.stdin.read()", RANK="4", LOCAL_RANK="0")
    second = rank.popen("hb.step(2)\nsys.stdin.read()", RANK="5", LOCAL_RANK="1")
    for process in (first, second):
        assert process.communicate("", timeout=60)[1] == ""
    assert [(beat.rank, beat.step, beat.phase) for beat in rank.beats()] == [(4, 1, "shutdown"), (5, 2, "shutdown")]
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
    assert (rank.beat().step, rank.beat().phase) == (3, "shutdown")


# --------------------------------------------------------------------------------------------------------------- ends


def test_close_says_done(rank) -> None:
    process = rank.popen("hb.step(1)\nhb.close()\nhb.step(2)\nprint('closed', flush=True)\nsys.stdin.read()")
    assert process.stdout.readline() == "closed\n"
    beat = rank.wait_for(lambda beat: beat.phase == "done", process)
    assert beat.step == 1
    process.communicate("")


WITH = "with hb:\n    hb.step(12)\n    "


@pytest.mark.parametrize(
    ("script", "code", "phase"),
    [
        ("hb.step(12)\nhb.close()", 0, "done"),
        (WITH + "pass", 0, "done"),
        (WITH + "sys.exit()", 0, "done"),
        (WITH + "sys.exit(0)", 0, "done"),
        # Whether it ended well cannot be known: the exit code says it.
        ("hb.step(12)", 0, "shutdown"),
        ("hb.step(12)\nsys.exit(1)", 1, "shutdown"),
        (WITH + "sys.exit(1)", 1, "shutdown"),
        (WITH + "sys.exit('no GPU')", 1, "shutdown"),
        # What never comes to the end of Python leaves the phase it was in.
        ("hb.step(12)\ntime.sleep(0.3)\nos._exit(0)", 0, "step"),
        (WITH + "time.sleep(0.3)\n    raise RuntimeError('NCCL')", 1, "step"),
        ("hb.step(12)\nsys.excepthook = lambda *error: None\ntime.sleep(0.3)\nraise RuntimeError('NCCL')", 1, "step"),
    ],
)
def test_only_a_rank_that_says_so_is_done(rank, script, code, phase) -> None:
    assert rank.run(script).returncode == code
    assert (rank.beat().step, rank.beat().phase) == (12, phase)


def test_an_exception_in_a_block_that_somebody_catches_does_not_end_the_heartbeat(rank) -> None:
    process = rank.popen(
        "try:\n    with hb:\n        hb.step(1)\n        raise OSError\nexcept OSError:\n    hb.step(2)\nsys.stdin.read()"
    )
    assert rank.wait_for(lambda beat: beat.step == 2, process).phase == "step"
    process.communicate("")


def test_a_heartbeat_made_after_the_last_was_closed_begins_anew(rank) -> None:
    process = rank.popen("hb.step(9)\nhb.close()\nhb = Heartbeat()\nsys.stdin.read()")
    beat = rank.wait_for(lambda beat: beat.phase == "startup" and beat.beat == 0, process)
    assert beat.step == -1
    process.communicate("")


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


# --------------------------------------------------------------------------------------------------- copied by itself


def test_the_file_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(SOURCE.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "." * node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


EVERYTHING = """
import signal, subprocess, threading
print("%d.%d" % sys.version_info[:2], flush=True)
signal.signal(signal.SIGALRM, lambda *_: hb.beat())
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
def work():
    for n in range(500):
        with hb.phase("checkpoint", budget="15m"):
            hb.step(1)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
signal.setitimer(signal.ITIMER_REAL, 0)
assert subprocess.call([sys.executable, "-c", "from heartbeat import Heartbeat; Heartbeat().beat()"]) == 0
if os.fork() == 0:
    hb.beat(); hb.close(); sys.exit(3)
assert os.wait()[1] >> 8 == 3
print(hb._open, hb._phase[0])
hb.step(2)
sys.exit(1)
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_file_alone_works_on_every_python(rank, version) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"no python{version} on PATH, under $PYENV_ROOT or made: heartbeat.py is NOT tested on it")
    done = rank.run(EVERYTHING, python, PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout, done.stderr) == (1, f"{version.removesuffix('t')}\n[] step\n", "")
    assert (rank.beat().step, rank.beat().phase) == (2, "shutdown")


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


def test_a_python_without_ctypes_beats_all_the_same(rank) -> None:
    begin = "import sys\nsys.modules['ctypes'] = None\n" + BEGIN
    assert rank.popen("hb.step(3); hb.close()", begin=begin).wait(20) == 0
    (beat,) = read_heartbeats(rank.directory, ATTEMPT).ranks
    assert beat.step == 3
