"""Leaves a checkpoint from which a run has died twice soon after loading it, where run.toml asks for that."""

import os
from collections.abc import Sequence
from dataclasses import replace

from krea_runner.decide.decision import CHARGED, RESTARTS
from krea_runner.decide.step_back import DEATHS, Death, step_to_leave
from krea_runner.model import Attempt, Decision, Finding, Incident, RunConfig, Snapshot
from krea_runner.observe.resumed import left_mark, resumed_step
from krea_runner.rundir import RunDir
from krea_runner.supervise.start_from import Start


def stepped_back(
    snapshot: Snapshot,
    attempt: Attempt,
    finding: Finding,
    decision: Decision,
    earlier: Sequence[Incident],
    attempts: Sequence[Attempt],
    start: Start,
    *,
    dry_run: bool = False,
) -> Decision:
    """The decision, its reason with what was found and done about checkpoints: the history keeps that, and people are told it.

    The name goes into RUN_DIR/checkpoints.left, which the batch script reads; never the only whole one. Where that cannot be
    written, nothing is left and that is said.
    """
    config = snapshot.run.config
    if decision.kind not in RESTARTS:
        return decision
    if start.note:
        decision = replace(decision, reason=f"{decision.reason}; {start.note}")
    if not config.checkpoint.step_back or config.files != "mounted":
        return decision
    known = {one.key: one for one in attempts}
    before = [
        known[one.attempt] for one in earlier[-DEATHS:] if one.attempt in known and one.finding.symptom in CHARGED
    ]
    deaths = [_death(config, one, snapshot.wall_at) for one in [*before, attempt]]
    step = step_to_leave(deaths) if finding.symptom in CHARGED else None
    if step is None or len(start.whole) < 2 or start.step != step:
        return decision
    bad, to = start.whole[:2]
    trouble = "" if dry_run else _leave(config, left_mark(config.checkpoint, bad.path))
    if trouble:
        return replace(decision, reason=f"{decision.reason}; could not step back from {bad.path.name}: {trouble}")
    back = f"died {DEATHS} times soon after loading step {step}: stepping back to step {to.step}"
    return replace(decision, reason=f"{back}; {decision.reason.replace(f'from step {step}', f'from step {to.step}')}")


def _leave(config: RunConfig, mark: str) -> str:
    """Why it could not; empty when it could."""
    if not mark:
        return "it could not be looked at"
    run_dir = RunDir(config.run_dir)
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        with run_dir.left_checkpoints.open("a") as file:
            file.write(f"{mark}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return str(error.strerror)
    return ""


def _death(config: RunConfig, attempt: Attempt, now: float) -> Death:
    loaded = resumed_step(RunDir(config.run_dir), attempt.key)
    lived_s = None if attempt.started_at is None else (attempt.ended_at or now) - attempt.started_at
    return Death(loaded, lived_s)
