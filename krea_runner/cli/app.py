"""The command line: which verbs there are, and how errors and exit codes look. One file a verb."""

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from krea_runner import __version__
from krea_runner.errors import ConfigError, KreaRunnerError

if TYPE_CHECKING:
    import typer


def main() -> None:
    if sys.argv[1:] in (
        ["--version"],
        ["-V"],
    ):  # asked by scripts and by doctor: no need to load the command line
        sys.stdout.write(f"krea-runner {__version__}\n")
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name or an arrow that this locale cannot write must not end a tick
            stream.reconfigure(errors="replace")
    try:
        _app()()
    except KreaRunnerError as error:
        _fail(error)


def _app() -> "typer.Typer":  # Typer is loaded here, not at the top
    import typer

    from krea_runner.cli import (
        adopt,
        check,
        checkpoints,
        demo,
        diagnose,
        doctor,
        explain,
        history,
        nodes,
        resume,
        status,
        stop,
        submit,
        supervise,
    )  # fmt: skip

    app = typer.Typer(
        name="krea-runner",
        help="Keep long Slurm training runs going: notice hangs and crashes, record them, restart from the last checkpoint.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def say_version(asked: bool) -> None:
        if asked:
            typer.echo(f"krea-runner {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        state_dir: Annotated[
            Path | None,
            typer.Option(
                envvar="KREA_RUNNER_STATE_DIR",
                help="Where the history is kept. Default: ~/.local/state/krea_runner",
                show_default=False,
            ),
        ] = None,
        version: Annotated[
            bool,
            typer.Option("--version", "-V", is_eager=True, callback=say_version, help="Print the version and exit."),
        ] = False,
    ) -> None:
        if state_dir is not None:
            os.environ["KREA_RUNNER_STATE_DIR"] = str(state_dir.absolute())

    app.add_typer(nodes.app, name="nodes")
    app.add_typer(checkpoints.app, name="checkpoints")
    for verb in (
        check.check, submit.submit, adopt.adopt, supervise.supervise, status.status, history.history, stop.stop,
        resume.resume, diagnose.diagnose, explain.explain, doctor.doctor, demo.demo,
    ):  # fmt: skip
        app.command()(verb)
    app.add_typer(diagnose.signatures, name="signatures")
    return app


def _fail(error: KreaRunnerError) -> NoReturn:
    lines = [f"krea-runner: error: {error}"]
    if isinstance(error, ConfigError):
        lines += [f"  {problem}" for problem in error.problems]
    if error.hint:
        lines.append(f"  {error.hint}")
    text = "\n".join(lines)  # names of files, and words of others, may be in it
    sys.stderr.write("".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text) + "\n")
    sys.exit(error.exit_code)
