"""The shape of the code: who may import whom, what is not loaded where, and that linters and types hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import krea_runner

PACKAGE = Path(krea_runner.__file__).parent
ROOT = PACKAGE.parent

# Layers from the bottom up (docs/design/layers.md): a module imports only from its own layer's package or from below.
LAYERS = [
    {"errors", "clock", "proc", "heartbeat", "adapters", "_init"},
    {"model"},
    {"rundir"},
    {"config"},
    {"transport"},
    {"schedulers", "observe", "diagnose", "decide", "history"},
    {"supervise", "launch", "report", "demo"},
    {"cli"},
    {"_main"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)


def top(path: Path) -> str:
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return {"__init__": "_init", "__main__": "_main"}.get(name, name)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("krea_runner.")} & set(LEVEL)


# The package's public names, which are imported on first use.
ALLOWED_UPWARD: set[tuple[str, str]] = {("_init", "heartbeat"), ("_init", "launch")}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = top(path)
    for other in imports_of(path):
        if other == own or (own, other) in ALLOWED_UPWARD:
            continue
        same_level = LEVEL[other] == LEVEL[own]
        assert LEVEL[other] <= LEVEL[own], f"{path.name} ({own}) imports {other}, which lies above it"
        # supervise may use nothing of launch or report, observe nothing of diagnose, and so on.
        assert not (same_level and LEVEL[own] == LEVEL["observe"]), f"{own} imports its neighbour {other}"


def test_every_package_has_a_layer() -> None:
    assert {top(path) for path in modules()} <= set(LEVEL)


def test_heartbeat_imports_only_the_standard_library() -> None:
    for node in ast.walk(ast.parse((PACKAGE / "heartbeat.py").read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names


def test_files_are_small() -> None:
    sizes = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in modules()}
    assert {name: size for name, size in sizes.items() if size > 500} == {}


def test_no_file_is_called_by_nothing() -> None:
    forbidden = {"utils", "helpers", "common", "misc", "base", "tools"}
    assert [path for path in modules() if path.stem in forbidden] == []


HEAVY = {
    "sqlalchemy",
    "alembic",
    "jinja2",
    "rich",
    "typer",
    "paramiko",
    "submitit",
    "pydantic",
    "torch",
    "numpy",
    "asyncio",
}


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import krea_runner", set()),
        ("from krea_runner import Heartbeat", set()),
        ("import krea_runner.diagnose.hang, krea_runner.diagnose.end, krea_runner.decide.decision", set()),
        ("import krea_runner.diagnose.logs", set()),
        ("import krea_runner.schedulers.slurm_cli, krea_runner.schedulers.local", set()),
        ("import krea_runner.observe.snapshot", set()),
        ("import krea_runner.config", set()),
        # A quiet tick needs the history and nothing else that is heavy; what SQLAlchemy itself loads is its business.
        ("import krea_runner.supervise.loop; import krea_runner.cli.context", {"sqlalchemy", "asyncio"}),
    ],
)
def test_nothing_heavy_is_loaded_where_it_is_not_needed(statement: str, allowed: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) & HEAVY - allowed == set()


def test_version_loads_no_command_line() -> None:
    code = (
        "import sys; sys.argv = ['krea-runner', '--version']\n"
        "from krea_runner.cli.app import main; main()\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0] == f"krea-runner {krea_runner.__version__}"
    assert set(out[1].split()) & HEAVY == set()


def run_tool(*argv: str) -> None:
    done = subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


needs_checkout = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="krea_runner is installed, not a checkout: nothing to lint"
)


@needs_checkout
def test_types_hold() -> None:
    run_tool("mypy")


@needs_checkout
def test_linter_is_content() -> None:
    run_tool("ruff", "check", ".")


@needs_checkout
def test_code_is_formatted() -> None:
    run_tool("ruff", "format", "--check", ".")
