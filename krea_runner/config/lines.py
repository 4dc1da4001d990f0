"""Where each table and key of a TOML file stands: tomllib keeps no positions."""

import re
import tomllib

_TOKEN = re.compile(
    r'''(?P<word>"""(?:\\.|(?!""")[^\\])*"{3,5}|\'\'\'(?:(?!\'\'\').)*\'{3,5}|"(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_+:-]+)
    |(?P<mark>[][{},=\n])|(?P<comment>\#[^\n]*)|(?P<rest>.)''',
    re.DOTALL | re.VERBOSE,
)


def key_lines(source: str) -> dict[tuple[str, ...], int]:
    """Line (from 1) at which each `(table,)` and `(table, key)` first stands. `source` must be TOML that tomllib has read."""
    lines: dict[tuple[str, ...], int] = {}
    number = started = 1
    table: tuple[str, ...] = ()
    open_values: list[tuple[str, tuple[str, ...]]] = []  # arrays and inline tables around this place, with their keys
    here: tuple[str, ...] = ()  # the key whose value this is
    key: list[str] | None = []  # what has been read of a key; None inside a value
    in_header = False

    def note(path: tuple[str, ...]) -> None:
        for length in range(1, min(len(path), 2) + 1):
            lines.setdefault(path[:length], started)

    for token in _TOKEN.finditer(source):
        text = token[0]
        if token["word"] and key is not None:
            started = number if not key else started
            key.append(_plain(text))
        elif text == "\n":
            key = key if open_values else []
        elif text == "[" and not open_values and key is not None:
            in_header = True
        elif text == "]" and in_header:
            table, key, in_header = tuple(key or ()), None, False
            note(table)
        elif text == "=" and key:
            here = (open_values[-1][1] if open_values else table) + tuple(key)
            key = None
            note(here)
        elif text in {"[", "{"}:
            open_values.append((text, here))
            key = [] if text == "{" else None
        elif text in {"]", "}"} and open_values:
            here, key = open_values.pop()[1], None
        elif text == "," and open_values and open_values[-1][0] == "{":
            key = []
        number += text.count("\n")
    return lines


def _plain(word: str) -> str:
    """A key without its quotes and escapes."""
    return str(tomllib.loads(f"x = {word}")["x"]) if word[0] in "\"'" else word
