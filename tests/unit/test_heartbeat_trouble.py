"""A file system or a program in trouble: training goes on, at its own speed, and the heartbeat comes back by itself.

The mounts are real ones, and need root: without it those cases are skipped.
"""

import ctypes
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.training_rank import ATTEMPT, Rank, warnings

# What the training thread pays meanwhile: the median of many calls, so that a busy machine does not decide.
TIMED = """
def cost_us(times=20000):
    costs = []
    for n in range(times):
        at = time.perf_counter_ns()
        hb.step(n)
        costs.append(time.perf_counter_ns() - at)
    return sorted(costs)[times // 2] / 1000
"""
LIBC = ctypes.CDLL(None, use_errno=True)
MNT_FORCE, MNT_DETACH = 1, 2


def mount(kind: str, place: Path, options: str) -> None:
    """Skips the test where this machine does not let us."""
    place.mkdir(parents=True, exist_ok=True)
    if LIBC.mount(kind.encode(), str(place).encode(), kind.encode(), 0, options.encode()) != 0:
        pytest.skip(
            f"cannot mount a {kind}: {os.strerror(ctypes.get_errno())}; a real file system in trouble is NOT tested"
        )


def unmount(place: Path) -> None:
    LIBC.umount2(str(place).encode(), MNT_FORCE | MNT_DETACH)


@contextmanager
def hung_file_system(place: Path) -> Iterator[int]:
    """FUSE without anybody who answers: each access waits in the kernel until the descriptor is closed."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}; a file system that really hangs is NOT tested")
    try:
        mount("fuse", place, f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other")
        yield device
    finally:
        os.close(device)
        unmount(place)


@contextmanager
def tmpfs(place: Path, options: str) -> Iterator[Path]:
    mount("tmpfs", place, options)
    try:
        yield place
    finally:
        unmount(place)


def run_until(process: "subprocess.Popen[str]", word: str) -> str:
    line = process.stdout.readline()
    assert line.startswith(word), (line, process.poll())
    return line


# ------------------------------------------------------------------------------------------------- nowhere to write


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


@pytest.mark.parametrize("broken", ["None", "open('/dev/full', 'w', 1)", "__import__('types').SimpleNamespace()"])
def test_training_goes_on_without_a_standard_error(rank, broken) -> None:
    in_the_way(rank)
    script = (
        f"sys.stderr = {broken}\nhb._write(); hb.step(1); hb._say('x', 'x')\nprint('trained', flush=True)\nos._exit(0)"
    )
    assert rank.run(script).stdout == "trained\n"


@pytest.mark.parametrize("error", ["OSError(28, 'No space')", "MemoryError()", "ValueError('embedded null byte')"])
def test_whatever_a_write_raises_the_next_one_is_tried(rank, error) -> None:
    script = (
        "pwrite, left = os.pwrite, [3]\n"
        "def bad(*what):\n    left[0] -= 1\n    if left[0] >= 0: raise " + error + "\n    return pwrite(*what)\n"
        "os.pwrite = bad\nhb.step(1)\nhb._write(); hb._write(); hb._write(); hb._write()\nos._exit(0)"
    )
    done = rank.run(script)
    assert (done.returncode, len(warnings(done))) == (0, 1)
    assert rank.beat().step == 1


def test_a_slot_written_in_part_is_said_and_made_whole_by_the_next_write(rank) -> None:
    script = (
        "pwrite = os.pwrite\nos.pwrite = lambda fd, data, at: pwrite(fd, data[:100], at)\nhb.step(1)\nhb._write()\n"
        "print('part', flush=True)\nos.pwrite = pwrite\nhb.step(2)\nhb._write()\nsys.stdin.read()"
    )
    process = rank.popen(script)
    run_until(process, "part")
    assert rank.wait_for(lambda beat: beat.step == 2, process).phase == "step"
    assert "No space left" in process.communicate("")[1]


# ------------------------------------------------------------------------------------------------------ real mounts


def test_a_file_system_that_hangs_in_the_kernel_costs_training_nothing_and_its_end_ends_the_wait(rank) -> None:
    with hung_file_system(rank.directory) as device:
        script = TIMED + (
            "time.sleep(0.3)\nprint('cost', cost_us(), flush=True)\nsys.stdin.readline()\n"
            "hb.step(7)\nhb.close()\nprint('trained', flush=True)"
        )
        process = rank.popen(script)
        cost_us = float(run_until(process, "cost").split()[1])
        assert in_the_kernel(process.pid), "the flusher was not caught in the file system"
        started = time.monotonic()
        process.stdin.write("go\n")
        process.stdin.flush()
        run_until(process, "trained")
        assert process.wait(timeout=30) == 0, "the process could not end"
        assert time.monotonic() - started < 10  # close() waits a second at most; the rest is a busy machine's
        assert cost_us < 10
        assert device


def in_the_kernel(pid: int) -> bool:
    """Whether a thread of the process waits in FUSE."""
    return any("fuse" in (task / "wchan").read_text() for task in Path(f"/proc/{pid}/task").iterdir()) or any(
        (task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "D" for task in Path(f"/proc/{pid}/task").iterdir()
    )


def test_a_file_system_that_hangs_and_comes_back_is_beaten_to_again(rank) -> None:
    rank.directory.mkdir(parents=True)
    with hung_file_system(rank.directory):
        process = rank.popen("hb.step(1)\nprint('stepped', flush=True)\nsys.stdin.read()")
        run_until(process, "stepped")
        time.sleep(0.3)
    # The mount is gone: the folder below it is what comes back.
    assert rank.wait_for(lambda beat: True, process).step == 1
    _, err = process.communicate("")
    assert len(err.splitlines()) == 1
    assert "cannot write" in err


def test_a_disk_that_is_full_is_beaten_to_once_there_is_room(rank) -> None:
    with tmpfs(rank.directory, "size=16k") as place:
        (place / "filler").write_bytes(b"x" * 16384)
        process = rank.popen("hb.step(1)\nhb._write()\nprint('stepped', flush=True)\nsys.stdin.read()")
        run_until(process, "stepped")
        assert rank.beats() == ()
        (place / "filler").unlink()
        assert rank.wait_for(lambda beat: True, process).step == 1
        assert "No space left on device" in process.communicate("")[1]


def test_a_disk_that_fills_up_later_keeps_the_beat_going_in_place(rank) -> None:
    with tmpfs(rank.directory, "size=16k") as place:
        process = rank.popen("hb.step(1)\nsys.stdin.readline()\nhb.step(2)\nsys.stdin.read()")
        rank.wait_for(lambda beat: beat.step == 1, process)
        with (place / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            filler.writelines(b"x" * 4096 for _ in range(5))
        process.stdin.write("\n")
        process.stdin.flush()
        assert rank.wait_for(lambda beat: beat.step == 2, process)
        assert process.communicate("")[1] == ""


def test_a_read_only_file_system_is_said_once(rank) -> None:
    with tmpfs(rank.directory, "ro"):
        done = rank.run("for n in range(9):\n    hb.step(n); hb._write()\nprint('trained')")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (line,) = warnings(done)
    assert line.endswith("Read-only file system")


# --------------------------------------------------------------------------------------------- removed, and back again


def test_a_folder_removed_in_the_middle_of_a_run_is_made_again(rank) -> None:
    process = rank.popen("hb.step(1)\nsys.stdin.read()")
    before = rank.wait_for(lambda beat: beat.step == 1, process)
    shutil.rmtree(rank.directory)
    after = rank.wait_for(lambda beat: True, process)
    assert after.flush > before.flush
    assert process.communicate("")[1] == ""


def test_a_run_directory_that_vanished_is_not_made_anew_but_found_when_it_is_back(rank) -> None:
    process = rank.popen("hb.step(1)\nsys.stdin.readline()\nhb._write()\nprint('away', flush=True)\nsys.stdin.read()")
    rank.wait_for(lambda beat: beat.step == 1, process)
    away = rank.directory.parent.rename(rank.directory.parent.with_name("away"))
    process.stdin.write("\n")
    process.stdin.flush()
    run_until(process, "away")
    assert not rank.directory.parent.exists()
    before = Rank.read(away / ATTEMPT)
    away.rename(rank.directory.parent)
    assert rank.wait_for(lambda beat: beat.flush > before.flush, process).step == 1
    assert len(process.communicate("")[1].splitlines()) == 1


def test_a_relative_place_stays_where_it_was_when_training_goes_elsewhere(rank) -> None:
    assert rank.run("os.chdir('/')\nhb.step(1)", KREA_HEARTBEAT_DIR=f"../heartbeats/{ATTEMPT}").stderr == ""
    assert rank.beat().step == 1


# ---------------------------------------------------------------------------------------- a program that is not simple


def test_no_argument_raises_into_training(rank) -> None:
    script = """
class Bad:
    def __int__(self): raise RuntimeError("CUDA error: an illegal memory access was encountered")
    __str__ = __repr__ = __int__
hb.step(Bad()); hb.step(5)
with hb.phase(Bad(), budget=Bad()): pass
with hb.phase(None, budget="\\x1b[31m"): pass
hb.step(10**30); hb._write()
print("trained", flush=True)
os._exit(0)
"""
    done = rank.run(script)
    assert (done.returncode, done.stdout, len(warnings(done))) == (0, "trained\n", 2)
    assert done.stderr.replace("\n", "").isprintable()
    assert rank.beat().step == 10**12 - 1


def test_a_signal_handler_may_beat_step_open_phases_and_close(rank) -> None:
    """In the worst place: while the loop itself is in one of these."""
    script = """
import signal
def handler(*_):
    with hb.phase("signal"): hb.beat()
    hb._step = -1  # every step is the first: each wakes the flusher
    hb.step(1)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    hb._step = -1
    hb.step(2)
    with hb.phase("x", budget="1m"): hb.beat()
signal.setitimer(signal.ITIMER_REAL, 0)
print(hb._open, hb._phase[0])
signal.signal(signal.SIGTERM, lambda *_: (hb.close(), sys.exit(0)))
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = rank.run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] step\n", "")
    assert rank.beat().phase == "done"


def test_phases_of_several_threads_end_in_any_order(rank) -> None:
    script = """
import threading
saving, saved = threading.Event(), threading.Event()
def save():
    with hb.phase("checkpoint"): saving.set(); saved.wait()
def show(): print(hb._phase[0])
hb.step(1)
with hb.phase("evaluation"):
    thread = threading.Thread(target=save); thread.start(); saving.wait()
    show()
show()
hb.step(2); show()  # while it is saved
saved.set(); thread.join(); show()
"""
    done = rank.run(script)
    assert (done.stdout.split(), done.stderr) == (["checkpoint", "checkpoint", "step", "step"], "")


def test_many_threads_beat_at_once(rank) -> None:
    script = """
import threading
sys.setswitchinterval(1e-5)
def work():
    for n in range(3000):
        hb.step(n)
        with hb.phase("a"):
            with hb.phase("b"): hb.beat()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(hb._open, hb._phase[0])
hb.close()
"""
    done = rank.run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] step\n", "")
    assert (rank.beat().step, rank.beat().phase) == (2999, "done")


@pytest.mark.parametrize(
    "script",
    [
        "import atexit\natexit.register(hb.step, 3)\natexit.register(hb.close)",
        "class Late:\n    def __del__(self): hb.step(9); hb.close(); Heartbeat()\nlate = Late()",
        "import threading\nthreading.Thread(target=lambda: (time.sleep(0.3), hb.step(9))).start()",
        "hb.close(); hb.close(); hb.step(1)",
        "os.close(next(iter(__import__('heartbeat')._claims.values())))",
    ],
)
@pytest.mark.parametrize("strict", ["error", ""])
def test_the_end_of_the_interpreter_is_quiet(rank, script, strict) -> None:
    done = rank.run(script, PYTHONWARNINGS=strict)
    assert (done.returncode, done.stderr) == (0, "")
    assert rank.beat().phase in {"done", "shutdown"}


def test_a_stopped_process_goes_on_where_it_was(rank) -> None:
    process = rank.popen("hb.step(1)\nsys.stdin.read()")
    rank.wait_for(lambda beat: beat.step == 1, process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    before = rank.beat()
    process.send_signal(signal.SIGCONT)
    assert rank.wait_for(lambda beat: beat.flush > before.flush, process).beat == before.beat
    process.communicate("")


def test_a_heartbeat_that_is_pickled_or_copied_is_still_one(rank) -> None:
    script = "import copy, pickle\nother = copy.deepcopy(pickle.loads(pickle.dumps(hb)))\nother.step(4)\nhb.close()"
    assert rank.run(script).stderr == ""
    assert (rank.beat().step, rank.beat().phase) == (4, "done")


def test_no_thread_to_be_had_is_said_once(rank) -> None:
    begin = 'import threading, heartbeat\ndef start(_): raise RuntimeError("can\'t start new thread")\n'
    begin += "threading.Thread.start = start\nhb = heartbeat.Heartbeat()\nhb.step(1)\nhb.close()\nprint('trained')"
    process = rank.popen("", begin=begin)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "trained\n")
    assert err == "krea_runner heartbeat, rank 5: can't start new thread; this process does not beat\n"


def test_a_step_costs_the_training_thread_less_than_a_microsecond_on_an_idle_core(rank) -> None:
    """The best of several rounds in CPU time, since this machine may be busy; tests/bench/bench_heartbeat.py has the median."""
    script = """
rounds = []
for _ in range(15):
    at = time.thread_time_ns()
    for n in range(20000): hb.step(n)
    rounds.append((time.thread_time_ns() - at) / 20000)
print(min(rounds))
"""
    costs = [float(rank.run(script).stdout) for _ in range(2)]
    assert statistics.fmean(costs) < 1000
