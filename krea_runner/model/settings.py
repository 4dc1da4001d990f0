"""What a validated run.toml holds."""

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

SCHEDULERS = ("slurm", "local")


@dataclass(frozen=True, slots=True)
class Gang:
    """All nodes or none."""

    nodes: int = 1
    ranks_per_node: int = 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Budgets:
    """How long, in seconds, a rank may go without a beat in each phase. A budget given by the rank itself
    (`hb.phase(name, budget=...)`) wins; a phase that is not named here gets `default_s`.

    A phase in `fixed` has the value that stands here; any other learns (model/learned.py), and this is its budget while it
    knows nothing."""

    startup_s: float = 1800.0
    step_s: float = 300.0
    checkpoint_s: float = 1800.0
    evaluation_s: float = 1800.0
    shutdown_s: float = 600.0
    default_s: float = 1800.0
    second_look: float = 2.0
    """Without a second signal that agrees, wait for this many times the budget."""
    compile_s: float = 900.0
    """Also of the first steps of an attempt."""
    data_s: float = 300.0
    fixed: tuple[str, ...] = ()

    def for_phase(self, phase: str) -> float:
        return float(getattr(self, f"{phase}_s", self.default_s))


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """`pattern` is the name of one checkpoint with `{step}` where the step number stands; `complete` is a file inside it
    that exists only once it is whole (empty: the entry's own name is enough, it was renamed into place)."""

    directory: Path | None = None
    pattern: str = "step_{step}"
    complete: str = "COMPLETE"
    step_back: bool = False
    """Leave a checkpoint for the one before it, after two deaths soon after loading it."""


@dataclass(frozen=True, slots=True)
class ProgressSpec:
    """Where else than in our heartbeats a run shows that it moves; [progress] of docs/reference/run-toml.md."""

    pattern: str = ""
    """The name of a preset, or a regular expression; empty: none."""
    budget_s: float | None = None
    checkpoints_s: float | None = None
    log_silence_s: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    mode: str = "act"
    """`observe` records and says what it would do; `act` does it."""
    max_restarts: int = 20
    window_s: float = 86400.0
    no_progress_limit: int = 2
    """Restarts in a row after the same failure that brought no newer complete checkpoint; then a person must look."""
    never_restart_exit_codes: tuple[int, ...] = (93,)
    """Besides 93, which nvidia-resiliency-ext's launcher exits with when a restart makes no sense."""
    always_restart_exit_codes: tuple[int, ...] = ()
    """Neither the logs nor a checkpoint that stays the same keep these from a restart; only the budget does. They win over
    those that mean never."""


@dataclass(frozen=True, slots=True)
class EvidenceSpec:
    """What may be spent on looking at a hung step before it is killed."""

    collect: bool = True
    timeout_s: float = 20.0
    py_spy: str = ""
    """A path on the compute nodes; empty: looked for."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A validated run.toml. Paths are absolute."""

    name: str
    slug: str
    run_dir: Path
    command: tuple[str, ...] | str
    """A list is one argv; a string is a shell line the user wrote."""
    workdir: Path
    scheduler: str = "slurm"
    transport: str = "local"  # or "ssh": the scheduler's commands run on `ssh_host`
    ssh_host: str = ""
    files: str = "mounted"  # or "sftp": `run_dir` and the checkpoints are paths on `ssh_host`
    env: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))
    gang: Gang = field(default_factory=Gang)
    slurm: MappingProxyType[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """sbatch options by their long names, with `_` for `-`, plus `extra`: list of whole options."""
    budgets: Budgets = field(default_factory=Budgets)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    policy: Policy = field(default_factory=Policy)
    evidence: EvidenceSpec = field(default_factory=EvidenceSpec)
    progress: ProgressSpec = field(default_factory=ProgressSpec)
    job_log: Path | None = None
    """Of an adopted job, its own log: it has no batch script of ours, so no events and no heartbeats."""

    @property
    def endpoint(self) -> str:
        """`slurm`, `local`, or `slurm@login1`: runs of one endpoint are asked about in one question."""
        return f"{self.scheduler}@{self.ssh_host}" if self.transport == "ssh" else self.scheduler
