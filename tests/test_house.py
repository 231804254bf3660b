"""House rules that a script can see, so that nobody has to look for them in a review."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
SHOWN = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}

MAX_LINES = 400
MAX_FUNCTION = 60
# file or "file:function" -> why it may be longer
LONG_FILES: dict[str, str] = {}
KERNELS = "src/replayssm/ops/triton/kernels"
A_KERNEL = "a kernel names every pointer, stride and constant it takes, and keeps its tiles in hand"
LONG_FUNCTIONS: dict[str, str] = {
    f"{KERNELS}/additive_pass.py:_serve": A_KERNEL,
    f"{KERNELS}/one_pass.py:_serve": A_KERNEL,
    f"{KERNELS}/one_pass.py:one_pass_kernel": A_KERNEL,
    f"{KERNELS}/products.py:products_kernel": A_KERNEL,
    f"{KERNELS}/pull_and_read.py:_serve": A_KERNEL,
    f"{KERNELS}/pullback.py:chain_kernel": A_KERNEL,
    f"{KERNELS}/whole.py:whole_kernel": A_KERNEL,
}


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.fixture(params=SOURCES, ids=SHOWN.__getitem__)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_module_has_a_docstring(tree: ast.Module) -> None:
    assert ast.get_docstring(tree)


def test_inputs_are_not_checked_by_assert(path: Path, tree: ast.Module) -> None:
    if "testing" in path.parts:
        pytest.skip("a conformance suite asserts")
    assert not [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert)]


def test_no_exception_is_swallowed(tree: ast.Module) -> None:
    handlers = [n for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)]
    broad = [n.lineno for n in handlers if n.type is None]
    silent = [n.lineno for n in handlers if all(isinstance(s, ast.Pass) for s in n.body)]
    assert not broad
    assert not silent


def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES or LONG_FILES.get(SHOWN[path]), f"{lines} lines"


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without those of functions defined in it."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    inner = [n for n in ast.walk(function) if n is not function and isinstance(n, type(function))]
    covered = {line for n in inner for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
    return total - len(covered)


def test_functions_are_short(path: Path, tree: ast.Module) -> None:
    long = {}
    for node in functions(tree):
        lines = own_lines(node)
        if lines > MAX_FUNCTION and f"{SHOWN[path]}:{node.name}" not in LONG_FUNCTIONS:
            long[node.name] = lines
    assert not long


def test_functions_that_mutate_say_so(path: Path, tree: ast.Module) -> None:
    """A public name that ends in ``_`` has a docstring; that is where the mutation is said."""
    silent = [
        node.name
        for node in functions(tree)
        if node.name.endswith("_") and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not silent, SHOWN[path]


def test_exceptions_to_the_rules_still_apply() -> None:
    """A listed exception whose file or function has become short is taken off the list."""
    for name in LONG_FILES:
        assert len((ROOT / name).read_text().splitlines()) > MAX_LINES
    for name in LONG_FUNCTIONS:
        file, _, wanted = name.partition(":")
        found = [n for n in functions(ast.parse((ROOT / file).read_text())) if n.name == wanted]
        assert any(own_lines(n) > MAX_FUNCTION for n in found)


def test_lanes_pass_numbers_on_in_no_assembly(path: Path) -> None:
    """A compiler does not know that all lanes have to meet there, and may part them before it."""
    if path.is_relative_to(ROOT / KERNELS):
        assert not re.search(r"shfl|\bvote\b|redux|bar\.", path.read_text())


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not for their types either."""
    graph = pytest.importorskip("grimp").build_graph("replayssm", cache_dir=None)
    circles = [
        (module, other)
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
        if graph.find_shortest_chain(importer=other, imported=module)
    ]
    assert not circles
