"""Where things are in a run directory (design §5). Pure: names only, nothing is touched."""

from dataclasses import dataclass
from pathlib import Path

from krea_runner.model import AttemptKey


def submit_environment(script: Path) -> Path:
    return script.with_name("submit.env")


@dataclass(frozen=True, slots=True)
class RunDir:
    root: Path

    @property
    def config(self) -> Path:
        return self.root / "run.toml"

    @property
    def script(self) -> Path:
        return self.root / "job.sbatch"

    @property
    def environment(self) -> Path:
        """What was set where the run was submitted (proc.py reads and writes it)."""
        return submit_environment(self.script)

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def batch_log(self, job_id: str) -> Path:
        """The batch script's own output, appended over all attempts of a job (sbatch cannot name one per restart)."""
        return self.logs / f"batch-{job_id}.log"

    def attempt_logs(self, attempt: AttemptKey) -> Path:
        """One file a node, `node-<node rank>.log`, every line led by its rank."""
        return self.logs / str(attempt)

    def heartbeats(self, attempt: AttemptKey) -> Path:
        return self.root / "heartbeats" / str(attempt)

    @property
    def events(self) -> Path:
        return self.root / "events"

    def script_events(self, attempt: AttemptKey) -> Path:
        """What the batch script itself says: its start and its true exit code."""
        return self.events / f"{attempt}.batch.jsonl"

    @property
    def left_checkpoints(self) -> Path:
        """Checkpoints that no attempt is to start from any more, `NAME/MTIME` one a line; read by the batch script."""
        return self.root / "checkpoints.left"

    @property
    def broken_checkpoints(self) -> Path:
        """Likewise those that say they are whole and were found not to be; written anew at each look."""
        return self.root / "checkpoints.broken"

    def incident(self, attempt: AttemptKey) -> Path:
        return self.root / "incidents" / str(attempt)
