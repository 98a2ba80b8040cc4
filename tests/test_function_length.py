"""No function has more than 100 lines, including its signature and its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST = 100
"""The most lines of a function."""

PYTHON = ("benchmarks", "examples", "python", "tests", "tools")
CPP = ("benchmarks", "csrc", "include", "tests")
CPP_KINDS = {".h", ".cuh", ".cpp", ".cu"}


class Function(NamedTuple):
    name: str
    line: int
    """The line where its signature begins."""
    lines: int
    """How many lines it has, from `line` to its end."""


def python_functions(text: str) -> Iterator[Function]:
    """All functions, also those inside of functions and classes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield Function(node.name, node.lineno, node.end_lineno - node.lineno + 1)


# Text whose braces do not count: comments, raw strings, strings, directives, and characters (a ' between digits begins
# no character).
_MEANINGLESS = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | R"(?P<end>[^(\s]*)\(.*?\)(?P=end)" | "(?:\\.|[^"\\\n])*"
    | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+' | ^[ \t]*\#(?:\\\n|[^\n])*""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_HOLDS_FUNCTIONS = re.compile(
    r"(?:template\s*<.*>\s*)?(?:inline\s+)?(?:namespace|class|struct|union|enum|extern)\b[^()]*", re.DOTALL
)
_ATTRIBUTE = re.compile(r"\b(?:alignas|requires|__launch_bounds__|__cluster_dims__)\s*\((?:[^()]|\([^()]*\))*\)")


def cpp_functions(text: str) -> Iterator[Function]:
    """Functions at namespace scope and in classes. Lambdas and local classes count as part of the function around them.

    Looks at braces alone, in text that clang-format has formatted. Raises `AssertionError` if the braces do not match.
    """
    text = _MEANINGLESS.sub(lambda found: "\n" * found[0].count("\n"), text)
    held: list[
        tuple[bool, str, int]
    ] = []  # for each open brace: whether functions may lie in it, the text before it (its head), where the head begins
    since = 0
    for found in re.finditer(r"[{};]|\b(?:public|private|protected):", text):
        at = found.start()
        if found[0] == "{":
            before = text[since:at]
            head = _ATTRIBUTE.sub("", before).strip()
            held.append((_HOLDS_FUNCTIONS.fullmatch(head) is not None, head, at - len(before.lstrip())))
        elif found[0] == "}":
            line = text.count("\n", 0, at) + 1
            assert held, f"line {line}: expected a brace to close, got none"
            holds, head, begin = held.pop()
            name = re.search(r"([~\w]+|operator\W+)\s*\(", head)
            # If a parenthesis of the head is open, as in to_array({, the brace begins a table.
            if name and not holds and head.count("(") == head.count(")") and all(outer for outer, *_ in held):
                first = text.count("\n", 0, begin) + 1
                yield Function(name[1], first, line - first + 1)
        since = found.end()
    assert not held, f"expected every brace to be closed, got {len(held)} open ones, the last of {held[-1][1]!r}"


def sources(root: Path, folders: tuple[str, ...], kinds: set[str]) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in kinds)


def functions(root: Path) -> Iterator[tuple[Path, Function]]:
    """All functions of the tree."""
    for path in sources(root, PYTHON, {".py"}):
        yield from ((path, each) for each in python_functions(path.read_text()))
    for path in sources(root, CPP, CPP_KINDS):
        yield from ((path, each) for each in cpp_functions(path.read_text()))


def too_long(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{each.line}: {each.name}: expected at most {MOST} lines, got {each.lines}"
        for path, each in functions(root)
        if each.lines > MOST
    ]


# ---- the tests -------------------------------------------------------------------------------------------------------


def test_no_function_is_too_long():
    assert too_long(ROOT) == []


def test_the_functions_are_seen():
    """Each folder has some functions, and three functions that are known to exist are found."""
    found = list(functions(ROOT))
    assert len(found) > 2000
    for folder in ("python", "tests", "tools", "benchmarks", "examples", "include", "csrc"):
        assert sum(path.relative_to(ROOT).parts[0] == folder for path, _ in found) > 3, folder
    names = {(path.relative_to(ROOT).as_posix(), each.name) for path, each in found}
    assert ("python/flashmoe/calls/moe.py", "moe") in names
    assert ("csrc/cpu/context.cpp", "call") in names
    assert ("include/flashmoe/actors/sender.h", "run") in names


def python_function(lines: int) -> str:
    return "class A:\n    def f(self) -> None:\n" + "        pass\n" * (lines - 1)


def cpp_function(head: str, lines: int) -> str:
    body = "  if (a) {  // } in a comment\n" + "  b(\"{\", '{', 1'000'000);\n" * (lines - 4) + "  }\n"
    return f"namespace n {{\n\nstruct alignas(8) S {{\n  int a = 0;\n}};\n\n{head} {{\n{body}}}\n\n}}  // namespace n\n"


HEADS = {
    "f": "void f(int a, int b)",
    "g": "template <class T>\n  requires(sizeof(T) == 4)\nauto g(const T& a) noexcept -> decltype(a)",
    "h": 'extern "C" __global__ void __launch_bounds__(384, 1) h(int a)',
    "S": "S::S(int a) : a_(a)",
    "T": "class U {\n public:\n  T(int a)",
}


@pytest.mark.parametrize(("lines", "caught"), [(MOST, False), (MOST + 1, True)])
def test_a_planted_long_function_of_python_is_caught(tmp_path, lines, caught):
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "a.py").write_text(python_function(lines))
    expected = [f"python/a.py:2: f: expected at most {MOST} lines, got {lines}"]
    assert too_long(tmp_path) == (expected if caught else [])


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("lines", "caught"), [(MOST, False), (MOST + 1, True)])
def test_a_planted_long_function_of_cpp_is_caught(tmp_path, name, lines, caught):
    head = HEADS[name]
    inside = head.startswith("class")
    signature = head.splitlines()[2:] if inside else head.splitlines()
    text = cpp_function(head, lines - len(signature) + 1)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "a.cuh").write_text(text.replace("}  // namespace n", "};\n}") if inside else text)
    expected = [f"include/a.cuh:{9 if inside else 7}: {name}: expected at most {MOST} lines, got {lines}"]
    assert too_long(tmp_path) == (expected if caught else [])


def test_tables_and_types_may_be_long():
    rows = "    {1, f(2)},\n" * MOST
    for head, end in (("const int kTable[] =", "};"), ("constexpr auto kRows = std::to_array<R>(", "});")):
        assert list(cpp_functions(f"namespace {{\n{head} {{\n{rows}{end}\n}}\n")) == []
    assert [each.lines for each in cpp_functions("struct S {\n" + "  int f() { return 1; }\n" * MOST + "};\n")] == [
        1
    ] * MOST


@pytest.mark.parametrize("text", ["void f() {\n", "void f() {}\n}\n"])
def test_braces_that_do_not_match_are_an_error(text):
    with pytest.raises(AssertionError, match=r"expected .* brace"):
        list(cpp_functions(text))
