"""Is a run stuck that writes no heartbeats of ours? Pure. Judged from whatever else shows its progress (observe/progress.py).

A source of progress convicts only after it was seen to move: one that never did says more about its configuration than
about the run. It must be frozen past the budget, none may be out of sight, and then a second one that does not look at the
same thing must agree, or the longer budget must have passed (design §7, rules 4 to 6). The log's pattern and the log's
silence are one witness. Silence alone is only told, unless [progress] log_silence says otherwise.
"""

from dataclasses import dataclass, replace

from krea_runner.model import BEAT_FILES, CHECKPOINTS, LOG, LOG_PATTERN, Finding, RunConfig, Snapshot, Symptom, Watch

Judgement = tuple[str, Finding | None, bool]
"""As HangJudgement: the line, the finding, whether it is blind."""

_STRONG = (BEAT_FILES, LOG_PATTERN)


@dataclass(frozen=True, slots=True)
class _Witness:
    name: str
    age_s: float
    budget_s: float
    step: int | None = None

    @property
    def is_frozen(self) -> bool:
        return self.age_s >= self.budget_s

    def __str__(self) -> str:
        return (
            f"{self.name} silent {self.age_s:.0f} s" if self.name == LOG else f"{self.name} frozen {self.age_s:.0f} s"
        )


def judge_progress(snapshot: Snapshot, watch: Watch) -> Judgement:
    config, mono = snapshot.run.config, snapshot.mono
    spec, budget_s = config.progress, progress_budget_s(config)
    moved = [
        _Witness(source.name, mono - source.moved_mono, budget_s, source.step)
        for source in watch.sources
        if source.moved_mono is not None and not source.unseen
    ]
    fresh = [witness for witness in moved if not witness.is_frozen]
    if fresh:
        newest = min(fresh, key=lambda witness: witness.age_s)
        return f"in progress{_at(newest.step)}, its {newest.name} moved {newest.age_s:.0f} s ago", None, False
    unseen = [source for source in watch.sources if source.unseen and (source.name in _STRONG or source.moved_mono)]
    if unseen:
        since_s = mono - (unseen[0].unseen_since_mono or mono)
        return f"could not see its {unseen[0].name} for {since_s:.0f} s: {unseen[0].unseen}", None, True
    strong = [witness for witness in moved if witness.name in _STRONG]
    saved = [
        replace(witness, budget_s=spec.checkpoints_s)
        for witness in moved
        if witness.name == CHECKPOINTS and spec.checkpoints_s is not None
    ]
    silence = _silence(snapshot, watch, budget_s)
    if strong or saved:
        # The pattern stands in the same log: its silence says nothing new.
        apart = [silence] if silence is not None and [witness.name for witness in strong] != [LOG_PATTERN] else []
        return _judge(snapshot, watch, strong or saved, [*(saved if strong else []), *apart])
    if spec.log_silence_s is not None and silence is not None:
        return _judge(snapshot, watch, [replace(silence, budget_s=spec.log_silence_s)], [])
    return _without_witness(config, watch, mono - watch.since_mono, silence)


def _judge(snapshot: Snapshot, watch: Watch, witnesses: list[_Witness], others: list[_Witness]) -> Judgement:
    """`witnesses` convict, the first of them with one more, or all with time; `others` only agree."""
    first = witnesses[0]
    if not first.is_frozen:
        return f"{first} of {first.budget_s:.0f} s", None, False
    agreed_by = ", ".join(str(witness) for witness in [*witnesses[1:], *others] if witness.is_frozen)
    if not agreed_by:
        longer = snapshot.run.config.budgets.second_look
        left_s = first.budget_s * longer - first.age_s
        if left_s > 0:
            return f"{first}, no second signal; judged a hang in {left_s:.0f} s", None, False
        agreed_by = f"{longer:g} times the budget has passed"
    frozen_s = min(witness.age_s for witness in witnesses)
    finding = Finding(
        symptom=Symptom.HANG,
        cause="no_progress",
        summary=f"hang: no progress for {frozen_s:.0f} s{_at(watch.step)} ({first})",
        step=watch.step,
        last_progress_at=snapshot.wall_at - frozen_s,
        evidence=tuple(f"{witness} (budget {witness.budget_s:g} s)" for witness in [*witnesses, *others]),
        agreed_by=agreed_by,
    )
    return f"hung: {first}", finding, False


def _without_witness(config: RunConfig, watch: Watch, running_s: float, silence: _Witness | None) -> Judgement:
    """Nothing that could convict has ever moved."""
    waiting = [source.name for source in watch.sources if source.name in _STRONG]
    silent = f"; its log is silent for {silence.age_s:.0f} s" if silence is not None else ""
    if config.job_log is not None and not waiting:
        return f"adopted, no heartbeats: hangs cannot be seen{silent}", None, False
    if running_s < config.budgets.startup_s:
        return f"starting: no {waiting[0] if waiting else 'heartbeat'} yet", None, False
    if waiting:
        why = f"no line of its log fits [progress] pattern = {config.progress.pattern!r}"
    else:
        why = "does the script use krea_runner.Heartbeat? Else: [progress] pattern"
    return f"no heartbeat for {running_s:.0f} s: hangs cannot be seen ({why}){silent}", None, True


def _silence(snapshot: Snapshot, watch: Watch, budget_s: float) -> _Witness | None:
    """None where there is no log to be silent, or it could not be read."""
    if not watch.log_size_bytes or snapshot.log.problems:
        return None
    return _Witness(LOG, snapshot.mono - watch.log_moved_mono, budget_s)


def progress_budget_s(config: RunConfig) -> float:
    """A log says no phase: what looks like a hang may be a checkpoint or an evaluation."""
    budgets = config.budgets
    return config.progress.budget_s or max(budgets.step_s, budgets.checkpoint_s, budgets.evaluation_s)


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
