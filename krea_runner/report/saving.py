"""How a run saves, in words. Pure."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from krea_runner.model import Saves, Warned
from krea_runner.report.checkpoints import size_words
from krea_runner.report.words import ago, seconds, utc


def saving_lines(saves: Saves, warned: Sequence[Warned], now: float) -> list[tuple[str, str, str]]:
    """Label, text and style, for the block about one run."""
    said = [_last(saves, now), _growing(saves, now), _room(saves, now)]
    lines = [("", text, "") for text in said if text]
    if saves.unseen:
        lines.append(("", f"could not see: {saves.unseen}", "yellow"))
    for index, one in enumerate(warned):
        since = ago(max(0.0, now - one.began_at))
        lines.append(("warning" if index == 0 else "", f"{one.text} (first seen {since})", "yellow"))
    return lines


def _last(saves: Saves, now: float) -> str:
    if not saves.written_at:
        return ""
    parts = [ago(max(0.0, now - saves.written_at[0]))]
    if saves.sizes_bytes:
        rate = (
            f" in {seconds(saves.took_s)} ({size_words(saves.bytes_per_s)}/s)"
            if saves.bytes_per_s and saves.took_s
            else ""
        )
        parts.append(f"{size_words(saves.sizes_bytes[0])}{rate}")
    if len(saves.sizes_bytes) > 1 and saves.sizes_bytes[1]:
        parts.append(f"{saves.sizes_bytes[0] / saves.sizes_bytes[1] - 1:+.1%} against the one before")
    if saves.interval_s is not None:
        parts.append(f"every {seconds(saves.interval_s)}")
    return ", ".join(parts)


def _growing(saves: Saves, now: float) -> str:
    if not saves.growing or saves.growing_at is None:
        return ""
    whole = f" of {size_words(saves.sizes_bytes[0])}" if saves.sizes_bytes else ""
    return f"{saves.growing}: {size_words(saves.growing_bytes)}{whole}, last written {ago(max(0.0, now - saves.growing_at))}"


def _room(saves: Saves, now: float) -> str:
    parts = []
    if saves.room is not None and saves.free_bytes is not None:
        parts.append(f"room for {saves.room:,.0f} more saves ({size_words(saves.free_bytes)} free)")
    if saves.limit_at is not None:
        save = f", a save takes {seconds(saves.took_s)}" if saves.took_s else ""
        parts.append(f"time limit in {seconds(max(0.0, saves.limit_at - now))}{save}")
    return "; ".join(parts)


def saving_document(saves: Saves | None, warned: Sequence[Warned]) -> dict[str, Any]:
    known = None
    if saves is not None:
        known = asdict(saves) | {
            "written_at": [utc(at) for at in saves.written_at],
            "growing_at": utc(saves.growing_at),
            "limit_at": utc(saves.limit_at),
            "interval_s": saves.interval_s,
            "bytes_per_s": saves.bytes_per_s,
            "room_for_saves": saves.room,
        }
    warnings = [
        {"kind": one.kind, "text": one.text, "attempt": one.attempt, "began_at": utc(one.began_at)} for one in warned
    ]
    return {"saves": known, "warnings": warnings}
