"""The reader of shell scripts, held against bash: what bash reads, it reads; what it calls a pipe, bash runs as one."""

import subprocess
import time
from pathlib import Path

import pytest

from krea_runner.launch.shell import ShellSyntaxError, commands, parse


def shape(text: str) -> list[str]:
    """Kind, or the words, of each command in order."""
    return [
        " ".join(word.text for word in each.words) if each.kind == "simple" else each.kind
        for each in commands(parse(text))
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b; c & d", ["a b", "c", "d"]),
        ("a 'x; y' \"z | $(b | c)\" # d", ["a 'x; y' \"z | $(b | c)\""]),
        ("a \\\n  b", ["a b"]),
        ("a <<E | b\nc | d\nE\ne", ["a", "b", "e"]),
        ("a <<-'E' <<F\n\tx\n\tE\ny\nF\nb", ["a", "b"]),
        ("if a; then b; elif c; then d; else e; fi", ["if", "a", "b", "c", "d", "e"]),
        ("for x in 1 2; do a; done", ["for", "a"]),
        ("for x\ndo a; done", ["for", "a"]),
        ("for ((i = 0; i < 3; i++)); do a; done", ["for", "a"]),
        ("while a; do b; done < <(c | d)", ["while", "a", "b"]),
        ("case $x in (a|b) c;; d) e;& *) f; esac", ["case", "c", "e", "f"]),
        ("f() { a; }; function g { b; }; f", ["function", "{", "a", "function", "{", "b", "f"]),
        ("(a; (b))", ["(", "a", "(", "b"]),
        ("((x = (1 | 2)))", ["(("]),
        ("((a); b)", ["(", "(", "a", "b"]),
        ("[[ $a =~ ^(x|y)$ && -f b ]] && c", ["[[", "c"]),
        ("x=( a 'b | c' # d\n e ) y=1 f", ["f"]),
        ("x=$(case a in a) b;; esac) c", ["c"]),
        ("a ${x:-'y'} ${!P@} $((1 | 2)) `b | c`", ["a ${x:-'y'} ${!P@} $((1 | 2)) `b | c`"]),
        ("! a | b", ["a", "b"]),
        ("time -p a", ["a"]),
        ("{ a; } 2>&1 >f &>>g", ["{", "a"]),
        ("echo }", ["echo }"]),
        ("echo a#b", ["echo a#b"]),
    ],
)
def test_commands_are_found_in_order(text: str, expected: list[str]) -> None:
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).returncode == 0
    assert shape(text) == expected


@pytest.mark.parametrize(
    "text",
    ["if a; then b", "a 'b", 'a "b', "a $(b", "a )", "( a", "case x in a) b", "{ a", "done", "a | ", "for x in 1; a"],
)
def test_what_bash_refuses_is_an_error_with_its_line(text: str) -> None:
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).returncode != 0
    with pytest.raises(ShellSyntaxError) as error:
        parse("echo\n" + text)
    assert error.value.line == 2


def test_words_lose_their_quotes_and_keep_their_expansions() -> None:
    [command] = commands(parse("""a 'b c'd "e $f" \\g $'h' "\\$i" """))
    assert [(word.value, word.expands) for word in command.words] == [
        ("a", False), ("b cd", False), ("e $f", True), ("g", False), ("h", False), ("$i", False),
    ]  # fmt: skip


def test_lines_are_those_of_the_file() -> None:
    text = "a\n\nb 'x\ny'\ncat <<E\nz\nE\nc\n"
    assert [(each.words[0].text, each.line) for each in commands(parse(text))] == [
        ("a", 1),
        ("b", 3),
        ("cat", 5),
        ("c", 8),
    ]


def scripts_of_this_machine() -> list[Path]:
    found = []
    for folder in ("/usr/bin", "/usr/sbin", "/etc/init.d", "/usr/lib/git-core"):
        for path in sorted(Path(folder).glob("*")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 60_000:
                with path.open("rb") as file:
                    if file.readline(80).rstrip().rpartition(b"/")[2] in {
                        b"sh",
                        b"bash",
                        b"env bash",
                        b"sh -e",
                        b"bash -e",
                    }:
                        found.append(path)
    return found


def test_every_script_of_this_machine_that_bash_can_read_is_read() -> None:
    failed = {}
    for path in scripts_of_this_machine():
        try:
            parse(path.read_text(errors="replace"))
        except ShellSyntaxError as error:
            if subprocess.run(["bash", "-n", path], capture_output=True, check=False).returncode == 0:
                failed[str(path)] = f"line {error.line}: {error}"
    assert failed == {}


def test_a_script_nested_beyond_reason_is_an_error_not_a_crash() -> None:
    with pytest.raises(ShellSyntaxError):
        parse("(" * 100_000)


def test_a_command_costs_no_more_for_what_stands_below_it() -> None:
    def seconds(text: str) -> float:
        start = time.process_time()
        parse(text)
        return time.process_time() - start

    above, below = "a\n" * 2_000, f"echo '{'x' * 10_000_000}'"
    assert seconds(above + below) < 5 * (seconds(above) + seconds(below))
