"""The batch script: read as a person would, and really run by bash with an `srun` that notes what it was asked."""

import dataclasses
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.config import slug_of
from krea_runner.errors import ConfigError, KreaRunnerError
from krea_runner.launch.render import render, sbatch_line
from krea_runner.launch.submit import prepare
from krea_runner.model import AttemptKey, CheckpointSpec, Gang, RunConfig
from krea_runner.observe.logs import read_script_end
from krea_runner.rundir import RunDir

FIRST = AttemptKey("42")
GOLDEN = Path(__file__).parent / "golden" / "job.sbatch"
HOSTILE = [
    "two words",
    "it's",
    'say "x"',
    "$(touch CANARY)",
    "`touch CANARY`",
    "; touch CANARY #",
    "&& touch CANARY",
    "$HOME ${HOME} !!",
    "50% %j",
    "* ? [a] {b,c} ~",
    "学習 ünï",
    "-n 7 --label",
]

# Stands in for srun: writes down options, command and environment, opens the logs as slurmstepd does, then ends or waits
# for a signal as told.
SRUN = """\
#!{python}
import json, os, signal, sys, time
words = sys.argv[1:]
border = next(at for at, word in enumerate(words) if not word.startswith("--"))
options = dict(word[2:].partition("=")[::2] for word in words[:border])
for node in range(int(os.environ["FAKE_LOGS"])):
    open(options["output"].replace("%%", "\\0").replace("%n", str(node)).replace("\\0", "%"), "w").close()
record = {{"options": options, "command": words[border:], "env": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid()}}
if "FAKE_EXIT_AT" in os.environ:
    def end(number, frame):
        record["got"] = signal.Signals(number).name
        save()
        os._exit(int(os.environ["FAKE_EXIT"]))
    signal.signal(getattr(signal, os.environ["FAKE_EXIT_AT"]), end)
def save():
    with open(os.environ["FAKE_RECORD"] + ".part", "w") as file:
        json.dump(record, file)
    os.rename(os.environ["FAKE_RECORD"] + ".part", os.environ["FAKE_RECORD"])
save()
if "FAKE_EXIT_AT" in os.environ:
    time.sleep(60)
sys.exit(int(os.environ["FAKE_EXIT"]))
"""


@dataclasses.dataclass
class Stage:
    folder: Path
    base: RunConfig

    def config(self, **changes: Any) -> RunConfig:
        return dataclasses.replace(self.base, **changes)

    def start(self, config: RunConfig, *, srun_exit: int = 0, logs: int = 2, exit_at: str = "", **env: str) -> Any:
        source = self.folder / "run.toml"
        source.write_text("# stands for the user's file\n")
        script = prepare(config, source)
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "HOME": str(self.folder), "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "n[1-2]", "FAKE_RECORD": str(self.record), "FAKE_EXIT": str(srun_exit),
            "FAKE_LOGS": str(logs), **({"FAKE_EXIT_AT": exit_at} if exit_at else {}), **env,
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", str(script)], env=environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, config: RunConfig, **how: Any) -> subprocess.CompletedProcess[str]:
        process = self.start(config, **how)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess("bash", process.returncode, out, err)

    @property
    def record(self) -> Path:
        return self.folder / "record.json"

    def asked(self) -> dict[str, Any]:
        return json.loads(self.record.read_text())

    def events(self, config: RunConfig, attempt: AttemptKey = FIRST) -> list[dict[str, Any]]:
        path = RunDir(config.run_dir).script_events(attempt)
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN.format(python=sys.executable))
    (tmp_path / "bin" / "srun").chmod(0o755)
    (tmp_path / "work").mkdir()
    base = RunConfig(
        name="llm", slug="llm", run_dir=tmp_path / "run", command=("python", "train.py"), workdir=tmp_path / "work",
        gang=Gang(2, 4),
    )  # fmt: skip
    return Stage(tmp_path, base)


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------- as read


def golden_config() -> RunConfig:
    return RunConfig(
        name="LLM 7B", slug=slug_of("LLM 7B"), run_dir=Path("/srv/runs/llm 7b"), command=("python", "train.py", "--note", "it's"),
        workdir=Path("/home/alice/code"), env=MappingProxyType({"OMP_NUM_THREADS": "8"}), gang=Gang(2, 8),
        slurm=MappingProxyType({"partition": "gpu", "exclusive": True, "hold": False, "extra": ("--switches=2",)}),
        checkpoint=CheckpointSpec(directory=Path("/srv/ckpt")),
    )  # fmt: skip


def test_the_script_is_the_one_on_record() -> None:
    """After a change that is meant: python -m tests.unit.test_render"""
    assert render(golden_config()) == GOLDEN.read_text()


def test_the_header_names_template_and_run_on_one_line(stage: Stage) -> None:
    text = render(stage.config(name="a\nrm -rf x\x1b[31m"))
    assert text.splitlines()[1] == "# Written by krea-runner from job.sbatch.j2 for the run: a?rm -rf x?[31m"


@pytest.mark.parametrize("hostile", HOSTILE)
def test_sbatch_words_are_read_back_as_they_were(hostile: str) -> None:
    assert shlex.split(sbatch_line(f"--wckey={hostile}"), comments=True) == [f"--wckey={hostile}"]


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
def test_any_value_without_control_characters_is_one_sbatch_word(value: str) -> None:
    assert shlex.split(sbatch_line(f"--wckey={value}"), comments=True) == [f"--wckey={value}"]


@pytest.mark.parametrize(
    "option", ["--x=a\nb", "--x=\x00", "--x=\x1b", "--x=\udc80", "--x y", "--x --job-name=y", "--x\n"]
)
def test_what_an_sbatch_line_cannot_hold_is_refused(option: str) -> None:
    with pytest.raises(ConfigError):
        sbatch_line(option)


def test_slurm_is_given_paths_without_patterns(stage: Stage) -> None:
    config = stage.config(run_dir=stage.folder / "50%j%", command=("pwd",))
    assert f"#SBATCH --output={stage.folder}/50%%j%%/logs/batch-%j.log\n" in render(config)
    stage.run(config)
    asked = stage.asked()
    assert (asked["cwd"], asked["options"]["output"]) == (f"{config.run_dir}/logs/42.r0", "node-%n.log")
    ranks = subprocess.run(asked["command"], cwd=asked["cwd"], capture_output=True, text=True, check=True)
    assert ranks.stdout == f"{config.workdir}\n"


# ----------------------------------------------------------------------------------------------------------- as run


def test_a_gang_that_ends_well_leaves_its_events_and_its_exit_code(stage: Stage) -> None:
    config = stage.config()
    done = stage.run(config)
    assert (done.returncode, done.stderr) == (0, "")
    start, end = stage.events(config)
    assert {**start, "at": 0} == {
        "schema_version": 1, "event": "attempt_start", "attempt": "42.r0", "at": 0, "restart_count": 0, "nodelist": "n[1-2]",
    }  # fmt: skip
    assert {**end, "at": 0} == {
        "schema_version": 1,
        "event": "attempt_end",
        "attempt": "42.r0",
        "at": 0,
        "exit_code": 0,
    }
    assert abs(start["at"] - time.time()) < 3600
    assert start["at"] <= end["at"]


def test_srun_is_asked_for_what_both_schedulers_know(stage: Stage) -> None:
    stage.run(stage.config())
    assert stage.asked()["options"] == {
        "kill-on-bad-exit": "1",
        "label": "",
        "open-mode": "append",
        "output": f"{stage.folder}/run/logs/42.r0/node-%n.log",
    }


@pytest.mark.parametrize("restart", [0, 1, 12])
def test_an_attempt_is_named_as_everybody_else_names_it(stage: Stage, restart: int) -> None:
    config, key = stage.config(), AttemptKey("42", restart)
    stage.run(config, **({"SLURM_RESTART_COUNT": str(restart)} if restart else {}))
    assert [event["attempt"] for event in stage.events(config, key)] == [str(key)] * 2
    end = read_script_end(RunDir(config.run_dir), key)
    assert end is not None
    assert end.exit_code == 0
    env = stage.asked()["env"]
    assert env["KREA_ATTEMPT"] == str(key)
    assert env["KREA_HEARTBEAT_DIR"] == str(RunDir(config.run_dir).heartbeats(key))
    assert Path(env["KREA_HEARTBEAT_DIR"]).is_dir()
    assert RunDir(config.run_dir).attempt_logs(key).is_dir()


@pytest.mark.parametrize("code", [1, 3, 93, 137, 255])
def test_the_exit_code_is_sruns_own(stage: Stage, code: int) -> None:
    config = stage.config()
    assert stage.run(config, srun_exit=code).returncode == code
    assert stage.events(config)[-1]["exit_code"] == code


def test_a_missing_workdir_is_78_and_nothing_is_run(stage: Stage) -> None:
    config = stage.config(workdir=stage.folder / "gone")
    done = stage.run(config)
    assert done.returncode == 78
    assert f"krea_runner: cannot enter {stage.folder}/gone" in done.stderr
    assert stage.events(config)[-1]["exit_code"] == 78
    assert not stage.record.exists()


@pytest.mark.parametrize("logs", [0, 1])
def test_a_node_that_opened_no_log_makes_a_zero_of_sruns_a_failure(stage: Stage, logs: int) -> None:
    config = stage.config()
    done = stage.run(config, logs=logs)
    assert done.returncode == 1
    assert f"node {logs} has no log: its ranks were not started" in done.stderr
    assert stage.events(config)[-1]["exit_code"] == 1


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_a_user_writes_is_executed_and_all_of_it_arrives(stage: Stage, hostile: str) -> None:
    folder = stage.folder / hostile.replace("/", "_")
    workdir = folder / "wörk"
    workdir.mkdir(parents=True)
    config = stage.config(
        name=hostile, slug=slug_of(hostile), run_dir=folder / "run", workdir=workdir,
        command=("prog", hostile, "", "a\nb", "\\"), env=MappingProxyType({"NOTE": f"{hostile}\n'\""}),
        checkpoint=CheckpointSpec(directory=folder / "ckpt"),
    )  # fmt: skip
    done = stage.run(config)
    assert (done.returncode, done.stderr) == (0, "")
    asked = stage.asked()
    back = ["bash", "-c", 'cd "$0" && exec "$@"', str(workdir)] if "%" in str(folder) else []
    assert asked["command"] == [*back, "prog", hostile, "", "a\nb", "\\"]
    assert asked["cwd"] == str(RunDir(config.run_dir).attempt_logs(FIRST) if back else workdir)
    assert {name: asked["env"][name] for name in ("KREA_RUN", "KREA_RUN_DIR", "KREA_CHECKPOINT_DIR", "NOTE")} == {
        "KREA_RUN": hostile,
        "KREA_RUN_DIR": str(folder / "run"),
        "KREA_CHECKPOINT_DIR": str(folder / "ckpt"),
        "NOTE": f"{hostile}\n'\"",
    }
    assert len(stage.events(config)) == 2
    assert [path for path in (*stage.folder.rglob("CANARY"), Path("/CANARY")) if path.exists()] == []


def test_a_shell_line_is_run_by_a_shell_of_each_rank(stage: Stage) -> None:
    stage.run(stage.config(command="cd sub && exec python train.py | tee 'a b'"))
    assert stage.asked()["command"] == ["bash", "-c", "cd sub && exec python train.py | tee 'a b'"]


@pytest.mark.parametrize("words", [("printf", "%s|", "a b", ":", "it's", ""), ("bash", "-c", ":")])
def test_no_word_is_a_bare_colon_to_srun_and_it_still_arrives(stage: Stage, words: tuple[str, ...]) -> None:
    stage.run(stage.config(command=words))
    command = stage.asked()["command"]
    assert ":" not in command
    told, meant = (subprocess.run(argv, capture_output=True, check=True).stdout for argv in (command, list(words)))
    assert told == meant


def test_variables_of_the_user_do_not_disturb_the_script(stage: Stage) -> None:
    names = "run_dir workdir restart attempt logs node rc srun_pid name config IFS RANDOM say finish forward".split()
    config = stage.config(env=MappingProxyType(dict.fromkeys(names, "17")))
    done = stage.run(config, srun_exit=3)
    assert (done.returncode, done.stderr) == (3, "")
    assert stage.events(config)[-1]["exit_code"] == 3
    env = stage.asked()["env"]
    assert {name: env[name] for name in names if name != "RANDOM"} == {name: "17" for name in names if name != "RANDOM"}


def test_what_another_job_left_behind_does_not_reach_the_ranks(stage: Stage) -> None:
    leaked = dict.fromkeys(
        "SBATCH_ACCOUNT SRUN_CPUS_PER_TASK SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_MEM_BIND SLURM_EXPORT_ENV SLURM_STEP_ID "
        "SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID RANK LOCAL_RANK GROUP_RANK".split(),
        "1",
    )
    stage.run(stage.config(), **leaked, SLURM_NTASKS="8", MASTER_ADDR="elsewhere", MASTER_PORT="1")
    env = stage.asked()["env"]
    assert set(leaked) & set(env) == set()
    assert (env["SLURM_JOB_ID"], env["SLURM_NTASKS"], env["WORLD_SIZE"]) == ("42", "8", "8")
    assert env["MASTER_ADDR"] == os.uname().nodename
    assert env["MASTER_PORT"] != "1"


def test_the_ports_of_attempts_differ_and_are_not_the_kernels_own(stage: Stage) -> None:
    ports = set()
    for job_id, restart in [("42", 0), ("42", 1), ("42", 2), ("43", 0), ("4294967295", 0), ("42+1", 3)]:
        stage.run(stage.config(), SLURM_JOB_ID=job_id, SLURM_RESTART_COUNT=str(restart))
        ports.add(int(stage.asked()["env"]["MASTER_PORT"]))
    assert len(ports) == 6
    assert all(1024 < port < 32768 for port in ports)


def test_ranks_of_one_machine_meet_on_its_loopback(stage: Stage) -> None:
    stage.run(stage.config(scheduler="local"))
    assert stage.asked()["env"]["MASTER_ADDR"] == "127.0.0.1"


# ------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("srun_exit", [0, 137])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_script_told_to_end_ends_srun_and_is_no_success(stage: Stage, sent: signal.Signals, srun_exit: int) -> None:
    config = stage.config()
    process = stage.start(config, exit_at="SIGTERM", srun_exit=srun_exit)
    until(stage.record.exists, "srun")
    process.send_signal(sent)
    process.communicate(timeout=30)
    assert process.returncode == (srun_exit or 143)
    assert stage.asked()["got"] == "SIGTERM"
    assert stage.events(config)[-1]["exit_code"] == (srun_exit or 143)


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("srun_exit", [0, 5])
def test_a_notice_goes_on_to_srun_and_the_exit_code_stays_sruns(
    stage: Stage, sent: signal.Signals, srun_exit: int
) -> None:
    config = stage.config()
    process = stage.start(config, exit_at=sent.name, srun_exit=srun_exit)
    until(stage.record.exists, "srun")
    process.send_signal(sent)
    process.communicate(timeout=30)
    assert process.returncode == srun_exit
    assert stage.asked()["got"] == sent.name
    assert stage.events(config)[-1]["exit_code"] == srun_exit


@pytest.mark.parametrize(("srun_exit", "code"), [(0, 75), (5, 5)])
def test_an_end_soon_after_the_notice_of_the_time_limit_is_marked_and_zero_is_requeue_me(
    stage: Stage, srun_exit: int, code: int
) -> None:
    config = stage.config(slurm=MappingProxyType({"signal": "B:USR1@300"}))
    process = stage.start(config, exit_at="SIGUSR1", srun_exit=srun_exit)
    until(stage.record.exists, "srun")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == code
    end = stage.events(config)[-1]
    assert (end["exit_code"], end["warned"]) == (code, True)


def test_an_end_without_a_notice_is_not_marked(stage: Stage) -> None:
    config = stage.config(slurm=MappingProxyType({"signal": "B:USR1@300"}))
    stage.run(config)
    assert "warned" not in stage.events(config)[-1]
    assert stage.events(config)[-1]["exit_code"] == 0


def test_an_srun_that_is_killed_is_not_a_success(stage: Stage) -> None:
    config = stage.config()
    process = stage.start(config, exit_at="SIGTERM")
    until(stage.record.exists, "srun")
    os.kill(stage.asked()["pid"], signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 137
    assert stage.events(config)[-1]["exit_code"] == 137


# ------------------------------------------------------------------------------------------------------- run directory


def test_the_run_directory_is_made_with_what_slurm_needs_before_the_start(stage: Stage) -> None:
    source = stage.folder / "my.toml"
    source.write_bytes(b"# \xc3\xbc\n")
    script = prepare(stage.base, source)
    run_dir = RunDir(stage.base.run_dir)
    assert script == run_dir.script
    assert script.read_text() == render(stage.base)
    assert run_dir.config.read_bytes() == b"# \xc3\xbc\n"
    made = sorted(path.name for path in run_dir.root.iterdir())
    assert made == ["events", "job.sbatch", "logs", "run.toml", "submit.env"]
    assert prepare(stage.base, run_dir.config) == script  # the copy itself may be submitted again
    assert run_dir.config.read_bytes() == b"# \xc3\xbc\n"


def test_a_run_directory_that_cannot_be_made_is_said_with_a_way_out(stage: Stage) -> None:
    (stage.folder / "run").write_text("in the way")
    with pytest.raises(KreaRunnerError) as caught:
        prepare(stage.base, stage.folder / "run.toml")
    assert f"preparing the run directory {stage.folder}/run: " in str(caught.value)
    assert "[run] dir" in str(caught.value.hint)


def test_a_disk_that_fills_up_leaves_the_old_script_whole(stage: Stage) -> None:
    source = stage.folder / "run.toml"
    source.write_text("#")
    script = prepare(stage.base, source)
    before = script.read_text()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
    try:
        with pytest.raises(KreaRunnerError) as caught:
            prepare(stage.config(command=("another",)), source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert str(caught.value) == f"preparing the run directory {stage.folder}/run: File too large"
    assert script.read_text() == before
    assert [path.name for path in script.parent.iterdir() if path.name.startswith(".")] == []


if __name__ == "__main__":
    GOLDEN.write_text(render(golden_config()))
