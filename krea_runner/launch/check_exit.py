"""Rules about exit codes and signals: does Slurm, and so whoever restarts the job, hear how the work ended?"""

import re
from collections.abc import Iterator

from krea_runner.launch.check import Hit, Job, Severity
from krea_runner.launch.check_shell import Shell, pipelines, program_of, statements, texts
from krea_runner.launch.shell import Command, Pipeline, Sequence, ShellSyntaxError, Statement, commands, parse, within
from krea_runner.launch.shell_words import ASSIGNMENT

# A right side of `||` that goes on as if nothing had happened.
_HARMLESS = frozenset("true : echo printf sleep date logger rm touch wait sync mail".split())
_ENDS = frozenset({"exit", "return", "false", "kill", "exec", "break"})
_DECIDES = frozenset({"exit", "return", "test", "[", "let"})
_STATUS = re.compile(r"\$\?|\$\{\?|PIPESTATUS")


def pipe_hides_exit(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        for pipeline in pipelines(shell.sequence):
            first = pipeline.commands[0]
            if len(pipeline.commands) < 2 or not any(shell.is_work(each) for each in pipeline.commands[:-1]):
                continue
            following = shell.after(pipeline.commands[-1])[:2]
            read = any("PIPESTATUS" in text for each in following for text in texts(each))
            if not read and not shell.option_at("pipefail", first):
                last = program_of(pipeline.commands[-1])
                yield Hit(pipeline.line, saw=f"the exit code is {last[0].value}'s" if last else "")


def or_hides_exit(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        for statement in statements(shell.sequence):
            yield from _or_true(shell, statement)


def _or_true(shell: Shell, statement: Statement) -> Iterator[Hit]:
    """`work || echo`, `work && echo || echo`; not `work && exit || echo`, after which only a failure goes on."""
    first = 0
    for at, operator in enumerate(statement.operators):
        if operator != "||":
            continue
        left, right, first = statement.pipelines[first : at + 1], statement.pipelines[at + 1], at + 1
        leaves = any(each.words and each.words[0].value in _ENDS for p in left for each in p.commands)
        if not leaves and any(_is_work(shell, each) for each in left) and _is_harmless(right):
            yield Hit(right.line, saw=f"`{program_words(right)}` is what counts")


def _is_harmless(pipeline: Pipeline) -> bool:
    """Nothing in it ends the script with an error or keeps the status."""
    found = [part for command in pipeline.commands for part in within(command) if part.kind == "simple"]
    named = [part for part in found if part.words]
    harmless = bool(named) and all(each.words[0].value in _HARMLESS or _ends_well(each) for each in named)
    return harmless and (len(named) == len(found) or any(map(_ends_well, named)))


def _ends_well(command: Command) -> bool:
    words = [word.value for word in command.words]
    return words[:1] in (["exit"], ["return"]) and words[1:] == ["0"]


def program_words(pipeline: Pipeline) -> str:
    first = next((part for part in within(pipeline.commands[0]) if part.words), None)
    return " ".join(word.text for word in first.words) if first else ""


def end_hides_exit(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        yield from _hidden_end(shell, shell.sequence)


def _hidden_end(
    shell: Shell,
    sequence: Sequence,
    beyond: Sequence = (),
    call: Statement | None = None,
    seen: set[str] | None = None,
) -> Iterator[Hit]:
    """The last statement that does the work, and whether what follows it still knows how it ended. `beyond` is what else
    may use a variable of it; `call` is what calls the function that this is the body of, `seen` the functions judged."""
    seen = set() if seen is None else seen
    waits = any(statement.background and _works(shell, statement) for statement in statements(shell.sequence))
    places = [
        at for at, statement in enumerate(sequence)
        if not statement.background and (_works(shell, statement) or (waits and _waits_for_one(statement)))
    ]  # fmt: skip
    for statement in (*(each for each in sequence if each.background), *(sequence[at] for at in places[-1:])):
        for name in sorted(_functions_called(shell, statement) - seen):
            seen.add(name)
            yield from _hidden_end(shell, shell.functions[name], shell.sequence, statement, seen)
    if not places:
        return
    work, rest = sequence[places[-1]], sequence[places[-1] + 1 :]
    command = work.pipelines[0].commands[0]
    if {part.kind for part in _parts(work)} & {"for", "while", "until", "select"} or any(_or_true(shell, work)):
        return  # a loop retries, or counts by itself; the other rule has said it
    if command.kind in {"if", "case"}:
        yield from _hidden_by_branch(shell, work, rest, beyond)
        return
    if command.kind in {"(", "{"} and len(work.pipelines) == 1 and len(work.pipelines[0].commands) == 1:
        outside = (*rest, *beyond) if command.kind == "{" else ()
        yield from _hidden_end(shell, command.bodies[0], outside, call, seen)
    if not rest or any(_handles(shell, part) for part in _parts(work)):
        return
    if not work.operators and _stops_at_failure(shell, command, call):
        return
    if len(work.pipelines) > 1 and work.operators[-1] == "||" and not _is_harmless(work.pipelines[-1]):
        return  # || something of the author's own
    yield from _hidden_after(shell, work, rest, beyond)


def _functions_called(shell: Shell, statement: Statement) -> set[str]:
    """Of those that do work."""
    programs = [program_of(part) for part in _parts(statement)]
    return {program[0].value for program in programs if program} & shell.working_functions


def _stops_at_failure(shell: Shell, command: Command, call: Statement | None) -> bool:
    """errexit; in a function that is called as a condition it does nothing (bash(1), set -e)."""
    if call is None:
        return shell.option_at("errexit", command)
    caller = call.pipelines[0].commands[0]
    if call.operators or call.pipelines[0].negated or caller.kind in {"if", "while", "until"}:
        return False
    return shell.option_at("errexit", command) or shell.option_at("errexit", caller)


def _hidden_after(shell: Shell, work: Statement, rest: Sequence, beyond: Sequence) -> Iterator[Hit]:
    caught = _caught(shell, rest[0])
    first = rest[0].pipelines[0].commands[0]
    if (first.words and first.words[0].value in {"exit", "return"} and not _ends_well(first)) or _ends_badly(rest):
        return
    if caught is not None and (not caught or _decides(caught, (*rest, *beyond))):
        return
    saw = f"the work, on line {work.line}, may have failed"
    yield Hit(rest[-1].line, saw=saw if caught is None else f"{saw}: its code is caught and never used")


def _hidden_by_branch(shell: Shell, work: Statement, rest: Sequence, beyond: Sequence) -> Iterator[Hit]:
    """`if srun ...; then ...; else echo failed; fi`: what is done where the work has failed, and below."""
    command = work.pipelines[0].commands[0]
    tested = [p for statement in command.condition for p in statement.pipelines if _is_work(shell, p)]
    if not tested:
        return
    bodies = command.bodies[:1] if tested[-1].negated else command.bodies[1:]
    failing = [
        *(part for body in bodies for part in commands(body)),
        *list(_parts(work))[1 + len(list(within(command))) :],
    ]
    kept = [match[1] for part in failing for word in part.assignments if (match := ASSIGNMENT.match(word.text))]
    if any(_handles(shell, part) for part in failing) or any(_decides(name, (*rest, *beyond)) for name in kept):
        return
    if any(map(_ends_well, failing)) or not _ends_badly(rest):
        yield Hit(command.line, saw="no branch ends with the code")


def _parts(statement: Statement) -> Iterator[Command]:
    for pipeline in statement.pipelines:
        for command in pipeline.commands:
            yield from within(command)


def _handles(shell: Shell, command: Command) -> bool:
    """It ends the script with an error, or reads the status. Inside a subshell `exit` ends the subshell, with its code."""
    if command.kind == "simple" and command.words and not _ends_well(command):
        name = command.words[0].value
        if name in _ENDS or any(_ends_script(part) for part in commands(shell.functions.get(name, ()))):
            return True
    return _reads_status(command) or any(_STATUS.search(word.text) for word in command.assignments)


def _ends_script(command: Command) -> bool:
    return bool(command.words) and command.words[0].value == "exit" and not _ends_well(command)


def _reads_status(command: Command) -> bool:
    """And goes by it: echo does not."""
    decides = command.kind != "simple" or (bool(command.words) and command.words[0].value in _DECIDES)
    return decides and any(_STATUS.search(word.text) for word in command.words)


def _caught(shell: Shell, statement: Statement) -> str | None:
    """The variable that takes the status, empty where something else goes by it; None where nothing does."""
    for part in _parts(statement):
        declares = part.words and part.words[0].value in {"local", "declare", "export", "readonly", "typeset"}
        for word in (*part.assignments, *(part.words if declares else ())):
            match = ASSIGNMENT.match(word.text)
            if match and _STATUS.search(word.text):
                return match[1]
        status = any(_STATUS.search(word.text) for word in part.words)
        if _reads_status(part) or (status and _handles(shell, part)):
            return ""
    return None


def _decides(name: str, sequence: Sequence) -> bool:
    """Whether anything but what prints uses the variable; `((` and `[[` may name it without `$`."""
    variable = re.compile(rf"\$\{{?#?{re.escape(name)}\b|^(\(\(|\[\[).*\b{re.escape(name)}\b", re.DOTALL)
    return any(variable.search(text) for each in sequence for text in _deciding_texts(each))


def _deciding_texts(statement: Statement) -> Iterator[str]:
    for part in _parts(statement):
        if not (part.words and part.words[0].value in {"echo", "printf", "logger"}):
            yield from (word.text for word in (*part.words, *part.assignments))


def _ends_badly(sequence: Sequence) -> bool:
    """With a code other than 0 whatever happens."""
    firsts = [each.pipelines[0].commands[0].words for each in sequence if len(each.pipelines) == 1]
    return any(
        len(words) > 1 and words[0].value in {"exit", "return"} and re.fullmatch(r"[1-9]\d*", words[1].value)
        for words in firsts
    )


def _works(shell: Shell, statement: Statement) -> bool:
    return any(_is_work(shell, pipeline) for pipeline in statement.pipelines)


def _is_work(shell: Shell, pipeline: Pipeline) -> bool:
    return any(shell.is_work(command) for command in pipeline.commands)


# ------------------------------------------------------------------------------------------------------------ background


def background_without_wait(job: Job) -> Iterator[Hit]:
    foreground = {id(shell): _programs_in_foreground(shell) for shell in job.shells}
    for shell, statement in _in_background(job):
        if _waits_after(shell, statement):
            continue
        last = shell.place[id(statement.pipelines[-1].commands[-1])]
        line = next((line for at, line in foreground[id(shell)] if at > last), 0)
        saw = f"ended with line {line}: right for what serves or watches that" if line else ""
        yield Hit(statement.line, saw=saw, severity=Severity.NOTE if line else None)


def _programs_in_foreground(shell: Shell) -> list[tuple[int, int]]:
    """Place and line of each that computes."""
    found = [each for statement in _foreground(shell.sequence) for p in statement.pipelines for each in p.commands]
    return [(shell.place[id(each)], each.line) for each in found if each.kind == "simple" and shell.computes(each)]


def _foreground(sequence: Sequence) -> Iterator[Statement]:
    """What is not in the background nor in a function, with what is inside of it."""
    for statement in sequence:
        if statement.background:
            continue
        yield statement
        for pipeline in statement.pipelines:
            for command in pipeline.commands:
                for inner in (command.condition, *(command.bodies if command.kind != "function" else ())):
                    yield from _foreground(inner)


def bare_wait_hides_exit(job: Job) -> Iterator[Hit]:
    for shell, statement in _in_background(job):
        waits = _waits_after(shell, statement)
        if waits and not any(len(wait.words) > 1 for wait in waits):
            yield Hit(waits[-1].line, saw=f"started on line {statement.line}")
            return


def _in_background(job: Job) -> Iterator[tuple[Shell, Statement]]:
    for shell in job.shells:
        for statement in statements(shell.sequence, into_functions=False):
            if statement.background and _works(shell, statement):
                yield shell, statement


def _waits_after(shell: Shell, statement: Statement) -> list[Command]:
    return [
        each
        for each in shell.after(statement.pipelines[-1].commands[-1])
        if each.words and each.words[0].value == "wait"
    ]


def _waits_for_one(statement: Statement) -> bool:
    words = statement.pipelines[-1].commands[-1].words
    return len(words) > 1 and words[0].value == "wait"


def idle_end(job: Job) -> Iterator[Hit]:
    """`sleep infinity`, `tail -f` as the last thing: nodes are kept after the work has died."""
    for shell in job.shells[:1]:
        last = shell.sequence[-1] if shell.sequence else None
        program = program_of(last.pipelines[-1].commands[0]) if last else ()
        text = " ".join(word.value for word in program)
        if last and not last.background and re.match(r"sleep (infinity|inf|\d+d|\d{5,})\b|tail (\S+ )*-\w*[fF]", text):
            yield Hit(last.line)


# --------------------------------------------------------------------------------------------------------------- signals


def _traps(shell: Shell) -> Iterator[tuple[Command, str, frozenset[str]]]:
    """Command, action and signals of each `trap` outside of functions."""
    for statement in statements(shell.sequence, into_functions=False):
        for pipeline in statement.pipelines:
            for command in pipeline.commands:
                words = [word.value for word in command.words]
                words = [word for word in words if word != "--"]
                if command.kind == "simple" and len(words) > 2 and words[0] == "trap" and words[1] != "-":
                    yield command, words[1], frozenset(signal_name(word) for word in words[2:])


_NUMBERS = {"0": "EXIT", "1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM", "18": "CONT"}


def signal_name(word: str) -> str:
    name = word.upper().removeprefix("SIG")
    return _NUMBERS.get(name, name)


def asked_signal(job: Job) -> tuple[str, str, int] | None:
    """(`B`, `R` or both or none, name, seconds before the limit) of --signal; 60 s unless given (sbatch.1)."""
    match = re.fullmatch(r"(?:([BR]+):)?(\w+)(?:@(\d+))?", job.option("signal") or "")
    return (match[1] or "", signal_name(match[2]), int(match[3] or 60)) if match else None


def trap_ignores_signal(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        for command, action, signals in _traps(shell):
            deadly = signals & {"TERM", "INT"}
            if action == "" and deadly and any(shell.is_work(each) for each in shell.after(command)):
                yield Hit(command.line, saw=f"SIG{min(deadly)} is ignored by the ranks too")


def trap_ends_well(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        for command, action, _ in _traps(shell):
            exits = [each for each in _surely_run(shell, parse_action(action)) if each.words[0].value == "exit"]
            if exits and _ends_well(exits[0]):
                yield Hit(command.line)


def parse_action(action: str) -> Sequence:
    """Of a trap; nothing where it cannot be read without expanding it."""
    try:
        return parse(action)
    except ShellSyntaxError:
        return ()


def _surely_run(shell: Shell, sequence: Sequence, seen: set[str] | None = None) -> Iterator[Command]:
    """Simple commands in order that hang on no condition, those in functions that are called too, once each."""
    seen = set() if seen is None else seen
    for statement in sequence:
        command = statement.pipelines[0].commands[0]
        if statement.background or len(statement.pipelines[0].commands) > 1:
            continue
        if command.kind == "{":
            yield from _surely_run(shell, command.bodies[0], seen)
        name = command.words[0].value if command.kind == "simple" and command.words else ""
        if name in shell.functions and name not in seen:
            seen.add(name)
            yield from _surely_run(shell, shell.functions[name], seen)
        elif name:
            yield command


def signal_misses_trap(job: Job) -> Iterator[Hit]:
    """In a script of ours the traps are for what comes from elsewhere; an empty one says that the ranks alone want it."""
    asked = asked_signal(job)
    for shell in job.shells[:1] if asked and "B" not in asked[0] and job.ours is None else ():
        for command, action, signals in _traps(shell):
            if asked and asked[1] in signals and action:
                fix = f"#SBATCH --signal=B:{asked[1]}@{asked[2]}"
                yield Hit(job.options["signal"].line, saw=f"the trap is on line {command.line}", fix=fix)


def signal_kills_script(job: Job) -> Iterator[Hit]:
    asked = asked_signal(job)
    if not asked or "B" not in asked[0] or asked[1] in {"CONT", "CHLD", "URG", "WINCH"} or not job.shells:
        return
    shell = job.shells[0]
    # In functions too: what sets up the traps may be one.
    traps = [each.words for each in shell.flat if each.words and each.words[0].value == "trap"]
    trapped = {signal_name(word.value) for words in traps for word in words[2:]}
    replaced = any(each.words and each.words[0].value == "exec" and len(each.words) > 1 for each in shell.flat)
    if asked[1] not in trapped and not replaced:
        yield Hit(job.options["signal"].line, saw=f"nothing in the script traps {asked[1]}")


def trap_waits_for_foreground(job: Job) -> Iterator[Hit]:
    asked = asked_signal(job)
    if not asked or "B" not in asked[0] or not job.shells:
        return
    shell = job.shells[0]
    for command, _, signals in _traps(shell):
        if asked[1] not in signals:
            continue
        after = shell.after(command)
        for statement in _foreground(shell.sequence):
            here = statement.pipelines[-1].commands[-1]
            if any(each is here for each in after) and here.kind == "simple" and _holds_shell(shell, statement):
                yield Hit(statement.line, saw=f"the trap for {asked[1]} on line {command.line} runs only after it")
                return


def _holds_shell(shell: Shell, statement: Statement, seen: set[str] | None = None) -> bool:
    """Work in the foreground; a function may put all of it into the background. Those `seen` do."""
    if not _works(shell, statement):
        return False
    seen = set() if seen is None else seen
    called = _functions_called(shell, statement)
    fresh = called - seen
    seen |= called
    inside = [each for name in fresh for each in _foreground(shell.functions[name])]
    simple = [each for each in inside if each.pipelines[-1].commands[-1].kind == "simple"]
    return not called or any(_holds_shell(shell, each, seen) for each in simple)


def exec_skips_trap(job: Job) -> Iterator[Hit]:
    for shell in job.shells[:1]:
        trapped = [command for command, _, _ in _traps(shell)]
        for at, statement in enumerate(shell.sequence):
            words = statement.pipelines[-1].commands[0].words
            if len(words) < 2 or words[0].value != "exec":
                continue
            rest = shell.sequence[at + 1 :]
            if rest and len(statement.pipelines) == 1:
                yield Hit(statement.line, saw=f"line {rest[0].line} is never reached")
            elif any(command.line < statement.line for command in trapped):
                yield Hit(statement.line, saw=f"the trap on line {trapped[0].line} is gone")
