"""The package as it is installed: imports, public names, metadata and what a wheel holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import replayssm

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "numpy", "numba", "triton", "transformers", "scipy", "matplotlib", "pydantic")
CORE = ("types", "errors", "ring", "slots", "formats", "storage", "transfer", "memory", "state")


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after ``statement``."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(result.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert not modules_after("import replayssm") & set(HEAVY)


def test_core_needs_torch_and_numpy_only() -> None:
    names = ", ".join(f"replayssm.{name}" for name in (*CORE, "ops"))
    optional = {"numba", "triton", "transformers", "typer", "rich", "pydantic", "scipy", "aiohttp"}
    # torch itself looks for triton where it is installed; that is not ours
    assert not (modules_after(f"import {names}") - modules_after("import torch, numpy")) & optional


def test_command_line_starts_without_torch() -> None:
    pytest.importorskip("replayssm.cli.main", reason="the command line is not there yet")
    assert not modules_after("import replayssm.cli.main") & {"torch", "transformers", "matplotlib"}


def test_public_names_resolve() -> None:
    assert "StatePool" in replayssm.__all__
    for name in replayssm.__all__:
        assert getattr(replayssm, name) is not None
    assert set(replayssm.__all__) <= set(dir(replayssm))


def test_public_names_are_typed() -> None:
    """Names that are imported on first use are known to a type checker all the same."""
    tree = ast.parse(Path(replayssm.__file__).read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    typed = {alias.asname for n in imports for alias in n.names if alias.asname}
    assert typed == set(replayssm.__all__) - {"__version__"}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RingState'"):
        replayssm.RingState  # noqa: B018


def test_version_is_the_projects() -> None:
    assert replayssm.__version__ == PROJECT["version"] == metadata.version("replayssm")


def test_changelog_names_the_version() -> None:
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_installed_extras_are_the_projects() -> None:
    extras = metadata.metadata("replayssm").get_all("Provides-Extra")
    assert set(extras or ()) == set(PROJECT["optional-dependencies"])
    assert {"cpu", "gpu", "transformers", "evaluate", "dev", "all"} <= set(extras or ())


def test_constraints_pin_every_direct_dependency_that_was_tested() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    groups = PROJECT["optional-dependencies"]
    direct = [*PROJECT["dependencies"]]
    for extra in ("cpu", "transformers", "evaluate", "dev"):
        direct += groups[extra]
    names = {requirement.partition(">")[0] for requirement in direct}
    assert names <= pinned


@pytest.mark.slow
def test_wheel_holds_all_package_data(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), "."]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "src"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    missing = {f.removeprefix("src/") for f in tracked.stdout.split("\0") if f} - packed
    assert not missing
    assert not [name for name in packed if name.startswith(("tests/", "benchmarks/"))]
