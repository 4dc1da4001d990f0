"""The words of a shell script: quotes, substitutions, here-documents, comments, continuation lines."""

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass, field

from krea_runner.errors import KreaRunnerError

_BLANK = " \t"
META = frozenset(" \t\n;&|()<>")
_OPERATOR = re.compile(r";;&|&>>|<<<|<<-|;;|;&|&&|\|\||\|&|&>|<<|>>|<&|>&|<>|>\||[;&|()<>]")
_PLAIN = re.compile(r"[\w./=:,%-]+", re.ASCII)  # what stands for itself wherever it is in a word
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?\+?=")


class ShellSyntaxError(KreaRunnerError):
    """`line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Word:
    """`text` as it stands; `value` without quotes, expansions still in it."""

    text: str
    value: str
    line: int
    expands: bool = False
    """Holds `$` or a backtick outside single quotes: `value` is not what the shell will see."""


@dataclass(slots=True)
class WordReader(ABC):
    text: str
    at: int = 0
    here_documents: list[tuple[str, bool]] = field(default_factory=list)
    line_ends: list[int] = field(init=False)

    @abstractmethod
    def sequence(self) -> object:
        """Past the statements up to a `)` or the end: what stands in `$(...)` is a script of its own."""

    # ------------------------------------------------------------------------------------------------------- characters

    def __post_init__(self) -> None:
        self.line_ends = [match.start() for match in re.finditer("\n", self.text)]

    @property
    def line(self) -> int:
        return bisect_left(self.line_ends, self.at) + 1

    def error(self, message: str) -> ShellSyntaxError:
        return ShellSyntaxError(message, self.line)

    def looking_at(self, word: str) -> bool:
        return self.text.startswith(word, self.at)

    def blanks(self) -> None:
        """Skips blanks, continuation lines and a comment."""
        while self.at < len(self.text):
            if self.text[self.at] in _BLANK:
                self.at += 1
            elif self.looking_at("\\\n"):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def newlines(self) -> bool:
        """Skips line ends, with the here-documents that begin after one; whether there was any."""
        seen = False
        self.blanks()
        while self.looking_at("\n"):
            seen = True
            self.at += 1
            for delimiter, tabs in self.here_documents:
                self._here_document(delimiter, tabs)
            self.here_documents.clear()
            self.blanks()
        return seen

    def _here_document(self, delimiter: str, tabs: bool) -> None:
        while self.at < len(self.text):
            end = self.text.find("\n", self.at)
            row = self.text[self.at :] if end < 0 else self.text[self.at : end]
            self.at = len(self.text) if end < 0 else end + 1
            if (row.lstrip("\t") if tabs else row) == delimiter:
                return

    def operator(self) -> str:
        """The operator that begins here, or nothing."""
        match = _OPERATOR.match(self.text, self.at)
        return match[0] if match else ""

    def take(self, *wanted: str) -> str:
        self.blanks()
        found = self.operator()
        if found not in wanted:
            return ""
        self.at += len(found)
        return found

    def expect(self, wanted: str, opened: str) -> None:
        self.newlines()
        if self.peek_word() == wanted and wanted not in "()":
            self.word()
        elif not self.take(wanted):
            raise self.error(f"{opened} without its {wanted}")

    # ------------------------------------------------------------------------------------------------------------ words

    def peek_word(self) -> str:
        """The text up to the next metacharacter: enough to know a reserved word."""
        self.blanks()
        match = re.compile(r"[^\s;&|()<>]*").match(self.text, self.at)
        return match[0] if match else ""

    def word(self) -> Word:
        self.blanks()
        start, line = self.at, self.line
        value: list[str] = []
        expands = False
        while self.at < len(self.text):
            char = self.text[self.at]
            begin = self.at
            if plain := _PLAIN.match(self.text, begin):
                self.at = plain.end()
                value.append(plain[0])
            elif char == "\\":
                self.at = min(self.at + 2, len(self.text))
                value.append("" if self.text[begin + 1 : self.at] == "\n" else self.text[begin + 1 : self.at])
            elif char == "'" or self.looking_at("$'"):
                value.append(self._single_quoted())
            elif char == '"' or self.looking_at('$"'):
                inner = self._double_quoted()
                expands |= re.search(r"(?<!\\)[$`]", inner) is not None
                value.append(re.sub(r'\\([$`"\\]|\n)', lambda match: match[1].strip("\n"), inner))
            elif char in "$`" or self.looking_at("<(") or self.looking_at(">("):
                self.expansion()
                expands = True
                value.append(self.text[begin : self.at])
            elif self._is_group(start):
                self.at = self.text.index("(", self.at)
                self.balanced("(", ")")
                value.append(self.text[begin : self.at])
            elif char in META:
                break
            elif char == "[" and self._is_subscript(start):
                self.balanced("[", "]")
                value.append(self.text[begin : self.at])
            else:
                self.at += 1
                value.append(char)
        if self.at == start:
            raise self.error(f"unexpected {self.text[self.at : self.at + 1] or 'end of the script'!r}")
        return Word(self.text[start : self.at], "".join(value), line, expands)

    def _is_group(self, start: int) -> bool:
        """`name=(` or an extended pattern such as `+(`."""
        if self.looking_at("(") and self.at > start:
            return ASSIGNMENT.fullmatch(self.text[start : self.at]) is not None
        return self.at + 1 < len(self.text) and self.text[self.at] in "?*+@!" and self.text[self.at + 1] == "("

    def _is_subscript(self, start: int) -> bool:
        return re.fullmatch(r"[A-Za-z_]\w*", self.text[start : self.at]) is not None and (
            re.compile(r"\[[^\n]*?\]\+?=").match(self.text, self.at) is not None
        )

    def _single_quoted(self) -> str:
        dollar = self.text[self.at] == "$"
        begin = self.at + 1 + dollar
        pattern = r"(?:[^'\\]|\\.)*'" if dollar else r"[^']*'"
        match = re.compile(pattern, re.DOTALL).match(self.text, begin)
        if match is None:
            raise self.error("a ' that is never closed")
        self.at = match.end()
        return self.text[begin : self.at - 1]

    def _double_quoted(self) -> str:
        """What stands between the quotes."""
        opened = self.error('a " that is never closed')
        self.at += 1 + (self.text[self.at] == "$")
        begin = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return self.text[begin : self.at - 1]
            if char == "\\":
                self.at += 2
            elif char in "$`":
                self.expansion(quoted=True)
            else:
                self.at += 1
        raise opened

    def expansion(self, *, quoted: bool = False) -> None:
        """Past `$x`, `${...}`, `$(...)`, `$((...))`, `$[...]`, a backtick's or `<(...)`."""
        if self.looking_at("$(("):
            begin = self.at
            self.at += 3
            if self._arithmetic():
                return
            self.at = begin
        if self.looking_at("$(") or self.looking_at("<(") or self.looking_at(">("):
            self.at += 2
            self._substitution()
        elif self.looking_at("${"):
            self.at += 1
            self.balanced("{", "}", quoted=quoted)
        elif self.looking_at("$["):
            self.at += 1
            self.balanced("[", "]")
        elif self.looking_at("`"):
            match = re.compile(r"`(?:[^`\\]|\\.)*`", re.DOTALL).match(self.text, self.at)
            if match is None:
                raise self.error("a ` that is never closed")
            self.at = match.end()
        else:
            self.at += 1

    def _substitution(self) -> None:
        """Past the `)` that closes what has just been opened; here-documents inside are its own."""
        outer, self.here_documents = self.here_documents, []
        opened = self.error("a ( that is never closed")
        self.sequence()
        self.newlines()
        if not self.take(")"):
            raise opened
        self.here_documents = outer

    def _arithmetic(self) -> bool:
        """Past the `))` of what has just been opened; False where it is no arithmetic but a subshell in a subshell."""
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 2
            elif char == '"':
                self._double_quoted()
            elif char in "$`":
                self.expansion()
            elif char == ")" and depth == 0:
                closed = self.looking_at("))")
                self.at += 2
                return closed
            else:
                depth += (char == "(") - (char == ")")
                self.at += 1
        return False

    def balanced(self, left: str, right: str, *, quoted: bool = False) -> None:
        """Past the `right` that closes the `left` here. Within double quotes a ' is only a character."""
        start = self.error(f"a {left} that is never closed")
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 2
            elif (char == "'" and not quoted) or (self.looking_at("$'") and not quoted):
                self._single_quoted()
            elif char == '"':
                self._double_quoted()
            elif char in "$`":
                self.expansion(quoted=quoted)
            elif char == "#" and left == "(" and self.text[self.at - 1] in " \t\n":
                self.blanks()
            else:
                depth += (char == left) - (char == right)
                self.at += 1
                if depth == 0:
                    return
        raise start
