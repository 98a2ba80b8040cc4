"""Digests of what a file of GPU tests depends on: three digests, and one for each kernel that it loads.

- Its tests: the file, and modules outside of the package that it imports.
- Python: the package's modules that these files import, directly or through other modules.
- Host: the C++ files that the CUDA engine's bindings are linked from: csrc/bindings/cuda.cpp, the headers that it
  includes, also through other files, and the .cpp file that belongs to each header.

Comments, docstrings and blank lines are not part of these three digests, because they do not run. A kernel's digest is
of all files that the kernel is compiled from, with their comments, as is the name of its file (python/flashmoe/jit.py).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import flashmoe
from flashmoe import jit
from flashmoe.spec import ACTIVATIONS, DTYPES

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path("tests/gpu")
CONFTEST = TESTS / "conftest.py"
"""pytest loads this file together with each file of tests, so it is part of each one's digest."""
TELLS = TESTS / "told.py"
"""This file is left out of all digests: it only reports outcomes, so no test's outcome depends on it."""
ON_CPU_TOO = TESTS / "test_cpu_engine.py"
"""This file also depends on the CPU engine, because it compares the two engines."""

_IMPORTED_FROM = ("python", "tests/gpu", "tests", "benchmarks")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_CPP = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


class Tree:
    """The sources in a folder, and their digests. The sources must not change while this object is in use, because it
    reads each file only once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._code: dict[Path, bytes] = {}
        self._imported: dict[Path, set[Path]] = {}
        self._of_entry: dict[str, bytes] = {}

    def sources_of(self, test: Path) -> dict[str, str]:
        """The three digests of a file of tests. `test`: its path from the root."""
        modules = closure([self.root / test, self.root / CONFTEST], self._imports)
        modules.discard(self.root / TELLS)
        package = {path for path in modules if self.root / "python" in path.parents}
        engines = ["cuda", "cpu"] if test == ON_CPU_TOO else ["cuda"]
        linked = closure([self.root / f"csrc/bindings/{engine}.cpp" for engine in engines], self._linked)
        return {"tests": self._digest(modules - package), "python": self._digest(package), "host": self._digest(linked)}

    def kernels(self, variants: Iterable[jit.Variant]) -> dict[str, str]:
        """The digests of these kernels, by name: a kernel's type, its activation and the options that are on."""
        found = {}
        for variant in variants:
            digest = hashlib.sha256(self._entry(variant) + " ".join(variant.flags).encode())
            options = [name for name in jit.OPTIONS if getattr(variant, name)]
            found[" ".join([variant.dtype, variant.activation, *options])] = digest.hexdigest()[:16]
        return dict(sorted(found.items()))

    def kernel(self, name: str) -> str | None:
        """The digest of the kernel with this name; None: these sources have no such kernel."""
        try:
            return self.kernels([variant_named(name)])[name]
        except (TypeError, ValueError, KeyError, OSError):  # an option, activation or source that no longer exists
            return None

    def source(self, path: Path) -> str:
        """The digest of a source that nvcc compiles without options, and of what the source includes."""
        return self._digest(closure([path], self._linked))

    def _entry(self, variant: jit.Variant) -> bytes:
        if variant.entry not in self._of_entry:
            digest = hashlib.sha256()
            for path, content in jit.sources_of(self.root, variant).items():
                digest.update(f"{path.relative_to(self.root)} {len(content)}\n".encode() + content)
            self._of_entry[variant.entry] = digest.digest()
        return self._of_entry[variant.entry]

    def _imports(self, path: Path) -> set[Path]:
        """The files of all modules that a file imports, also inside its functions, and of the packages that the modules
        are in."""
        if path not in self._imported:
            names = {name[:end] for name in _imported_names(self.root, path) for end in range(1, len(name) + 1)}
            folders = [self.root / folder for folder in _IMPORTED_FROM]
            self._imported[path] = {file for name in names for each in folders for file in _module_files(each, name)}
        return self._imported[path]

    def _linked(self, path: Path) -> set[Path]:
        """The headers that a file includes, each with the .cpp file of the same name, if there is one."""
        found = set()
        for name in _INCLUDE.findall(path.read_text()):
            for each in (path.parent / name, self.root / "include" / name, self.root / "csrc" / name):
                found |= {file.resolve() for file in (each, each.with_suffix(".cpp")) if file.is_file()}
        return found

    def _digest(self, paths: Iterable[Path]) -> str:
        digest = hashlib.sha256()
        for path in sorted(paths):
            if path not in self._code:
                self._code[path] = code_of(path)
            digest.update(f"{path.relative_to(self.root)}\n".encode() + self._code[path] + b"\n")
        return digest.hexdigest()[:16]


def differing(root: Path = ROOT) -> str:
    """The first source that differs from the installed package's copy of it; empty: none differs."""
    package = Path(flashmoe.__file__).resolve().parent
    pairs = [(path, package / path.relative_to(root / "python/flashmoe")) for path in _files(root / "python/flashmoe")]
    pairs += [(path, jit.source_root() / path.relative_to(root)) for path in _files(root / "include")]
    pairs += [(path, jit.source_root() / path.relative_to(root)) for path in _files(root / "csrc/cuda/entry")]
    others = (
        path for path, installed in pairs if not installed.is_file() or path.read_bytes() != installed.read_bytes()
    )
    return next((str(path.relative_to(root)) for path in others), "")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".h", ".cuh", ".cu"))


def variant_named(name: str) -> jit.Variant:
    """The build of a kernel by its name in `Tree.kernels`."""
    dtype, activation, *options = name.split()
    return jit.Variant(dtype, activation, **dict.fromkeys(options, True))


def variant_of(flags: Sequence[str]) -> jit.Variant:
    """The build of a kernel by the flags with which nvcc was called."""
    macros = dict(flag[2:].partition("=")[::2] for flag in flags if flag.startswith("-DFLASHMOE_"))
    on = {name: macro in macros for name, macro in jit.OPTIONS.items()}
    return jit.Variant(DTYPES[int(macros["FLASHMOE_DTYPE"])], ACTIVATIONS[int(macros["FLASHMOE_ACTIVATION"])], **on)


def closure(paths: Iterable[Path], leads_to: Callable[[Path], Iterable[Path]]) -> set[Path]:
    """These files and all files that they lead to, directly or through other files."""
    found: set[Path] = set()
    todo = list(paths)
    while todo:
        if (path := todo.pop()) not in found:
            found.add(path)
            todo += leads_to(path)
    return found


def _module_files(folder: Path, name: Sequence[str]) -> list[Path]:
    path = folder.joinpath(*name)
    return [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()][:1]


def _imported_names(root: Path, path: Path) -> Iterator[tuple[str, ...]]:
    package = path.relative_to(root / "python").parts[:-1] if root / "python" in path.parents else ()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(each.name.split(".")) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            within = package[: len(package) - node.level + 1] if node.level else ()
            name = (*within, *(node.module.split(".") if node.module else ()))
            yield from ((*name, each.name) for each in node.names)


def code_of(path: Path) -> bytes:
    """The part of a Python or C++ file that runs, without comments; the whole content of any other file."""
    if path.suffix == ".py":
        return without_words(path.read_text()).encode()
    if path.suffix in (".h", ".cpp", ".cuh", ".cu"):
        return without_comments(path.read_text()).encode()
    return path.read_bytes()


@functools.cache
def without_comments(text: str) -> str:
    """C++ without its comments and blank lines."""
    code = _CPP.sub(lambda found: " " if found[0][0] == "/" else found[0], text)
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


@functools.cache
def without_words(text: str) -> str:
    """Python without its comments, docstrings and blank lines. The result does not depend on the version of Python that
    runs this."""
    lines = text.splitlines(keepends=True)
    spans = [*_comments(text), *_docstrings(text)]
    for (first, start), (last, end) in sorted(spans, reverse=True):
        head, tail = lines[first - 1][:start], lines[last - 1][end:]
        lines[first - 1 : last] = [head + tail, *[""] * (last - first)]
    return "\n".join(line.rstrip() for line in lines if line.strip())


_Span = tuple[tuple[int, int], tuple[int, int]]
"""Where a span begins and where it ends, each as a line and a column."""


def _comments(text: str) -> Iterator[_Span]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start, token.end


def _docstrings(text: str) -> Iterator[_Span]:
    """The spans of all strings that are statements: docstrings, and strings below a name that describe the name."""
    lines = text.splitlines(keepends=True)

    def column(line: int, in_bytes: int) -> int:
        return len(lines[line - 1].encode()[:in_bytes].decode())

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
            yield (start[0], column(*start)), (end[0], column(*end))
