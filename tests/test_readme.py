"""The documentation tells the truth: its examples run, its links lead somewhere."""

from __future__ import annotations

import doctest
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def examples(page: Path) -> list[str]:
    return FENCE.findall(page.read_text())


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=name)
def test_examples_run(page: Path) -> None:
    """Examples of a page share their names, as a reader who types along would have them."""
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner()
    for i, code in enumerate(examples(page)):
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, f"{name(page)}[{i}]", None, 0)
            output: list[str] = []
            failures = runner.run(test, out=output.append, clear_globs=False)
            assert not failures.failed, "".join(output)
            names.update(test.globs)
        else:
            exec(compile(code, f"{name(page)}[{i}]", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text()) if "://" not in t]
    assert not [t for t in targets if not (page.parent / t).exists()]


def test_readme_commands_are_those_of_the_script() -> None:
    commands = re.findall(r"^\./run (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["evaluate", "test"]
    usage = subprocess.run(["bash", ROOT / "run"], capture_output=True, text=True, timeout=60)
    assert usage.returncode == 2
    assert all(f"./run {command}" in usage.stderr for command in commands)
    assert "./run test" in (ROOT / ".ci" / "run").read_text()


def test_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = subprocess.run(
        ["bash", ROOT / "run", "test"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(old), "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr == f"run: PYTHON={old} is not a Python of version 3.11 or newer\n"
    assert not (tmp_path / "venv").exists()
