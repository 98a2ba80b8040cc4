"""benchmarks/same_bits.py: it finds whether two versions of the package differ in any layer's bits."""

from __future__ import annotations

import pytest
from bits_layers import cpu_layers, gpu_layers, group_layers
from harness import Tree
from same_bits import compare

SEEN = {name: {"inputs": "i", "y": "y", "routing": "r", "steady": True} for name in ("one", "two")}


def with_one(**changes) -> dict[str, dict]:
    return {**SEEN, "one": {**SEEN["one"], **changes}}


def test_equal_hashes_are_the_same_bits():
    row = compare(SEEN, dict(reversed(SEEN.items())))
    assert (row["layers"], row["equal"], row["different"], row["unsteady"]) == (2, 2, [], [])
    assert row["digest_old"] == row["digest_new"]


@pytest.mark.parametrize("part", ["inputs", "y", "routing"])
def test_one_other_hash_is_found(part):
    row = compare(SEEN, with_one(**{part: "other"}))
    assert (row["equal"], row["different"]) == (1, [f"one ({part})"])
    assert row["digest_old"] != row["digest_new"]


def test_a_layer_that_one_version_lacks_is_found():
    assert compare(SEEN, {"one": SEEN["one"]})["different"] == ["two (in one tree only)"]
    assert compare({"one": SEEN["one"]}, SEEN)["different"] == ["two (in one tree only)"]


def test_a_version_that_differs_from_itself_is_found():
    assert compare(with_one(steady=False), with_one(steady=False))["unsteady"] == ["one (old)", "one (new)"]


def test_layers_have_names_of_their_own():
    """Results are kept by the layer's name, so of two layers with the same name one would be lost."""
    layers = [*(layer for ranks in (1, 2, 4, 8) for layer in cpu_layers(ranks)), *gpu_layers(), *group_layers()]
    assert len({layer.name for layer in layers}) == len(layers) > 600


def test_trees_differ_by_any_file_of_the_package(tmp_path):
    package = tmp_path / "flashmoe"
    package.mkdir()
    (package / "__init__.py").write_text("")
    first = Tree.at(tmp_path)
    assert Tree.at(tmp_path) == first
    (package / "kernel.cuh").write_text("// another")
    assert Tree.at(tmp_path).digest != first.digest
    with pytest.raises(SystemExit, match="expected a folder that holds"):
        Tree.at(package)
