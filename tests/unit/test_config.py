"""run.toml: what is right, and what a person is told about what is not."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from krea_runner.config import config_from_json, config_to_json, load_run, slug_of
from krea_runner.config.durations import is_slurm_time, parse_duration
from krea_runner.config.keys import OWNED, SBATCH, TABLES
from krea_runner.config.load import MAX_BYTES
from krea_runner.errors import ConfigError
from krea_runner.model import Budgets, CheckpointSpec, Gang, Policy, RunConfig

ROOT = Path(__file__).parents[2]
RUN = '[run]\nname = "llm"\ncommand = ["python", "train.py"]\n'


@pytest.fixture
def toml(tmp_path):
    def write(content: str | bytes) -> Path:
        path = tmp_path / "run.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refused(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert str(caught.value).isprintable()
    for problem in caught.value.problems:
        assert problem.isprintable()
    return caught.value


def problem_of(toml, content: str) -> str:
    (problem,) = refused(toml(content)).problems
    return problem


# ------------------------------------------------------------------------------------------------------ what is right


def test_two_keys_are_enough(toml, tmp_path) -> None:
    assert load_run(toml(RUN)) == RunConfig(
        name="llm",
        slug="llm",
        run_dir=tmp_path / "runs" / "llm",
        command=("python", "train.py"),
        workdir=tmp_path,
    )


FULL = """
run = { name = "LLM 7B", command = "python train.py | tee log", dir = "out/../run", workdir = "~/code", scheduler = "local" }
[env]
OMP_NUM_THREADS = 8
LR = 0.5
WANDB_MODE = "offline"
[gang]
nodes = 4
ranks_per_node = 8
[slurm]
partition = "gpu"
time = "2-00:00:00"
time_min = 90
exclusive = true
gpus_per_node = 8
extra = ["--switches=2", "--no-kill"]
[budgets]
startup = "1h"
step = 90
checkpoint = "20m"
evaluation = "1h30m"
shutdown = "00:05:00"
default = "10m"
second_look = 3
[checkpoint]
dir = "ckpt"
pattern = "global_step{step}"
complete = ""
[policy]
mode = "observe"
max_restarts = 0
window = "1-00:00:00"
no_progress_limit = 3
never_restart_exit_codes = [93, 2]
"""


def test_every_key_arrives(toml, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/alice")
    config = load_run(toml(FULL))
    code = Path("/home/of/alice/code")
    assert (config.name, config.slug) == ("LLM 7B", slug_of("LLM 7B"))
    assert (config.run_dir, config.workdir, config.scheduler) == (tmp_path / "run", code, "local")
    assert config.command == "python train.py | tee log"
    assert dict(config.env) == {"OMP_NUM_THREADS": "8", "LR": "0.5", "WANDB_MODE": "offline"}
    assert config.gang == Gang(4, 8)
    assert dict(config.slurm) == {
        "partition": "gpu",
        "time": "2-00:00:00",
        "time_min": "90",
        "exclusive": True,
        "gpus_per_node": 8,
        "extra": ("--switches=2", "--no-kill"),
    }
    assert config.budgets == Budgets(
        3600, 90, 1200, 5400, 300, 600, 3.0,
        fixed=("startup", "step", "checkpoint", "evaluation", "shutdown", "default"),
    )  # fmt: skip
    assert config.checkpoint == CheckpointSpec(code / "ckpt", "global_step{step}", "")
    assert config.policy == Policy("observe", 0, 86400, 3, (93, 2))


def test_a_stored_run_is_the_run(toml) -> None:
    for content in (RUN, FULL):
        config = load_run(toml(content))
        assert config_from_json(config_to_json(config)) == config


def test_a_run_stored_by_another_version_is_read(toml) -> None:
    plain = json.loads(config_to_json(load_run(toml(FULL))))
    plain["from_the_future"] = 1
    plain["policy"]["from_the_future"] = 1
    del plain["budgets"]["second_look"], plain["scheduler"]
    config = config_from_json(json.dumps(plain))
    assert (config.budgets.second_look, config.scheduler) == (Budgets().second_look, "slurm")


def test_a_budget_that_is_auto_or_not_given_learns_and_any_other_stands(toml) -> None:
    budgets = load_run(toml(f'{RUN}[budgets]\nstep = "auto"\ncheckpoint = "20m"\n')).budgets
    assert budgets == Budgets(checkpoint_s=1200, fixed=("checkpoint",))
    assert load_run(toml(RUN)).budgets.fixed == ()


def test_a_run_stored_before_budgets_learned_keeps_its_own(toml) -> None:
    plain = json.loads(config_to_json(load_run(toml(FULL))))
    del plain["budgets"]["fixed"], plain["budgets"]["compile_s"], plain["budgets"]["data_s"]
    budgets = config_from_json(json.dumps(plain)).budgets
    assert (budgets.step_s, set(budgets.fixed) >= {"step", "checkpoint", "default"}) == (90, True)


printable = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
seconds = st.floats(0.001, 1e9)
absolute = printable.map(lambda word: Path("/srv") / word.replace("/", "_"))
configs = st.builds(
    RunConfig,
    name=printable,
    slug=printable.map(slug_of),
    run_dir=absolute,
    command=st.one_of(printable, st.lists(st.text(), min_size=1, max_size=4).map(tuple)),
    workdir=absolute,
    scheduler=st.sampled_from(["slurm", "local"]),
    env=st.dictionaries(names, st.text()).map(MappingProxyType),
    gang=st.builds(Gang, st.integers(1, 4096), st.integers(1, 64)),
    slurm=st.fixed_dictionaries(
        {},
        optional={
            "partition": printable,
            "cpus_per_task": st.integers(),
            "exclusive": st.booleans(),
            "extra": st.lists(printable.map("--x={}".format), max_size=3).map(tuple),
        },
    ).map(MappingProxyType),
    budgets=st.builds(Budgets, *[seconds] * 6, st.floats(1, 100)),
    checkpoint=st.builds(CheckpointSpec, st.none() | absolute, st.text(), st.text()),
    policy=st.builds(
        Policy, st.sampled_from(["act", "observe"]), st.integers(0), seconds, st.integers(1),
        st.lists(st.integers(1, 255), max_size=4).map(tuple),
    ),
)  # fmt: skip


@given(configs)
def test_any_run_stored_is_the_run(config) -> None:
    assert config_from_json(config_to_json(config)) == config


# ------------------------------------------------------------------------------------------------------ what is wrong

WRONG = """\
[run]
name = ""
comand = "x"

[gang]
nodes = 0
ranks = 8   # too short
[budgts]
step = "5m"
[budgets]
step = "soon"
[env]
2X = "x"
RANK = "0"
SLURM_NODEID = "0"
LIST = [1]
[policy]
mode = "perhaps"
never_restart_exit_codes = [0]
"""


def test_every_problem_is_said_at_once_in_file_order_with_its_line(toml) -> None:
    error = refused(toml(WRONG))
    assert str(error).endswith("run.toml has 13 problems")
    assert [problem.split(": ", 1)[0] for problem in error.problems] == [
        f"line {number}" for number in (1, 2, 3, 6, 7, 8, 11, 13, 14, 15, 16, 18, 19)
    ]
    for problem, words in zip(
        error.problems,
        [
            "[run] command is missing",
            "[run] name: a name has 1 to 100",
            "[run] unknown key 'comand'; did you mean command?",
            "[gang] nodes: a whole number of at least 1 is wanted, not 0",
            "[gang] unknown key 'ranks'; did you mean ranks_per_node?",
            "unknown table 'budgts'; did you mean budgets?",
            "[budgets] step: 'soon' is no duration",
            "[env] '2X' is no name of an environment variable",
            "[env] RANK is set by Slurm or krea_runner",
            "[env] SLURM_NODEID is set by Slurm or krea_runner",
            "[env] LIST: text in quotes is wanted, not [1]",
            "[policy] mode: one of 'act', 'observe' is wanted, not 'perhaps'",
            "[policy] never_restart_exit_codes: a list of exit codes from 1 to 255 is wanted, not [0]",
        ],
        strict=True,
    ):
        assert words in problem


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (RUN + '[ "gang" ] # comment\nnods = 1\n', 5),
        (RUN + "gang = 1\n", 4),
        ("[gang]\n'nods' = 1\n" + RUN, 2),
        ('[gang]\n"n\\u006fds" = 1\n' + RUN, 2),
        ("env = { A = \"{, nods = 1\" }\ngang = { nodes = 1, 'nods' = 1 }\n" + RUN, 2),
        ("gang.nods = 1\n" + RUN, 1),
        ("gang = { nodes = 1, nods = 1 }\n" + RUN, 1),
        ("# a separator\u2028 in a comment\n[gang]\nnods = 1\n" + RUN, 3),
        ("[run]\r\nname = 'x'\r\ncommand = ['x']\r\n[gang]\r\nnods = 1\r\n", 5),
        ('[run]\nname = "x"\ncommand = """\n[gang]\nnods = 1\n"""\n[gang]\nnods = 1\n', 8),
    ],
)
def test_the_line_is_right_however_the_key_is_written(toml, content, line) -> None:
    assert problem_of(toml, content).startswith(f"line {line}: ")


# Whatever stands above the wrong key must not move its line: strings that look like tables, brackets over many lines.
NOISE = [
    "",
    "# [gang] ''' and \"\"\" in a comment [",
    'A{n} = "# no comment, [gang] no table"',
    "A{n} = '''\n[gang]\nnods = 1\n# \"\"\"\n'''",
    'A{n} = """\n[gang]\nnods = 1 \\\\\n\\"""\n"""',
    'A{n} = """"quoted""""',
    'A{n} = "a \\" [gang] \\\\"',
    "A{n} = 'C:\\'",
    '"A.{n}" = "x"',
    "A{n} . 'b c' = 1",
    "A{n} = 1979-05-27T07:32:00Z",
    "A{n} = 6.626e-34",
]


@given(st.lists(st.sampled_from(NOISE), max_size=8), st.booleans())
def test_the_line_is_right_below_anything(tmp_path_factory, noise, crlf) -> None:
    above = ["[env]", *(line.replace("{n}", str(number)) for number, line in enumerate(noise))]
    many = 'command = [  # ["]\n  "python", \'[gang]\',\n  """\n[gang]\nnods = 1\n""",\n\n]'
    source = "\n".join(["[run]", 'name = "x"', many, *above, "[gang]", "  nodes = 1", "\tnods = 1"])
    path = tmp_path_factory.getbasetemp() / "lines.toml"
    path.write_text(source.replace("\n", "\r\n") if crlf else source, newline="")
    assert f"line {len(source.splitlines())}: [gang] unknown key 'nods'; did you mean nodes?" in refused(path).problems


@given(st.data())
def test_any_slip_of_the_finger_is_led_to_a_key_that_exists(tmp_path_factory, data) -> None:
    table = data.draw(st.sampled_from([table for table in TABLES if table != "env"]))
    right = [key.name for key in TABLES[table]]
    name = data.draw(st.sampled_from(right))
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_"))
    slips = [name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name[:at] + letter + name[at + 1 :]]
    typed = data.draw(st.sampled_from(slips))
    assume(typed and typed not in right and typed not in OWNED)
    path = tmp_path_factory.getbasetemp() / "typo.toml"
    content = {"run": {"name": "x", "command": "x"}}
    content.setdefault(table, {})[typed] = 1
    lines = [
        f"[{head}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in body.items())
        for head, body in content.items()
    ]
    path.write_text("".join(lines))
    (problem,) = refused(path).problems
    advised = problem.removesuffix("?").split("did you mean ")[-1]
    assert advised in right or "it belongs under [" in problem
    assert repr(typed) in problem


@pytest.mark.parametrize("value", ["1", "true", "[]", '""', '"  "', "[1]", '["a", 2]', "{ a = 1 }", '["a\\u0000"]'])
def test_a_command_is_words_or_a_line(toml, value) -> None:
    assert "[run] command: a " in problem_of(toml, f'[run]\nname = "x"\ncommand = {value}\n')


WRONG_VALUES = [
    ("gang", "nodes", ['"4"', "true", "1.0", "-1", "0"]),
    ("budgets", "step", ["true", "0", "-1", "nan", "inf", '""', '"5"', '"5 minutes"', "1" + "0" * 400, "[]"]),
    ("budgets", "second_look", ["0.5", "nan", "true", '"2"', "101"]),
    ("checkpoint", "pattern", ['"step"', '"{step}/{step}"', '"a/{step}"', "5"]),
    ("checkpoint", "complete", ['"a/b"', "true"]),
    ("checkpoint", "dir", ['""', "1", '"a\\nb"', '"~no-such-user-here/x"']),
    ("policy", "max_restarts", ["-1", "true", '"5"']),
    ("policy", "never_restart_exit_codes", ["93", "[256]", "[true]", '["93"]']),
    ("slurm", "time", ['"two days"', "0", "true", '"1:2:3:4"', '"\u0661"']),
    ("slurm", "partition", ["1.5", "[]", '"a\\nb"', '"\\u001b[31m"']),
    ("slurm", "extra", ['"--x=1"', '["-x"]', '["--x=1\\n--y"]', "[1]", '["-- x"]']),
]


@pytest.mark.parametrize(
    ("table", "key", "value"), [(table, key, value) for table, key, values in WRONG_VALUES for value in values]
)
def test_a_wrong_value_is_named_with_its_key_and_line(toml, table, key, value) -> None:
    assert problem_of(toml, f"{RUN}[{table}]\n{key} = {value}\n").startswith(f"line 5: [{table}] {key}: ")


@pytest.mark.parametrize("name", ["UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS"])
def test_a_variable_that_bash_keeps_to_itself_is_refused(toml, name) -> None:
    assert problem_of(toml, f'{RUN}[env]\n{name} = "1"\n') == f"line 5: [env] {name} is bash's own and cannot be set"


@pytest.mark.parametrize("word", ["", "-v", "--uid=0"])
def test_a_command_that_srun_would_take_for_its_option_is_refused(toml, word) -> None:
    problem = problem_of(toml, f'[run]\nname = "x"\ncommand = [{json.dumps(word)}, "x"]\n')
    assert problem == f"line 3: [run] command: a program is wanted as the first word, not {word!r}"


@pytest.mark.parametrize("option", ["--exclusive --job-name=x", "--exclusive\u00a0--hold", "--x y"])
def test_no_second_option_hides_behind_a_blank(toml, option) -> None:
    assert "one option is written --name=value" in problem_of(toml, f"{RUN}[slurm]\nextra = [{json.dumps(option)}]\n")


def test_a_run_directory_in_which_slurm_would_expand_nothing_is_refused(toml) -> None:
    problem = problem_of(toml, f'{RUN}dir = "back\\\\slash"\n')
    assert problem.startswith("line 4: [run] dir: Slurm cannot write logs below ")


def test_paths_with_blanks_quotes_and_percent_signs_are_right(toml, tmp_path) -> None:
    config = load_run(toml(RUN + "dir = '50% of \"it\" %j%%'\nworkdir = 'a%b%c \\ d'\n"))
    assert config.run_dir == tmp_path / '50% of "it" %j%%'
    assert config.workdir == tmp_path / "a%b%c \\ d"


@pytest.mark.parametrize("folder", [b"a\nb", b"not-utf8-\xff", b"\x1b[31m"])
def test_a_folder_whose_name_no_script_can_hold_is_said(tmp_path, folder) -> None:
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + folder))
    place.mkdir()
    (place / "run.toml").write_text(RUN)
    with pytest.raises(ConfigError) as caught:
        load_run(place / "run.toml")
    assert [problem.split(": ")[1] for problem in caught.value.problems] == ["[run] workdir", "[run] dir"]
    for problem in caught.value.problems:
        assert problem.isprintable()


def test_what_is_missing_is_said_also_of_an_empty_file(toml) -> None:
    error = refused(toml(""))
    assert [problem.split(":")[0] for problem in error.problems] == [
        "[run] name is missing",
        "[run] command is missing",
    ]


def test_a_key_under_the_wrong_table_is_told_where_it_belongs(toml) -> None:
    assert "it belongs under [slurm]" in problem_of(toml, RUN + 'partition = "gpu"\n')
    assert "it belongs under [gang]" in problem_of(toml, RUN + "[policy]\nranks_per_node = 8\n")
    assert "it belongs under [policy]" in problem_of(toml, "max_restarts = 3\n" + RUN)


def test_sbatchs_own_spelling_is_led_to_ours(toml) -> None:
    assert "did you mean cpus_per_task?" in problem_of(toml, RUN + "[slurm]\ncpus-per-task = 4\n")


@pytest.mark.parametrize("name", OWNED)
def test_an_option_that_we_set_is_refused_with_what_to_use(toml, name) -> None:
    for spelling in {name, name.replace("_", "-")}:
        assert problem_of(toml, f"{RUN}[slurm]\n{spelling} = 1\n").endswith(f"is krea_runner's own: {OWNED[name]}")
        dashes = name.replace("_", "-")
        for option in (f"--{dashes}=1", f"--{dashes} 1", f"--{dashes}"):
            problem = problem_of(toml, f'{RUN}[slurm]\nextra = ["--x=1", "{option}"]\n')
            assert problem.endswith(f"is krea_runner's own: {OWNED[name]}")


@pytest.mark.parametrize("option", ["--job-n=x", "--outp=x", "--nod=3", "--no-r"])
def test_an_option_that_we_set_is_refused_also_when_cut_short(toml, option) -> None:
    assert "is krea_runner's own" in problem_of(toml, f'{RUN}[slurm]\nextra = ["{option}"]\n')


def test_an_option_is_either_ours_or_the_users() -> None:
    assert not set(SBATCH) & set(OWNED)
    assert len(SBATCH) == len(set(SBATCH))


def test_no_option_of_the_users_is_mistaken_for_one_cut_short() -> None:
    assert [(word, owned) for word in SBATCH for owned in OWNED if owned.startswith(word)] == []


# -------------------------------------------------------------------------------------------------- what is no run.toml


def test_a_syntax_error_is_said_with_its_line(toml) -> None:
    error = refused(toml(RUN + "[gang\n"))
    assert "is not TOML" in str(error)
    assert "line 4" in str(error)
    assert error.hint


@pytest.mark.parametrize(
    "content",
    [
        "x = " + "[" * 20_000,
        "x = " + "{a=" * 20_000,
        "x = 1" + "0" * 5_000,
        "x = \x00",
        "x = 1\nx = 2",
        "a.b = 1\n[a.b]",
    ],
    ids=range(6),
)
def test_nothing_that_is_no_toml_is_a_traceback(toml, content) -> None:
    assert "run.toml" in str(refused(toml(RUN.replace("[run]", f"{content}\n[run]"))))


def test_not_utf8_is_said_with_the_byte(toml) -> None:
    assert str(refused(toml(b'[run]\nname = "\xfc"\n'))).endswith("is not UTF-8: byte 14 is 0xfc")


def test_a_file_that_is_too_large_is_not_read(toml) -> None:
    load_run(toml(RUN + "#" * (MAX_BYTES - len(RUN))))
    assert "larger than 1 MiB" in str(refused(toml(RUN + "#" * (MAX_BYTES - len(RUN) + 1))))


def test_a_directory_is_led_to_the_file_in_it(tmp_path) -> None:
    error = refused(tmp_path)
    assert "is a directory" in str(error)
    assert str(tmp_path / "run.toml") in str(error.hint)


def test_a_missing_file_is_said(tmp_path) -> None:
    assert "No such file" in str(refused(tmp_path / "none.toml"))


@given(st.binary(max_size=300))
def test_no_content_is_a_traceback(tmp_path_factory, data) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(data)
    refused(path)


# ----------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[31m", "x" * 101, "a\u2028b", "a\u202eb", "a\u0085b"])
def test_a_name_that_would_garble_a_terminal_is_refused(toml, name) -> None:
    assert "[run] name: " in problem_of(toml, f'[run]\nname = {json.dumps(name)}\ncommand = "x"\n')


@pytest.mark.parametrize("name", ["../../etc", "-rf", "a b; rm", "$(id)", "'\"`", "学習", ".", "..", "%j", "x" * 100])
def test_a_hostile_name_is_kept_and_its_files_stay_below_runs(toml, tmp_path, name) -> None:
    config = load_run(toml(f'[run]\nname = {json.dumps(name)}\ncommand = "x"\n'))
    assert config.name == name
    assert config.run_dir.parent == tmp_path / "runs"
    check_slug(config.slug)


def check_slug(slug: str) -> None:
    assert 0 < len(slug) <= 60
    assert slug.isascii()
    assert slug[0].isalnum() or slug[0] == "_"
    assert all(character.isalnum() or character in "._-" for character in slug)


def test_a_plain_name_is_its_own_slug() -> None:
    assert slug_of("llm-7b_v1.2") == "llm-7b_v1.2"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100), unique=True, max_size=20))
def test_different_names_have_different_slugs(names) -> None:
    slugs = [slug_of(name) for name in names]
    assert len(set(slugs)) == len(names)
    for slug in slugs:
        check_slug(slug)


@given(st.text("ab -", min_size=45, max_size=70), st.text("ab -", min_size=45, max_size=70))
def test_names_that_differ_only_in_what_is_cut_off_have_different_slugs(one, other) -> None:
    assert (slug_of(one) == slug_of(other)) == (one == other)


# ------------------------------------------------------------------------------------------------------------- durations


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90s", 90.0),
        ("15m", 900.0),
        ("1.5h", 5400.0),
        ("1h30m", 5400.0),
        ("2d", 172800.0),
        ("1d2h3m4s", 93784.0),
        (" 15M ", 900.0),
        ("05:30", 330.0),
        ("02:00:00", 7200.0),
        ("1-02", 93600.0),
        ("1-02:30", 95400.0),
        ("1-02:30:15", 95415.0),
    ],
)
def test_durations(value, seconds) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        *["", "90", "m", "1h 30m", "1w", "-5m", "5m-", "1-", "::", "1:2:3:4", "0s", "00:00", "١m"],
        *["9" * 400 + "d", "9" * 400 + ":00", "9" * 5000 + ":00", 10**400],
        *[True, None, [], {}, float("nan"), float("inf"), 0, -1],
    ],
)
def test_what_is_no_duration_is_refused_with_what_would_be_right(value) -> None:
    with pytest.raises(ValueError, match=r"duration|more than zero|digits"):
        parse_duration(value)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.text("0123456789:-.smhd")))
def test_a_duration_is_a_positive_number_or_refused(value) -> None:
    try:
        seconds = parse_duration(value)
    except ValueError:
        return
    assert 0 < seconds < float("inf")


@pytest.mark.parametrize("text", ["90", "90:00", "1:30:00", "1-0", "1-12:00", "2-00:00:00", "UNLIMITED", "infinite"])
def test_slurms_own_times_are_known(text) -> None:
    assert is_slurm_time(text)


@pytest.mark.parametrize("text", ["", "1h", "-1", "1-", "1:2:3:4", "90 ", "90\n", "never"])
def test_what_slurm_would_refuse_is_no_time(text) -> None:
    assert not is_slurm_time(text)


# ------------------------------------------------------------------------------------------------------------- reference


def test_the_reference_page_is_current() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make-reference", "--print"], capture_output=True, text=True, check=True
    )
    assert (ROOT / "docs" / "reference" / "run-toml.md").read_text() == made.stdout, "run scripts/make-reference"


def test_the_defaults_on_the_reference_page_are_the_programs(toml) -> None:
    """A file that states every default is the file that states none."""
    lines = [RUN]
    for table in ("gang", "budgets", "checkpoint", "policy"):
        lines.append(f"[{table}]")
        for key in TABLES[table]:
            if key.default != "none":
                plain = key.default in {"true", "false"} or (
                    key.default[0] in "[0123456789" and key.default[-1] in "]0123456789"
                )
                value = key.default if plain else None
                lines.append(f"{key.name} = {value or json.dumps(key.default)}")
    stated = load_run(toml("\n".join(lines)))
    assert dataclasses.asdict(dataclasses.replace(stated, env={}, slurm={})) == dataclasses.asdict(
        dataclasses.replace(load_run(toml(RUN)), env={}, slurm={})
    )
