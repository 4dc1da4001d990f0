"""The heartbeat of a training rank: `hb = Heartbeat()`, then `hb.step(n)` in the training loop.

This one file needs nothing but Python 3.9 and can be copied into a container by itself. The training thread only stores
numbers in memory (no lock, no I/O, well under a microsecond); a daemon thread writes them once a second, so that a slow,
full or hung file system never slows training. Nothing here ever raises into training.

The format (docs/reference/heartbeat.md): one file a node, one line of SLOT bytes a local rank, rewritten in place.
"""

from __future__ import annotations  # so that Python 3.9 reads the types

import atexit
import os
import socket
import sys
import threading
import time
import zlib
from contextlib import contextmanager
from typing import Iterator

FORMAT = "khb1"
SLOT = 256  # bytes a local rank, its line break included
FLUSH_S = 1.0
MAX_LOCAL_RANKS = 256

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Heartbeat:
    """Reads where to write and who it is from the environment:

    KREA_HEARTBEAT_DIR, KREA_ATTEMPT (both set by the batch script; without them every call is a no-op), the rank from
    RANK or SLURM_PROCID, the local rank from LOCAL_RANK or SLURM_LOCALID, the node from SLURMD_NODENAME.

    Phases are `startup` until the first step, then `step`, inside `with hb.phase(name)` that name, and `done` after
    `close()`, which a normal exit of the process calls.
    """

    def __init__(self) -> None:
        env = os.environ
        self._beat = 0
        self._step = -1
        self._phase: tuple[str, float | None] = ("startup", None)
        self._flush = 0
        self._warned = False
        self._closing = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._thread_pid = 0
        directory, self._attempt = env.get("KREA_HEARTBEAT_DIR"), _word(env.get("KREA_ATTEMPT", ""), 64)
        self._rank = _number(env.get("RANK") or env.get("SLURM_PROCID"), 0)
        self._local_rank = _number(env.get("LOCAL_RANK") or env.get("SLURM_LOCALID"), 0)
        node = _word(env.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0], 64)
        self._path = os.path.join(directory, node + ".hb") if directory and self._attempt else None
        if self._path is not None and self._local_rank >= MAX_LOCAL_RANKS:
            self._warn("local rank %d: a node has at most %d" % (self._local_rank, MAX_LOCAL_RANKS))
            self._path = None
        if self._path is not None:
            self._start()

    # ------------------------------------------------------------------------------------------- the training thread

    def step(self, number: int) -> None:
        """The optimizer step `number` is done."""
        first = self._step < 0
        try:
            self._step = max(0, int(number))
        except (TypeError, ValueError, OverflowError):
            self._warn("step %r is no number" % (number,))
        self._phase = _STEP
        self._beat += 1
        if first:  # the end of a restart: shown at once
            self._wake.set()

    def beat(self) -> None:
        """Something moved that is no step, such as a batch of an evaluation."""
        self._beat += 1

    @contextmanager
    def phase(self, name: str, budget: float | str | None = None) -> Iterator[None]:
        """A stretch in which no step is to be expected: `with hb.phase("checkpoint", budget="15m"):`. Phases nest.

        `budget` is how long it may take (seconds, or "90s", "15m", "2h"); without it the run's own budgets hold.
        """
        outer = self._phase
        self._phase = (_word(str(name), 24) or "_", self._seconds(budget))
        self._beat += 1
        try:
            yield
        finally:
            # Steps inside the phase have ended the startup for good.
            self._phase = _STEP if outer[0] == "startup" and self._step >= 0 else outer
            self._beat += 1

    def close(self) -> None:
        """The rank has finished well: it owes no more beats. Writes one last time, waiting no longer than a second."""
        if self._thread is None or self._thread_pid != os.getpid():
            return
        self._phase = ("done", None)
        self._beat += 1
        self._closing = True
        self._wake.set()
        self._thread.join(FLUSH_S)
        self._thread = None

    # ------------------------------------------------------------------------------------------------ the other thread

    def _start(self) -> None:
        _allow_stacks()
        self._thread_pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="krea-heartbeat", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no threads left, or the interpreter is ending
            self._thread = None
            self._warn("no thread for the heartbeat: %s" % error)
            return
        atexit.register(_close_if_well, self)
        # A fork has no flusher and must not write: its parent's slot is the parent's.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._thread = None
        self._wake = threading.Event()  # the parent's may have been locked at that moment

    def _run(self) -> None:
        while True:
            last = self._closing
            self._write()
            if last:
                return
            self._wake.wait(FLUSH_S)
            self._wake.clear()

    def _write(self) -> None:
        path = self._path
        if path is None:
            return
        self._flush += 1
        try:
            # Opened and closed each time: a close is what makes other NFS clients see it, and a file system that went
            # away and came back is found again.
            descriptor = self._open(path)
            try:
                os.pwrite(descriptor, self._line(), self._local_rank * SLOT)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._warn("cannot write %s: %s" % (path, error.strerror))

    def _open(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o644)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return os.open(path, flags, 0o644)

    def _line(self) -> bytes:
        phase, budget = self._phase
        body = "%s rank=%d local=%d attempt=%s beat=%d flush=%d step=%d phase=%s budget=%s pid=%d at=%.3f" % (
            FORMAT,
            self._rank,
            self._local_rank,
            self._attempt,
            self._beat,
            self._flush,
            self._step,
            phase,
            "-" if budget is None else "%g" % budget,
            os.getpid(),
            time.time(),
        )
        padded = body.ljust(SLOT - 14)[: SLOT - 14].encode("ascii", "replace")
        return padded + b" crc=%08x\n" % zlib.crc32(padded)

    def _seconds(self, budget: float | str | None) -> float | None:
        if budget is None:
            return None
        try:
            text = str(budget).strip()
            seconds = float(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else float(text)
            if 0 < seconds < 1e9:
                return seconds
        except ValueError:
            pass
        self._warn('budget %r is no duration such as "15m": the run\'s own budgets hold' % (budget,))
        return None

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            try:
                sys.stderr.write("krea_runner heartbeat, rank %d: %s\n" % (self._rank, text))
            except (OSError, ValueError, AttributeError):
                return  # nobody listens


_STEP: tuple[str, float | None] = ("step", None)


def _close_if_well(heartbeat: Heartbeat) -> None:
    # A rank that dies of an exception has not finished: its last phase stays on the slot.
    if getattr(sys, "last_value", None) is None:
        heartbeat.close()


def _allow_stacks() -> None:
    """Let other processes of this user read the stacks of this one, for the evidence of a hang, where kernel.yama.ptrace_scope
    is 1 (Ubuntu) too. A kernel without Yama allows that anyway, and refuses the call."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(ctypes.c_int(0x59616D61), ctypes.c_ulong(2**64 - 1), 0, 0, 0)  # PR_SET_PTRACER, _ANY
    except (ImportError, OSError, AttributeError):
        return


def _word(text: str, longest: int) -> str:
    """`text` as one printable word."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-+[]") else "_" for c in text)[:longest]


def _number(text: str | None, default: int) -> int:
    try:
        return default if text is None else max(0, int(text))
    except ValueError:
        return default
