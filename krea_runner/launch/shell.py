"""The shape of a shell script: which commands are piped, chained, put in the background or nested in what.

Reads what bash reads (quotes, here-documents, continuation lines, `case`, `[[`, `((`, arrays, substitutions) and expands
nothing. Not a shell's whole grammar checker: what bash refuses may be read here, but not the other way round.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from krea_runner.errors import KreaRunnerError

_BLANK = " \t"
_META = frozenset(" \t\n;&|()<>")
_OPERATORS = (";;&", "&>>", "<<<", "<<-", ";;", ";&", "&&", "||", "|&", "&>", "<<", ">>", "<&", ">&", "<>", ">|")
_REDIRECTS = frozenset({"&>>", "<<<", "<<-", "&>", "<<", ">>", "<&", ">&", "<>", ">|", "<", ">"})
_CLOSERS = frozenset({"then", "do", "done", "fi", "elif", "else", "esac", "}"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?\+?=")


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


@dataclass(frozen=True, slots=True)
class Redirect:
    operator: str
    descriptor: str
    target: Word


@dataclass(frozen=True, slots=True)
class Command:
    """`kind` is `simple`, or the word that begins the compound: `(`, `{`, `if`, `for`, `while`, `until`, `case`, `select`,
    `function`, `coproc`, `((`, `[[`. `words` of a simple command have no assignments; of a function its name; of `((` and `[[`
    all that is in them as one word."""

    kind: str
    line: int
    words: tuple[Word, ...] = ()
    assignments: tuple[Word, ...] = ()
    redirects: tuple[Redirect, ...] = ()
    condition: "Sequence" = ()
    bodies: "tuple[Sequence, ...]" = ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    commands: tuple[Command, ...]
    negated: bool = False

    @property
    def line(self) -> int:
        return self.commands[0].line


@dataclass(frozen=True, slots=True)
class Statement:
    """Pipelines with `&&` or `||` between them, which bind alike and to the left."""

    pipelines: tuple[Pipeline, ...]
    operators: tuple[str, ...] = ()
    background: bool = False

    @property
    def line(self) -> int:
        return self.pipelines[0].line


Sequence = tuple[Statement, ...]


def parse(text: str) -> Sequence:
    """Raises: ShellSyntaxError."""
    try:
        reader = _Reader(text)
        found = reader.sequence()
        reader.blanks()
        if reader.at < len(text):
            raise reader.error(f"unexpected {text[reader.at]!r}")
    except RecursionError:
        raise ShellSyntaxError("nested too deeply", 1) from None
    return found


def commands(sequence: Sequence) -> Iterator[Command]:
    """Every command in order, those inside of compound ones too."""
    for statement in sequence:
        for pipeline in statement.pipelines:
            for command in pipeline.commands:
                yield from within(command)


def within(command: Command) -> Iterator[Command]:
    yield command
    yield from commands(command.condition)
    for body in command.bodies:
        yield from commands(body)


@dataclass(slots=True)
class _Reader:
    text: str
    at: int = 0
    here_documents: list[tuple[str, bool]] = field(default_factory=list)
    line_ends: list[int] = field(init=False)

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
        for word in _OPERATORS:
            if self.looking_at(word):
                return word
        char = self.text[self.at : self.at + 1]
        return char if char and char in ";&|()<>" else ""

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
            if char == "\\":
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
            elif char in _META:
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
            return _ASSIGNMENT.fullmatch(self.text[start : self.at]) is not None
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

    # ------------------------------------------------------------------------------------------------- lists, pipelines

    def sequence(self, *, until: frozenset[str] = frozenset()) -> Sequence:
        """Statements up to a word of `until`, a `)`, a `;;` or the end."""
        found: list[Statement] = []
        while True:
            self.newlines()
            if self.at >= len(self.text) or self.operator() in {")", ";;", ";&", ";;&"} or self.peek_word() in until:
                return tuple(found)
            statement = self._statement()
            self.blanks()
            if self.take("&"):
                statement = Statement(statement.pipelines, statement.operators, background=True)
            elif not self.take(";") and self.at < len(self.text) and self.text[self.at] not in "\n);":
                raise self.error(f"unexpected {self.operator() or self.peek_word()!r}")
            found.append(statement)

    def _statement(self) -> Statement:
        pipelines, operators = [self._pipeline()], []
        while operator := self.take("&&", "||"):
            self.newlines()
            operators.append(operator)
            pipelines.append(self._pipeline())
        return Statement(tuple(pipelines), tuple(operators))

    def _pipeline(self) -> Pipeline:
        negated = False
        while (word := self.peek_word()) in {"!", "time"}:
            self.word()
            negated ^= word == "!"
            if word == "time" and self.peek_word() == "-p":
                self.word()
        found = [self._command()]
        while self.take("|", "|&"):
            self.newlines()
            found.append(self._command())
        return Pipeline(tuple(found), negated)

    # --------------------------------------------------------------------------------------------------------- commands

    def _command(self) -> Command:
        self.blanks()
        line = self.line
        if self.looking_at("(("):
            begin = self.at
            self.at += 2
            if self._arithmetic():
                return self._ended(Command("((", line, (self._raw(begin, line),)))
            self.at = begin
        if self.take("("):
            body = self.sequence()
            self.expect(")", "(")
            return self._ended(Command("(", line, bodies=(body,)))
        word = self.peek_word()
        if word in _CLOSERS:
            raise self.error(f"unexpected {word!r}")
        if reader := _COMPOUND.get(word):
            self.word()
            return self._ended(reader(self, line))
        return self._simple(line)

    def _simple(self, line: int) -> Command:
        words: list[Word] = []
        assignments: list[Word] = []
        redirects: list[Redirect] = []
        while True:
            self.blanks()
            if redirect := self._redirect():
                redirects.append(redirect)
                continue
            if self.at >= len(self.text) or self.looking_at("\n") or (self.operator() and not self._is_substitution()):
                break
            word = self.word()
            if not words and _ASSIGNMENT.match(word.text):
                assignments.append(word)
                continue
            words.append(word)
            if len(words) == 1 and not assignments and re.match(r"[ \t]*\([ \t]*\)", self.text[self.at :]):
                self.at = self.text.index(")", self.at) + 1
                return self._function_body(word, line)
        if not words and not assignments and not redirects:
            raise self.error(f"unexpected {self.operator() or 'end of the script'!r}")
        return Command("simple", line, tuple(words), tuple(assignments), tuple(redirects))

    def _is_substitution(self) -> bool:
        return self.looking_at("<(") or self.looking_at(">(")

    def _redirect(self) -> Redirect | None:
        match = re.compile(r"(\d+|\{\w+\})?(?=[<>]|&>)").match(self.text, self.at)
        if match is None or (self._is_substitution() and not match[0]):
            return None
        self.at = match.end()
        operator = self.operator()
        if operator not in _REDIRECTS:
            self.at = match.start()
            return None
        self.at += len(operator)
        target = self.word()
        if operator in {"<<", "<<-"}:
            self.here_documents.append((target.value, operator == "<<-"))
        return Redirect(operator, match[0], target)

    def _ended(self, command: Command) -> Command:
        """With the redirects that follow a compound command."""
        redirects = []
        self.blanks()
        while redirect := self._redirect():
            redirects.append(redirect)
            self.blanks()
        return Command(
            command.kind, command.line, command.words, (), tuple(redirects), command.condition, command.bodies
        )

    def _function_body(self, name: Word, line: int) -> Command:
        self.newlines()
        body = Statement((Pipeline((self._command(),)),))
        return Command("function", line, (name,), bodies=((body,),))

    def _function(self, line: int) -> Command:
        name = self.word()
        if self.take("("):
            self.expect(")", "(")
        return self._function_body(name, line)

    def _group(self, line: int) -> Command:
        body = self.sequence(until=frozenset({"}"}))
        self.expect("}", "{")
        return Command("{", line, bodies=(body,))

    def _if(self, line: int) -> Command:
        """`condition` is the first one; those of `elif` are bodies, each before its own."""
        condition = self.sequence(until=frozenset({"then"}))
        self.expect("then", "if")
        branches = frozenset({"elif", "else", "fi"})
        bodies = [self.sequence(until=branches)]
        while (word := self.peek_word()) in {"elif", "else"}:
            self.word()
            if word == "elif":
                bodies.append(self.sequence(until=frozenset({"then"})))
                self.expect("then", "elif")
            bodies.append(self.sequence(until=branches))
        self.expect("fi", "if")
        return Command("if", line, condition=condition, bodies=tuple(bodies))

    def _loop(self, line: int, kind: str) -> Command:
        condition = self.sequence(until=frozenset({"do"}))
        return Command(kind, line, condition=condition, bodies=(self._do_group(kind),))

    def _for(self, line: int) -> Command:
        words: list[Word] = []
        self.blanks()
        if self.looking_at("(("):
            self.at += 2
            self._arithmetic()
        else:
            self.word()
            self.newlines()
            if self.peek_word() == "in":
                self.word()
                self.blanks()
                while not (self.at >= len(self.text) or self.looking_at("\n") or self.operator() == ";"):
                    words.append(self.word())
                    self.blanks()
        self.take(";")
        return Command("for", line, tuple(words), bodies=(self._do_group("for"),))

    def _do_group(self, kind: str) -> Sequence:
        self.newlines()
        if self.peek_word() == "{":  # for x; { ...; }
            self.word()
            return self._group(self.line).bodies[0]
        self.expect("do", kind)
        body = self.sequence(until=frozenset({"done"}))
        self.expect("done", "do")
        return body

    def _case(self, line: int) -> Command:
        subject = self.word()
        self.expect("in", "case")
        bodies: list[Sequence] = []
        while True:
            self.newlines()
            if self.peek_word() == "esac":
                self.word()
                return Command("case", line, (subject,), bodies=tuple(bodies))
            self.take("(")
            self.word()
            while self.take("|"):
                self.word()
            self.expect(")", "case pattern")
            bodies.append(self.sequence(until=frozenset({"esac"})))
            if not self.take(";;", ";&", ";;&") and self.peek_word() != "esac":
                raise self.error("case without its esac")

    def _raw(self, begin: int, line: int) -> Word:
        text = self.text[begin : self.at]
        return Word(text, text, line, expands=True)

    def _test(self, line: int) -> Command:
        begin = self.at
        while True:
            self.newlines()
            if self.at >= len(self.text):
                raise self.error("[[ without its ]]")
            if self.peek_word() == "]]":
                self.word()
                return Command("[[", line, (self._raw(begin, line),))
            if self.text[self.at] in _META:
                self.at += 1
            else:
                self.word()

    def _coprocess(self, line: int) -> Command:
        if re.compile(r"\s*[A-Za-z_]\w*\s*[({]").match(self.text, self.at):
            self.word()
        return Command("coproc", line, bodies=((Statement((Pipeline((self._command(),)),)),),))


_COMPOUND = {
    "{": _Reader._group,
    "if": _Reader._if,
    "while": lambda reader, line: reader._loop(line, "while"),
    "until": lambda reader, line: reader._loop(line, "until"),
    "for": _Reader._for,
    "select": _Reader._for,
    "case": _Reader._case,
    "function": _Reader._function,
    "[[": _Reader._test,
    "coproc": _Reader._coprocess,
}
