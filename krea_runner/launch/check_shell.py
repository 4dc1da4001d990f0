"""Which commands of a script are its work, what becomes of their exit codes: what the rules ask about the shell."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from krea_runner.launch.shell import (
    Command,
    Pipeline,
    Sequence,
    ShellSyntaxError,
    Statement,
    Word,
    commands,
    parse,
    within,
)

# What starts ranks. Where a script has none of these, its programs themselves are the work.
LAUNCHERS = frozenset(
    "srun mpirun mpiexec mpiexec.hydra prun jsrun ibrun aprun flux torchrun accelerate deepspeed horovodrun composer torchx "
    "pdsh clush".split()
)
_PROGRAMS = frozenset("apptainer singularity enroot podman docker julia".split())
_WRAPPERS = frozenset(
    "env nohup exec command time timeout nice ionice stdbuf numactl taskset setsid chrt unbuffer".split()
)
# Started by srun they prepare or look; their exit code is not the run's.
_LOOKERS = frozenset(
    "hostname nvidia-smi rocm-smi echo printf true date mkdir ls cp rm cat env printenv uname lscpu free df test sleep "
    "ibstat ulimit which id pwd find du touch".split()
)
# Options of srun that take no value, or only one after `=` (srun.1).
_SRUN_ALONE = frozenset(
    "bcast contiguous disable-status exact exclusive hold immediate interactive kill-on-bad-exit label multi-prog "
    "no-allocate no-kill overcommit overlap oversubscribe preserve-env propagate pty quiet quit-on-interrupt "
    "reboot resv-ports spread-job unbuffered use-min-nodes verbose whole H I K O Q X Z E k l s u v".split()
)
_SHELL_NAMES = frozenset({"sh", "bash", "dash", "ksh", "zsh"})


@dataclass(frozen=True, slots=True)
class Shell:
    """A script, or one that stands in it as `bash -c '...'` (`nested`). Lines count from 1 in the file."""

    sequence: Sequence
    first_line: int
    last_line: int
    nested: bool = False
    errexit: bool = False
    pipefail: bool = False
    flat: tuple[Command, ...] = ()
    """Every command in the order in which it is written, those inside of compound ones too."""
    place: Mapping[int, int] = field(default_factory=dict)
    """Where in `flat` a command is, by its `id`."""
    launches: bool = False
    """Has a launcher; otherwise any program that computes is work."""
    functions: Mapping[str, Sequence] = field(default_factory=dict)
    """What stands between the braces of each."""
    working_functions: frozenset[str] = frozenset()
    changes: tuple[tuple[int, str, bool], ...] = field(default=())
    """(index in `flat`, option, on) of each `set`."""

    def option_at(self, name: str, command: Command) -> bool:
        """Whether `pipefail` or `errexit` is on when `command` starts, going by the order in which the script is written."""
        here = self.place[id(command)]
        state = self.pipefail if name == "pipefail" else self.errexit
        for at, option, on in self.changes:
            if option == name and at < here:
                state = on
        return state

    def after(self, command: Command) -> tuple[Command, ...]:
        """All that is written after `command` and what is inside of it."""
        here = self.place[id(command)]
        return self.flat[here + sum(1 for _ in within(command)) :]

    def is_work(self, command: Command) -> bool:
        """Whether the exit code of this command is the run's; of a compound one, whether any of its parts' is."""
        if command.kind == "function":
            return False
        return any(self._starts_work(each) for each in within(command) if each.kind == "simple")

    def _starts_work(self, command: Command) -> bool:
        program = program_of(command)
        if not program:
            return False
        name = program[0].value.rpartition("/")[2]
        if name in self.working_functions:
            return True
        return is_launch(program) if self.launches else self.computes(command)

    def computes(self, command: Command) -> bool:
        """Starts a program that may be the work, with a launcher or without."""
        program = program_of(command)
        if not program or _only_looks(program):
            return False
        name = program[0].value.rpartition("/")[2]
        return bool(
            is_launch(program)
            or name in self.working_functions
            or re.fullmatch(r"python[\d.]*", name)
            or name in _PROGRAMS
            or re.search(r"\.(py|sh)$", name)
            or (name in _SHELL_NAMES and len(program) > 1)
            or (program[0].text.lstrip('"').startswith("$") and not program[0].text.startswith("$("))
        )


def shells_of(text: str) -> tuple[Shell, ...]:
    """The script and all that stand in it, in order.

    Raises: ShellSyntaxError for the script itself; one inside of it that cannot be read is left out.
    """
    first = text.split("\n", 1)[0]
    flags = re.findall(r"\s-([a-z]+)", first) if first.startswith("#!") else []
    outer = _shell(parse(text), 1, text.count("\n") + 1, errexit=any("e" in flag for flag in flags))
    return outer, *_nested(outer)


def _nested(outer: Shell) -> Iterator[Shell]:
    for command in outer.flat:
        for at, word in enumerate(command.words):
            if word.value.rpartition("/")[2] not in _SHELL_NAMES:
                continue
            flags, script = _dash_c(command.words[at + 1 :])
            if script is None:
                continue
            try:
                sequence = parse("\n" * (script.line - 1) + script.value)
            except ShellSyntaxError:
                continue  # what is left of it depends on what is expanded in it
            last = script.line + script.text.count("\n")
            inner = _shell(
                sequence, script.line, last, nested=True, errexit=bool(re.search(r"(^| )-\w*e", flags)),
                pipefail="pipefail" in flags,
            )  # fmt: skip
            yield inner
            yield from _nested(inner)


def _dash_c(words: tuple[Word, ...]) -> tuple[str, Word | None]:
    """The options before the script of `bash -c`, and the script."""
    given: list[str] = []
    for at, word in enumerate(words):
        if not word.value.startswith(("-", "+")) and not (given and given[-1].endswith("o")):
            has_c = any(re.fullmatch(r"-\w*c\w*", each) for each in given)
            return " ".join(given), word if has_c else None
        given.append(word.value)
        if at > 6:
            break
    return "", None


def _shell(
    sequence: Sequence, first: int, last: int, *, nested: bool = False, errexit: bool = False, pipefail: bool = False
) -> Shell:
    flat = tuple(commands(sequence))
    shell = Shell(
        sequence, first, last, nested, errexit, pipefail, flat, place={id(command): at for at, command in enumerate(flat)},
        launches=any(is_launch(program_of(command)) for command in flat), changes=tuple(_set_changes(flat)),
    )  # fmt: skip
    bodies = {each.words[0].value: each.bodies[0] for each in flat if each.kind == "function"}
    calls = {
        name: {program[0].value for program in map(program_of, commands(body)) if program}
        for name, body in bodies.items()
    }
    working = found = {name for name, body in bodies.items() if any(map(shell._starts_work, commands(body)))}
    while found:
        found = {name for name, called in calls.items() if called & found} - working
        working = working | found
    inside = {name: body[0].pipelines[0].commands[0] for name, body in bodies.items()}
    functions = {name: group.bodies[0] if group.kind in {"{", "("} else bodies[name] for name, group in inside.items()}
    return replace(shell, working_functions=frozenset(working), functions=functions)


def _set_changes(flat: tuple[Command, ...]) -> Iterator[tuple[int, str, bool]]:
    for at, command in enumerate(flat):
        words = [word.value for word in command.words]
        if command.kind != "simple" or not words or words[0] != "set":
            continue
        for number, word in enumerate(words[1:], 1):
            if re.fullmatch(r"[-+][a-zA-Z]+", word):
                if "e" in word:
                    yield at, "errexit", word[0] == "-"
                if word.endswith("o") and number + 1 < len(words):
                    yield at, words[number + 1], word[0] == "-"


def _is_for_env(words: list[Word]) -> bool:
    """A variable for the program, or what may become options or variables."""
    return "=" in words[0].value or (words[0].value.startswith("${!") and len(words) > 1)


def program_of(command: Command) -> tuple[Word, ...]:
    """The words from the program on, without `env A=1`, `timeout 5m`, `exec` and the like before it; empty where it is
    no simple command."""
    words = list(command.words) if command.kind == "simple" else []
    while words and words[0].value.rpartition("/")[2] in _WRAPPERS:
        wrapper = words.pop(0).value
        while words and (words[0].value.startswith("-") or (wrapper == "env" and _is_for_env(words))):
            option = words.pop(0).value
            if wrapper == "env" and option in {"-u", "--unset", "-C", "--chdir"} and len(words) > 1:
                words.pop(0)
            if wrapper in {"nice", "ionice", "taskset"} and re.fullmatch(r"-\w", option) and len(words) > 1:
                words.pop(0)
        if wrapper.endswith("timeout") and words:
            words.pop(0)
    return tuple(words)


_LOOKS = re.compile(r"(-V+|--version|-h|--help|-m (pip3?|venv|ensurepip|site)\b.*)", re.DOTALL)
_TRIES = re.compile(r"\s*(import|from|print|assert|sys\.exit|exit|quit)\b[^;\n]*")


def _only_looks(program: tuple[Word, ...]) -> bool:
    """`python --version`, `python -m pip`, `python -c 'import x'`."""
    arguments = [word.value for word in program[1:]]
    if arguments[:1] == ["-c"] and len(arguments) > 1 and "python" in program[0].value:
        return all(_TRIES.fullmatch(each) or not each.strip() for each in re.split(r"[;\n]", arguments[1]))
    return _LOOKS.fullmatch(" ".join(arguments)) is not None


def is_launch(program: tuple[Word, ...]) -> bool:
    """Starts ranks, and not just a look at the nodes."""
    if not program or program[0].value.rpartition("/")[2] not in LAUNCHERS or _only_looks(program):
        return False
    if program[0].value.rpartition("/")[2] != "srun":
        return True
    rest = srun_pairs(program)[1]
    return not rest or rest[0].value.rpartition("/")[2] not in _LOOKERS


_VARIABLE = re.compile(r'"?\$\{?(\w+)(\[[@*]\])?\}?"?')


def srun_pairs(program: tuple[Word, ...]) -> tuple[list[tuple[Word, Word | None]], tuple[Word, ...]]:
    """Options of srun with the words that are their values, and the command. A variable where an option may stand is a pair
    without value, unless nothing follows it: then it is the command."""
    pairs: list[tuple[Word, Word | None]] = []
    rest = list(program[1:])
    while rest and (rest[0].value.startswith("-") or (len(rest) > 1 and variable_in(rest[0]))):
        word = rest.pop(0)
        option = word.value
        name = option.lstrip("-")
        has_value = "=" in option or (not option.startswith("--") and len(name) > 1)
        takes = option.startswith("-") and not has_value and name not in _SRUN_ALONE and rest
        pairs.append((word, rest.pop(0) if takes else None))
    return pairs, tuple(rest)


def variable_in(word: Word) -> str:
    """The name, where the word is one variable and nothing else."""
    match = _VARIABLE.fullmatch(word.text)
    return match[1] if match else ""


def srun_options(program: tuple[Word, ...]) -> list[str]:
    return [word.value for pair in srun_pairs(program)[0] for word in pair if word is not None]


def pipelines(sequence: Sequence) -> Iterator[Pipeline]:
    """Every pipeline in order, those inside of compound commands too."""
    for statement in sequence:
        for pipeline in statement.pipelines:
            yield pipeline
            for command in pipeline.commands:
                yield from pipelines(command.condition)
                for body in command.bodies:
                    yield from pipelines(body)


def statements(sequence: Sequence, *, into_functions: bool = True) -> Iterator[Statement]:
    for statement in sequence:
        yield statement
        for pipeline in statement.pipelines:
            for command in pipeline.commands:
                if command.kind == "function" and not into_functions:
                    continue
                yield from statements(command.condition, into_functions=into_functions)
                for body in command.bodies:
                    yield from statements(body, into_functions=into_functions)


def texts(command: Command) -> Iterator[str]:
    """All that is written in a command, and in those inside of it."""
    for each in within(command):
        for word in (*each.words, *each.assignments, *(redirect.target for redirect in each.redirects)):
            yield word.text
