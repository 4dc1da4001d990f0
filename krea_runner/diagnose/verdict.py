"""What a diagnosis says: one cause, the evidence for it, the suspects, and how sure it is. Frozen data, no I/O."""

from dataclasses import dataclass, field

from krea_runner.model import Suspect

NOT_A_CRASH = "not_a_crash"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line that speaks for or about the cause. `at` is seconds since the epoch as if the log's local time were UTC:
    good for ordering lines of one machine's time zone, for nothing else."""

    file: str
    line: int
    text: str
    signature: str
    at: float | None = None
    rank: int | None = None
    node: str = ""
    gpu: str = ""
    count: int = 1
    """How many lines were folded into this one: the same event of other ranks, or repeated."""


@dataclass(frozen=True, slots=True)
class Suspects:
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    """`node:local index`."""
    reasons: tuple[Suspect, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    cause: str
    policy: str
    title: str
    advice: str
    symptom: str = ""
    """How it showed, where that differs from the cause: the signature of the loudest fallout."""
    confidence: str = "high"
    """`high`, `medium` or `low`; `why` says for what reason."""
    why: str = ""
    suspects: Suspects = field(default_factory=Suspects)
    everywhere: bool = False
    """Every rank of the gang says the same."""
    first_evidence: Evidence | None = None
    evidence: tuple[Evidence, ...] = ()
    fallout: tuple[Evidence, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be read. Not evidence of anything else."""

    @property
    def retryable(self) -> bool:
        return self.policy in {"restart", "restart_and_exclude_node"}
