"""The table of options (flashmoe.spec.options): few other files declare an option, and all that is made from the table
has all options."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe.spec import LayerSpec, Options
from flashmoe.spec.options import OPTIONS, ModuleOptions
from flashmoe.spec.tensors import OPTIONAL, WRITTEN, Tensors

ROOT = Path(__file__).resolve().parents[1]
MOST = 3
"""The most files that may declare an option: the table, `LayerSpec` in C++, and the arguments of kernels."""


def declared_in_python(source: str) -> set[str]:
    """The names of all parameters of functions, and of all annotated fields of classes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            found |= {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        if isinstance(node, ast.ClassDef):
            found |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    return found


def declared_in_cpp(source: str) -> set[str]:
    """The names of all fields, which are recognised by their types and by what follows the names."""
    types = r"\b(?:bool|float|double|uint32_t|[A-Z]\w+) "
    lists = re.findall(rf"^\s*{types}((?:\w+(?: = [^,;()]+(?:\(\))?)?(?:, )?)+);", source, flags=re.M)
    return {name for each in lists for name in re.findall(r"(?:^|, )(\w+)", each)}


def files_that_declare(name: str) -> list[str]:
    sources = {
        **dict.fromkeys((ROOT / "python").rglob("*.py"), declared_in_python),
        **dict.fromkeys((ROOT / "include").rglob("*.*h"), declared_in_cpp),
        **dict.fromkeys((ROOT / "csrc").rglob("*.*h"), declared_in_cpp),
    }
    return sorted(str(path.relative_to(ROOT)) for path, found in sources.items() if name in found(path.read_text()))


@pytest.mark.parametrize("name", ["round_logits", "weights_on_input", "up_offset", "routed_scale"])
def test_an_option_is_said_in_few_places(name):
    files = files_that_declare(name)
    assert {"python/flashmoe/spec/options.py", "include/flashmoe/spec/layer.h"} <= set(files)
    assert len(files) <= MOST, files


def test_declarations_are_seen():
    assert declared_in_python("class A:\n    x: int = 1\n    def f(self, y, *, z: bool = False): ...\n") == {
        *("x", "y", "z", "self")
    }
    assert declared_in_cpp("struct A {\n  bool x = false;\n  float a = f(), b = 1.0f, c;\n  DType t;\n};\n") == {
        *("x", "a", "b", "c", "t")
    }


def test_signatures_have_all_options():
    of_moe, of_module = (
        inspect.signature(each).parameters for each in (flashmoe.moe, pytest.importorskip("flashmoe.nn").MoE)
    )
    assert {*OPTIONS, *Tensors._fields, "ctx", "trace"} == set(of_moe)
    assert set(ModuleOptions.__annotations__) <= set(of_module)
    for parameters in (of_moe, of_module):
        for name in OPTIONS.keys() & parameters.keys() - {"top_k"}:
            assert parameters[name].default == OPTIONS[name].default


def test_the_help_describes_every_option_and_tensor():
    text = " ".join(inspect.getdoc(flashmoe.moe).split())
    for each in (*OPTIONS.values(), *OPTIONAL.values()):
        assert " ".join(each.text.split()) in text


def test_the_operator_takes_all_options_and_tensors():
    torch_op = pytest.importorskip("flashmoe.pytorch.operator")
    names = [each.name for each in torch_op.torch.ops.flashmoe.moe.default._schema.arguments]
    assert names == ["context", *(name for name in Tensors._fields if name not in WRITTEN), *Options._fields]


def test_the_page_is_of_the_tables(tmp_path):
    page = tmp_path / "options.md"
    subprocess.run([sys.executable, ROOT / "tools" / "options_page.py", page], check=True)
    assert (ROOT / "docs" / "options.md").read_text() == page.read_text(), "run python tools/options_page.py"


def test_defaults_pass_their_own_checks():
    for name, option in OPTIONS.items():
        if option.check is not None:
            assert option.check(name, option.default) == option.default


def test_a_layer_has_the_options_that_it_takes_as_they_are():
    layer = LayerSpec(16, 8, 4, 2)
    for name, option in OPTIONS.items():
        assert not option.in_layer or getattr(layer, name) == option.default


SIZES = {"hidden": 16, "intermediate": 8, "experts": 4, "top_k": 2}


@pytest.mark.parametrize("of", ["name", "numpy", "ml_dtypes", "torch"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_an_element_type_is_taken_as_each_library_has_it(name, of):
    if of == "torch":
        given = getattr(pytest.importorskip("torch"), name)
    elif of == "name":
        given = name
    elif hasattr(np, name) == (of == "numpy"):
        given = getattr(np if of == "numpy" else ml_dtypes, name)
    else:
        pytest.skip(f"{of} has no {name}")
    with flashmoe.Context(max_tokens=8, dtype=given, **SIZES) as context:
        assert context.dtype == name
        assert repr(context) == (
            "<flashmoe.Context cpu, rank 0 of 1, max_tokens=8, hidden=16, intermediate=8, experts=4, top_k=2, "
            f"dtype={name!r}>"
        )
        if of == "torch":
            from flashmoe.nn import MoE

            for each in (given, name):
                assert MoE(context, *SIZES.values(), dtype=each).gate.weight.dtype is given
    assert repr(context).endswith(", closed>")
    weights = ml_dtypes.float8_e4m3fn
    with flashmoe.Context(max_tokens=8, dtype=given, weight_dtype=weights, **SIZES) as context:
        assert context.weight_dtype == "float8_e4m3fn"
