"""The table of known messages (signatures.toml), loaded and compiled once. Users' own tables have the same form."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from krea_runner.errors import ConfigError

EXCEPTION_CLASS = r"(?:[\w.]+(?:Error|Exception): )?"
ROLES = frozenset(
    "root scheduler kernel signal fabric network stuck timeout exit exception fallout context start restart end".split()
)


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    policy: str
    scope: str
    title: str
    advice: str


@dataclass(frozen=True, slots=True)
class Signature:
    name: str
    role: str
    literals: tuple[str, ...]
    pattern: re.Pattern[str]
    cause: str = ""
    blame: str = "reporter"
    source: str = ""
    versions: str = ""
    examples: tuple[str, ...] = ()
    near_misses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Catalog:
    """`by_literal` gives, for each literal, the signatures that may match a line holding it, in the order of the table."""

    causes: Mapping[str, Cause]
    signatures: tuple[Signature, ...]
    xids: Mapping[int, tuple[str, str]]
    literals: tuple[bytes, ...]
    by_literal: tuple[tuple[int, ...], ...]


def parse(
    document: Mapping[str, Any], origin: str
) -> tuple[dict[str, Cause], list[Signature], dict[int, tuple[str, str]]]:
    """Raises ConfigError naming every wrong entry."""
    problems: list[str] = []
    causes = {
        name: Cause(name, row["policy"], row["scope"], row["title"], row["advice"])
        for name, row in document.get("cause", {}).items()
    }
    signatures = []
    for number, row in enumerate(document.get("signature", []), 1):
        name = str(row.get("id", f"signature number {number}"))
        try:
            signatures.append(_signature(row))
        except (KeyError, TypeError, ValueError, re.error) as error:
            problems.append(f"{origin}: {name}: {type(error).__name__}: {error}")
    if problems:
        raise ConfigError(
            f"{origin} holds signatures that cannot be used", problems=problems, hint="see docs/reference/signatures.md"
        )
    return causes, signatures, {int(number): (row[0], row[1]) for number, row in document.get("xid", {}).items()}


def _signature(row: Mapping[str, Any]) -> Signature:
    role, literals = row.get("role", "root"), tuple(row["literal"])
    if role not in ROLES:
        raise ValueError(f"role {role!r} is none of {', '.join(sorted(ROLES))}")
    if not literals or any(len(literal) < 4 for literal in literals):
        raise ValueError("literal must be a list of texts of at least 4 characters: the fast search needs them")
    return Signature(
        name=row["id"],
        role=role,
        literals=literals,
        pattern=re.compile(row["pattern"].replace("{EXC}", EXCEPTION_CLASS)),
        cause=row.get("cause", ""),
        blame=row.get("blame", "reporter"),
        source=row.get("source", ""),
        versions=row.get("versions", ""),
        examples=tuple(row.get("example", ())),
        near_misses=tuple(row.get("near_miss", ())),
    )


def combine(
    causes: Mapping[str, Cause], signatures: Sequence[Signature], xids: Mapping[int, tuple[str, str]]
) -> Catalog:
    literals: dict[str, list[int]] = {}
    for index, signature in enumerate(signatures):
        for literal in signature.literals:
            literals.setdefault(literal, []).append(index)
    return Catalog(
        causes,
        tuple(signatures),
        xids,
        tuple(literal.encode() for literal in literals),
        tuple(tuple(indices) for indices in literals.values()),
    )


@lru_cache(maxsize=4)
def load_catalog(extra: tuple[Path, ...] = ()) -> Catalog:
    """The built-in table, with the tables in `extra` tried first. A wrong table raises ConfigError."""
    built_in = resources.files("krea_runner.diagnose").joinpath("signatures.toml").read_text(encoding="utf-8")
    causes, signatures, xids = parse(tomllib.loads(built_in), "signatures.toml")
    own: list[Signature] = []
    for path in extra:
        more_causes, more, _ = parse(read_table(path), str(path))
        causes |= more_causes
        own += more
    unknown = [f"{s.name}: no cause is called {s.cause!r}" for s in own if s.cause and s.cause not in causes]
    if unknown:
        raise ConfigError(
            "a signature names an unknown cause",
            problems=unknown,
            hint="add it under [cause], or use one of: " + ", ".join(sorted(causes)),
        )
    return combine(causes, [*own, *signatures], xids)


def read_table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read signatures from {path}: {error}", hint="see docs/reference/signatures.md"
        ) from error


def match(catalog: Catalog, indices: Iterable[int], message: str) -> tuple[Signature, re.Match[str]] | None:
    """The first signature among `indices` (ascending) that matches `message`."""
    for index in indices:
        signature = catalog.signatures[index]
        found = signature.pattern.match(message)
        if found:
            return signature, found
    return None
