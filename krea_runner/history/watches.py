"""A Watch as text. The many records of one kind are columns of values, not objects: 16,384 ranks are a seventh of the time."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any, TypeVar

from krea_runner.model import FollowedLog, RankWatch, SourceWatch, Watch
from krea_runner.model.learned import learned_of

_MANY: dict[str, type[Any]] = {"ranks": RankWatch, "sources": SourceWatch, "followed": FollowedLog}
T = TypeVar("T")


def watch_to_text(watch: Watch) -> str:
    plain = {field.name: getattr(watch, field.name) for field in fields(watch)}
    plain |= {name: _columns(kind, plain[name]) for name, kind in _MANY.items()}
    return json.dumps(plain, separators=(",", ":"), default=asdict)


def watch_from_text(text: str) -> Watch | None:
    """None where another version wrote it, with other fields, or it is damaged: its clocks are begun afresh."""
    try:
        plain = json.loads(text)
        plain |= {"learned": learned_of(plain["learned"]), "behind": tuple(map(tuple, plain["behind"]))}
        return Watch(**plain | {name: _records(kind, plain[name]) for name, kind in _MANY.items()})
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def _columns(kind: type[Any], records: Sequence[Any]) -> dict[str, list[Any]]:
    names = [field.name for field in fields(kind)]
    return {name: list(map(attrgetter(name), records)) for name in names}


def _records(kind: type[T], columns: dict[str, list[Any]]) -> tuple[T, ...]:
    """Raises: TypeError when the columns are not this version's."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if set(names) != set(columns):
        raise TypeError(f"another version's {kind.__name__}")
    return tuple(map(kind, *(columns[name] for name in names)))
