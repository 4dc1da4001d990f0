"""How the verbs print: JSON with a schema version; a table on a terminal; in a pipe aligned text, nothing cut off."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from krea_runner.report.tables import Sheet, plain_lines

SCHEMA_VERSION = 1


def print_json(document: Mapping[str, Any]) -> None:
    """One document; times in it are ISO 8601 UTC strings, durations seconds. Fields are only ever added."""
    sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=2, default=str) + "\n")


def print_sheet(sheet: Sheet) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write("\n".join(plain_lines(sheet)) + "\n")
        return
    from rich.console import Console

    from krea_runner.report.tables import terminal_sheet

    console = Console(highlight=False)
    console.print(terminal_sheet(sheet, console.width))
