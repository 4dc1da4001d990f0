"""Supervisors killed with SIGKILL at every numbered point of their ticks.

A point lies before and after each transaction of the history, each effect on the scheduler, each file put in its place. What
is played is compared with the same scenario undisturbed: the same run state, attempts, incidents and actions, and as many starts
of the job's own script. The long form: `python -m tests.chaos.kills --kills 1000` (also with --scheduler slurm, in a cluster's
shell).
"""

import argparse
import collections
import contextlib
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from krea_runner.cli.context import current_user
from krea_runner.clock import SystemClock
from krea_runner.history.database import Database
from krea_runner.history.store import open_history
from krea_runner.model import RunState
from krea_runner.schedulers import local_state, open_scheduler
from krea_runner.supervise.lease import own_holder
from krea_runner.supervise.loop import run_loop
from krea_runner.supervise.supervisor import Supervisor

EFFECTS = (
    "submit",
    "requeue",
    "release",
    "start_now",
    "exclude",
    "drain",
    "undrain",
    "cancel",
    "run_beside",
    "end_beside",
)
TIMES = 8  # kills of one play, where it is killed again and again
NEVER = 1 << 40
WITHIN_S = 1200.0  # a submission whose supervisor died before the answer is looked for during 90 s, each time

# How many starts there were is a file's lines: what the job itself saw, whatever anybody's records say.
BEGIN = (
    'while [ ! -e go ]; do sleep 0.1; done; echo "$SLURM_JOB_ID $SLURM_RESTART_COUNT" >> begun; n=$(wc -l < begun)\n'
)
BEAT = (
    "import os, signal, time\nfrom krea_runner import Heartbeat\nbeat = Heartbeat()\n"
    "for n in range(1, 9): beat.step(n); time.sleep(0.2)\n"
    "os.kill(os.getpid(), signal.SIGSTOP)\n"
)
SCENARIOS: dict[str, tuple[str, str]] = {
    # name: what the script does, more of run.toml
    "done": (f"{BEGIN}exit 0", ""),
    "crash": (f"{BEGIN}[ $n -ge 2 ] || exit 7", ""),
    "no-requeue": (f"{BEGIN}[ $n -ge 2 ] || exit 7", ""),
    "again": (f"{BEGIN}exit 7", "[policy]\nmax_restarts = 2"),
    "hang": (f"{BEGIN}[ $n -ge 2 ] || exec {sys.executable} beat.py", '[budgets]\nstartup = "4s"\nstep = "4s"'),
}


@dataclass
class Played:
    """How a scenario ended, and what it took."""

    end: dict[str, Any]
    points: int = 0
    kills: list[str] = field(default_factory=list)
    """Where: what the point is before or after."""


class Counter:
    """Of the points passed, and the name of the last one, shared with the supervisor that passes them."""

    def __init__(self) -> None:
        self.shared = mmap.mmap(-1, 4096)

    def reset(self) -> None:
        self.shared[:8] = struct.pack("q", 0)

    def passed(self) -> tuple[int, str]:
        (count,) = struct.unpack("q", self.shared[:8])
        return count, self.shared[8:200].rstrip(b"\0").decode()

    def arm(self, at: int) -> None:
        """From here on, in this process: it kills itself at point `at`."""
        kept = Database.write

        @contextlib.contextmanager
        def write(database: Database) -> Iterator[Any]:
            with kept(database) as connection:
                yield connection
                self._point("before commit", at)
            self._point("after commit", at)

        Database.write = write  # type: ignore[method-assign]
        os.replace = self._around(os.replace, "file", at)

    def around_effects(self, scheduler: Any, at: int) -> Any:
        for name in EFFECTS:
            setattr(scheduler, name, self._around(getattr(scheduler, name), name, at))
        return scheduler

    def _around(self, call: Callable[..., Any], name: str, at: int) -> Callable[..., Any]:
        def wrapped(*args: Any, **more: Any) -> Any:
            self._point(f"before {name}", at)
            answer = call(*args, **more)
            self._point(f"after {name}", at)
            return answer

        return wrapped

    def _point(self, name: str, at: int) -> None:
        count = self.passed()[0] + 1
        self.shared[:200] = struct.pack("q", count) + name.encode().ljust(192, b"\0")
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)


class Stage:
    """One run of a scenario in a folder of its own."""

    def __init__(self, name: str, kind: str) -> None:
        script, more = SCENARIOS[name]
        self.name, self.kind = name, kind
        self.folder = Path(tempfile.mkdtemp(prefix=f"krea-kills-{name}-"))
        self.state = self.folder / "state"
        self.counter = Counter()
        (self.folder / "job.sh").write_text(script)
        (self.folder / "beat.py").write_text(BEAT)
        (self.folder / "run.toml").write_text(
            f'[run]\nname = "{name}"\nscheduler = "{kind}"\ndir = "run"\ncommand = ["sh", "job.sh"]\n[gang]\nnodes = 1\n{more}\n'
        )
        os.environ["KREA_RUNNER_STATE_DIR"] = str(self.state)
        argv = [sys.executable, "-m", "krea_runner", "submit", "run.toml", "--no-check"]
        subprocess.run(argv, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)
        if name == "no-requeue":
            self._forbid_requeue()
        (self.folder / "go").touch()

    def _forbid_requeue(self) -> None:
        (run,) = open_history(self.state).list_runs()
        if self.kind == "slurm":
            subprocess.run(["scontrol", "update", f"jobid={run.job_id}", "requeue=0"], check=True)
            return
        home = self.state / "local" / "jobs" / str(run.job_id)
        with local_state.locked(home):
            job = local_state.load(home)
            job.requeue = False
            local_state.save(home, job)

    def supervisor(self, at: int) -> int:
        """Forks one tick, as `supervise --once` makes it, to be killed at that point; its pid."""
        self.counter.reset()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            self.counter.arm(at)

            def opened(kind: str) -> Any:
                return self.counter.around_effects(open_scheduler(kind, state_dir=self.state), at)

            supervisor = Supervisor(
                history=open_history(self.state),
                open_scheduler=opened,
                clock=SystemClock(),
                user=current_user(),
                holder=own_holder(),
            )
            report = run_loop(supervisor, every_s=5.0, for_s=0.0, emit=lambda _: None)
            (self.folder / "said").open("a").write("".join(f"{line.text}\n" for line in report.lines))
            os._exit(75 if report.blind else 0)
        except BaseException as error:  # noqa: BLE001 - a forked child must not return into pytest
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)

    def tick(self, at: int = NEVER) -> tuple[int, str]:
        """How many points it passed; where it was killed, or empty."""
        _, status = os.waitpid(self.supervisor(at), 0)
        count, name = self.counter.passed()
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL, status
            return count, name
        code = os.waitstatus_to_exitcode(status)
        assert code in {0, 75}, f"a tick ended with {code}"
        return count, ""

    def is_over(self) -> bool:
        history = open_history(self.state)
        (run,) = history.list_runs()
        return not run.state.is_supervised and history.open_action(run.run_id) is None

    def play(self, next_kill: Callable[[int], int], *, within_s: float = WITHIN_S) -> Played:
        """`next_kill`: at which point the next tick is killed, from the number of all points passed before it."""
        played, deadline = Played({}), time.monotonic() + within_s
        while not self.is_over():
            assert time.monotonic() < deadline, f"stuck after {played.kills}: {self.document()}\n{self.said()}"
            count, where = self.tick(next_kill(played.points))
            played.points += count
            played.kills += [where] if where else []
            if not where:
                time.sleep(0.05)
        for _ in range(2):
            self.tick()
        played.end = self.document()
        return played

    def document(self) -> dict[str, Any]:
        history = open_history(self.state)
        (run,) = history.list_runs()
        jobs = open_scheduler(self.kind, state_dir=self.state).my_jobs([])
        mine = sorted({attempt.key.job_id for attempt in history.attempts(run.run_id)})
        return {
            "state": str(run.state),
            "attempts": [
                (mine.index(one.key.job_id), one.key.restart_count, str(one.end_state), one.exit_code)
                for one in history.attempts(run.run_id)
            ],
            "incidents": [
                (str(one.finding.symptom), one.finding.cause, str(one.decision.kind))
                for one in reversed(history.incidents())
            ],
            "actions": [(str(one.kind), str(one.stage)) for one in history.actions(run.run_id)],
            "starts": (self.folder / "begun").read_text().count("\n"),
            "jobs": sum(job.comment.partition(".")[0] == run.tag.partition(".")[0] for job in jobs.values()),
        }

    def said(self) -> str:
        path = self.folder / "said"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        history, scheduler = open_history(self.state), open_scheduler(self.kind, state_dir=self.state)
        for run in history.list_runs():
            if run.job_id and run.state is not RunState.DONE:
                scheduler.cancel(run.job_id)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def stage(name: str, kind: str) -> Iterator[Stage]:
    made = Stage(name, kind)
    try:
        yield made
    finally:
        made.close()


def undisturbed(name: str, kind: str) -> Played:
    with stage(name, kind) as made:
        return made.play(lambda _: NEVER)


def killed_once(name: str, kind: str, at: int) -> Played:
    """At the `at`-th point of the whole play."""
    with stage(name, kind) as made:
        return made.play(lambda passed: at - passed if at > passed else NEVER)


def killed_often(name: str, kind: str, points: int, draw: random.Random) -> Played:
    left = iter([draw.randint(1, points) for _ in range(TIMES)])
    with stage(name, kind) as made:
        return made.play(lambda _: next(left, NEVER))


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or ""))
    parser.add_argument("--scheduler", default="local", choices=["local", "slurm"])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="one scenario")
    given = parser.parse_args()
    draw, wheres, wrong, kills = random.Random(given.seed), collections.Counter[str](), 0, 0
    names = [given.only] if given.only else list(SCENARIOS)
    expected = {name: undisturbed(name, given.scheduler) for name in names}

    def judge(name: str, how: str, played: Played) -> None:
        nonlocal wrong, kills
        kills += len(played.kills)
        wheres.update(played.kills)
        if played.end != expected[name].end:
            wrong += 1
            print(f"WRONG {name} {how} {played.kills}\n  want {expected[name].end}\n  got  {played.end}", flush=True)

    for name, played in expected.items():
        print(f"{name}: {played.points} points, {played.end}", flush=True)
        for at in range(1, played.points + 1):
            judge(name, f"killed at {at}", killed_once(name, given.scheduler, at))
    while kills < given.kills:
        name = draw.choice(names)
        judge(name, "killed often", killed_often(name, given.scheduler, expected[name].points, draw))
    print(f"{kills} kills, {wrong} plays ended otherwise than undisturbed")
    for where, count in sorted(wheres.items()):
        print(f"  {count:5} {where}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
