"""Leaves a checkpoint from which a run has died twice soon after loading it, where run.toml asks for that."""

import os
from collections.abc import Sequence
from dataclasses import replace

from krea_runner.decide.decision import CHARGED, RESTARTS
from krea_runner.decide.step_back import DEATHS, Death, step_to_leave
from krea_runner.model import Attempt, Decision, Finding, Incident, RunConfig, Snapshot
from krea_runner.observe.checkpoints.newest import whole_checkpoints
from krea_runner.observe.resumed import read_left, resumed_step
from krea_runner.rundir import RunDir


def stepped_back(
    snapshot: Snapshot,
    attempt: Attempt,
    finding: Finding,
    decision: Decision,
    earlier: Sequence[Incident],
    attempts: Sequence[Attempt],
    *,
    dry_run: bool = False,
) -> Decision:
    """The decision, with what was done about the checkpoint in its reason, which is what the history keeps and people are told.

    The name goes into RUN_DIR/checkpoints.left, which the batch script reads; never the only whole one. Where that cannot be
    written, nothing is left and that is said.
    """
    config = snapshot.run.config
    spec = config.checkpoint
    wanted = spec.step_back and config.files == "mounted" and decision.kind in RESTARTS and finding.symptom in CHARGED
    if not wanted:
        return decision
    known = {one.key: one for one in attempts}
    before = [
        known[one.attempt] for one in earlier[-DEATHS:] if one.attempt in known and one.finding.symptom in CHARGED
    ]
    deaths = [_death(config, one, snapshot.wall_at) for one in [*before, attempt]]
    step = step_to_leave(deaths)
    run_dir = RunDir(config.run_dir)
    left = read_left(run_dir)
    whole = [one for one in whole_checkpoints(spec, most=len(left) + 2) if one.path.name not in left]
    if step is None or len(whole) < 2 or whole[0].step != step:
        return decision
    name, to = whole[0].path.name, whole[1].step
    if not dry_run:
        try:
            run_dir.root.mkdir(parents=True, exist_ok=True)
            with run_dir.left_checkpoints.open("a") as file:
                file.write(f"{name}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return replace(decision, reason=f"{decision.reason}; could not step back from {name}: {error.strerror}")
    back = f"died {DEATHS} times soon after loading step {step}: stepping back to step {to}"
    return replace(decision, reason=f"{back}; {decision.reason.replace(f'from step {step}', f'from step {to}')}")


def _death(config: RunConfig, attempt: Attempt, now: float) -> Death:
    loaded = resumed_step(RunDir(config.run_dir), attempt.key)
    lived_s = None if attempt.started_at is None else (attempt.ended_at or now) - attempt.started_at
    return Death(loaded, lived_s)
