"""When what the logs say speaks against a restart. Pure.

A diagnosis may only hold a restart, never cause one, and only one that is sure may. What a restart would not mend is held at
once where the message says so by itself (a full disk), or where every rank of the gang says the same (a bug in the code that all
of them run). One rank's exception may be its data's or its node's: that one is tried again, and held when the very same comes
back before anything was gained. Everything else is decided as if nobody had read the logs.
"""

from collections.abc import Sequence
from enum import Enum

from krea_runner.model import Diagnosis, Finding, Incident, Symptom

STOP_FOR_HUMAN = "stop_for_human"


class Hold(Enum):
    AT_ONCE = "at once"
    EVERYWHERE = "when every rank says so, else when it comes back"
    REPEATED = "when it comes back"


# Of causes with the policy stop_for_human. One that is not here is the site's own, whose policy is its word: at once.
HOLDS = {
    "storage_full": Hold.AT_ONCE,
    "checkpoint_corrupt": Hold.AT_ONCE,
    "user_exception": Hold.EVERYWHERE,
    "launch_config_error": Hold.EVERYWHERE,
    "cuda_oom": Hold.EVERYWHERE,
    "cuda_device_assert": Hold.EVERYWHERE,
    "numeric_divergence": Hold.REPEATED,
    "collective_desync": Hold.REPEATED,
    "shm_exhausted": Hold.REPEATED,
}


def speaks_against_restart(finding: Finding, checkpoint_step: int | None, earlier: Sequence[Incident]) -> str:
    """Why a person must look, or nothing. `earlier` are the run's incidents since the last hold, oldest first."""
    told = finding.diagnosis
    if told is None or not told.is_sure or told.policy != STOP_FOR_HUMAN:
        return ""
    when = HOLDS.get(told.cause, Hold.AT_ONCE)
    what = f"{told.title}: {told.advice}" if told.advice else told.title
    if finding.symptom is Symptom.CRASH and when is Hold.AT_ONCE:
        return what
    if finding.symptom is Symptom.CRASH and when is Hold.EVERYWHERE and told.everywhere:
        return f"every rank says the same, {what}"
    if finding.symptom in {Symptom.CRASH, Symptom.HANG} and _came_back(finding, told, checkpoint_step, earlier):
        return f"for the second time, {what}"
    return ""


def _came_back(finding: Finding, told: Diagnosis, checkpoint_step: int | None, earlier: Sequence[Incident]) -> bool:
    """The attempt before ended the same way, at the same step or from the same checkpoint: what is not known is not the same."""
    last = earlier[-1] if earlier else None
    if last is None or last.finding.diagnosis is None:
        return False
    before = last.finding.diagnosis
    no_step_further = finding.step is not None and finding.step == last.finding.step
    nothing_saved = checkpoint_step is not None and checkpoint_step == last.checkpoint_step
    return before.is_sure and before.cause == told.cause and (no_step_further or nothing_saved)
