"""Lint of a batch script before it is submitted: text and facts in, findings out. The rules are in check_rules.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from krea_runner.launch.check_shell import Shell, shells_of
from krea_runner.launch.sbatch_lines import Option, read_options
from krea_runner.launch.shell import ShellSyntaxError
from krea_runner.schedulers.slurm_facts import ClusterFacts

SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh", "ash"})


class Severity(StrEnum):
    ERROR = "error"
    """The job will lose work, or will not run."""
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a rule found something. `line` counts from 1, 0 where no line is to blame; `text` then says what is.
    `saw` is what was seen there, if the line does not show it. An empty `severity` or `fix` is the rule's."""

    line: int = 0
    text: str = ""
    saw: str = ""
    fix: str = ""
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """`line` counts from 1, 0 where no line is to blame; `text` is what stands there."""

    code: str
    severity: Severity
    harm: str
    fix: str
    path: str
    line: int
    text: str = ""
    saw: str = ""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True, slots=True)
class Rule:
    """`harm` and `fix` are one line each; `seen` says where the harm comes from. A rule that needs the cluster is not
    judged where the cluster could not be asked."""

    code: str
    severity: Severity
    harm: str
    fix: str
    seen: str
    judge: "Callable[[Job], Iterator[Hit]]"
    needs_cluster: bool = False
    near: str = ""
    """What looks like it and is left alone."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known outside of the script. `file_system` gives the type of the file system that holds a path on this
    host, `exists` whether it is there; both are about this host, which need not be a node.

    `unseen` says why `cluster` is None. Times are seconds; None: not known."""

    cluster: ClusterFacts | None = None
    unseen: str = "it was not asked"
    environ: Mapping[str, str] = field(default_factory=dict)
    defaults: str = ""
    """The text of ~/.slurm/defaults, where the cluster has sbatch read it."""
    file_system: Callable[[str], str] = lambda path: ""
    exists: Callable[[str], bool] = lambda path: True
    seen_from: str = "this host"
    submit_dir: str = "/"
    checkpoint_every_s: float | None = None
    startup_s: float | None = None
    checkpoint_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ours:
    """What a run.toml adds: the script is ours, and only what its author chose is judged.

    `option_lines` has the line of each sbatch option, `command_line` that of the command; `directories` pairs a path with
    its line and what it is."""

    path: str
    lines: tuple[str, ...]
    option_lines: Mapping[str, int]
    command_line: int
    directories: tuple[tuple[str, int, str], ...]
    scheduler: str = "slurm"


@dataclass(frozen=True, slots=True)
class Job:
    """A script with what was read from it. `shells` is empty when its interpreter is no shell or `unreadable` says why."""

    path: str
    lines: tuple[str, ...]
    options: Mapping[str, Option]
    shells: tuple[Shell, ...]
    facts: Facts
    unreadable: ShellSyntaxError | None = None
    ours: Ours | None = None

    def option(self, name: str) -> str | None:
        return self.options[name].value if name in self.options else None

    def line_of(self, *names: str) -> int:
        """That of the first of these options that is there; otherwise 0, no line is to blame."""
        return next((self.options[name].line for name in names if name in self.options), 0)

    @property
    def cluster(self) -> ClusterFacts:
        """For rules that need it: they are not judged without."""
        if self.facts.cluster is None:
            raise ValueError("a rule that reads the cluster must say needs_cluster")
        return self.facts.cluster

    @property
    def asks_slurm(self) -> bool:
        return self.ours is None or self.ours.scheduler == "slurm"


@dataclass(frozen=True, slots=True)
class Report:
    """`unjudged` has the codes of the rules that could not be judged, `why` for which reason."""

    findings: tuple[Finding, ...]
    unjudged: tuple[str, ...] = ()
    why: str = ""

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)


def read_job(path: str, text: str, facts: Facts, ours: Ours | None = None) -> Job:
    lines = tuple(text.split("\n"))
    options = {option.name: option for option in read_options(lines)}
    shells: tuple[Shell, ...] = ()
    unreadable = None
    if interpreter(lines[0]) in SHELLS:
        try:
            shells = shells_of(text.replace("\r\n", "\n"))
        except ShellSyntaxError as error:
            unreadable = error
    return Job(path, lines, options, shells, facts, unreadable, ours)


def interpreter(first_line: str) -> str:
    """The program after `#!`, without its folder; `env bash` is bash. Empty without a `#!`."""
    if not first_line.startswith("#!"):
        return ""
    words = [word for word in first_line[2:].split() if word != "-S"]
    if len(words) > 1 and words[0].rpartition("/")[2] == "env":
        words = words[1:]
    return words[0].rpartition("/")[2] if words else ""


def check(job: Job, rules: Sequence[Rule]) -> Report:
    """Findings in the order of the lines, the worst first where they share one."""
    found: list[Finding] = []
    unjudged = []
    for rule in rules:
        if rule.needs_cluster and not job.asks_slurm:
            continue
        if rule.needs_cluster and job.facts.cluster is None:
            unjudged.append(rule.code)
            continue
        found += [_finding(job, rule, hit) for hit in rule.judge(job)]
    order = list(Severity)
    found.sort(key=lambda finding: (finding.path, finding.line, order.index(finding.severity)))
    return Report(tuple(found), tuple(unjudged), job.facts.unseen if unjudged else "")


def _finding(job: Job, rule: Rule, hit: Hit) -> Finding:
    path, lines, number = job.path, job.lines, hit.line
    if job.ours is not None and (theirs := _line_in_toml(job, job.ours, number)) is not None:
        path, lines, number = job.ours.path, job.ours.lines, theirs
    text = hit.text or (lines[number - 1].strip() if 0 < number <= len(lines) else "")
    return Finding(
        rule.code, hit.severity or rule.severity, rule.harm, hit.fix or rule.fix, path, number, text, hit.saw
    )


def _line_in_toml(job: Job, ours: Ours, number: int) -> int | None:
    """The line of run.toml from which a line of our script was made; None for what is in the template. 0 stays 0, and a
    negative number is a line of run.toml already."""
    if number <= 0:
        return -number
    for name, option in job.options.items():
        if option.line == number and name.replace("-", "_") in ours.option_lines:
            return ours.option_lines[name.replace("-", "_")]
    nested = any(shell.nested and shell.first_line <= number <= shell.last_line for shell in job.shells)
    return ours.command_line if nested else None
