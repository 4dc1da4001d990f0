"""What README and docs say is held against the program: commands, options, files, configurations."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from krea_runner.config import load_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


@page
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@cache
def help_of(*words: str) -> str:
    argv = [sys.executable, "-m", "krea_runner", *words, "--help"]
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    return done.stdout if done.returncode == 0 else ""


def commands(path: Path) -> set[tuple[str, ...]]:
    """Every `krea-runner ...` in code, as words."""
    text = path.read_text()
    spans = re.findall(r"`([^`\n]*krea-runner [^`\n]*)`", text)
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        spans += block.splitlines()
    found = set()
    for span in (span.split(" #")[0] for span in spans):
        for match in re.finditer(r"(?<![\w./-])(?:/path/to/venv/bin/)?krea-runner ((?!-)[a-z][^#|;]*)", span):
            found.add(tuple(shlex.split(match[1].replace("…", ""))))
    return found


@page
def test_commands_exist_with_their_options(path: Path) -> None:
    for words in commands(path):
        if words[0] in {"submit", "install"} and "krea-runner" in words:
            continue
        text = help_of(words[0]) + (
            help_of(*words[:2]) if words[0] in {"nodes", "checkpoints"} and len(words) > 1 else ""
        )
        assert text, f"{path.name}: krea-runner {words[0]} is no verb"
        for option in (word.split("=")[0] for word in words[1:] if word.startswith("-")):
            assert re.search(rf"(^|[\s,]){re.escape(option)}\b", text), f"{path.name}: {words[0]} has no {option}"


def test_every_verb_has_help_with_an_example() -> None:
    verbs = re.findall(r"^\s{2}([a-z]+)\s{2,}", help_of().split("Commands:")[-1], re.MULTILINE)
    assert {"submit", "adopt", "supervise", "status", "history", "stop", "resume", "doctor", "demo"} <= set(verbs)
    for verb in verbs:
        assert f"Example: krea-runner {verb}" in help_of(verb)


def toml_blocks() -> list[str]:
    return [block for path in PAGES for block in re.findall(r"```toml\n(.*?)```", path.read_text(), re.DOTALL)]


def test_the_readmes_run_toml_is_valid(tmp_path: Path) -> None:
    whole = [textwrap_dedent(block) for block in toml_blocks() if "[run]" in block and "command" in block]
    assert whole
    for number, block in enumerate(whole):
        path = tmp_path / f"{number}.toml"
        path.write_text(block)
        load_run(path)


def textwrap_dedent(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)


def test_the_example_is_valid() -> None:
    config = load_run(ROOT / "docs" / "examples" / "ddp_run.toml")
    assert config.gang.world_size == 8


def test_the_python_function_of_the_how_to_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "python-functions.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    env = {**os.environ, "KREA_RUNNER_STATE_DIR": str(tmp_path / "state")}
    argv = [sys.executable, "train.py"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=tmp_path, check=False, timeout=90)
    assert done.stdout == "1 [1000, 1000, 1000, 1000]\n", done.stderr


@pytest.mark.timeout(300)
def test_the_first_command_of_the_readme(tmp_path: Path) -> None:
    """scripts/demo, into a virtual environment of its own, in an empty home."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "VENV": str(tmp_path / "venv")}
    env |= {
        key: value
        for key, value in os.environ.items()
        if key.startswith("PIP_") or "CERT" in key or "PROXY" in key.upper()
    }
    done = subprocess.run(
        [ROOT / "scripts" / "demo"], capture_output=True, text=True, env=env, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "final weights: identical" in done.stdout
