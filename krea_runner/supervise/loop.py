"""Ticks at an interval, and looks at the heartbeats in between."""

from collections.abc import Callable

from krea_runner.errors import HistoryUnavailable
from krea_runner.supervise.supervisor import Supervisor, TickReport
from krea_runner.supervise.tick import look, tick

# Heartbeats are flushed once a second: looking more often sees nothing new.
LOOK_S = 1.0


def run_loop(
    supervisor: Supervisor, *, every_s: float, for_s: float | None, emit: Callable[[TickReport], None]
) -> TickReport:
    """Tick every `every_s` seconds, for `for_s` seconds or until killed; returns the last report.

    A history that cannot be written for now is reported like a scheduler that cannot be asked, and tried again.
    """
    clock = supervisor.clock
    end = None if for_s is None else clock.mono() + for_s
    while True:
        next_tick = clock.mono() + every_s
        report = _tick_or_blind(supervisor)
        emit(report)
        if any(line.news for line in report.lines):  # what was just done has consequences to see
            next_tick = min(next_tick, clock.mono() + LOOK_S)
        supervisor.memory = {
            snapshot.attempt.attempt_id: supervisor.memory[snapshot.attempt.attempt_id]
            for snapshot in report.snapshots
            if snapshot.attempt is not None and snapshot.attempt.attempt_id in supervisor.memory
        }
        while clock.mono() < next_tick:
            if end is not None and clock.mono() >= end:
                return report
            clock.sleep(max(0.0, min(LOOK_S, next_tick - clock.mono())))
            if clock.mono() < next_tick and look(supervisor, report):
                break
        if end is not None and clock.mono() >= end:
            return report


def _tick_or_blind(supervisor: Supervisor) -> TickReport:
    try:
        return tick(supervisor)
    except HistoryUnavailable as error:
        return TickReport(error=error)
