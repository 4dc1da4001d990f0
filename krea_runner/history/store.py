"""What the program remembers, as records of model/ in and out. Every write is one transaction.

A quiet tick, `status` and `history` all come through here; nothing else speaks SQL.
"""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from krea_runner.config import config_to_json
from krea_runner.errors import HistoryError, NotFound
from krea_runner.history.database import Database, open_history_file
from krea_runner.history.rows import action_of, attempt_of, incident_of, run_of
from krea_runner.history.schema import actions, attempts, incidents, runs
from krea_runner.history.watches import watch_from_text, watch_to_text
from krea_runner.model import (
    Action,
    ActionKind,
    ActionStage,
    Attempt,
    AttemptKey,
    Decision,
    Finding,
    Incident,
    Run,
    RunConfig,
    RunState,
    Watch,
)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to act on one run until it expires. Writes that act carry it; a stale generation is refused."""

    run_id: int
    holder: str
    generation: int


class LeaseLost(HistoryError):
    """Somebody else took over while we slept: nothing was written."""

    exit_code = 75
    transient = True


def open_history(state_dir: Path) -> "History":
    """Raises: HistoryUnavailable, HistoryError, SchemaTooNew."""
    return History(open_history_file(state_dir))


class History:
    def __init__(self, database: Database) -> None:
        self._db = database

    @property
    def path(self) -> Path:
        return self._db.path

    @property
    def database(self) -> Database:
        """For the modules beside this one: exclusions.py, ticks.py."""
        return self._db

    def kept_open(self) -> AbstractContextManager[None]:
        """The file stays open during the block; each call is still a transaction of its own."""
        return self._db.kept_open()

    # -------------------------------------------------------------------------------------------------------- runs

    def create_run(self, config: RunConfig, *, user: str, tag: str, now: float) -> Run:
        """Record the intent to submit (SUBMITTING). Raises: HistoryError when the directory has a live run already."""
        values = {
            "name": config.name, "user": user, "run_dir": os.path.realpath(config.run_dir), "config": config_to_json(config),
            "state": RunState.SUBMITTING, "state_reason": "", "tag": tag, "created_at": now, "updated_at": now,
        }  # fmt: skip
        ending = (
            sa.select(actions.c.job_id)
            .join(runs, runs.c.run_id == actions.c.run_id)
            .where(runs.c.run_dir == values["run_dir"], actions.c.stage.not_in([ActionStage.DONE, ActionStage.FAILED]))
        )
        try:
            with self._db.write() as connection:
                if (job_id := connection.execute(ending).scalars().first()) is not None:
                    raise HistoryError(
                        f"job {job_id} of the last run in {config.run_dir} is still to be ended",
                        hint="one tick does it: krea-runner supervise --once",
                    )
                result = connection.execute(sa.insert(runs).values(values))
                run_id = int(result.inserted_primary_key[0])  # type: ignore[index]
        except IntegrityError:
            raise HistoryError(
                f"a run is alive in {config.run_dir}",
                hint="see it with: krea-runner status; end it with: krea-runner stop NAME; or give this one another [run] dir",
            ) from None
        return self.run(run_id)

    def run(self, run_id: int) -> Run:
        with self._db.read() as connection:
            row = connection.execute(sa.select(runs).where(runs.c.run_id == run_id)).one()
        return run_of(row)

    def runs(self, run_ids: Iterable[int]) -> list[Run]:
        """Oldest first."""
        query = sa.select(runs).where(runs.c.run_id.in_(list(run_ids))).order_by(runs.c.run_id)
        with self._db.read() as connection:
            return [run_of(row) for row in connection.execute(query)]

    def find_run(self, reference: str, *, user: str | None = None) -> Run:
        """The newest run of that name or slug, one that is not over before one that is; `#7` or `7` is a run id when no
        run has it as its name.

        Raises: NotFound.
        """
        query = sa.select(runs).order_by(runs.c.run_id.desc())
        if user is not None:
            query = query.where(runs.c.user == user)
        with self._db.read() as connection:
            found = [run_of(row) for row in connection.execute(query)]
        found.sort(key=lambda run: run.state in {RunState.DONE, RunState.STOPPED})  # stable: newest first within each
        for run in found:
            if reference in {run.name, run.config.slug}:
                return run
        for run in found:
            if reference.removeprefix("#") == str(run.run_id):
                return run
        raise NotFound(f"no run is called {reference!r}", hint="see what there is: krea-runner status")

    def list_runs(
        self, *, user: str | None = None, states: Sequence[RunState] = (), changed_since: float | None = None
    ) -> list[Run]:
        """Oldest first; no `states` means all of them."""
        query = sa.select(runs).order_by(runs.c.run_id)
        if user is not None:
            query = query.where(runs.c.user == user)
        if states:
            query = query.where(runs.c.state.in_(list(states)))
        if changed_since is not None:
            query = query.where(runs.c.updated_at >= changed_since)
        with self._db.read() as connection:
            return [run_of(row) for row in connection.execute(query)]

    def run_tagged(self, tag: str) -> Run | None:
        """The run whose submissions carry `tag` or `tag.N`."""
        query = sa.select(runs).where(sa.or_(runs.c.tag == tag, runs.c.tag.startswith(f"{tag}.", autoescape=True)))
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else run_of(row)

    def set_run_state(
        self, run_id: int, state: RunState, reason: str, *, now: float, was: RunState | None = None
    ) -> None:
        """With `was`, nothing is written unless that is its state."""
        query = sa.update(runs).where(runs.c.run_id == run_id)
        query = query if was is None else query.where(runs.c.state == was)
        with self._db.write() as connection:
            connection.execute(query.values(state=state, state_reason=reason, updated_at=now))

    def set_submitted(self, run_id: int, job_id: str, *, now: float) -> bool:
        """False, and nothing written, when the run is SUBMITTING no more: a person has stopped it meanwhile."""
        values = {"job_id": job_id, "state": RunState.ACTIVE, "state_reason": "submitted", "updated_at": now}
        with self._db.write() as connection:
            query = sa.update(runs).where(runs.c.run_id == run_id, runs.c.state == RunState.SUBMITTING)
            return connection.execute(query.values(values)).rowcount == 1

    def _update_run(self, run_id: int, **values: Any) -> None:
        with self._db.write() as connection:
            connection.execute(sa.update(runs).where(runs.c.run_id == run_id).values(**values))

    # ------------------------------------------------------------------------------------------------------- lease

    def take_leases(
        self, run_ids: Iterable[int], holder: str, *, now: float, until: float, dead: str | None = None
    ) -> dict[int, Lease]:
        """By run, those that nobody else holds, unless that is `dead`. A holder's own lease is renewed, under a new
        generation."""
        takers = [holder] if dead is None else [holder, dead]
        free = sa.or_(runs.c.lease_holder.is_(None), runs.c.lease_holder.in_(takers), runs.c.lease_until <= now)
        these = runs.c.run_id.in_(list(run_ids))
        take = sa.update(runs).values(
            lease_holder=holder, lease_until=until, lease_generation=runs.c.lease_generation + 1
        )
        # Not RETURNING, which SQLite has since 3.35: RHEL 8 has 3.26.
        taken = sa.select(runs.c.run_id, runs.c.lease_generation).where(these, runs.c.lease_holder == holder)
        with self._db.write() as connection:
            connection.execute(take.where(these, free))
            rows = connection.execute(taken.order_by(runs.c.run_id)).all()
        return {run_id: Lease(run_id, holder, generation) for run_id, generation in rows}

    def lease_holder(self, run_id: int) -> str | None:
        with self._db.read() as connection:
            holder: str | None = connection.execute(
                sa.select(runs.c.lease_holder).where(runs.c.run_id == run_id)
            ).scalar_one()
        return holder

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is still the newest. Expiry does not matter as long as nobody else took it."""
        with self._db.read() as connection:
            return _generation(connection, lease.run_id) == lease.generation

    def drop_leases(self, leases: Iterable[Lease]) -> None:
        with self._db.write() as connection:
            for lease in leases:
                connection.execute(
                    sa.update(runs)
                    .where(runs.c.run_id == lease.run_id, runs.c.lease_generation == lease.generation)
                    .values(lease_holder=None, lease_until=None)
                )

    # ---------------------------------------------------------------------------------------------------- attempts

    def attempts(self, run_id: int) -> list[Attempt]:
        """In order of their start."""
        query = sa.select(attempts).where(attempts.c.run_id == run_id).order_by(attempts.c.attempt_id)
        with self._db.read() as connection:
            return [attempt_of(row) for row in connection.execute(query)]

    def latest_attempt(self, run_id: int) -> Attempt | None:
        query = sa.select(attempts).where(attempts.c.run_id == run_id).order_by(attempts.c.attempt_id.desc()).limit(1)
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else attempt_of(row)

    def add_attempt(self, run_id: int, key: AttemptKey, *, now: float) -> Attempt:
        """Record an attempt, or find the row that another tick made for it."""
        values = {
            "run_id": run_id, "job_id": key.job_id, "restart_count": key.restart_count, "relaunch": key.relaunch,
            "first_seen_at": now,
        }  # fmt: skip
        same = [attempts.c[name] == values[name] for name in ("run_id", "job_id", "restart_count", "relaunch")]
        with self._db.write() as connection:
            row = connection.execute(sa.select(attempts).where(*same)).one_or_none()
            if row is None:
                connection.execute(sa.insert(attempts).values(values))
                row = connection.execute(sa.select(attempts).where(*same)).one()
        return attempt_of(row)

    def save_observations(self, *observations: tuple[Attempt, Watch | None]) -> None:
        """What this tick learned of attempts, a row each."""
        with self._db.write() as connection:
            for attempt, watch in observations:
                connection.execute(
                    sa.update(attempts)
                    .where(attempts.c.attempt_id == attempt.attempt_id)
                    .values(
                        submitted_at=attempt.submitted_at, started_at=attempt.started_at, ended_at=attempt.ended_at,
                        end_state=attempt.end_state, exit_code=attempt.exit_code, signal=attempt.signal,
                        end_node=attempt.end_node, ended_by=attempt.ended_by, nodelist=attempt.nodelist,
                        first_step=attempt.first_step, last_step=attempt.last_step,
                        watch=None if watch is None else watch_to_text(watch),
                    )
                )  # fmt: skip

    def watch(self, attempt_id: int) -> Watch | None:
        with self._db.read() as connection:
            stored = connection.execute(
                sa.select(attempts.c.watch).where(attempts.c.attempt_id == attempt_id)
            ).scalar_one_or_none()
        return None if stored is None else watch_from_text(stored)

    # --------------------------------------------------------------------------------------------------- incidents

    def record_incident(
        self,
        lease: Lease,
        attempt: Attempt,
        finding: Finding,
        decision: Decision,
        *,
        checkpoint_step: int | None,
        now: float,
        run_state: RunState | None = None,
        action: tuple[ActionKind, int] | None = None,
    ) -> int | None:
        """Commit an incident, the decision about it, the run's new state and the intended action (kind, restart count
        before it) together, before any of it is carried out.

        Returns the incident's id; None when this attempt has its incident already (nothing is written then).
        Raises: LeaseLost.
        """
        values = {
            "run_id": attempt.run_id, "attempt_id": attempt.attempt_id, "symptom": finding.symptom,
            "cause": finding.cause, "summary": finding.summary, "node": finding.node, "by": finding.by,
            "step": finding.step,
            "last_progress_at": finding.last_progress_at, "evidence": json.dumps(finding.evidence),
            "suspects": json.dumps([asdict(suspect) for suspect in finding.suspects]),
            "agreed_by": finding.agreed_by,
            "diagnosis": None if finding.diagnosis is None else json.dumps(asdict(finding.diagnosis)),
            "checkpoint_step": checkpoint_step, "noticed_at": now,
            "decision": decision.kind, "decision_reason": decision.reason,
        }  # fmt: skip
        with self._db.write() as connection:
            _check_lease(connection, lease)
            known = sa.select(incidents.c.incident_id).where(incidents.c.attempt_id == attempt.attempt_id)
            if connection.execute(known).scalar_one_or_none() is not None:
                return None
            result = connection.execute(sa.insert(incidents).values(values))
            incident_id = int(result.inserted_primary_key[0])  # type: ignore[index]
            if run_state is not None:
                connection.execute(
                    sa.update(runs)
                    .where(runs.c.run_id == attempt.run_id)
                    .values(state=run_state, state_reason=decision.reason, updated_at=now)
                )
            if action is not None:
                kind, restart_count = action
                _insert_action(
                    connection, attempt.run_id, incident_id, kind, attempt.key.job_id, restart_count,
                    decision.reason, lease.holder, now,
                )  # fmt: skip
        return incident_id

    def incidents(self, *, run_id: int | None = None, limit: int | None = None) -> list[Incident]:
        """Oldest first; `limit` keeps the newest."""
        query = (
            sa.select(incidents, runs.c.name, attempts.c.job_id, attempts.c.restart_count, attempts.c.relaunch)
            .join(runs, runs.c.run_id == incidents.c.run_id)
            .join(attempts, attempts.c.attempt_id == incidents.c.attempt_id)
            .order_by(incidents.c.incident_id.desc())
        )
        if run_id is not None:
            query = query.where(incidents.c.run_id == run_id)
        if limit is not None:
            query = query.limit(limit)
        with self._db.read() as connection:
            return [incident_of(row) for row in connection.execute(query)][::-1]

    def note_recovery(
        self, incident_id: int, *, restarted_at: float | None = None, resumed: tuple[float, int] | None = None
    ) -> None:
        """When the next attempt was seen running, and when (and at which step) it was first seen to step."""
        values: dict[str, Any] = {} if restarted_at is None else {"restarted_at": restarted_at}
        if resumed is not None:
            values |= {"resumed_at": resumed[0], "resumed_step": resumed[1]}
        with self._db.write() as connection:
            connection.execute(sa.update(incidents).where(incidents.c.incident_id == incident_id).values(**values))

    # ----------------------------------------------------------------------------------------------------- actions

    def open_action(self, run_id: int) -> Action | None:
        return self.open_actions([run_id]).get(run_id)

    def open_actions(self, run_ids: Iterable[int]) -> dict[int, Action]:
        """By run; a run has one at most."""
        query = sa.select(actions).where(
            actions.c.run_id.in_(list(run_ids)), actions.c.stage.not_in([ActionStage.DONE, ActionStage.FAILED])
        )
        with self._db.read() as connection:
            return {row.run_id: action_of(row) for row in connection.execute(query)}

    def runs_with_open_actions(self, *, user: str) -> list[Run]:
        query = (
            sa.select(runs)
            .join(actions, actions.c.run_id == runs.c.run_id)
            .where(runs.c.user == user, actions.c.stage.not_in([ActionStage.DONE, ActionStage.FAILED]))
        )
        with self._db.read() as connection:
            return [run_of(row) for row in connection.execute(query)]

    def actions(self, run_id: int) -> list[Action]:
        """In order."""
        query = sa.select(actions).where(actions.c.run_id == run_id).order_by(actions.c.action_id)
        with self._db.read() as connection:
            return [action_of(row) for row in connection.execute(query)]

    def advance_action(
        self,
        lease: Lease,
        action: Action,
        stage: ActionStage,
        *,
        detail: str,
        now: float,
        restart_count: int | None = None,
        kind: ActionKind | None = None,
        tag: str | None = None,
        job_id: str | None = None,
        run_state: RunState | None = None,
    ) -> Action:
        """`tag`, `job_id`: the run's new ones, when it is submitted again; the action keeps the job that it began with.
        `run_state`: the run's new one, for which `detail` is the reason.

        Raises: LeaseLost.
        """
        of_run: dict[str, Any] = {
            name: value for name, value in (("tag", tag), ("job_id", job_id), ("state", run_state)) if value is not None
        }
        if run_state is not None:
            of_run["state_reason"] = detail
        with self._db.write() as connection:
            _check_lease(connection, lease)
            if of_run:
                connection.execute(
                    sa.update(runs).where(runs.c.run_id == action.run_id).values(updated_at=now, **of_run)
                )
            connection.execute(
                sa.update(actions)
                .where(actions.c.action_id == action.action_id)
                .values(
                    stage=stage, detail=detail, updated_at=now, kind=kind or action.kind,
                    restart_count=action.restart_count if restart_count is None else restart_count,
                )
            )  # fmt: skip
            row = connection.execute(sa.select(actions).where(actions.c.action_id == action.action_id)).one()
        return action_of(row)

    def stop_run(self, run: Run, *, reason: str, by: str, now: float) -> None:
        """A person's stop: the run is STOPPED, whatever was under way is dropped, and the cancel is intended. Needs no
        lease: a person outranks a tick, and the generation is raised so that a tick in flight writes nothing more."""
        with self._db.write() as connection:
            connection.execute(
                sa.update(actions)
                .where(
                    actions.c.run_id == run.run_id,
                    actions.c.stage.not_in([ActionStage.DONE, ActionStage.FAILED]),
                )
                .values(stage=ActionStage.FAILED, detail="overtaken by a stop", updated_at=now)
            )
            connection.execute(
                sa.update(runs)
                .where(runs.c.run_id == run.run_id)
                .values(
                    state=RunState.STOPPED, state_reason=reason, updated_at=now, lease_holder=None, lease_until=None,
                    lease_generation=runs.c.lease_generation + 1,
                )
            )  # fmt: skip
            if run.job_id is not None:
                _insert_action(connection, run.run_id, None, ActionKind.CANCEL, run.job_id, 0, reason, by, now)

    def resume_run(self, run: Run, *, reason: str, by: str, now: float) -> None:
        """A person lets a HELD run go on: the requeue is intended, the next tick carries it out.

        Raises: HistoryError when it is not HELD any more.
        """
        latest = self.latest_attempt(run.run_id)
        with self._db.write() as connection:
            held = connection.execute(
                sa.update(runs)
                .where(runs.c.run_id == run.run_id, runs.c.state == RunState.HELD)
                .values(state=RunState.ACTIVE, state_reason=reason, updated_at=now)
            ).rowcount
            if not held:
                raise HistoryError(f"{run.name!r} is not held any more", hint=f"krea-runner status {run.run_id}")
            if run.job_id is not None and latest is not None:
                _insert_action(
                    connection, run.run_id, None, ActionKind.REQUEUE, run.job_id, latest.key.restart_count, reason, by, now
                )  # fmt: skip


def _check_lease(connection: sa.Connection, lease: Lease) -> None:
    current = _generation(connection, lease.run_id)
    if current != lease.generation:
        raise LeaseLost(f"run {lease.run_id}: another supervisor took over (generation {current})")


def _generation(connection: sa.Connection, run_id: int) -> int:
    return int(connection.execute(sa.select(runs.c.lease_generation).where(runs.c.run_id == run_id)).scalar_one())


def _insert_action(
    connection: sa.Connection,
    run_id: int,
    incident_id: int | None,
    kind: ActionKind,
    job_id: str,
    restart_count: int,
    reason: str,
    by: str,
    now: float,
) -> None:
    connection.execute(
        sa.insert(actions).values(
            run_id=run_id, incident_id=incident_id, kind=kind, stage=ActionStage.INTENDED, job_id=job_id,
            restart_count=restart_count, reason=reason, by=by, created_at=now, updated_at=now,
        )
    )  # fmt: skip
