"""The batch script of a run, from sbatch_templates/."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from krea_runner.errors import ConfigError, KreaRunnerError
from krea_runner.model import RunConfig
from krea_runner.rundir import RunDir

TEMPLATE = "job.sbatch.j2"


def template_dir() -> Path:
    """Packaged into a wheel as `_data`; in an editable install the package is the source tree and they lie beside it.

    Raises: KreaRunnerError when they are in neither place.
    """
    package = Path(__file__).parents[1]
    for place in (package / "_data" / "sbatch_templates", package.parent / "sbatch_templates"):
        if (place / TEMPLATE).is_file():
            return place
    raise KreaRunnerError(
        f"no {TEMPLATE} in {package}/_data nor beside it",
        hint="install again: pip install --force-reinstall krea-runner",
    )


def render(config: RunConfig) -> str:
    """The whole script; the same for `slurm` and `local`.

    Raises: ConfigError where a value cannot be written on an #SBATCH line.
    """
    run_dir = RunDir(config.run_dir)
    return str(
        _environment(template_dir())
        .get_template(TEMPLATE)
        .render(
            config=config,
            template=TEMPLATE,
            options=_options(config, run_dir),
            run_dir=str(run_dir.root),
            argv=_argv(config.command),
            notice_s=_notice_s(config),
            checkpoint=dict(zip(("before", "after"), config.checkpoint.pattern.split("{step}"), strict=True)),
        )
    )


def _notice_s(config: RunConfig) -> int:
    """For how long after SIGUSR1 an end is due to the time limit, where the run asks Slurm for that notice (`signal =
    "B:USR1@300"`); 0 where it does not. Slurm may send it up to 60 s early, and looks at limits every 30 s (22.05.8)."""
    match = re.fullmatch(r"[BR]*:?(?:SIG)?(?:USR1|10)@(\d+)", str(config.slurm.get("signal", "")))
    return int(match[1]) + 120 if match else 0


def _argv(command: tuple[str, ...] | str) -> list[str]:
    argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
    # srun takes a word that is just a colon for the border of a heterogeneous step (22.05.8).
    return ["bash", "-c", f"exec {shlex.join(argv)}"] if ":" in argv else argv


def _options(config: RunConfig, run_dir: RunDir) -> list[str]:
    """The #SBATCH options, in the order in which they are written. All that the run stands on is said, also where it is what
    Slurm would do anyway: a ~/.slurm/defaults (with the cluster's cli_filter/user_defaults) holds where the script is silent,
    and `ntasks=1` in it makes one rank of a gang (22.05.8)."""
    log = _percent(str(run_dir.logs)) + "/batch-%j.log"
    options = [
        f"--job-name={config.slug}",
        f"--nodes={config.gang.nodes}",
        f"--ntasks-per-node={config.gang.ranks_per_node}",
        f"--ntasks={config.gang.world_size}",
        "--requeue",
        "--open-mode=append",
        f"--output={log}",
        f"--error={log}",
        "--export=ALL",
        f"--chdir={config.workdir}",
    ]
    for key, value in config.slurm.items():
        name = "--" + key.replace("_", "-")
        if key == "extra" or value is False:
            continue
        options.append(name if value is True else f"{name}={value}")
    return options + list(config.slurm.get("extra", ()))


def _percent(path: str) -> str:
    """A path in which Slurm finds no file name pattern."""
    return path.replace("%", "%%")


@cache
def _environment(directory: Path) -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(directory),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - this makes a shell script; every value goes through shquote or sbatch_line
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"shquote": shlex.quote, "sbatch_line": sbatch_line, "comment": comment}
    return environment


def sbatch_line(option: str) -> str:
    """One option as sbatch reads it from an #SBATCH line: split at blanks, `#` begins a comment, and inside double quotes
    only a double quote and a backslash are special, each kept by a backslash (22.05.8).

    Raises: ConfigError where a line cannot hold the value.
    """
    if re.fullmatch(r"[A-Za-z0-9_./:=,@%+~*\[\]-]+", option):
        return option
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", option):
        raise ConfigError(f"an #SBATCH line cannot hold {option!r}", hint="leave control characters out of it")
    name, equals, value = option.partition("=")
    if re.search(r"[^A-Za-z0-9-]", name):
        raise ConfigError(f"{option!r} is no option of sbatch", hint="write it as --name=value")
    return name + equals + '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def comment(text: str) -> str:
    """`text` on one comment line."""
    return re.sub(r"[^\x20-\x7e\xa0-\U0010ffff]", "?", text)
