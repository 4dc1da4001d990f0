"""Lengths of time as people and Slurm write them."""

import re

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PARTS = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+", re.ASCII)
# Slurm: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]] (sbatch.1, --time)
_CLOCK = re.compile(r"(?:(?P<d>\d+)-(?=\d))?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?", re.ASCII)


def parse_duration(value: object) -> float:
    """Seconds of `90`, `"90s"`, `"1h30m"`, `"1-02:00:00"`, `"02:00:00"`.

    Raises: ValueError, with what would be right.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f'a duration is wanted, such as "90s", "15m" or "1h30m", not {value!r}')
    try:
        seconds = _parse_text(value.strip().lower()) if isinstance(value, str) else float(value)
    except OverflowError:
        raise ValueError("a duration this long has no end") from None
    if not 0 < seconds < float("inf"):
        raise ValueError(f"a duration is more than zero, not {value!r}")
    return seconds


def is_slurm_time(text: str) -> bool:
    return text.upper() in {"UNLIMITED", "INFINITE"} or _CLOCK.fullmatch(text) is not None


def _parse_text(text: str) -> float:
    if _PARTS.fullmatch(text):
        return sum(float(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[\d.]+[smhd]", text))
    match = _CLOCK.fullmatch(text)
    if match is None or (":" not in text and "-" not in text):
        raise ValueError(f'{text!r} is no duration; write it as "90s", "15m", "1h30m" or "1-02:00:00"')
    a, b, c = (int(match[name] or 0) for name in "abc")
    if match["d"] is not None:
        return int(match["d"]) * 86400.0 + a * 3600 + b * 60 + c
    return float(a * 3600 + b * 60 + c) if match["c"] is not None else float(a * 60 + b)
