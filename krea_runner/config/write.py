"""Tables of a run.toml → its text, for runs that did not begin with a file."""

import json
from collections.abc import Mapping
from typing import Any


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Text, numbers, booleans and lists of text: what the keys of run.toml hold (config/keys.py)."""
    parts = []
    for table, values in tables.items():
        lines = [f"{_quoted(key)} = {_value(value)}" for key, value in values.items()]
        parts.append("\n".join([f"[{_quoted(table)}]", *lines]) + "\n")
    return "\n".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return _quoted(str(value))


def _quoted(text: str) -> str:
    # A basic string of TOML has JSON's escapes; JSON leaves DEL as it is, TOML does not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
