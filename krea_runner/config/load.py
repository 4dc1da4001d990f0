"""run.toml → RunConfig. Every problem is found in one pass and named with its line and the nearest right key."""

import difflib
import hashlib
import os
import re
import stat
import tomllib
from pathlib import Path
from types import MappingProxyType
from typing import Any

from krea_runner.config.keys import OWNED, TABLES, Key
from krea_runner.config.lines import key_lines
from krea_runner.errors import ConfigError
from krea_runner.model import Budgets, CheckpointSpec, EvidenceSpec, Gang, Policy, ProgressSpec, RunConfig

MAX_BYTES = 1 << 20
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What the batch script sets itself, or what would leak another job into this one.
_ENV_OWNED = re.compile(r"(SLURM|SBATCH|SRUN|KREA)_.*|RANK|LOCAL_RANK|WORLD_SIZE")
# No line of a script and no message can hold these; the last are bytes of a path that is not UTF-8.
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_ENV_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})


def load_run(path: Path) -> RunConfig:
    """Raises: ConfigError with all `problems`."""
    source = _read(path)
    return check_run(_parse(source, path), path.absolute().parent, what=str(path), lines=key_lines(source))


def read_document(path: Path) -> dict[str, Any]:
    """The tables of a file as they stand there, unchecked. Raises: ConfigError."""
    return _parse(_read(path), path)


def check_run(
    document: dict[str, Any], base: Path, *, what: str, lines: dict[tuple[str, ...], int] | None = None
) -> RunConfig:
    """The tables of a run.toml, from wherever they come; paths are relative to `base`, `what` names them in messages.

    Raises: ConfigError with all `problems`.
    """
    checker = _Checker(lines or {})
    values = checker.check(document)
    checker.check_places(values, base)
    checker.check_transport(values["run"])
    if checker.problems:
        ordered = [text for _, text in sorted(checker.problems, key=lambda problem: problem[0])]
        count = f"{len(ordered)} problem" + ("s" if len(ordered) > 1 else "")
        raise ConfigError(f"{what} has {count}", problems=ordered, hint="all keys: docs/reference/run-toml.md")
    return _build(values, base)


def _parse(source: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not TOML: {error}", hint="strings stand in quotes, tables in [brackets]"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets thousands deep
        raise ConfigError(f"{path} cannot be read: {error}") from None


def slug_of(name: str) -> str:
    """`name` as a file and job name: `[A-Za-z0-9._-]`, at most 60; a hash keeps two changed names apart."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:50]
    if slug == name:
        return slug
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{slug}-{digest}" if slug else f"run-{digest}"


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a directory", hint=f"name the file: {path / 'run.toml'}")
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it is read twice, and kept
                raise ConfigError(f"{path} is not a regular file", hint="write it down: krea-runner submit run.toml")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"reading {path}: {error.strerror}", hint="krea-runner submit wants the path of a run.toml"
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB: is that a run.toml?")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start} is {data[error.start]:#x}") from None


# ----------------------------------------------------------------------------------------------------------- checking


class _Checker:
    """Collects problems as (line, text); `lines` knows where each (table, key) stands."""

    def __init__(self, lines: dict[tuple[str, ...], int]) -> None:
        self.lines = lines
        self.problems: list[tuple[int, str]] = []

    def check(self, document: dict[str, Any]) -> dict[str, dict[str, Any]]:
        values: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
        for table, content in document.items():
            if table not in TABLES:
                self._unknown((table,), table, list(TABLES), "table" if isinstance(content, dict) else "key")
            elif not isinstance(content, dict):
                self._problem((table,), f"{table} is a table: write [{table}] and its keys below")
            elif table == "env":
                values[table] = self._environment(content)
            else:
                values[table] = self._table(table, content)
        for key in TABLES["run"]:
            if key.required and not isinstance(document.get("run", {}), dict):
                continue
            if key.required and key.name not in document.get("run", {}):
                self._problem(("run",), f"[run] {key.name} is missing: {key.about}")
        return values

    def _table(self, table: str, content: dict[str, Any]) -> dict[str, Any]:
        keys: dict[str, Key] = {key.name: key for key in TABLES[table]}
        values: dict[str, Any] = {}
        for name, value in content.items():
            place = (table, name)
            if name in keys:
                try:
                    values[name] = keys[name].check(value)
                except ValueError as error:
                    self._problem(place, f"[{table}] {name}: {error}")
            elif table == "slurm" and name.replace("-", "_") in OWNED:
                self._problem(place, f"[slurm] {name} is krea_runner's own: {OWNED[name.replace('-', '_')]}")
            else:
                self._unknown(place, name, list(keys), "key", table)
        return values

    def _environment(self, content: dict[str, Any]) -> dict[str, str]:
        values: dict[str, str] = {}
        for name, value in content.items():
            place = ("env", name)
            if not _ENV_NAME.fullmatch(name):
                self._problem(place, f"[env] {name!r} is no name of an environment variable")
            elif _ENV_OWNED.fullmatch(name):
                self._problem(place, f"[env] {name} is set by Slurm or krea_runner for each attempt")
            elif name in _ENV_READ_ONLY:
                self._problem(place, f"[env] {name} is bash's own and cannot be set")
            elif isinstance(value, bool) or not isinstance(value, str | int | float):
                self._problem(place, f"[env] {name}: text in quotes is wanted, not {value!r}")
            elif "\x00" in str(value):
                self._problem(place, f"[env] {name} cannot hold a zero byte")
            else:
                values[name] = str(value)
        return values

    def check_places(self, values: dict[str, dict[str, Any]], base: Path) -> None:
        """What the folder of run.toml adds to a path is checked too. Looks at `workdir`, `dir` and the checkpoints'."""
        run = values["run"]
        workdir = _below(base, run.get("workdir", "."))
        places = {("run", "workdir"): workdir, ("run", "dir"): _below(base, run.get("dir", "runs"))}
        if "dir" in values["checkpoint"]:
            places["checkpoint", "dir"] = _below(workdir, values["checkpoint"]["dir"])
        for (table, key), path in places.items():
            if _UNWRITABLE.search(str(path)):
                self._problem((table, key), f"[{table}] {key}: a path of printable UTF-8 is wanted, not {str(path)!r}")
            # A backslash in a file name turns all of sbatch's patterns off (22.05.8).
            elif key == "dir" and table == "run" and "\\" in str(path):
                self._problem((table, key), f"[run] dir: Slurm cannot write logs below {str(path)!r}: a backslash")

    def check_transport(self, run: dict[str, Any]) -> None:
        if run.get("transport") != "ssh":
            for key in ("ssh_host", "files"):
                if key in run:
                    self._problem(("run", key), f'[run] {key} goes with transport = "ssh"')
            return
        for key in ("dir", "workdir"):
            if run.get("files") == "sftp" and not run.get(key, "").startswith("/"):
                self._problem(
                    ("run", "files"), f'[run] files = "sftp" needs {key} = "/an/absolute/path" of the cluster'
                )
        if "ssh_host" not in run:
            self._problem(("run", "transport"), '[run] transport = "ssh" needs ssh_host = "a login node"')
        if run.get("scheduler", "slurm") != "slurm":
            self._problem(("run", "transport"), '[run] transport = "ssh" goes with scheduler = "slurm"')

    def _unknown(self, place: tuple[str, ...], name: str, right: list[str], kind: str, table: str = "") -> None:
        where = f"[{table}] " if table else ""
        near = difflib.get_close_matches(name.replace("-", "_"), right, n=1, cutoff=0.0)
        elsewhere = [other for other, keys in TABLES.items() if other != table and name in {key.name for key in keys}]
        if elsewhere and difflib.SequenceMatcher(None, name, near[0] if near else "").ratio() < 0.8:
            advice = f"it belongs under [{elsewhere[0]}]"
        else:
            advice = f"did you mean {near[0]}?" if near else f"there are no keys in [{table}]"
        self._problem(place, f"{where}unknown {kind} {name!r}; {advice}")

    def _problem(self, place: tuple[str, ...], text: str) -> None:
        line = self.lines.get(place) or self.lines.get(place[:1], 0)
        self.problems.append((line, f"line {line}: {text}" if line else text))


# ----------------------------------------------------------------------------------------------------------- building


def _build(values: dict[str, dict[str, Any]], base: Path) -> RunConfig:
    run, budgets, checkpoint = values["run"], dict(values["budgets"]), dict(values["checkpoint"])
    slug = slug_of(run["name"])
    workdir = _below(base, run.get("workdir", "."))
    directory = checkpoint.pop("dir", None)
    second_look = {"second_look": budgets.pop("second_look")} if "second_look" in budgets else {}
    budgets = {phase: value for phase, value in budgets.items() if value is not None}  # the others learn
    evidence = {("timeout_s" if key == "timeout" else key): value for key, value in values["evidence"].items()}
    policy = {("window_s" if key == "window" else key): value for key, value in values["policy"].items()}
    return RunConfig(
        name=run["name"],
        slug=slug,
        run_dir=_below(base, run.get("dir", f"runs/{slug}")),
        command=run["command"],
        workdir=workdir,
        scheduler=run.get("scheduler", "slurm"),
        transport=run.get("transport", "local"),
        ssh_host=run.get("ssh_host", ""),
        files=run.get("files", "mounted"),
        env=MappingProxyType(values["env"]),
        gang=Gang(**values["gang"]),
        slurm=MappingProxyType(values["slurm"]),
        budgets=Budgets(**{f"{key}_s": value for key, value in budgets.items()}, **second_look, fixed=tuple(budgets)),
        checkpoint=CheckpointSpec(directory=_below(workdir, directory) if directory else None, **checkpoint),
        policy=Policy(**policy),
        evidence=EvidenceSpec(**evidence),
        progress=ProgressSpec(
            **{key if key == "pattern" else f"{key}_s": value for key, value in values["progress"].items()}
        ),
    )


def _below(base: Path, path: str) -> Path:
    """Absolute, `~` expanded, `..` folded; symbolic links are left as they are: compute nodes may resolve them otherwise."""
    import os

    return Path(os.path.normpath(base / Path(path).expanduser()))
