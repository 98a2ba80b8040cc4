"""What help() says: every argument with its type and default, and examples that run as they stand."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from typing import Any

import pytest

DESCRIBED = ["flashmoe.moe", "flashmoe.Context", "flashmoe.nn.MoE"]
WITH_EXAMPLES = [
    *DESCRIBED,
    "flashmoe.release",
    "flashmoe.integrations.transformers.check",
    "flashmoe.integrations.transformers.fuse",
    "flashmoe.launch.run_ranks",
    "flashmoe.placement.contiguous",
    "flashmoe.placement.hybrid",
    "flashmoe.placement.balanced",
    "flashmoe.placement.roomy",
    "flashmoe.placement.local_experts",
    "flashmoe.placement.owners",
    "flashmoe.placement.move",
    "flashmoe.quantize.quantize_rows",
    "flashmoe.quantize.quantize_weights",
    "flashmoe.quantize.dequantize",
    "flashmoe.quantize.quantize_mxfp4",
    "flashmoe.quantize.dequantize_mxfp4",
    "flashmoe.quantize.quantize_layer",
    "flashmoe.quantize.quantize_checkpoint",
    "flashmoe.trace.write_traces",
    "flashmoe.trace.write_perfetto",
    "flashmoe.trace.write_timeline",
    "flashmoe.account.accounts",
    "flashmoe.account.account",
    "flashmoe.integrations.transformers.parallelize",
    "flashmoe.integrations.transformers.load_parallel",
    "flashmoe.integrations.transformers.load_mxfp4",
]
SHAPED = ("x", "gate_up_proj", "down_proj")
"""Tensors that every call has. Their headers in docstrings give a shape instead of a type."""


def public(name: str) -> Any:
    module, _, own = name.rpartition(".")
    if module != "flashmoe":
        pytest.importorskip("torch")
    if "transformers" in module:
        pytest.importorskip("transformers")
    return getattr(importlib.import_module(module), own)


def headers(text: str) -> dict[str, str]:
    """For each parameter of a docstring, the text behind its name."""
    section = re.search(r"^Parameters\n-+\n(.*?)^\w+\n-+$", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    found = re.findall(r"^(\w+(?:, \w+)*): ?(.*)$", section[1], re.MULTILINE)
    return {name: rest for names, rest in found for name in names.split(", ")}


@pytest.mark.parametrize("name", DESCRIBED)
def test_help_has_each_argument_with_type_and_default(name: str):
    of, said = public(name), headers(inspect.getdoc(public(name)))
    parameters = {each: what for each, what in inspect.signature(of).parameters.items() if each != "self"}
    assert said.keys() == parameters.keys()
    for each, parameter in parameters.items():
        kind, _, default = said[each].partition(", default ")
        assert kind.startswith("[") if each in SHAPED else re.match(r"\w", kind), each
        assert default == ("" if parameter.default is parameter.empty else repr(parameter.default)), each


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str):
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(public(name)), {}, name, None, None)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
