"""The heartbeat of a training rank: `hb = Heartbeat()`, then `hb.step(n)` in the training loop.

This one file needs nothing but Python 3.9 and can be copied into a container by itself. The training thread only stores
numbers in memory (no lock, no I/O, well under a microsecond); a daemon thread writes them once a second, so that a slow,
full or hung file system never slows training. Nothing here ever raises into training.

The format (docs/reference/heartbeat.md): one file a node, one line of SLOT bytes a local rank, rewritten in place.
"""

from __future__ import annotations  # so that Python 3.9 reads the types

import atexit
import errno
import hashlib
import os
import queue
import socket
import sys
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from typing import Any, Iterator, Optional, Tuple

FORMAT = "khb1"
SLOT = 256  # bytes a local rank, its line break included
FLUSH_S = 1.0
MAX_LOCAL_RANKS = 256

# Who is this? The rank and the local rank as launchers set them. The first rank that is set counts: what starts the ranks
# themselves stands before Slurm, whose variables tell of mpirun's daemon or torchrun's agent where those run in a step.
LAUNCHERS = (
    ("RANK", "LOCAL_RANK"),  # torchrun, accelerate, deepspeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),  # MVAPICH2
    ("PMI_RANK", "MPI_LOCALRANKID"),  # MPICH, Intel MPI; srun --mpi=pmi2 sets the first
    ("PMIX_RANK", "PMI_LOCAL_RANK"),  # srun --mpi=pmix sets the first; Cray PALS the second, with PMI_RANK
    ("JAX_PROCESS_ID", "JAX_LOCAL_PROCESS_ID"),
    ("SLURM_PROCID", "SLURM_LOCALID"),  # srun
)

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_Phase = Tuple[str, Optional[float], object]  # name, budget in seconds or None, what makes it unlike any other
_STARTUP: _Phase = ("startup", None, 0)
_STEP: _Phase = ("step", None, 1)
_MOST_STEPS = 10**12 - 1  # more digits would not fit the slot


class Heartbeat:
    """Reads where to write and who it is from the environment:

    KREA_HEARTBEAT_DIR, KREA_ATTEMPT (both set by the batch script; without them every call is a no-op), the rank and the
    local rank from what the launcher sets (LAUNCHERS), the node from SLURMD_NODENAME. Give `rank` and `local_rank` only where
    no launcher says them. Where the rank cannot be known, that is said once and nothing is written.

    Phases are `startup` until the first step, then `step`, inside `with hb.phase(name)` that name, `done` after `close()`, and
    `shutdown` when the process exits without it.

    A slot has one writer: in a process, every `Heartbeat()` of the same rank is the same heartbeat; of several processes, the
    first that makes one is the rank. Safe to use from threads and signal handlers; a fork of the process writes nothing.
    """

    def __init__(self, rank: int | None = None, local_rank: int | None = None) -> None:
        self._given = (rank, local_rank)
        self._beat = 0
        self._step = -1
        self._phase = _STARTUP
        self._open: list[_Phase] = []  # the phases that are open, of all threads
        self._over: str | None = None
        self._flush = 0
        self._said: set[str] = set()
        self._refused = False  # another process writes the slot
        self._placed = False  # something has been written
        # A signal handler may put() while the loop is in a put(); an Event's set() would wait for itself.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._rank = -1  # unknown
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._say("begin", "%s; this process does not beat" % error)

    def _begin(self) -> None:
        directory, attempt = os.environ.get("KREA_HEARTBEAT_DIR"), os.environ.get("KREA_ATTEMPT")
        if (not directory and not attempt) or sys.is_finalizing():
            return  # nobody supervises this process, or it has ended: no thread would come up any more
        if not directory or not attempt:
            raise ValueError("%s is not set" % ("KREA_ATTEMPT" if directory else "KREA_HEARTBEAT_DIR"))
        self._rank, self._local_rank = _identity(*self._given)
        node = _word(os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0], 64)
        self._attempt = _word(attempt, 64)
        self._path = os.path.join(os.path.abspath(directory), node + ".hb")
        self._slot = "%s %s %d" % (self._path, self._attempt, self._local_rank)
        shared = _living.setdefault(self._slot, self)
        if shared is not self:
            self.__dict__ = shared.__dict__
        elif _claim(self._slot):
            self._start()
        else:
            self._refused = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Heartbeat, self._given  # another process finds out for itself who it is

    # ------------------------------------------------------------------------------------------- the training thread

    def step(self, number: int) -> None:
        """The optimizer step `number` is done."""
        first = self._step < 0
        try:
            self._step = max(0, int(number))
        except Exception as error:  # noqa: BLE001 - numbers may be of any library
            self._step = max(0, self._step)
            self._say("step", "a step of type %s is no number: %s" % (type(number).__name__, error))
        self._phase = _STEP
        self._beat += 1
        if first:
            self._first_step()

    def beat(self) -> None:
        """Something moved that is no step, such as a batch of an evaluation."""
        self._beat += 1

    @contextmanager
    def phase(self, name: str, budget: float | str | None = None) -> Iterator[None]:
        """A stretch in which no step is to be expected: `with hb.phase("checkpoint", budget="15m"):`. Phases nest.

        `budget` is how long it may take (seconds, or "90s", "15m", "2h"); without it the run's own budgets hold. Of phases
        in several threads the one opened last is shown; a step is shown from the moment it is done.
        """
        phase = (self._name(name), self._seconds(budget), object())
        self._open.append(phase)
        self._phase = phase
        self._beat += 1
        try:
            yield
        finally:
            self._open.remove(phase)
            around = self._open[-1:]
            # Steps inside the phase have ended the startup for good.
            self._phase = around[0] if around else _STEP if self._step >= 0 else _STARTUP
            self._beat += 1

    def close(self) -> None:
        """The rank has finished well: it owes no more beats. Writes one last time, waiting no longer than a second."""
        self._end("done")

    def __enter__(self) -> Heartbeat:
        """`with Heartbeat() as hb:` closes it, unless the block ends in an exception or in `sys.exit` with an error."""
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()

    def _first_step(self) -> None:
        self._wake.put(None)  # the end of a restart: shown at once
        if self._refused:
            self._say("refused", "another process of this node beats for this rank; this one does not")

    def _end(self, phase: str) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        _living.pop(self._slot, None)
        self._over = phase
        self._beat += 1
        self._wake.put(None)
        try:
            thread.join(FLUSH_S)
        except RuntimeError:  # the interpreter is ending
            return

    # ------------------------------------------------------------------------------------------------ the other thread

    def _start(self) -> None:
        _allow_stacks()
        thread = threading.Thread(target=self._run, name="krea-heartbeat", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while True:
            last = self._over is not None
            self._write()
            if last:
                return
            try:
                self._wake.get(timeout=FLUSH_S)
            except queue.Empty:
                continue

    def _write(self) -> None:
        self._flush += 1
        try:
            self._put()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next second may be better
            self._say("write", "cannot write %s: %s" % (ascii(self._path), getattr(error, "strerror", None) or error))

    def _put(self) -> None:
        # Opened and closed each time: a close is what makes other NFS clients see it, and a file system that went
        # away and came back is found again.
        descriptor = self._opened()
        try:
            if os.pwrite(descriptor, self._line(), self._local_rank * SLOT) != SLOT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
        self._placed = True

    def _opened(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o644)
        except FileNotFoundError:
            # Once it was there, what is missing above it was removed or unmounted: not ours to make anew.
            folder = os.path.dirname(self._path)
            if not self._placed:
                os.makedirs(os.path.dirname(folder), exist_ok=True)
            with suppress(FileExistsError):  # another rank's
                os.mkdir(folder)
            return os.open(self._path, flags, 0o644)

    def _line(self) -> bytes:
        phase, budget, _ = (self._over, None, None) if self._over else self._phase
        body = "%s rank=%d local=%d attempt=%s beat=%d flush=%d step=%d phase=%s budget=%s pid=%d at=%.3f" % (
            FORMAT,
            self._rank,
            self._local_rank,
            self._attempt,
            self._beat,
            self._flush,
            min(self._step, _MOST_STEPS),
            phase,
            "-" if budget is None else "%g" % budget,
            os.getpid(),
            time.time(),
        )
        padded = body.ljust(SLOT - 14)[: SLOT - 14].encode("ascii", "replace")
        return padded + b" crc=%08x\n" % zlib.crc32(padded)

    def _name(self, name: object) -> str:
        try:
            return _word(str(name), 24) or "_"
        except Exception:  # noqa: BLE001 - of any type
            return "_"

    def _seconds(self, budget: float | str | None) -> float | None:
        if budget is None:
            return None
        try:
            text = str(budget).strip()
            seconds = float(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else float(text)
            if 0 < seconds < 1e9:
                return seconds
        except Exception:  # noqa: BLE001 - of any type
            text = type(budget).__name__
        self._say("budget", 'budget %.80s is no duration such as "15m": the run\'s own budgets hold' % ascii(text))
        return None

    def _say(self, topic: str, text: str) -> None:
        """Once a topic and process."""
        if topic in self._said:
            return
        self._said.add(topic)
        who = "" if self._rank < 0 else ", rank %d" % self._rank
        try:
            sys.stderr.write("krea_runner heartbeat%s: %s\n" % (who, text))
        except Exception:  # noqa: BLE001 - it may be gone, closed, or any object
            return  # nobody listens


def _identity(rank: int | None, local_rank: int | None) -> tuple[int, int]:
    """The rank and the local rank. ValueError says why they cannot be known: a wrong rank would be a lie about another."""
    locals_ = [local for _, local in LAUNCHERS]
    if rank is None:
        for name, local in LAUNCHERS:
            if os.environ.get(name, "").strip():
                rank = _number(name, os.environ[name])
                locals_.insert(0, local)
                break
        else:
            raise ValueError("no rank: none of %s is set" % ", ".join(name for name, _ in LAUNCHERS))
    if local_rank is None:
        found = [name for name in locals_ if os.environ.get(name, "").strip()]
        local_rank = _number(found[0], os.environ[found[0]]) if found else 0
    if local_rank >= MAX_LOCAL_RANKS:
        raise ValueError("rank %d: local rank %d: a node has at most %d" % (rank, local_rank, MAX_LOCAL_RANKS))
    return rank, local_rank


def _number(name: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError("%s is %.80s, which is no rank" % (name, ascii(text)))
    return int(text)


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


# --------------------------------------------------------------------------------------------------------- the process

_living: dict[str, Heartbeat] = {}  # by slot
_claims: dict[str, int] = {}  # the open sockets that keep the slots of this process


def _claim(slot: str) -> bool:
    """Whether this process is the first on its node to want the slot; then it keeps it for as long as it lives.

    A name in Linux's abstract socket namespace: no file, no wait, gone with its process. Elsewhere nobody is refused.
    """
    if slot in _claims:
        return True
    try:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind("\0krea-heartbeat-" + hashlib.sha256(slot.encode("utf-8", "backslashreplace")).hexdigest())
        except OSError as error:
            claim.close()
            return error.errno != errno.EADDRINUSE
    except OSError:
        return True
    _claims[slot] = claim.detach()
    return True


def _forked() -> None:
    # A fork has no flusher and must not write: its parent's slot is the parent's, also when the parent has died.
    for heartbeat in list(_living.values()):
        heartbeat._thread = None
        heartbeat._step, heartbeat._refused = -1, True  # should it train, it says so
        heartbeat._wake = queue.SimpleQueue()  # the parent's may have been locked at that moment
    for descriptor in _claims.values():
        os.close(descriptor)
    _living.clear()
    _claims.clear()


def _leave() -> None:
    # A rank that dies of an exception has not finished: its last phase stays on the slot. The exit code cannot be known here.
    if getattr(sys, "last_value", None) is None:
        for heartbeat in list(_living.values()):
            heartbeat._end("shutdown")


atexit.register(_leave)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
