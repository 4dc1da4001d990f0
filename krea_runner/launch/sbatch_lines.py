"""The `#SBATCH` lines of a script, read as sbatch reads them (22.05.8)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from krea_runner.config.keys import OWNED, SBATCH

_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help", "I": "immediate",
    "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes",
    "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos", "S": "core-spec",
    "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose", "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_LONG = frozenset({word.replace("_", "-") for word in (*SBATCH, *OWNED)} | set(_SHORT.values()))
# These take no value, or one only after `=` (sbatch.1).
_ALONE = frozenset(
    "contiguous exclusive help hold ignore-pbs immediate no-kill no-requeue overcommit oversubscribe parsable quiet reboot "
    "requeue spread-job use-min-nodes verbose version wait".split()
)
_WORD = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|[^\s#"'])+""")


@dataclass(frozen=True, slots=True)
class Option:
    """`name` is the long one; `line` counts from 1."""

    name: str
    value: str
    line: int


def header_end(lines: Sequence[str]) -> int:
    """The first line (from 0) that is neither blank nor a comment: sbatch reads no options from there on."""
    return next((at for at, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), len(lines))


def read_options(lines: Sequence[str]) -> list[Option]:
    """In the order of the script; of two that are alike the last one holds."""
    end = header_end(lines)
    numbered = ((number, line) for number, line in enumerate(lines[:end], 1) if line.startswith("#SBATCH"))
    return [Option(*pair, number) for number, line in numbered for pair in option_pairs(words(line[7:]))]


def words(text: str) -> list[str]:
    """Split at blanks up to a `#`, without the quotes."""
    found: list[str] = []
    at = 0
    while match := re.compile(r"\s*").match(text, at):
        at = match.end()
        word = _WORD.match(text, at)
        if word is None:
            return found
        found.append(re.sub(r'"((?:\\.|[^"\\])*)"|\'([^\']*)\'', _unquoted, word[0]))
        at = word.end()
    return found


def _unquoted(match: re.Match[str]) -> str:
    return match[2] if match[1] is None else re.sub(r"\\(.)", r"\1", match[1])


def option_pairs(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(long name, value) of each option; without a value an empty one."""
    rest = list(given)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            written, equals, value = word[2:].partition("=")
            name = _whole(written)
            if not equals and name not in _ALONE and rest:
                value = rest.pop(0)
            yield name, value
        elif len(word) > 1 and word[0] == "-" and word[1] in _SHORT:
            name = _SHORT[word[1]]
            value = word[2:].removeprefix("=")
            yield name, rest.pop(0) if not value and name not in _ALONE and rest else value


def _whole(name: str) -> str:
    """getopt_long takes an option that is cut short, as long as only one begins so."""
    longer = [each for each in _LONG if each.startswith(name)]
    return longer[0] if name not in _LONG and len(longer) == 1 else name
