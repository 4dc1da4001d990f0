"""The pretended nodes of the local scheduler: `local1` to `local64`. They can be drained and excluded as Slurm's can, so
that what is done about a bad node can be tried on one machine."""

import json
import os
import pwd
import time
from collections.abc import Sequence
from pathlib import Path

from krea_runner.errors import SchedulerError, SchedulerOutputError, SchedulerUnavailable
from krea_runner.schedulers import DRAIN_PREFIX, NodeRecord, refuse_others_drains
from krea_runner.schedulers.local_state import locked
from krea_runner.schedulers.nodelist import fold

POOL = 64
PARTITION = "local"


class LocalNodes:
    """ROOT/drained.json: {node: [reason, who, when]}, written under the root's lock."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def records(self, names: Sequence[str] | None = None) -> dict[str, NodeRecord]:
        drained = self._drained()
        wanted = _pool() if names is None else [name for name in _pool() if name in set(names)]
        return {
            name: NodeRecord(name, "IDLE+DRAIN" if name in drained else "IDLE", (PARTITION,), (), "", "", *drained.get(name, ()))
            for name in wanted
        }  # fmt: skip

    def pick(self, count: int, excluded: Sequence[str]) -> list[str]:
        """The first `count` nodes that are neither excluded nor drained; a gang larger than the pool gets the pool's names
        going on.

        Raises: SchedulerError for a node that does not exist, or when too few are left.
        """
        if unknown := set(excluded) - set(_pool()):
            raise SchedulerError(f"Invalid node name specified: {fold(sorted(unknown))}", hint="krea-runner nodes")
        if not excluded and count > POOL:
            return _pool(count)
        out = {*excluded, *self._drained()}
        left = [name for name in _pool() if name not in out]
        if len(left) < count:
            raise SchedulerError(f"Requested node configuration is not available: {count} of {len(left)} nodes")
        return left[:count]

    def drain(self, names: Sequence[str], reason: str) -> None:
        refuse_others_drains(self.records(names), names, f"draining {fold(names)}")
        said: list[str | float] = [
            DRAIN_PREFIX + reason.removeprefix(DRAIN_PREFIX),
            pwd.getpwuid(os.getuid()).pw_name,
            time.time(),
        ]
        self._write(dict.fromkeys(names, said), ())

    def undrain(self, names: Sequence[str]) -> None:
        refuse_others_drains(self.records(names), names, f"resuming {fold(names)}", lifting=True)
        self._write({}, names)

    def _drained(self) -> dict[str, tuple[str, str, float]]:
        path = self.root / "drained.json"
        try:
            text = path.read_text()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise SchedulerUnavailable(f"reading {path}: {error.strerror}") from error
        try:
            return {name: (reason, by, at) for name, (reason, by, at) in json.loads(text).items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise SchedulerOutputError(f"reading {path}: {error}", line=text[:500]) from None

    def _write(self, more: dict[str, list[str | float]], fewer: Sequence[str]) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with locked(self.root):
            drained = {k: v for k, v in {**self._drained(), **more}.items() if k not in fewer}
            partial = self.root / ".drained.json"
            partial.write_text(json.dumps(drained))
            partial.replace(self.root / "drained.json")


def _pool(count: int = POOL) -> list[str]:
    return [f"local{number + 1}" for number in range(count)]
