"""site.toml: what holds for every run of a user or of a cluster. Which files there are, and their tables as they stand there;
what is in a table is checked by whom it belongs to."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from krea_runner.errors import ConfigError

VARIABLE = "KREA_RUNNER_SITE"
CLUSTER = Path("/etc/krea_runner/site.toml")
KEYS = ("signatures", "cause")
MAX_BYTES = 1 << 20


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
    if problems:
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        raise ConfigError(f"{path} has {count}", problems=problems, hint="all keys: docs/reference/site-toml.md")
    return Site(path, document)


def nearest(name: str, right: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), right, n=1, cutoff=0.0)
    return f"did you mean {near[0]}?" if near else f"one of {', '.join(right)} is wanted"
