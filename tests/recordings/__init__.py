"""What real Slurm commands printed, one JSON file a case; written by record.py in this folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
OLDEST = "slurm-22.05.8"


@dataclass(frozen=True)
class Recording:
    argv: list[str]
    returncode: int
    stdout: str
    stderr: str
    jobs: dict[str, str] = field(default_factory=dict)
    """Job ids by the part that the job plays in this case."""


def recording(case: str, version: str = OLDEST) -> Recording:
    return Recording(**json.loads((FOLDER / version / f"{case}.json").read_text()))
