"""The signatures of this site: site.toml's tables before the built-in one, those that are named beside it first of all."""

import tomllib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from krea_runner.config.site_toml import nearest, read_site, site_files
from krea_runner.diagnose.signature_table import HINT, Table, parse_table
from krea_runner.diagnose.signatures import Catalog, combine, load_catalog
from krea_runner.errors import ConfigError

_State = tuple[Path, int, int]


def load_site_catalog(extra: Iterable[Path] = ()) -> Catalog:
    """`extra` are files of signatures, tried before site.toml's. Loaded again only when a file has changed.

    Raises: ConfigError naming every wrong entry of every file.
    """
    named = [_state(path) for path in extra]
    return _loaded(tuple(named), tuple(_state(path) for path in site_files()))


def site_catalog() -> tuple[Catalog, list[str]]:
    """For whoever must go on: where site.toml is wrong the built-in signatures alone, and what is wrong with it."""
    try:
        return load_site_catalog(), []
    except ConfigError as error:
        return load_catalog(), [f"site.toml is not used: {'; '.join([*error.problems] or [str(error)])}"]


def _state(path: Path) -> _State:
    try:
        status = path.stat()
    except OSError:  # reading it says why
        return path, 0, 0
    return path, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=4)
def _loaded(named: tuple[_State, ...], sites: tuple[_State, ...]) -> Catalog:
    tables, problems = list[Table](), list[str]()
    for path, *_ in named:
        _add(tables, problems, path, is_site=False)
    for path, *_ in sites:
        _add(tables, problems, path, is_site=True)
    built_in = load_catalog()
    if not tables and not problems:
        return built_in
    causes = dict(built_in.causes)
    for table in reversed(tables):
        causes |= table.causes
    own = [signature for table in tables for signature in table.signatures]
    taken = {signature.name for signature in built_in.signatures}
    for signature in own:
        if signature.cause and signature.cause not in causes:
            near = nearest(signature.cause, tuple(causes))
            problems.append(f"signature {signature.name}: no cause is called {signature.cause!r}; {near}")
        if signature.name in taken:
            problems.append(f"signature {signature.name}: there is one of that id already")
        taken.add(signature.name)
    if problems:
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        raise ConfigError(f"your own signatures have {count}", problems=problems, hint=HINT)
    return combine(causes, [*own, *built_in.signatures])


def _add(tables: list[Table], problems: list[str], path: Path, *, is_site: bool) -> None:
    """The table of a file, and of those it names."""
    try:
        if not is_site:
            tables.append(_of_file(path))
            return
        document = read_site(path).document
        rows = document.get("signatures", [])
        files = [rows] if isinstance(rows, str) else rows if _are_paths(rows) else []
        tables.append(parse_table(document.get("cause", {}), [] if files else rows, str(path)))
        for name in files:
            _add(tables, problems, path.parent / Path(name).expanduser(), is_site=False)
    except ConfigError as error:
        problems += error.problems or [str(error)]


def _are_paths(rows: object) -> bool:
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, str) for row in rows)


def _of_file(path: Path) -> Table:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read signatures from {path}: {error}", hint=HINT) from error
    wrong = [
        f"{path}: unknown key {name!r}; {nearest(name, ('signature', 'cause'))}"
        for name in document
        if name not in {"signature", "signatures", "cause"}
    ]
    if wrong:
        raise ConfigError(f"{path} has {len(wrong)} wrong keys", problems=wrong, hint=HINT)
    rows = document.get("signatures", document.get("signature", []))
    return parse_table(document.get("cause", {}), rows, str(path))
