"""A table of signatures as it stands in TOML → causes and signatures. Every wrong entry is found in one pass and named, with
the nearest right key."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from krea_runner.config.site_toml import nearest
from krea_runner.diagnose.signatures import EXCEPTION_CLASS, ROLES, Cause, Signature
from krea_runner.errors import ConfigError

POLICIES = ("restart", "restart_and_exclude_node", "stop_for_human", "not_a_crash")
SCOPES = ("user_code", "infra_node", "infra_network", "infra_storage", "scheduler", "unknown")
BLAMES = ("reporter", "peer", "pair", "none", "absent", "rank0", "ofi")
LEAST_LITERAL = 4
HINT = "see docs/reference/signatures.md"


@dataclass(slots=True)
class Table:
    """Of one file."""

    causes: dict[str, Cause] = field(default_factory=dict)
    signatures: list[Signature] = field(default_factory=list)


def parse_table(causes: object, rows: object, origin: str) -> Table:
    """`causes` is what stands under [cause], `rows` what stands under [[signature]] (of site.toml: [[signatures]]).

    Raises: ConfigError with all `problems`.
    """
    table, problems = Table(), list[str]()
    for name, row in _items(causes, f"{origin}: [cause]", problems):
        values = _checked(row, _CAUSE, {"policy", "title"}, f"{origin}: cause {name}", problems)
        if values is not None:
            table.causes[name] = Cause(name, **{"scope": "unknown", "advice": "", **values})
    if not isinstance(rows, list):
        problems.append(f"{origin}: signatures are tables: write [[signatures]] above each")
        rows = []
    for number, row in enumerate(rows, 1):
        named = row.get("id") if isinstance(row, dict) else None
        where = f"{origin}: signature {named if isinstance(named, str) else f'number {number}'}"
        values = _checked(row, _SIGNATURE, {"id", "literal", "pattern"}, where, problems)
        if values is not None:
            table.signatures.append(_signature(values, where, problems))
    if problems:
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        raise ConfigError(f"{origin} has {count}", problems=problems, hint=HINT)
    return table


def _items(value: object, where: str, problems: list[str]) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    problems.append(f"{where} is a table: write [cause.NAME] and its keys below")
    return []


def _checked(
    row: object, keys: Mapping[str, Callable[[Any], Any]], required: set[str], where: str, problems: list[str]
) -> dict[str, Any] | None:
    """The values; None where one of them is wrong or missing, which is then among the problems."""
    if not isinstance(row, dict):
        problems.append(f"{where}: a table is wanted, not {row!r}")
        return None
    values: dict[str, Any] = {}
    before = len(problems)
    for name, value in row.items():
        if name not in keys:
            problems.append(f"{where}: unknown key {name!r}; {nearest(name, tuple(keys))}")
            continue
        try:
            values[name] = keys[name](value)
        except (ValueError, re.error, OverflowError, RecursionError) as error:
            problems.append(f"{where}: {name}: {error}")
    problems += [f"{where}: {name} is missing" for name in sorted(required - row.keys())]
    return values if len(problems) == before else None


def _signature(values: Mapping[str, Any], where: str, problems: list[str]) -> Signature:
    signature = Signature(
        name=values["id"],
        role=values.get("role", "root"),
        literals=values["literal"],
        pattern=values["pattern"],
        cause=values.get("cause", ""),
        blame=values.get("blame", "reporter"),
        source=values.get("source", ""),
        versions=values.get("versions", ""),
        examples=values.get("example", ()),
        near_misses=values.get("near_miss", ()),
    )
    for text in signature.examples:
        if not signature.pattern.match(text):
            problems.append(f"{where}: its pattern does not match its example {text!r}")
        elif not any(literal.rstrip("\n") in text for literal in signature.literals):
            problems.append(f"{where}: none of its literals is in its example {text!r}")
    problems += [
        f"{where}: its pattern matches its near miss {t!r}" for t in signature.near_misses if signature.pattern.match(t)
    ]
    return signature


# -------------------------------------------------------------------------------------------------------------- checks


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"text in quotes is wanted, not {value!r}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f'a list of texts is wanted, such as ["licence lost"], not {value!r}')
    return tuple(value)


def _literals(value: Any) -> tuple[str, ...]:
    texts = _texts(value)
    if not texts or any(len(text) < LEAST_LITERAL for text in texts):
        raise ValueError(f"texts of at least {LEAST_LITERAL} characters are wanted: the fast search looks for them")
    return texts


def _pattern(value: Any) -> re.Pattern[str]:
    return re.compile(_text(value).replace("{EXC}", EXCEPTION_CLASS))


def _one_of(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in words:
            raise ValueError(f"{value!r} is none of {', '.join(words)}; {nearest(str(value), words)}")
        return str(value)

    return check


_CAUSE: dict[str, Callable[[Any], Any]] = {
    "policy": _one_of(*POLICIES),
    "scope": _one_of(*SCOPES),
    "title": _text,
    "advice": _text,
}
_SIGNATURE: dict[str, Callable[[Any], Any]] = {
    "id": _text,
    "role": _one_of(*sorted(ROLES)),
    "cause": _text,
    "literal": _literals,
    "pattern": _pattern,
    "blame": _one_of(*BLAMES),
    "source": _text,
    "versions": _text,
    "example": _texts,
    "near_miss": _texts,
}
