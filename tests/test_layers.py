"""Rules for includes and imports: layers of C++ include only layers below them, and Python modules import in no circle.

C++: a layer of `MAY_INCLUDE` may include itself and the layers that its row names. Python: imports between modules of
the package form no circle, and imports in functions count too. Imports for annotations alone, under TYPE_CHECKING, do
not count. The tables of exceptions list what breaks these rules today; an exception that is no longer needed fails a
test, like an include that breaks the rules (it "points up"). Neither the package nor a benchmark changes `sys.path`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

_SPEC, _PROTOCOL_H, _ACTORS_H, _GPU_H, _SM90 = (
    f"include/flashmoe/{layer}" for layer in ("spec", "protocol", "actors", "gpu", "sm90")
)
_PROTOCOL = {_SPEC, _PROTOCOL_H}
_ACTORS = _PROTOCOL | {_ACTORS_H}
_GPU = _ACTORS | {_GPU_H}
_MACHINE = _GPU | {_SM90}
_ROLES = _MACHINE | {f"{_SM90}/machine", f"{_SM90}/epilogue"}
_HOST_OF_CUDA = _GPU | {_SM90, "csrc/host", "csrc/cuda/device"}
MAY_INCLUDE: dict[str, set[str]] = {
    _SPEC: set(),
    _PROTOCOL_H: _PROTOCOL,
    _ACTORS_H: _ACTORS,
    _GPU_H: _GPU,
    f"{_SM90}/machine": _MACHINE,
    f"{_SM90}/epilogue": _MACHINE | {f"{_SM90}/machine"},
    f"{_SM90}/roles": _ROLES,
    f"{_SM90}/gradients": _ROLES | {f"{_SM90}/roles"},
    f"{_SM90}/decode": _MACHINE | {f"{_SM90}/machine"},
    _SM90: _GPU,
    "csrc/host": _PROTOCOL,
    "csrc/cpu": _ACTORS | {"csrc/host"},
    "csrc/cuda/device": _PROTOCOL | {"csrc/host"},
    "csrc/cuda/transport": _PROTOCOL | {"csrc/host", "csrc/cuda/device"},
    "csrc/cuda/entry": _ROLES | {f"{_SM90}/{room}" for room in ("roles", "gradients", "decode")},
    "csrc/cuda": _HOST_OF_CUDA | {"csrc/cuda/transport"},
    "csrc/network": _PROTOCOL | {"csrc/host"},
    "csrc/sim": _ACTORS | {"csrc/host", "csrc/cuda", "csrc/network"},
}
"""If a folder lies in another, the inner one comes first, because `layer_of` takes the first match. The fused kernel's
roles include nothing of gradients: a template parameter brings what a pass does in addition (sm90/roles/pass.cuh)."""
MAY_INCLUDE["csrc/bindings"] = set(MAY_INCLUDE)

KNOW_ARCHITECTURES = ("csrc/cuda/arch.h", "csrc/cuda/arch.cpp", "csrc/cuda/entry/")
"""The files of csrc that may name a GPU architecture. Other host code uses an `Arch` object (csrc/cuda/arch.h)."""

FOREIGN = ("non_abi/", "device/")
"""Quoted includes of NVSHMEM's headers, which are not in the repository."""

Arrow = tuple[str, str]

INCLUDES_THAT_POINT_UP: set[Arrow] = set()
"""Exceptions: (file, included file). They are to be removed."""

IMPORTS_IN_CIRCLES: set[Arrow] = set()
"""Exceptions: (module, imported module). Without them there is no circle, and with any of them there is one. They are
to be removed."""


# ---- includes --------------------------------------------------------------------------------------------------------


def sources(root: Path) -> list[Path]:
    kinds = {".h", ".cuh", ".cpp", ".cu"}
    return sorted(path for top in ("include", "csrc") for path in (root / top).rglob("*") if path.suffix in kinds)


def includes(root: Path) -> list[Arrow]:
    """(file, included file), relative to the root. Raises `AssertionError` if a file included in quotes is nowhere."""
    arrows = []
    for path in sources(root):
        for quote, name in re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', path.read_text(), re.MULTILINE):
            places = (root / "include" / name, root / "csrc" / name, path.parent / name)
            found = [place.resolve() for place in places if place.is_file()]
            assert found or quote == "<" or name.startswith(FOREIGN), f"{path}: {name} is nowhere in the repository"
            arrows += [(path.relative_to(root).as_posix(), each.relative_to(root).as_posix()) for each in found[:1]]
    return arrows


def naming_architectures(root: Path) -> list[str]:
    """Lines of csrc that name an architecture by its number (in an include, a namespace or a comment) and may not."""
    found = []
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        if not name.startswith("csrc/") or name.startswith(KNOW_ARCHITECTURES):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"sm_?\d", line, re.IGNORECASE):
                found.append(f"{name}:{number}: {line.strip()}")
    return found


def layer_of(file: str) -> str:
    """The layer in which the file lies. Raises `AssertionError` if it lies in none."""
    for layer in MAY_INCLUDE:
        if file.startswith(f"{layer}/"):
            return layer
    raise AssertionError(f"{file}: expected in one of {', '.join(MAY_INCLUDE)}")


def pointing_up(arrows: Iterable[Arrow]) -> set[Arrow]:
    """The includes that the rules do not allow."""
    bad = set()
    for who, whom in arrows:
        above, below = layer_of(who), layer_of(whom)
        if below != above and below not in MAY_INCLUDE[above]:
            bad.add((who, whom))
    return bad


# ---- imports ---------------------------------------------------------------------------------------------------------


def imports(package: Path) -> list[Arrow]:
    """(module, imported module) within the package, by their dotted names."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    arrows = []
    for name, path in sorted(modules.items()):
        folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in executed(ast.parse(path.read_text())):
            for imported in targets(node, folder, modules.keys()):
                arrows.append((name, imported))
    return arrows


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from executed(other)
            continue
        yield child
        yield from executed(child)


def targets(node: ast.AST, folder: str, modules: Iterable[str]) -> Iterator[str]:
    """The modules of `modules` that the node imports, if it is an import statement. `folder`: the package of the module
    that has the statement."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    if isinstance(node, ast.ImportFrom):
        above = folder.split(".")[: len(folder.split(".")) - node.level + 1] if node.level else []
        origin = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            if (inner := f"{origin}.{alias.name}") in modules:
                yield inner
            elif origin in modules:
                yield origin


# ---- circles ---------------------------------------------------------------------------------------------------------


def circle(arrows: Iterable[Arrow]) -> list[str]:
    """One circle of the graph, its first node repeated at the end; empty if there is none."""
    after: dict[str, list[str]] = {}
    for who, whom in sorted(set(arrows)):
        after.setdefault(who, []).append(whom)
    done: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for following in after.get(node, []):
            if found := walk(following, [*way, node]):
                return found
        done.add(node)
        return []

    return next((found for start in sorted(after) if (found := walk(start, []))), [])


def needless(arrows: list[Arrow], exceptions: set[Arrow]) -> set[Arrow]:
    """Exceptions that are not needed: those that are no arrows, and those that alone make no circle with the rest."""
    rest = [arrow for arrow in arrows if arrow not in exceptions]
    return {each for each in exceptions if each not in arrows or not circle([*rest, each])}


# ---- where modules are found -----------------------------------------------------------------------------------------


def changing_the_path(root: Path) -> list[str]:
    """Lines of the package and of benchmarks that name `sys.path`, in whatever form they import it."""
    found = []
    for path in sorted([*(root / "python").rglob("*.py"), *(root / "benchmarks").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path"
            if isinstance(node, ast.ImportFrom) and node.module == "sys":
                named = any(alias.name == "path" for alias in node.names)
            if named:
                found.append(f"{path.relative_to(root).as_posix()}:{node.lineno}")
    return found


# ---- the tests -------------------------------------------------------------------------------------------------------


def test_includes_point_one_way():
    assert pointing_up(includes(ROOT)) == INCLUDES_THAT_POINT_UP


def test_no_file_includes_itself_by_way_of_others():
    assert circle(includes(ROOT)) == []


def test_layers_stand_one_above_the_other():
    arrows = [(who, whom) for who, below in MAY_INCLUDE.items() for whom in below if whom != who]
    assert circle(arrows) == []


def test_host_code_names_no_architecture():
    assert naming_architectures(ROOT) == []
    assert "sm90" in (ROOT / KNOW_ARCHITECTURES[0]).read_text()


def test_every_source_is_in_a_layer():
    assert len(sources(ROOT)) > 50
    for path in sources(ROOT):
        layer_of(path.relative_to(ROOT).as_posix())


def test_imports_have_no_circle():
    arrows = imports(ROOT / "python" / "flashmoe")
    assert len(arrows) > 50
    assert circle([arrow for arrow in arrows if arrow not in IMPORTS_IN_CIRCLES]) == []
    assert needless(arrows, IMPORTS_IN_CIRCLES) == set()


def leaving(arrows: Iterable[Arrow], package: str) -> set[Arrow]:
    """The arrows that lead from `package`, or from a module in it, to a module outside of it."""

    def inside(name: str) -> bool:
        return name == package or name.startswith(f"{package}.")

    return {(who, whom) for who, whom in arrows if inside(who) and not inside(whom)}


def used_by(arrows: Iterable[Arrow], package: str) -> set[str]:
    """The modules and packages, directly below the root, that import `package` or something in it from outside."""
    backwards = [(whom, who) for who, whom in arrows]
    return {".".join(user.split(".")[:2]) for _, user in leaving(backwards, package)}


def test_the_reference_stands_alone():
    """The reference shares no code with the engines, but it does share the tables of arguments' names and defaults."""
    arrows = imports(ROOT / "python" / "flashmoe")
    assert ("flashmoe.reference", "flashmoe.reference.forward") in arrows
    tables = {"flashmoe.spec.tensors", "flashmoe.spec.options"}
    assert {whom for _, whom in leaving(arrows, "flashmoe.reference")} == tables


def test_nothing_that_computes_knows_models():
    arrows = imports(ROOT / "python" / "flashmoe")
    assert used_by(arrows, "flashmoe.models") == {"flashmoe.cli", "flashmoe.simulation"}


def test_nothing_that_computes_knows_the_frameworks_that_it_is_in():
    """Only flashmoe.bench imports them, because `flashmoe bench` measures a whole model of Transformers."""
    arrows = imports(ROOT / "python" / "flashmoe")
    assert ("flashmoe.integrations.transformers.experts", "flashmoe.pytorch.operator") in arrows
    assert used_by(arrows, "flashmoe.integrations") == {"flashmoe.bench"}


def test_modules_are_found_where_they_are_installed():
    assert changing_the_path(ROOT) == []


HEADERS = {
    "include/flashmoe/spec/types.h": "",
    "include/flashmoe/protocol/call.h": '#include "flashmoe/spec/types.h"\n',
    "include/flashmoe/actors/os.h": '#include "flashmoe/protocol/call.h"\n#include <cstdint>\n',
    "csrc/cuda/context.h": '#include "flashmoe/actors/os.h"\n#include "cuda/transport/group.h"\n',
    "csrc/cuda/transport/group.h": '#include "flashmoe/spec/types.h"\n',
    "include/flashmoe/sm90/machine/tma.cuh": "",
    "include/flashmoe/sm90/roles/clerk.cuh": '#include "flashmoe/sm90/machine/tma.cuh"\n',
    "include/flashmoe/sm90/gradients/router.cuh": '#include "flashmoe/sm90/roles/clerk.cuh"\n',
    "csrc/cpu/engine.h": '#include "flashmoe/actors/os.h"\n',
    "csrc/host/error.h": "",
}
"""A tree that breaks no rule."""


def planted(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path.resolve()


def test_a_tree_without_a_fault_passes(tmp_path):
    arrows = includes(planted(tmp_path, HEADERS))
    assert len(arrows) == 8
    assert pointing_up(arrows) == set() and circle(arrows) == []


@pytest.mark.parametrize(
    ("who", "whom"),
    [
        ("include/flashmoe/spec/types.h", "include/flashmoe/protocol/call.h"),
        ("include/flashmoe/protocol/call.h", "include/flashmoe/actors/os.h"),
        ("include/flashmoe/actors/os.h", "csrc/cpu/engine.h"),
        ("csrc/host/error.h", "include/flashmoe/actors/os.h"),
        ("csrc/host/error.h", "csrc/cpu/engine.h"),
        ("csrc/host/error.h", "csrc/cuda/context.h"),
        ("csrc/cuda/context.h", "csrc/cpu/engine.h"),
        ("csrc/cpu/engine.h", "csrc/cuda/context.h"),
        ("csrc/cuda/transport/group.h", "csrc/cuda/context.h"),
        ("include/flashmoe/sm90/roles/clerk.cuh", "include/flashmoe/sm90/gradients/router.cuh"),
        ("include/flashmoe/sm90/machine/tma.cuh", "include/flashmoe/sm90/roles/clerk.cuh"),
    ],
)
@pytest.mark.parametrize("marks", ['""', "<>"])
def test_a_planted_arrow_is_caught(tmp_path, who, whom, marks):
    name = whom.removeprefix("include/").removeprefix("csrc/")
    line = f"  #  include {marks[0]}{name}{marks[1]}\n"
    assert pointing_up(includes(planted(tmp_path, {**HEADERS, who: HEADERS[who] + line}))) == {(who, whom)}


@pytest.mark.parametrize(
    "line",
    ['#include "flashmoe/sm90/geometry.h"', "using sm90::kTileTokens;", "// as for sm_90a", "// sm120/roles/clerk.cuh"],
)
def test_a_planted_architecture_is_caught(tmp_path, line):
    allowed = {"csrc/cuda/arch.h": line, "csrc/cuda/arch.cpp": line, "csrc/cuda/entry/moe.cu": line}
    root = planted(tmp_path, {**HEADERS, **allowed, "csrc/sim/rank.h": f"\n{line}\n"})
    assert naming_architectures(root) == [f"csrc/sim/rank.h:2: {line}"]


def test_a_planted_circle_of_includes_is_caught(tmp_path):
    files = {
        "include/flashmoe/protocol/a.h": '#include "flashmoe/protocol/b.h"\n',
        "include/flashmoe/protocol/b.h": '#include "c.h"\n',
        "include/flashmoe/protocol/c.h": '#include "flashmoe/protocol/a.h"\n',
    }
    found = circle(includes(planted(tmp_path, files)))
    assert [Path(each).stem for each in found] == ["a", "b", "c", "a"]


def test_a_source_outside_all_layers_is_caught(tmp_path):
    root = planted(tmp_path, {**HEADERS, "include/flashmoe/stages/gate.h": '#include "flashmoe/spec/types.h"\n'})
    with pytest.raises(AssertionError, match=r"stages/gate\.h: expected in one of"):
        pointing_up(includes(root))


def test_an_include_that_is_nowhere_is_caught(tmp_path):
    root = planted(tmp_path, {**HEADERS, "csrc/host/text.h": '#include "host/errors.h"\n'})
    with pytest.raises(AssertionError, match=r"host/errors\.h is nowhere"):
        includes(root)


@pytest.mark.parametrize("name", ["python/flashmoe/bench/run.py", "benchmarks/decode.py"])
@pytest.mark.parametrize("line", ["sys.path.append(x)", "sys.path[:0] = [x]", "from sys import argv, path"])
def test_a_planted_path_is_caught(tmp_path, name, line):
    root = planted(tmp_path, {name: f"import sys\n{line}\n"})
    assert changing_the_path(root) == [f"{name}:2"]


MODULES = {
    "p/__init__.py": "from .a import f\n",
    "p/a.py": "from . import b\nfrom .inner import c\n",
    "p/b.py": "import os\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a\n",
    "p/inner/__init__.py": "",
    "p/inner/c.py": "from .. import b\nfrom ..inner.d import x as y\n",
    "p/inner/d.py": "import p.b\n",
}


def test_a_package_without_a_circle_passes(tmp_path):
    arrows = imports(planted(tmp_path, MODULES) / "p")
    expected = {"p p.a", "p.a p.b", "p.a p.inner.c", "p.inner.c p.b", "p.inner.c p.inner.d", "p.inner.d p.b"}
    assert {" ".join(arrow) for arrow in arrows} == expected
    assert circle(arrows) == []


@pytest.mark.parametrize(
    "line",
    [
        "from . import a",
        "from .a import f",
        "import p.a",
        "from p.inner import c",
        "def g():\n    from .inner.d import x",
        "class G:\n    def h(self):\n        try:\n            import p.inner.c\n        finally:\n            pass",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from . import a",
    ],
)
def test_a_planted_circle_of_imports_is_caught(tmp_path, line):
    """Each line makes p.b import a module that imports p.b, itself or through others."""
    found = circle(imports(planted(tmp_path, {**MODULES, "p/b.py": MODULES["p/b.py"] + line + "\n"}) / "p"))
    assert "p.b" in found and found[0] == found[-1] and len(found) > 2


def test_a_planted_import_from_outside_is_caught(tmp_path):
    arrows = imports(planted(tmp_path, MODULES) / "p")
    assert leaving(arrows, "p.inner") == {("p.inner.c", "p.b"), ("p.inner.d", "p.b")}
    assert leaving(arrows, "p.b") == set()
    assert used_by(arrows, "p.inner") == {"p.a"}
    assert used_by(arrows, "p.b") == {"p.a", "p.inner"}


def test_an_exception_that_is_not_needed_is_caught():
    arrows = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]
    assert needless(arrows, {("c", "a")}) == set()
    assert needless(arrows, {("c", "a"), ("c", "d")}) == {("c", "d")}
    assert needless(arrows, {("c", "a"), ("d", "a")}) == {("d", "a")}
    assert needless(arrows, {("c", "a"), ("b", "c")}) == {("c", "a"), ("b", "c")}  # one exception would do
