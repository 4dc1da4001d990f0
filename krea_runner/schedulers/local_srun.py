"""`srun` for the local scheduler: as much of it as a batch script of ours uses, with srun 22.05's words and exit codes."""

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, cast

from krea_runner.schedulers.nodelist import expand

KILL_WAIT_S = 3.0
LINE_BYTES = 64 * 1024  # a longer line is written in pieces
DRAIN_S = 0.5  # what a rank's children may still write after its end
# How srun 22.05.8 words the end of a task by a signal.
_SIGNAL_WORDS = {
    signal.SIGKILL: "Killed", signal.SIGTERM: "Terminated", signal.SIGSEGV: "Segmentation fault", signal.SIGABRT: "Aborted",
    signal.SIGBUS: "Bus error", signal.SIGFPE: "Floating point exception", signal.SIGINT: "Interrupt",
}  # fmt: skip


@dataclass(slots=True)
class Task:
    rank: int
    local_rank: int
    node_index: int
    node: str
    process: subprocess.Popen[bytes]
    pipe: IO[bytes]
    output: int
    label: bytes
    pending: bytes = b""
    code: int | None = None
    """As srun counts: the exit code, or 128 + signal."""


@dataclass(slots=True)
class Step:
    tasks: list[Task]
    kill_on_bad_exit: bool
    ending_since: float | None = None
    files: dict[str, int] = field(default_factory=dict)


def main() -> int:
    options = _options(sys.argv[1:])
    env = os.environ
    nodes = _nodes(env)
    if options.nodes is not None:
        nodes = nodes[: options.nodes]
    per_node = options.ntasks_per_node or int(env.get("SLURM_NTASKS_PER_NODE", "1"))
    if options.ntasks is not None:
        per_node = -(-options.ntasks // len(nodes))
    wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    try:
        step = _start(options, nodes, per_node, env)
    except OSError as error:
        sys.stderr.write(f"srun: error: {options.command[0]}: {error.strerror}\n")
        return 2
    return _watch(step, wakeup_read)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False, description=__doc__)
    parser.add_argument("-K", "--kill-on-bad-exit", nargs="?", const=1, default=0, type=int)
    parser.add_argument("-l", "--label", action="store_true")
    parser.add_argument("-o", "--output", default="")
    parser.add_argument("--open-mode", choices=["append", "truncate"], default="append")
    parser.add_argument("-N", "--nodes", type=int)
    parser.add_argument("-n", "--ntasks", type=int)
    parser.add_argument("--ntasks-per-node", type=int)
    parser.add_argument("--export", default="ALL")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not options.command:
        parser.error("a command is wanted")
    return options


def _nodes(env: Mapping[str, str]) -> list[str]:
    return expand(env.get("SLURM_JOB_NODELIST", "local1"))


def _start(options: argparse.Namespace, nodes: list[str], per_node: int, env: Mapping[str, str]) -> Step:
    count = options.ntasks or len(nodes) * per_node
    step = Step([], bool(options.kill_on_bad_exit))
    shared = {"SLURM_NTASKS": str(count), "SLURM_NPROCS": str(count), "SLURM_STEP_ID": "0", "SLURM_STEPID": "0",
              "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NUM_NODES": str(len(nodes))}  # fmt: skip
    for rank in range(count):
        index, local_rank = divmod(rank, per_node)
        node = nodes[index]
        process = subprocess.Popen(
            options.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**env, **shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank),
                 "SLURM_NODEID": str(index), "SLURMD_NODENAME": node},
            start_new_session=True,
        )  # fmt: skip
        output = _output(step, options, node, index, rank, env)
        label = f"{rank}: ".encode() if options.label else b""
        pipe = cast(IO[bytes], process.stdout)
        step.tasks.append(Task(rank, local_rank, index, node, process, pipe, output, label))
    return step


def _output(step: Step, options: argparse.Namespace, node: str, index: int, rank: int, env: Mapping[str, str]) -> int:
    if not options.output:
        return 1
    path = options.output.replace("%%", "\0")
    for pattern, value in (("%n", index), ("%N", node), ("%t", rank), ("%j", env.get("SLURM_JOB_ID", "0"))):
        path = path.replace(pattern, str(value))
    path = path.replace("\0", "%")
    if path not in step.files:
        mode = os.O_APPEND if options.open_mode == "append" else os.O_TRUNC
        step.files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, 0o644)
    return step.files[path]


# ---------------------------------------------------------------------------------------------------------- watching


def _watch(step: Step, wakeup: int) -> int:
    """Until every task has ended; the highest of their codes, as srun does."""
    selector = selectors.DefaultSelector()
    selector.register(wakeup, selectors.EVENT_READ, None)
    for task in step.tasks:
        os.set_blocking(task.pipe.fileno(), False)
        selector.register(task.pipe, selectors.EVENT_READ, task)
    while any(task.code is None for task in step.tasks):
        timeout = None if step.ending_since is None else 0.1
        for key, _ in selector.select(timeout):
            if key.data is None:
                _signals(step, os.read(wakeup, 512))
            elif not _pump(key.data):
                selector.unregister(key.fileobj)
        for task in step.tasks:
            if task.code is None and task.process.poll() is not None:
                _ended(step, task)
        if step.ending_since is not None and time.monotonic() - step.ending_since > KILL_WAIT_S:
            _signal_all(step, signal.SIGKILL)
    _drain(step, selector)
    return max(task.code or 0 for task in step.tasks)


def _signals(step: Step, numbers: bytes) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        if number in numbers:
            _end_all(step)


def _pump(task: Task) -> bool:
    """Write the whole lines that have arrived, each with its label; False at the end of the pipe."""
    try:
        data = task.pipe.read1(LINE_BYTES)  # type: ignore[attr-defined]
    except BlockingIOError:
        return True
    if data is None:
        return True
    task.pending += data
    *lines, task.pending = task.pending.split(b"\n")
    if len(task.pending) >= LINE_BYTES or (not data and task.pending):
        lines.append(task.pending)
        task.pending = b""
    if lines:
        os.write(task.output, b"".join(task.label + line + b"\n" for line in lines))
    return bool(data)


def _ended(step: Step, task: Task) -> None:
    code = task.process.returncode
    task.code = code if code >= 0 else 128 - code
    if code == 0:
        return
    word = f"Exited with exit code {code}" if code > 0 else _SIGNAL_WORDS.get(signal.Signals(-code), f"Signal {-code}")
    sys.stderr.write(f"srun: error: {task.node}: task {task.rank}: {word}\n")
    sys.stderr.flush()
    if step.kill_on_bad_exit and step.ending_since is None:
        sys.stderr.write("srun: launch/slurm: _step_signal: Terminating StepId=0\n")
        _end_all(step)


def _end_all(step: Step) -> None:
    step.ending_since = step.ending_since or time.monotonic()
    _signal_all(step, signal.SIGTERM)
    _signal_all(step, signal.SIGCONT)  # a stopped task must wake up to hear it


def _signal_all(step: Step, number: signal.Signals) -> None:
    for task in step.tasks:
        if task.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.process.pid, number)


def _drain(step: Step, selector: selectors.BaseSelector) -> None:
    """What is left in the pipes; a grandchild that keeps one open is not waited for longer than DRAIN_S."""
    deadline = time.monotonic() + DRAIN_S
    waiting = {key.data.rank for key in selector.get_map().values() if key.data is not None}
    while waiting and time.monotonic() < deadline:
        for key, _ in selector.select(0.05):
            if key.data is not None and not _pump(key.data):
                selector.unregister(key.fileobj)
                waiting.discard(key.data.rank)
    for task in step.tasks:
        if task.pending:
            os.write(task.output, task.label + task.pending + b"\n")


if __name__ == "__main__":
    sys.exit(main())
