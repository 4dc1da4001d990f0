"""The only place that runs a command and waits for it: argv lists, a timeout, an own session, a known environment."""

import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Slurm's commands read their defaults from these prefixes: a user's SQUEUE_FORMAT would change what we parse, an
# inherited SLURM_CPU_BIND pins every rank of the new job (goodfire-ai/spd#955), an array id leaks (submitit#1782).
SCRUBBED_PREFIXES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCONTROL_", "SINFO_", "SCANCEL_", "PMI_", "PMIX_",
    "KREA_",
    "_SLURM_SPANK_OPTION_",  # salloc --container-image=... of a SPANK plugin, for the steps of that allocation (spank.8)
)  # fmt: skip
# Where the cluster is and how to authenticate; not how to behave.
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
KEPT_OURS = frozenset({"KREA_RUNNER_STATE_DIR", "KREA_RUNNER_SITE"})
# For what is read: English, and times as epochs. Slurm takes an epoch back from the local time, which is an hour off where a
# clock was set back without summer time (Almaty 2024, Moscow 2014): UTC is never set back.
FOR_READING = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "TZ": "UTC0"}


KILLED_S = 5.0


@dataclass(frozen=True, slots=True)
class Completed:
    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what another job or a user's profile would leak into ours."""
    return {k: v for k, v in environ.items() if k in KEPT or k in KEPT_OURS or not k.startswith(SCRUBBED_PREFIXES)}


def packed(environ: Mapping[str, str]) -> bytes:
    """The cleaned environment as /proc/PID/environ has it, without what expires."""
    pairs = (f"{name}={value}" for name, value in clean_environment(environ).items() if name != "SLURM_JWT")
    return b"".join(os.fsencode(pair) + b"\0" for pair in pairs)


def unpacked(data: bytes, environ: Mapping[str, str]) -> dict[str, str]:
    """What `packed` kept, with where the cluster is and how to authenticate as `environ` has it now."""
    pairs = (os.fsdecode(pair).partition("=") for pair in data.split(b"\0") if pair)
    here = {name: value for name, value in environ.items() if name in KEPT}
    return {name: value for name, _, value in pairs} | here


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> Completed:
    """Run `argv` to its end, or kill its whole process group after `timeout_s` (then `timed_out`, returncode -9).

    Without `env` the command gets the cleaned environment and FOR_READING; with it, exactly that (for `sbatch`, whose
    environment becomes the job's). Output is decoded with replacement characters: what a job can
    put into a name is not always UTF-8.
    Raises: FileNotFoundError where the command does not exist; PermissionError where it may not be run.
    """
    if env is None:
        env = clean_environment(os.environ) | FOR_READING
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin.encode() if stdin is not None else None, timeout=timeout_s)
        timed_out = False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=KILLED_S)
        except subprocess.TimeoutExpired:  # in uninterruptible sleep, on a dead file system
            out, err = b"", b"killed, and still there"
            process.returncode = -signal.SIGKILL
        timed_out = True
    return Completed(
        argv=tuple(argv),
        returncode=process.returncode,
        stdout=out.decode(errors="replace"),
        stderr=err.decode(errors="replace"),
        timed_out=timed_out,
    )


class Companion:
    """A child process that answers one line with one line, for as long as we ask it."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str]) -> None:
        """Raises: OSError where it cannot be started."""
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=dict(env),
            bufsize=0,
            start_new_session=True,
        )

    def ask(self, line: str, *, timeout_s: float) -> str:
        """An empty `line` sends nothing: it waits for what the child says of itself.

        Raises: TimeoutError; EOFError when the child has ended, with the last it said on stderr. Either way it is gone.
        """
        try:
            return self._ask(line, time.monotonic() + timeout_s)
        except (TimeoutError, EOFError):
            self.close()
            raise

    def _ask(self, line: str, deadline: float) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # noqa: S101 - both are pipes
        assert stdout is not None  # noqa: S101
        try:
            if line:
                stdin.write(f"{line}\n".encode())
        except OSError as error:
            raise EOFError(self._last_words()) from error
        answer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                part = stdout.read(1 << 20)
                if not part:
                    raise EOFError(self._last_words())
                answer += part
        return answer.decode(errors="replace")

    def _last_words(self) -> str:
        self._words.seek(0)
        return self._words.read()[-2000:].decode(errors="replace").strip()

    def close(self) -> None:
        """Kill it; nothing is waited for but its end."""
        for pipe in (self._process.stdin, self._process.stdout, self._words):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()


class Talk:
    """A child process whose stdin and stdout are one socket of ours, as a ProxyCommand of OpenSSH; its end is the socket's."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises: OSError where it cannot be started."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            # In a session of its own: Ctrl-C is for us, who still have something to say over it.
            self._process = subprocess.Popen(
                list(argv),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        """End it and what it started; nothing is waited for but its end."""
        self.socket.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
