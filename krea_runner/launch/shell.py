"""The shape of a shell script: which commands are piped, chained, put in the background or nested in what.

Reads what bash reads (quotes, here-documents, continuation lines, `case`, `[[`, `((`, arrays, substitutions) and expands
nothing. Not a shell's whole grammar checker: what bash refuses may be read here, but not the other way round.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from krea_runner.launch.shell_words import ASSIGNMENT, META, ShellSyntaxError, Word, WordReader

__all__ = [
    "Command",
    "Pipeline",
    "Redirect",
    "Sequence",
    "ShellSyntaxError",
    "Statement",
    "Word",
    "commands",
    "parse",
    "within",
]

_REDIRECTS = frozenset({"&>>", "<<<", "<<-", "&>", "<<", ">>", "<&", ">&", "<>", ">|", "<", ">"})
_FUNCTION = re.compile(r"[ \t]*\([ \t]*\)")
_CLOSERS = frozenset({"then", "do", "done", "fi", "elif", "else", "esac", "}"})


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
class _Reader(WordReader):
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
            elif self.take(";") or self.at >= len(self.text) or self.text[self.at] in "\n);":
                pass
            elif self.peek_word() not in until:  # `fi fi` needs no `;` between
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
            if not words and ASSIGNMENT.match(word.text):
                assignments.append(word)
                continue
            words.append(word)
            if len(words) == 1 and not assignments and _FUNCTION.match(self.text, self.at):
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
            if self.text[self.at] in META:
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
