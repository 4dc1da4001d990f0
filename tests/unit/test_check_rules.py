"""Each rule of `krea-runner check`: a script that it is for, and near misses that it must leave alone."""

import re
from pathlib import Path

import pytest

from krea_runner.config import load_run
from krea_runner.launch.check import Facts, Severity, check, read_job
from krea_runner.launch.check_facts import check_run
from krea_runner.launch.check_rules import RULES
from krea_runner.launch.render import render, template_dir
from krea_runner.schedulers.slurm_facts import ClusterFacts, parse_partitions, parse_qos

# What a careful person submits: nothing is found in it.
GOOD = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --time=1-00:00:00
#SBATCH --requeue --open-mode=append --output=/lustre/logs/%j.log
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/lustre/fr_
{body}
"""
SRUN = "srun -K python train.py"


def file_system(path: str) -> str:
    return {"lustre": "lustre", "dev": "tmpfs", "home": "nfs4", "data": "xfs", "ramdisk": "tmpfs"}.get(
        path.split("/")[1], ""
    )


def cluster(config: str = "", *partitions: str) -> ClusterFacts:
    values = dict(pair.split("=", 1) for pair in f"JobRequeue=1 {config}".split())
    lines = partitions or ("PartitionName=train Default=YES MaxTime=UNLIMITED DefaultTime=NONE PreemptMode=OFF",)
    return ClusterFacts(values, parse_partitions("\n".join(lines)), parse_qos("low|cancel\nnormal|cluster\n"))


def found(text: str, **facts: object) -> dict[str, object]:
    """Findings by code. The job would be submitted from /lustre."""
    known = {"cluster": cluster(), "file_system": file_system, "submit_dir": "/lustre", **facts}
    report = check(read_job("job.sbatch", text, Facts(**known)), RULES)
    return {finding.code: finding for finding in report.findings}


def body(script: str, **facts: object) -> dict[str, object]:
    return found(GOOD.format(body=script), **facts)


def header(line: str, **facts: object) -> dict[str, object]:
    return found(GOOD.format(body=SRUN).replace("#SBATCH --requeue", f"{line}\n#SBATCH --requeue"), **facts)


def without(option: str, **facts: object) -> dict[str, object]:
    text = GOOD.format(body=SRUN)
    assert option in text
    return found(text.replace(option, ""), **facts)


def test_nothing_is_found_in_a_good_script() -> None:
    assert body(SRUN) == {}


BODIES = {
    "pipe-hides-exit": [
        f"{SRUN} 2>&1 | tee -a /lustre/log",
        f"{SRUN} |& tee -a /lustre/log",  # a pipe like any other: `false |& cat` is 0
        f"set -o pipefail\nset +o pipefail\n{SRUN} | cat",
        f"(set -e; {SRUN}) | cat",
        f"train() {{ {SRUN}; }}\ntrain | cat",
        "srun -K bash -c 'python train.py | cat'",
        "set -o pipefail\nsrun -K bash -c 'python train.py | cat'",  # not inherited
        f"if true; then\n  {SRUN} | cat\nfi",
        "timeout 2h env A=1 srun -K -n 2 python train.py | cat",
        "python train.py | cat",
        "python -c 'import train; train.main()' | cat",
        '"${LAUNCH[@]}" train.py | cat',
    ],
    "or-hides-exit": [
        f"{SRUN} || true",
        f"{SRUN} || :",
        f"{SRUN} || echo failed",
        f"{SRUN} || {{ echo no; sleep 5; }}",
        f"{SRUN} || exit 0",
        f"{SRUN} || {{ rc=$?; echo $rc; exit 0; }}",
        f"launch() {{ {SRUN} || return 0; }}\nlaunch",
        f"set -e\n{SRUN} && echo ok || echo failed",
        f"[ -d /lustre ] && {SRUN} && date || echo failed",
    ],
    "end-hides-exit": [
        f"{SRUN}\necho done",
        f"{SRUN}\nexit 0",
        f"{SRUN}\nrm -rf /lustre/x\necho $?",
        f'{SRUN}\nrc=$?\necho "exit code $rc"',
        f"set -e\nset +e\n{SRUN}\necho done",
        f"if {SRUN}; then echo good; else echo bad; fi",
        f"{SRUN} && echo good\ndate",
        f"{SRUN} & pid=$!\nwait $pid\necho done",
        "srun -K bash -c 'python train.py; echo done'",
        f"(\n{SRUN}\necho done\n)",
        f'{SRUN}\necho "exit code $?"',
        f"{SRUN}\npython notify.py $?",
        f"if {SRUN}; then echo ok; else echo bad; exit 0; fi",
        f"if ! {SRUN}; then echo bad; exit 0; fi\nexit 1",
        f"if {SRUN}; then exit 0; fi\necho failed",
        f"run() {{\n{SRUN}\necho finished\n}}\nrun",
        f"run() {{ {SRUN}; echo finished; }}\nrun & wait $!",
        f"launch() {{ {SRUN}; }}\nmain() {{ launch; echo finished; }}\nmain",
        f"set -e\nrun() {{ {SRUN}; echo finished; }}\nrun || exit 1",
    ],
    "background-not-awaited": [f"{SRUN} &", f"nohup {SRUN} >> /lustre/log 2>&1 &\necho started", f"({SRUN}) &"],
    "bare-wait": [f"{SRUN} &\nwait", f"for i in 1 2; do {SRUN} & done\nwait"],
    "idle-end": [f"{SRUN}\nsleep infinity", f"{SRUN}\ntail -f /dev/null"],
    "exec-ends-script": [f"trap 'rm -f /lustre/x' EXIT\nexec {SRUN}", f"exec {SRUN}\nexit 1"],
    "trap-ends-well": [
        f"trap 'echo bye; exit 0' TERM\n{SRUN}",
        f"bye() {{ echo bye; exit 0; }}\ntrap bye EXIT TERM\n{SRUN}",
        f"end() {{ exit 0; }}\nbye() {{ end; }}\ntrap 'sleep 1; bye' TERM\n{SRUN}",
    ],
    "trap-ignores-signal": [f"trap '' TERM\n{SRUN}"],
    "redirect-truncates": [
        f"{SRUN} > /lustre/log",
        f"set -o pipefail\n{SRUN} | tee /lustre/log",
        f"{SRUN} &> train.out",
    ],
    "own-requeue": [
        f"{SRUN} || scontrol requeue $SLURM_JOB_ID",
        f"trap 'echo bye; scontrol requeue $SLURM_JOB_ID' USR2\n{SRUN} & wait $!",
        f"setup() {{ trap 'timeout 9 scontrol requeue $SLURM_JOB_ID' USR2; }}\nsetup\n{SRUN} & wait $!",
    ],
    "gang-outlives-rank": [
        "srun python train.py",
        "srun -K0 python train.py",
        "srun --ntasks=4 python train.py",
        "srun --jobid $SLURM_JOB_ID python train.py",
        "srun -W 60 -n 4 python train.py",
        'SRUN_ARGS=(--mpi=none)\nsrun -N 4 "${SRUN_ARGS[@]}" python train.py',
    ],
    "submits-with-everything": [
        f"{SRUN} || exit 1\nsbatch next.sh",
        f"{SRUN} || exit 1\nenv ${{!SLURM_CPU_BIND@/#/-u }} sbatch next.sh",
        f"{SRUN} || exit 1\nenv A=1 nice sbatch -i next.sh",
        f"{SRUN} || exit 1\nsalloc true",
    ],
    "flight-recorder-off": [f"export TORCH_NCCL_DUMP_ON_TIMEOUT=0\n{SRUN}", f"TORCH_NCCL_TRACE_BUFFER_SIZE=0 {SRUN}"],
    "sbatch-after-command": [f"cd /lustre\n#SBATCH --time=5\n{SRUN}"],
    "node-local": [
        "srun -K python train.py --save /tmp/ckpt",
        "srun -K python train.py --output_dir=/dev/shm/out",
        f"CKPT_DIR=$TMPDIR/x {SRUN}",
        f"export CHECKPOINT_DIR=/ramdisk/x\n{SRUN}",
        'ARGS=( --save /tmp/ckpt --seed 1 )\nsrun -K python train.py "${ARGS[@]}"',
        'ARGS+=(\n  --seed 1  # why\n  "--save" "/tmp/ckpt"\n)\nsrun -K python train.py "${ARGS[@]}"',
        'export OPTS=" --seed 1 \\\n --save /tmp/ckpt"\nsrun -K python train.py $OPTS',
        "srun -K --output=/tmp/%j.log python train.py",
        "srun -K -e /tmp/%j.log python train.py",
        "set -o pipefail\nsrun -K python train.py | tee -a /tmp/train.log",
        "srun -K python train.py --resume /lustre/x --log-dir $TMPDIR/tb",
    ],
    "unreadable-shell": [f"if {SRUN}; then", "echo 'never closed"],
}

NEAR = [
    f"set -euo pipefail\n{SRUN} 2>&1 | tee -a /lustre/log",
    f"set -e -o pipefail\n{SRUN} |& tee -a /lustre/log",
    f"set -o pipefail\n{{ {SRUN}; }} | cat",
    f"{SRUN} | tee -a /lustre/log\nexit ${{PIPESTATUS[0]}}",
    f"{SRUN} | cat\nrc=${{PIPESTATUS[0]}}\nexit $rc",
    f"echo 'a | b'; echo \"c | d\" # srun x | tee y\n{SRUN}",
    f"cat <<EOF >> /lustre/note\nsrun python x.py | tee log\n#SBATCH --time=1\nEOF\n{SRUN}",
    f"head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)\n{SRUN}",
    f"nodes=$(srun hostname | sort -u)\nsrun hostname | sort\n{SRUN}",
    f"scontrol show hostnames | head -1\n{SRUN}",
    "srun -K bash -o pipefail -c 'python train.py | cat'",
    "srun -K bash -c 'set -o pipefail; python train.py | cat'",
    f"{SRUN} > >(tee -a /lustre/log) 2>&1",
    f"case a in a|b) {SRUN};; esac",
    f"[[ $x =~ a|b ]] && echo y\n{SRUN}",
    f"{SRUN} || exit 1\necho done",
    f"{SRUN} || exit $?\ndate",
    f"{SRUN} || die 'no'\ndate",
    f"{SRUN} || rc=$?\nexit ${{rc:-0}}",
    f"{SRUN} || {{ rc=$?; echo $rc; }}\nexit ${{rc:-0}}",
    f"{SRUN} && exit 0 || echo failed\nexit 1",
    f"{SRUN} && exit 0\necho failed\nexit 1",
    f"{SRUN}\nexit $?",
    f"{SRUN}\n[ $? = 0 ] || exit 1\necho done",
    f"{SRUN}\nfinish $?\nfinish() {{ exit $1; }}",
    f"{SRUN}\ncode=$(( $? ))\necho done\n(( code == 0 ))",
    f"if {SRUN}; then exit 0; fi\necho failed\nexit 1",
    f"if ! {SRUN}; then failed=1; fi\necho done\nexit ${{failed:-0}}",
    f"if {SRUN}; then exit 0; else exit 3; fi",
    f"set -e\nrun() {{ {SRUN}; echo finished; }}\nrun",
    f"run() {{ {SRUN}; echo finished; }}\nset -e\nrun",
    f"run() {{ {SRUN}; local rc=$?; echo finished; return $rc; }}\nrun",
    f"run() {{ {SRUN}; rc=$?; echo finished; }}\nrun\nexit $rc",
    f"again() {{ {SRUN}; again; }}\nagain",
    f"launch() {{ {SRUN}; }}\nmain() {{ date; launch; }}\nmain",
    f"warm_up() {{ {SRUN}; echo finished; }}\nwarm_up\n{SRUN}",
    f"bye() {{ rc=$?; if [ $rc = 0 ]; then exit 0; fi; exit $rc; }}\ntrap bye EXIT\n{SRUN}",
    f"trap '[ $? = 0 ] && exit 0' EXIT\n{SRUN}",
    "python --version 2>&1 | head -1\npython -c 'import torch; print(torch.__version__)' || echo no\npython train.py",
    "python -m pip install x | tail -1\npython train.py",
    f"set -e\n{SRUN}\necho done",
    f"{SRUN}\nrc=$?\necho $rc\nexit $rc",
    f"set +e\n{SRUN}\nrc=$?\nset -e\n[ $rc = 0 ] || exit $rc",
    f"{SRUN}\nif [ $? -ne 0 ]; then exit 1; fi\ndate",
    f"if ! {SRUN}; then exit 1; fi\necho done",
    f"{SRUN}\nexit",
    f"{SRUN} && echo good",
    f"until {SRUN}; do sleep 9; done\necho done",
    f"for try in 1 2 3; do {SRUN} && exit 0; done\nexit 1",
    f"{SRUN} & pid=$!\nwait $pid",
    f"{SRUN} &\nsrun_pid=$!\nwait $srun_pid || exit $?\necho done",
    f"for i in 1 2; do {SRUN} & done\nwait -n || exit 1",
    f"nvidia-smi dmon > /dev/null &\n{SRUN}",
    f"exec >> /lustre/log 2>&1\n{SRUN}",
    f"exec {SRUN}",
    f"sleep infinity &\n{SRUN}",
    f"trap 'kill -TERM $pid' TERM\n{SRUN}",
    f"trap 'scontrol show job $SLURM_JOB_ID; echo scontrol requeue' USR2\n{SRUN} & wait $!",
    f"finish() {{ trap '' TERM; exit $1; }}\n{SRUN}",
    f"{SRUN} > /lustre/log.$SLURM_RESTART_COUNT",
    f"{SRUN} > /dev/null",
    f"LOG=/lustre/log.$(date +%s)\n{SRUN} > $LOG",
    f"{SRUN} > $LOG",  # not known
    f"set -o pipefail\n{SRUN} | tee -a /lustre/log",
    "srun --ntasks=1 --nodes=1 python train.py",
    "srun --kill-on-bad-exit=1 python train.py",
    "export SLURM_KILL_BAD_EXIT=1\nsrun python train.py",
    "ARGS=' --wait=60 --kill-on-bad-exit=1 '\nsrun $ARGS python train.py",
    'args=(--label -K)\nsrun "${args[@]}" python train.py',
    'SRUN_ARGS=(--kill-on-bad-exit=1 --mpi=none)\nsrun -N 4 "${SRUN_ARGS[@]}" python train.py',
    "LABEL=--label\nsrun $LABEL --immediate -W 60 -K python train.py",
    "LABEL=--label\nsrun $LABEL -N 1 -n 1 python train.py",
    "LABEL=--label\nsrun $LABEL hostname | sort\nsrun -K python train.py",
    f"{SRUN} || exit 1\nsbatch --export=NONE next.sh",
    f"{SRUN} || exit 1\nsbatch --export NIL next.sh",
    f"{SRUN} || exit 1\nenv -u SLURM_CPU_BIND sbatch next.sh",
    f"{SRUN} || exit 1\nenv A=1 -i /usr/bin/sbatch next.sh",
    f"echo start\n##SBATCH --time=1\n{SRUN}",
    "srun -K python train.py --save /lustre/ckpt --seed 1",
    'ARGS=( --save /lustre/ckpt --cache /tmp/x )\nsrun -K python train.py "${ARGS[@]}"',
    'OPTS="--cache /tmp/x"\nsrun -K python train.py $OPTS',
    "srun -K -o /dev/null --error=/lustre/%j.err python train.py",
    "date | tee -a /tmp/date\nsrun -K python train.py",
    f"a=( 'x | y' z )\nf() {{ echo; }}\n((x = 1 | 2))\n{SRUN}",
]


@pytest.mark.parametrize(("code", "script"), [(code, script) for code, scripts in BODIES.items() for script in scripts])
def test_a_rule_finds_what_it_is_for(code: str, script: str) -> None:
    assert code in body(script)


@pytest.mark.parametrize("script", NEAR)
def test_a_near_miss_is_left_alone(script: str) -> None:
    assert {code: (each.where, each.saw) for code, each in body(script).items()} == {}


# ------------------------------------------------------------------------------------------------- options and the file

TRAP = "trap 'kill -USR1 $pid' USR1"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("no-requeue", "#SBATCH --no-requeue"),
        ("sbatch-misspelt", "# SBATCH --exclusive"),
        ("sbatch-misspelt", " #SBATCH --exclusive"),
        ("sbatch-misspelt", "#sbatch --exclusive"),
        ("sbatch-not-expanded", "#SBATCH --error=$HOME/x.log"),
        ("sbatch-not-expanded", "#SBATCH -D ~/work"),
        ("signal-kills-script", "#SBATCH --signal=B:USR1@300"),
        ("signal-too-late", "#SBATCH --signal=USR1@10"),
        ("unknown-partition", "#SBATCH -p gpu"),
        ("node-local", "#SBATCH --error=/tmp/x.log"),
        ("node-local", "#SBATCH --error=/ramdisk/x.log"),
        ("missing-log-folder", "#SBATCH --error=/lustre/%j/x.log"),
        ("export-none", "#SBATCH --export=NONE"),
    ],
)
def test_a_rule_finds_an_option(code: str, line: str) -> None:
    finding = header(line)[code]
    assert finding.where == "job.sbatch:3" or code == "export-none"


@pytest.mark.parametrize(
    "line",
    [
        "##SBATCH --no-requeue",
        "# about SBATCH --no-requeue",
        '#SBATCH --comment="50 $ a day"',
        "#SBATCH --signal=TERM@300",
        "#SBATCH -p train",
        "#SBATCH --error=/lustre/err-%j.log",
        "#SBATCH --error=/dev/null",
        "#SBATCH --export=ALL",
    ],
)
def test_an_option_that_is_right_is_left_alone(line: str) -> None:
    assert header(line) == {}


@pytest.mark.parametrize(
    ("code", "signal", "script"),
    [
        ("signal-misses-trap", "USR1@120", f"{TRAP}\n{SRUN} & pid=$!\nwait $pid"),
        ("trap-waits", "B:USR1@120", f"{TRAP}\n{SRUN}"),
        (None, "B:USR1@120", f"{TRAP}\n{SRUN} & pid=$!\nwait $pid"),
        (None, "USR1@120", f"trap '' USR1\n{SRUN}"),  # for the ranks, on purpose
        (None, "B:10@120", f"{TRAP}\n{SRUN} & pid=$!\nwait $pid"),
        (None, "B:USR1@120", f"exec {SRUN}"),
        (None, "B:USR1@120", f"{TRAP}\nmain() {{ {SRUN} & pid=$!; wait $pid; }}\nmain"),
        (None, "B:USR1@120", f"{TRAP}\n({SRUN}) & wait $!"),
        ("trap-waits", "B:USR1@120", f"{TRAP}\nmain() {{ {SRUN}; }}\nmain"),
        (None, "B:USR1@120", f"setup() {{ {TRAP}; }}\nsetup\n{SRUN} & pid=$!\nwait $pid"),
    ],
)
def test_a_signal_and_its_trap(code: str | None, signal: str, script: str) -> None:
    text = GOOD.format(body=script).replace("#SBATCH --requeue", f"#SBATCH --signal={signal}\n#SBATCH --requeue")
    assert list(found(text)) == ([code] if code else [])


def test_a_signal_for_the_ranks_alone_stops_no_submission(tmp_path: Path) -> None:
    text = GOOD.format(body=f"{TRAP}\n{SRUN} & wait $!").replace("--requeue", "--requeue --signal=USR1@120")
    assert found(text)["signal-misses-trap"].severity is Severity.WARNING
    path = run_toml(tmp_path, '["true"]', 'signal = "USR2@90"\n')
    assert {finding.code for finding in check_run(path).findings} <= CODES_OF_THIS_MACHINE


def test_append_mode_missing_is_an_error_unless_the_cluster_appends() -> None:
    assert without("--open-mode=append")["log-truncated"].severity is Severity.ERROR
    assert without("--open-mode=append", cluster=cluster("JobFileAppend=1")) == {}
    assert without("--open-mode=append", environ={"SBATCH_OPEN_MODE": "append"}) == {}


def test_requeue_not_asked_for_weighs_what_the_cluster_does_by_default() -> None:
    assert without("--requeue")["requeue-not-asked"].severity is Severity.NOTE
    assert without("--requeue", cluster=cluster("JobRequeue=0"))["requeue-not-asked"].severity is Severity.ERROR
    assert without("--requeue", cluster=None)["requeue-not-asked"].severity is Severity.WARNING


def test_the_whole_gang_ends_where_the_cluster_sees_to_it() -> None:
    assert body("srun python train.py", cluster=cluster("KillOnBadExit=1")) == {}


def test_what_serves_or_watches_a_program_in_the_foreground_is_only_noted() -> None:
    ray = f"{SRUN} &\nsleep 10\npython drive.py"
    for script in (ray, f"srun -K --overlap dcgmi dmon >> /lustre/log &\n{SRUN}"):
        finding = body(script)["background-not-awaited"]
        assert (finding.severity, finding.line, "line" in finding.saw) == (Severity.NOTE, 5, True)
    for script in (f"{SRUN} &\nsleep 10\necho done", f"{SRUN} &\nf() {{ python x.py; }}"):
        assert body(script)["background-not-awaited"].severity is Severity.ERROR


def test_options_of_srun_in_a_variable_from_elsewhere_are_not_known() -> None:
    for script in ("srun --cpus-per-task 12 $EXTRA python train.py", "srun $COMMAND"):
        assert body(script)["gang-outlives-rank"].severity is Severity.NOTE
    assert body("srun $ARGS python train.py")["gang-outlives-rank"].severity is Severity.NOTE
    assert body("ARGS=--label\nsrun $ARGS python train.py")["gang-outlives-rank"].severity is Severity.ERROR


def test_variables_of_the_job_one_sits_in_are_found_by_name() -> None:
    leaking = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_CONF": "/x",
        "SLURM_JOB_ID": "7",
    }
    finding = body(SRUN, environ=leaking)["inherited-environment"]
    assert finding.text == "environment: SLURM_ARRAY_TASK_ID, SLURM_CPU_BIND"
    assert finding.fix == "env -u SLURM_ARRAY_TASK_ID -u SLURM_CPU_BIND sbatch job.sbatch"
    assert body(SRUN, environ={"SLURM_CONF": "/x", "SLURM_JOB_ID": "7"}) == {}
    assert body(f"unset ${{!SLURM_CPU_BIND@}} ${{!SLURM_ARRAY_@}}\n{SRUN}", environ=leaking) == {}
    assert "inherited-environment" not in header("#SBATCH --export=NONE", environ=leaking)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("sbatch next.sh", "sbatch --export=NONE next.sh"),
        ("nice /usr/bin/sbatch -p x next.sh", "/usr/bin/sbatch --export=NONE -p x next.sh"),
        ("env ${!SLURM_CPU_BIND@/#/-u } sbatch next.sh", "sbatch --export=NONE next.sh"),
        ("salloc true", "env -u SLURM_CPU_BIND salloc true"),
    ],
)
def test_the_fix_of_a_submission_inside_of_a_job_is_a_command_that_passes(line: str, fix: str) -> None:
    assert body(f"{SRUN} || exit 1\n{line}")["submits-with-everything"].fix == fix
    assert body(f"{SRUN} || exit 1\n{fix}") == {}


def test_two_places_on_one_line_are_two_findings() -> None:
    text = GOOD.format(body="srun -K python train.py --save /tmp/a --log-dir /tmp/b --load /tmp/a")
    report = check(read_job("job.sbatch", text, Facts(file_system=file_system, submit_dir="/lustre")), RULES)
    seen = [finding.saw.split()[1] for finding in report.findings if finding.code == "node-local"]
    assert seen == ["/tmp/a", "/tmp/b"]


def test_flight_recorder_variables_may_have_either_name_or_come_from_outside() -> None:
    old = "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/lustre/fr_\n"
    new = "export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=/lustre/fr_\n"
    text = GOOD.format(body="srun -K torchrun train.py")
    assert found(text.replace(old, new)) == {}
    finding = found(text.replace(old, ""))["no-flight-recorder"]
    assert (finding.severity, "TORCH_NCCL_TRACE_BUFFER_SIZE=2000" in finding.fix) == (Severity.WARNING, True)
    assert found(text.replace(old, ""), environ=dict(pair.split("=") for pair in new.split()[1:])) == {}
    assert found(GOOD.format(body=SRUN).replace(old, ""))["no-flight-recorder"].severity is Severity.NOTE
    assert found(GOOD.format(body="srun -K ./solver").replace(old, "")) == {}
    inside = 'RUN="python -m torch.distributed.run"\nCMD="train.py"\nsrun -K bash -c "$RUN $CMD"'
    assert "no-flight-recorder" in found(GOOD.format(body=inside).replace(old, ""))
    assert found(GOOD.format(body='RUN="./solver -v"\nsrun -K bash -c "$RUN $CMD"').replace(old, "")) == {}
    pairs = ",".join(old.split()[1:])
    assert found(GOOD.format(body=f"srun -K --export=ALL,{pairs} torchrun train.py").replace(old, "")) == {}
    assert found(text.replace(old, "").replace("--requeue", f"--requeue --export=ALL,{pairs}")) == {}
    assert "no-flight-recorder" in found(GOOD.format(body="srun -K --export=ALL,A=1 torchrun t.py").replace(old, ""))


def test_the_file_as_a_whole() -> None:
    assert "no-interpreter" in found("#SBATCH --time=1\n" + SRUN)
    assert found(GOOD.format(body=SRUN).replace("\n", "\r\n"))["carriage-return"].text == "#!/bin/bash\\r"
    assert "bad-interpreter" in body(SRUN, exists=lambda path: path != "/bin/bash")
    python = found(GOOD.format(body="x = 1").replace("/bin/bash", "/usr/bin/env python3"))
    assert python["unreadable-shell"].severity is Severity.NOTE


def test_folders_that_are_not_there() -> None:
    gone = {"/lustre/gone", "/lustre/logs/gone"}
    known = {"exists": lambda path: path not in gone}
    assert header("#SBATCH -D /lustre/gone", **known)["missing-workdir"].where == "job.sbatch:3"
    assert header("#SBATCH --error=logs/gone/%x.err", **known)["missing-log-folder"].fix == "mkdir -p /lustre/logs/gone"
    assert header("#SBATCH -D /lustre/logs --error=there/%x.err", **known) == {}


@pytest.mark.parametrize(
    ("version", "missing"), [("22.05.8", True), ("23.02.0", False), ("26.05.5", False), ("strange", True)]
)
def test_slurm_makes_the_folder_of_a_log_since_23_02(version: str, missing: bool) -> None:
    known = {"exists": lambda path: path != "/lustre/gone", "cluster": cluster(f"SLURM_VERSION={version}")}
    for line in ("#SBATCH --error=gone/x.err", "#SBATCH --error=/lustre/%j/x.log"):
        assert ("missing-log-folder" in header(line, **known)) == missing


# ----------------------------------------------------------------------------------------------------------- the cluster

PRIO = "PreemptType=preempt/partition_prio PreemptMode=CANCEL"
QOS = "PreemptType=preempt/qos PreemptMode=REQUEUE"


@pytest.mark.parametrize(
    ("config", "mode", "line", "cancels"),
    [
        (PRIO, "CANCEL", "", True),
        (PRIO, "REQUEUE", "", False),
        (PRIO, "OFF", "", False),
        ("PreemptType=preempt/none PreemptMode=CANCEL", "CANCEL", "", False),
        (QOS, "REQUEUE", "#SBATCH --qos=low", True),
        (QOS, "REQUEUE", "", False),
        (PRIO, "CANCEL", "#SBATCH --partition=safe", False),
        (PRIO, "CANCEL", "#SBATCH --partition=safe,train", True),
    ],
)
def test_who_is_preempted_by_cancel(config: str, mode: str, line: str, cancels: bool) -> None:
    partitions = (f"PartitionName=train Default=YES PreemptMode={mode}", "PartitionName=safe PreemptMode=OFF")
    codes = header(line, cluster=cluster(config, *partitions))
    assert ("preempted-by-cancel" in codes) == cancels


def test_a_limit_above_the_partitions_is_named_with_what_would_do() -> None:
    short = cluster("", "PartitionName=train Default=YES MaxTime=08:00:00 DefaultTime=01:00:00")
    assert body(SRUN, cluster=short)["limit-above-partition"].fix == "--time=08:00:00"
    both = cluster("", "PartitionName=train Default=YES MaxTime=08:00:00", "PartitionName=long MaxTime=2-00:00:00")
    assert header("#SBATCH -p train,long", cluster=both) == {}


def test_a_time_limit_that_no_checkpoint_fits_into() -> None:
    text = GOOD.format(body=SRUN).replace("--time=1-00:00:00", "--time=45")
    every = {"checkpoint_every_s": 3600.0, "startup_s": 300.0}
    assert found(text, **every)["limit-below-checkpoint"].severity is Severity.ERROR
    likely = {"checkpoint_every_s": 2400.0, "startup_s": 600.0}
    assert found(text, **likely)["limit-below-checkpoint"].severity is Severity.WARNING
    assert found(text, checkpoint_every_s=1200.0, startup_s=600.0) == {}
    by_default = cluster("", "PartitionName=train Default=YES MaxTime=UNLIMITED DefaultTime=00:30:00")
    text = GOOD.format(body=SRUN).replace("--time=1-00:00:00", "")
    assert "DefaultTime=00:30:00" in found(text, cluster=by_default, **every)["limit-below-checkpoint"].saw


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("sbatch:*:array=1-3", Severity.ERROR),
        ("SBATCH : dev : test-only = yes", Severity.ERROR),
        ("hold=1", Severity.WARNING),
        ("*:quiet=1", Severity.WARNING),
        ("salloc:*:array=1-3", None),
        ("sbatch:moon:array=1-3", None),
        ("# sbatch:*:array=1-3", None),
        ("sbatch:*:array", None),
        ("sbatch:*:partition=debug", None),
    ],
)
def test_a_default_that_no_script_takes_back_is_found_in_its_file(line: str, severity: Severity | None) -> None:
    facts = {"cluster": cluster("ClusterName=dev"), "defaults": f"*:*:time=5\n{line}\n"}
    finding = body(SRUN, **facts).get("defaults-stay")
    assert (finding and (finding.severity, finding.text)) == (severity and (severity, f"~/.slurm/defaults:2: {line}"))
    assert "defaults-stay" not in header("#SBATCH --array=1-2 --hold --quiet --test-only", **facts)


def test_what_an_unreachable_cluster_would_have_to_say_is_not_judged_and_said_so() -> None:
    facts = Facts(
        cluster=None, unseen="Unable to contact slurm controller", file_system=file_system, submit_dir="/lustre"
    )
    report = check(read_job("job.sbatch", GOOD.format(body=SRUN), facts), RULES)
    assert report.findings == ()
    assert set(report.unjudged) == {
        "preempted-by-cancel",
        "limit-above-partition",
        "unknown-partition",
        "defaults-stay",
    }
    assert report.why == "Unable to contact slurm controller"


def test_a_local_file_system_here_is_only_noted() -> None:
    assert body("srun -K python train.py --save /data/ckpt")["node-local"].severity is Severity.NOTE
    assert body("srun -K python train.py --save /home/ckpt") == {}


# --------------------------------------------------------------------------------------------------------------- run.toml

RUN = """\
[run]
name = "llm"
command = {command}
dir = "{dir}"

[env]
TORCH_NCCL_TRACE_BUFFER_SIZE = 2000
TORCH_NCCL_DUMP_ON_TIMEOUT = 1
TORCH_NCCL_DEBUG_INFO_TEMP_FILE = "/lustre/fr_"

[slurm]
time = "2-00:00:00"
"""
CODES_OF_THIS_MACHINE = {"node-local"}  # the folders of these tests are on it


def run_toml(tmp_path: Path, command: str, more: str = "") -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(command=command, dir=tmp_path / "run") + more)
    return path


@pytest.mark.parametrize("template", sorted(path.name for path in template_dir().glob("*.j2")))
@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_what_we_render_ourselves_is_clean(tmp_path: Path, template: str, scheduler: str, monkeypatch) -> None:
    monkeypatch.setattr("krea_runner.launch.render.TEMPLATE", template)
    path = run_toml(tmp_path, '["python", "train.py"]', "[checkpoint]\ndir = '/lustre/ckpt'\n[gang]\nnodes = 2\n")
    text = path.read_text().replace(f'"{tmp_path}/run"', '"/lustre/run"')
    path.write_text(text.replace("[env]", f'scheduler = "{scheduler}"\n[env]'))
    text = render(load_run(path))
    assert "srun" in text
    assert found(text) == {}
    codes = {finding.code for finding in check_run(path).findings}
    assert codes <= CODES_OF_THIS_MACHINE


@pytest.mark.parametrize("command", ['"python train.py | tee log"', '["bash", "-c", "python train.py | tee log"]'])
def test_a_command_in_run_toml_is_judged_as_the_shell_line_that_it_is(tmp_path: Path, command: str) -> None:
    path = run_toml(tmp_path, command)
    findings = {finding.code: finding for finding in check_run(path).findings}
    assert findings["pipe-hides-exit"].where == f"{path}:3"
    assert findings["pipe-hides-exit"].text.startswith("command = ")


def test_an_option_in_run_toml_is_named_by_its_line_there(tmp_path: Path) -> None:
    path = run_toml(tmp_path, '["true"]', 'signal = "USR1@10"\n')
    [finding] = [finding for finding in check_run(path).findings if finding.code == "signal-too-late"]
    assert (finding.where, finding.text) == (f"{path}:13", 'signal = "USR1@10"')
    assert re.fullmatch(r'signal = "USR1@\d+"', finding.fix)


# -------------------------------------------------------------------------------------------------------------- the table


def test_every_rule_has_a_test_that_finds_something() -> None:
    source = Path(__file__).read_text()
    assert [rule.code for rule in RULES if f'"{rule.code}"' not in source] == []


def test_rules_are_told_apart_and_fit_a_line() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", rule.code)
        assert rule.harm.endswith(".")
        assert len(rule.harm) <= 120
        assert rule.fix
