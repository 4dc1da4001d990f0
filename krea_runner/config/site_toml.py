"""site.toml: what holds for every run of a user or of a cluster. Which files there are, and their tables as they stand there;
what is in a table is checked by whom it belongs to."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from krea_runner.config.durations import parse_duration
from krea_runner.errors import ConfigError

VARIABLE = "KREA_RUNNER_SITE"
CLUSTER = Path("/etc/krea_runner/site.toml")
KEYS = ("signatures", "cause", "files")
FILES_KEYS = ("answer_within",)
MAX_BYTES = 1 << 20
# A busy NFS server answers within a second or two, one that restarts not within a tick.
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Site:
    path: Path
    document: Mapping[str, Any]


def site_files() -> list[Path]:
    """The user's before the cluster's: `$KREA_RUNNER_SITE` alone where it is set, else those of
    `$XDG_CONFIG_HOME/krea_runner/site.toml` (`~/.config`) and /etc/krea_runner/site.toml that are there."""
    named = os.environ.get(VARIABLE)
    if named:
        return [Path(named).absolute()]
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [path for path in (Path(base) / "krea_runner" / "site.toml", CLUSTER) if os.path.exists(path)]


def read_site(path: Path) -> Site:
    """Raises: ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than 1 MiB: is that a site.toml?")
        document = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"reading {path}: {error.strerror}", hint=f"unset {VARIABLE}, or name another") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint="see docs/reference/site-toml.md") from None
    problems = [f"unknown key {name!r}; {nearest(name, KEYS)}" for name in document if name not in KEYS]
    problems += _problems_of_files(document.get("files", {}))
    if problems:
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        raise ConfigError(f"{path} has {count}", problems=problems, hint="all keys: docs/reference/site-toml.md")
    return Site(path, document)


def answer_within_s() -> float:
    """How long the files of one run may keep a look waiting. Raises: ConfigError."""
    for path in site_files():
        value = read_site(path).document.get("files", {}).get("answer_within")
        if value is not None:
            return parse_duration(value)
    return ANSWER_S


def _problems_of_files(table: Any) -> list[str]:
    if not isinstance(table, dict):
        return [f"files: a table is wanted, [files], not {table!r}"]
    problems = [
        f"[files]: unknown key {name!r}; {nearest(name, FILES_KEYS)}" for name in table if name not in FILES_KEYS
    ]
    try:
        if "answer_within" in table and not 1 <= parse_duration(table["answer_within"]) <= 60:
            problems.append(f"[files] answer_within: 1 s to 60 s are possible, not {table['answer_within']!r}")
    except ValueError as error:
        problems.append(f"[files] answer_within: {error}")
    return problems


def nearest(name: str, right: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), right, n=1, cutoff=0.0)
    return f"did you mean {near[0]}?" if near else f"one of {', '.join(right)} is wanted"
