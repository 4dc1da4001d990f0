"""The table of known messages (signatures.toml), loaded and compiled once."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

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
    literals: tuple[bytes, ...]
    by_literal: tuple[tuple[int, ...], ...]


def combine(causes: Mapping[str, Cause], signatures: Sequence[Signature]) -> Catalog:
    literals: dict[str, list[int]] = {}
    for index, signature in enumerate(signatures):
        for literal in signature.literals:
            literals.setdefault(literal, []).append(index)
    return Catalog(
        causes,
        tuple(signatures),
        tuple(literal.encode() for literal in literals),
        tuple(tuple(indices) for indices in literals.values()),
    )


@lru_cache(maxsize=1)
def load_catalog() -> Catalog:
    """The built-in table. diagnose/site.py adds a site's own."""
    from krea_runner.diagnose.signature_table import parse_table

    text = resources.files("krea_runner.diagnose").joinpath("signatures.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    table = parse_table(document["cause"], document["signature"], "signatures.toml")
    return combine(table.causes, table.signatures)


def match(catalog: Catalog, indices: Iterable[int], message: str) -> tuple[Signature, re.Match[str]] | None:
    """The first signature among `indices` (ascending) that matches `message`."""
    for index in indices:
        signature = catalog.signatures[index]
        found = signature.pattern.match(message)
        if found:
            return signature, found
    return None
