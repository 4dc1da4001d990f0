"""Whether a run should go on from an older checkpoint: the one it loaded may be damaged in a way that no look finds. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

# Dying this soon after a start, twice from the same checkpoint, speaks against the checkpoint: 44 times the same crash within
# 90 s was seen (NVIDIA/Megatron-LM#5281).
SOON_S = 600.0
DEATHS = 2


@dataclass(frozen=True, slots=True)
class Death:
    """Of one attempt: the step that it started from and for how long it ran; None where that is not known."""

    loaded_step: int | None
    lived_s: float | None


def step_to_leave(deaths: Sequence[Death]) -> int | None:
    """The step that nobody should start from any more; None where there is none. `deaths`: oldest first."""
    last = deaths[-DEATHS:]
    if len(last) < DEATHS or last[-1].loaded_step is None:
        return None
    soon = all(one.lived_s is not None and one.lived_s <= SOON_S for one in last)
    return last[-1].loaded_step if soon and len({one.loaded_step for one in last}) == 1 else None
