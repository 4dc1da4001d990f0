"""Whose heartbeat is it? The rank as launchers say it, and the one process that beats for a rank."""

import shutil
import subprocess
import sys

import pytest

from krea_runner.heartbeat import LAUNCHERS, MAX_LOCAL_RANKS
from tests.training_rank import BEGIN, PYTHON, warnings

NOBODY = {"RANK": "", "LOCAL_RANK": ""}


def identity(rank) -> tuple[int, int]:
    return rank.beat().rank, rank.beat().local_rank


# --------------------------------------------------------------------------------------------------------- launchers


@pytest.mark.parametrize(("rank_name", "local_name"), LAUNCHERS)
def test_every_launcher_says_the_rank_in_its_own_variables(rank, rank_name, local_name) -> None:
    done = rank.run("", **{**NOBODY, rank_name: "9", local_name: "3"})
    assert (done.returncode, done.stderr, identity(rank)) == (0, "", (9, 3))


SLURMS = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}  # of torchrun's agent or mpirun's daemon


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1", **SLURMS}, (5, 1)),
        (
            {**NOBODY, "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "5", **SLURMS},
            (5, 1),
        ),
        ({**NOBODY, "PMI_RANK": "5", "MPI_LOCALRANKID": "1", **SLURMS}, (5, 1)),
        ({**NOBODY, "PMI_RANK": "5", "PMI_LOCAL_RANK": "1", **SLURMS}, (5, 1)),
        ({**NOBODY, "PMIX_RANK": "5", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, (5, 1)),
        # `export RANK=$SLURM_PROCID`, as many scripts do
        ({"RANK": "5", "LOCAL_RANK": "", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, (5, 1)),
        # Lightning's own launcher sets the local rank alone, below a task of Slurm's: it is rank 0 that Slurm tells of
        ({"RANK": "", "LOCAL_RANK": "1", **SLURMS}, (0, 0)),
        ({"RANK": "5", "LOCAL_RANK": ""}, (5, 0)),
        ({"RANK": " 5\n", "LOCAL_RANK": "1"}, (5, 1)),
    ],
)
def test_what_starts_the_ranks_wins_over_what_started_the_starter(rank, env, expected) -> None:
    done = rank.run("", **env)
    assert (done.returncode, done.stderr, identity(rank)) == (0, "", expected)


def test_an_empty_rank_variable_counts_as_unset(rank) -> None:
    begin = "import os\nos.environ.update(RANK='', LOCAL_RANK='')\n" + BEGIN
    process = rank.popen("", begin=begin, SLURM_PROCID="9", SLURM_LOCALID="3")
    assert process.communicate(timeout=60)[1] == ""
    assert identity(rank) == (9, 3)


def test_a_rank_that_no_launcher_says_may_be_given(rank) -> None:
    process = rank.popen("", begin="from heartbeat import Heartbeat\nhb = Heartbeat(rank=7, local_rank=2)\n", **NOBODY)
    assert process.communicate(timeout=60)[1] == ""
    assert identity(rank) == (7, 2)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "zero"}, "RANK is 'zero', which is no rank"),
        ({"RANK": "-1"}, "RANK is '-1', which is no rank"),
        ({"RANK": "5.0"}, "RANK is '5.0', which is no rank"),
        ({"RANK": "1_0"}, "RANK is '1_0', which is no rank"),
        ({"RANK": "٣"}, "RANK is '\\u0663', which is no rank"),
        ({"RANK": "\x1b[31m"}, "RANK is '\\x1b[31m', which is no rank"),
        ({"RANK": "5" * 10}, "RANK is '5555555555', which is no rank"),
        ({"RANK": "zero", "SLURM_PROCID": "3"}, "RANK is 'zero', which is no rank"),
        ({"LOCAL_RANK": "gpu1"}, "LOCAL_RANK is 'gpu1', which is no rank"),
        (NOBODY, "no rank: none of RANK, OMPI_COMM_WORLD_RANK, "),
        ({"LOCAL_RANK": str(MAX_LOCAL_RANKS)}, "rank 5: local rank 256: a node has at most 256"),
        ({"KREA_ATTEMPT": ""}, "KREA_ATTEMPT is not set"),
        ({"KREA_HEARTBEAT_DIR": ""}, "KREA_HEARTBEAT_DIR is not set"),
    ],
)
def test_a_rank_that_cannot_be_known_is_said_once_and_never_guessed(rank, env, said) -> None:
    script = "hb.step(1)\nwith hb.phase('x'): hb.beat()\nhb.close()\nprint('trained')"
    done = rank.run(script, **env)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (line,) = warnings(done)
    assert said in line
    assert line.endswith("; this process does not beat")
    assert not rank.directory.exists()


def test_without_a_supervisor_the_heartbeat_does_nothing_and_says_nothing(rank) -> None:
    script = (
        "import threading\nhb.step(1)\nwith hb.phase('x', budget='1m'): hb.beat()\n"
        "print(len(threading.enumerate()))\nhb.close()"
    )
    done = rank.run(script, KREA_HEARTBEAT_DIR="", KREA_ATTEMPT="", RANK="zero")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.parametrize(("name", "value"), [("SLURMD_NODENAME", "n\udcff\x01/é"), ("KREA_ATTEMPT", "4\udcff\n1")])
def test_bytes_that_are_no_text_become_one_word(rank, name, value) -> None:
    done = rank.run("hb.step(1)", **{name: value})
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = rank.directory.iterdir()
    assert path.name in {"n1.hb", "n____.hb"}
    assert path.read_bytes()[256:].decode("ascii").count("\n") == 1


MPIRUNS = {
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "3"),
    "MPICH": ("mpiexec.hydra", "-n", "3"),
}


@pytest.mark.parametrize("mpi", MPIRUNS)
def test_every_process_of_mpirun_is_its_own_rank(rank, mpi) -> None:
    program, *options = MPIRUNS[mpi]
    if shutil.which(program) is None:
        pytest.skip(
            f"no {program}: the heartbeat is NOT tested under {mpi}; as root: apt-get install openmpi-bin mpich"
        )
    script = BEGIN + "hb.step(hb._rank)\nhb.close()"
    argv = [program, *options, PYTHON, "-c", script]
    env = {**rank.env(**NOBODY), "OMPI_MCA_plm": "isolated", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    done = subprocess.run(argv, cwd=rank.place, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(beat.rank, beat.local_rank, beat.step, beat.phase) for beat in rank.beats()] == [
        (number, number, number, "done") for number in range(3)
    ]


@pytest.mark.torch
def test_every_worker_of_torchrun_is_its_own_rank_also_after_an_elastic_restart(rank) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: the heartbeat is NOT tested under torchrun")
    script = rank.place / "train.py"
    script.write_text(
        BEGIN + "hb.step(10 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))\ntime.sleep(1.2)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)\nhb.close()"
    )
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max_restarts=1", "--monitor_interval=0.1",
        "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0", str(script),
    ]  # fmt: skip
    env = rank.env(**NOBODY, **SLURMS, OMP_NUM_THREADS="1", PYTHONPATH=str(rank.place))
    done = subprocess.run(argv, cwd=rank.place, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not beat" not in done.stderr
    assert [(beat.rank, beat.local_rank, beat.step, beat.phase) for beat in rank.beats()] == [
        (0, 0, 11, "done"),
        (1, 1, 11, "done"),
    ]


# ---------------------------------------------------------------------------------------------- one process is the rank


REFUSED = "krea_runner heartbeat, rank 5: another process of this node beats for this rank; this one does not"
STEADY = "hb.step(1)\nprint('ready', flush=True)\nsys.stdin.read()"


def test_of_two_processes_that_claim_a_rank_the_first_beats_and_the_second_says_so(rank) -> None:
    first = rank.popen(STEADY)
    assert first.stdout.readline() == "ready\n"
    second = rank.run("hb.step(99)\nhb.step(100)\ntime.sleep(1.2)\nhb.close()\nprint('trained')")
    assert (second.returncode, second.stdout, warnings(second)) == (0, "trained\n", [REFUSED])
    assert (rank.beat().step, rank.beat().pid) == (1, first.pid)
    first.communicate("")


def test_a_rank_started_anew_takes_the_slot_of_the_dead_one(rank) -> None:
    first = rank.popen(STEADY)
    assert first.stdout.readline() == "ready\n"
    first.kill()
    first.communicate()
    assert rank.run("hb.step(2)").stderr == ""
    assert rank.beat().step == 2


def test_two_heartbeats_of_a_process_are_one(rank) -> None:
    process = rank.popen(
        "other = Heartbeat()\nother.step(3)\nwith hb.phase('load'):\n    import threading\n"
        "    print(other._phase[0], len(threading.enumerate()), flush=True)\n    sys.stdin.read()"
    )
    assert process.stdout.readline() == "load 2\n"
    assert rank.wait_for(lambda beat: beat.phase == "load", process).step == 3
    process.communicate("")


CHILD = """
import multiprocessing, pickle
from heartbeat import Heartbeat

hb = Heartbeat()  # as scripts have it, at the top: a worker that is spawned runs this too

def work(theirs):
    (theirs or hb).beat()
    if theirs:
        theirs.step(99)
    return len(__import__("threading").enumerate())

if __name__ == "__main__":
    import sys
    hb.step(1)
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(work, [None, hb if sys.argv[2] == "trains" else None]), flush=True)
    hb._write()
    sys.stdin.read()
"""


@pytest.mark.parametrize("says", ["trains", "works"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_of_the_rank_beats_for_nobody_and_is_quiet_unless_it_trains(rank, method, says) -> None:
    script = rank.place / "train.py"
    script.write_text(CHILD)
    process = subprocess.Popen(
        [PYTHON, script, method, says], cwd=rank.place, env=rank.env(PYTHONWARNINGS="ignore"), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "[1, 1]\n"
    beat = rank.wait_for(lambda beat: beat.flush > 1, process)
    assert (beat.step, beat.phase, beat.pid) == (1, "step", process.pid)
    _, err = process.communicate("")
    assert err.splitlines() == ([REFUSED] if says == "trains" else [])


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


def test_a_fork_does_not_write_its_parents_slot(rank) -> None:
    process = rank.popen(FORK, PYTHONWARNINGS="ignore")
    assert process.stdout.readline() == "None 1\n"
    beat = rank.wait_for(lambda beat: beat.flush > 1, process)
    assert (beat.step, beat.phase, beat.pid) == (1, "step", process.pid)
    out, err = process.communicate("")
    assert (process.returncode, out, err) == (0, "", REFUSED + "\n")
    assert (rank.beat().step, rank.beat().phase) == (1, "shutdown")


ORPHAN = """
hb.step(1)
if os.fork() == 0:
    print("orphan", flush=True)
    sys.stdin.read()
    os._exit(0)
time.sleep(0.2)
os.kill(os.getpid(), 9)
"""


def test_a_worker_that_outlives_its_rank_does_not_keep_the_slot(rank) -> None:
    first = rank.popen(ORPHAN, PYTHONWARNINGS="ignore")
    assert first.stdout.readline() == "orphan\n"
    first.wait()
    assert rank.run("hb.step(2)").stderr == ""
    assert rank.beat().step == 2
    first.communicate("")


def test_a_fork_in_the_middle_of_a_flush_neither_hangs_nor_writes(rank) -> None:
    script = (
        "held, go = [], __import__('threading').Event()\npwrite = os.pwrite\n"
        "def slow(*what):\n    held.append(1); go.wait(); return pwrite(*what)\nos.pwrite = slow\n"
        "hb.step(1)\n"
        "while not held: time.sleep(0.01)\n"
        "child = os.fork()\n"
        "if child == 0:\n    hb.beat()\n    with hb.phase('x'): pass\n    hb.close()\n    sys.exit(7)\n"
        "print(os.waitpid(child, 0)[1] >> 8)\ngo.set()\nhb.step(2)\nhb.close()"
    )
    done = rank.run(script, PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
    assert (rank.beat().step, rank.beat().phase) == (2, "done")
