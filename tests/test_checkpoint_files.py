"""Checkpoint files that a stranger may have made. Whatever is in them, loading ends with a layer or with an error of
the package, does not allocate the memory that the files claim, and does not wait."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashmoe.checkpoint import files, load_hidden_states, load_layer, planned
from flashmoe.errors import CheckpointError

BLOCK = "model.layers.1.mlp"
ROUTER = f"{BLOCK}.gate.weight"
GATE_UP, DOWN = f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj"
SHAPES = {ROUTER: [4, 8], GATE_UP: [4, 12, 8], DOWN: [4, 8, 6]}
INDEX = "model.safetensors.index.json"


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Expect a CheckpointError whose message has the parts, in order, fits on a screen and can be printed."""

    with pytest.raises(CheckpointError, match="(?s)" + ".*".join(map(re.escape, parts))) as raised:
        yield
    message = str(raised.value)
    assert message.isprintable() and message.encode() and len(message) < 4000


def header(shapes: dict[str, list[int]], dtype: str = "F32", element: int = 4) -> dict[str, Any]:
    """The header of a file that has these tensors, one after another."""
    said, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + element * int(np.prod([int(size) for size in shape], dtype=object))
        said[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    return said


def write(path: Path, said: Any, size: int | None = None) -> Path:
    """Writes a file with the header `said` (an object, or bytes) and `size` zeros, which take no room on the disk."""
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    if size is None:
        size = max((each["data_offsets"][1] for each in said.values()), default=0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of a correct checkpoint, which tests then damage."""
    write(tmp_path / "model.safetensors", header(SHAPES))
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_experts_per_tok": 2}')
    assert load_layer(tmp_path).experts == 4
    return tmp_path


@pytest.fixture
def small_machine(monkeypatch):
    """The package takes this machine to have 16 GiB of memory."""
    monkeypatch.setattr(planned, "machine_bytes", lambda: 2**34)


@pytest.fixture
def little_memory(small_machine):
    """An allocation of more than 1 GiB fails in this process."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def grown(act) -> int:
    """The bytes by which the peak of this process's memory grows while `act` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    peak = re.compile(r"VmHWM:\s*(\d+)")
    before = int(peak.search(Path("/proc/self/status").read_text())[1])
    act()
    return 1024 * (int(peak.search(Path("/proc/self/status").read_text())[1]) - before)


# ---- JSON ------------------------------------------------------------------------------------------------------------

DEEP = b"[" * 100_000
NESTED = b'{"weight_map": ' + b"[" * 300 + b"]" * 300 + b', "num_experts_per_tok": ' + b"[" * 300 + b"]" * 300 + b"}"
BAD_JSON = {
    "nested too deeply": (b'{"a": ' + DEEP, "nested too deeply"),
    "objects nested too deeply": (b'{"a":' * 100_000, "nested too deeply"),
    "a name twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the name 'c' twice"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
    "no UTF-8": (b'{"a": "\xff"}', "utf-8"),
    "another encoding": ('{"a": 1}'.encode("utf-16"), "utf-8"),
    "nothing": (b"", "Expecting value"),
}


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors"])
@pytest.mark.parametrize(("content", "why"), BAD_JSON.values(), ids=BAD_JSON)
def test_json_that_is_none(folder, name, content, why):
    if name == "model.safetensors":
        write(folder / name, content, 0)
    else:
        (folder / name).write_bytes(content)
    with refused("path: expected", name, "got", why):
        load_layer(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_value_nested_as_deeply_as_json_may_be(folder, name):
    """To show the value in an error must not need a deeper stack than to parse it did."""

    def at_depth(depth: int) -> None:
        if depth:
            return at_depth(depth - 1)
        with refused("expected", "got"):
            load_layer(folder)

    (folder / name).write_bytes(NESTED)
    for depth in range(0, 700, 7):
        at_depth(depth)


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors"])
def test_a_file_that_claims_terabytes_of_json(folder, name):
    """The file is refused by its size, before memory is allocated: to allocate so much would cause another error."""
    if name == "model.safetensors":
        with (folder / name).open("wb") as file:
            file.write((2**43).to_bytes(8, "little"))
            file.truncate(8 + 2**43)
    else:
        os.truncate(folder / name, 2**43) if (folder / name).exists() else write(folder / name, b"", 2**43)
    with refused("path: expected", name, "bytes, which are more than"):
        load_layer(folder)


@pytest.mark.parametrize("value", [[], "a", 1, None, True])
def test_json_that_is_no_object(folder, value):
    for name in ("config.json", INDEX):
        (folder / name).write_text(json.dumps(value))
        with refused("path: expected a JSON object", name, f"got {type(value).__name__}"):
            load_layer(folder)
        (folder / name).unlink()


# ---- paths that name no regular file ---------------------------------------------------------------------------------

MAKERS = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: os.symlink("/dev/zero", path),
    "no such file": lambda path: os.symlink("nowhere", path),
    "Too many levels of symbolic links": lambda path: os.symlink(path, path),
}


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors"])
@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_regular_file(folder, name, kind):
    """It is refused at once: a pipe, for example, is not waited for."""
    (folder / name).unlink(missing_ok=True)
    MAKERS[kind](folder / name)
    with refused("path: expected", name, f"got {kind}"):
        load_layer(folder)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_shard_that_is_no_regular_file(folder, kind):
    MAKERS[kind](folder / "shard")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, "shard")}))
    with refused("path: expected", "shard", f"got {kind}"):
        load_layer(folder)


def test_a_file_that_may_not_be_read(folder, monkeypatch):
    def denied(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with refused("path: expected", "model.safetensors", "got Permission denied"):
        load_layer(folder)


def test_links_are_followed(folder):
    """The folders of Hugging Face's cache have such links."""
    os.rename(folder / "model.safetensors", folder / "blob")
    os.symlink("blob", folder / "model.safetensors")
    assert load_layer(folder).experts == 4


@pytest.mark.parametrize("path", ["a\0b", "a" * 300, "\ud800", "a/" * 3000], ids=["NUL", "long", "surrogate", "deep"])
def test_a_path_that_no_file_can_have(tmp_path, path):
    for load in (load_layer, load_hidden_states):
        with refused("path: expected a complete safetensors file", "got"):
            load(tmp_path / path)


# ---- the index -------------------------------------------------------------------------------------------------------


def index_of(folder: Path, weight_map: Any) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "/etc/passwd", "a/b", "a/", "/", "a\0b", "..\0"],
    ids=["empty", "here", "up", "beside", "absolute", "below", "a folder", "root", "NUL", "up and NUL"],
)
def test_a_shard_whose_name_is_a_path(folder, name):
    with refused("weight_map: expected plain file names", "got", repr(name)):
        load_layer(index_of(folder, {ROUTER: name}))


@pytest.mark.parametrize("name", ["a" * 300, "\ud800", "é" * 200], ids=["long", "surrogate", "long in bytes"])
def test_a_shard_whose_name_no_file_can_have(folder, name):
    with refused("path: expected a complete safetensors file", "got"):
        load_layer(index_of(folder, dict.fromkeys(SHAPES, name)))


@pytest.mark.parametrize("value", [None, 1, "a", [], ["a"], {"a": None}, {"a": 1}, {"a": {"b": "c"}}, [[]] * 9999])
def test_a_weight_map_of_another_type(folder, value):
    with refused("weight_map: expected an object", "got"):
        load_layer(index_of(folder, value))


def test_a_header_is_read_once(folder, monkeypatch):
    """If each tensor had the header read again, the time would be the product of the number of tensors and the header's
    size."""
    read, read_header = [], files.read_header
    monkeypatch.setattr(files, "read_header", lambda path: read.append(path) or read_header(path))
    load_layer(index_of(folder, dict.fromkeys(SHAPES, "model.safetensors")))
    assert read == [folder / "model.safetensors"]


# ---- the header ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": None}, "dtype None"),
        ({"dtype": ["F32"]}, "dtype ['F32']"),
        ({"shape": None}, "shape None"),
        ({"shape": "48"}, "shape '48'"),
        ({"shape": {"0": 4}}, "shape {'0': 4}"),
        ({"shape": [4, "8"]}, "shape [4, '8']"),
        ({"shape": [4.0, 8]}, "shape [4.0, 8]"),
        ({"shape": [4, True, 8]}, "shape [4, True, 8]"),
        ({"shape": [-4, -8]}, "shape [-4, -8]"),
        ({"shape": [float("nan"), 8]}, "shape [nan, 8]"),
        ({"shape": [float("inf")]}, "shape [inf]"),
        ({"shape": [2**64, 8]}, f"shape [{2**64}, 8]"),
        ({"shape": [4, 9]}, "F32 [4, 9] in 128 bytes"),
        ({"shape": [2**62, 2**62, 2**62]}, "in 128 bytes"),
        ({"shape": [2**63 - 1] * 20_000}, "in 128 bytes"),
        ({"data_offsets": None}, "data_offsets None"),
        ({"data_offsets": [0]}, "data_offsets [0]"),
        ({"data_offsets": [0, 64, 128]}, "data_offsets [0, 64, 128]"),
        ({"data_offsets": [0.0, 128]}, "data_offsets [0.0, 128]"),
        ({"data_offsets": [128, 0]}, "data_offsets [128, 0]"),
        ({"data_offsets": [-128, 0]}, "data_offsets [-128, 0]"),
        ({"data_offsets": [float("nan"), float("inf")]}, "data_offsets [nan, inf]"),
        ({"data_offsets": [4, 132]}, "from byte"),
        ({"data_offsets": [1664, 1792]}, "from byte"),
        ({"data_offsets": [2**62, 2**62 + 128]}, "from byte"),
    ],
)
def test_a_tensor_of_another_form(folder, changes, why):
    said = header(SHAPES)
    size = said[DOWN]["data_offsets"][1]
    said[ROUTER] |= changes
    with refused("path: expected a complete safetensors file at", "got", why):
        load_layer(write(folder / "model.safetensors", said, size))


@pytest.mark.parametrize("said", [[], "a", 1, None, True])
def test_a_tensor_that_is_no_object(folder, said):
    with refused("path: expected a complete safetensors file", "got", "'a' of dtype None"):
        load_layer(write(folder / "model.safetensors", header(SHAPES) | {"a": said}, 0))


@pytest.mark.parametrize("said", [[], "a", None, {"a": 1}, {"a": {}}])
def test_metadata_of_another_type(folder, said):
    with refused("path: expected a complete safetensors file", "got __metadata__ that is no object of strings"):
        load_layer(write(folder / "model.safetensors", header(SHAPES) | {"__metadata__": said}, 0))


@pytest.mark.parametrize(("said", "shown"), [(b"[]", "[]"), (b"1", "1"), (b'"a"', "'a'"), (b"NaN", "nan")])
def test_a_header_that_is_no_object(folder, said, shown):
    with refused("path: expected a complete safetensors file", f"got a header that is no object: {shown}"):
        load_layer(write(folder / "model.safetensors", said, 0))


def test_a_tensor_twice(folder):
    """A header that has one name twice is refused. (Python's JSON parser would keep the last tensor of the name.)"""
    end = header(SHAPES)[DOWN]["data_offsets"][1]
    text = json.dumps(header(SHAPES)).replace("{", '{"%s": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},', 1)
    with refused("path: expected a complete safetensors file", f"the name '{ROUTER}' twice"):
        load_layer(write(folder / "model.safetensors", (text % ROUTER).encode(), end))


@pytest.mark.parametrize("by", [-1, 1, 2**40])
def test_a_file_of_another_length(folder, by):
    said = header(SHAPES)
    with refused("path: expected a complete safetensors file", "bytes, where tensors end at"):
        load_layer(write(folder / "model.safetensors", said, said[DOWN]["data_offsets"][1] + by))


@pytest.mark.parametrize("size", [0, 1, 7, 2**63, 2**64 - 1, 100_000_001, 1_000])
def test_a_header_s_length(folder, size):
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little"))
    with refused("path: expected a complete safetensors file", "got"):
        load_layer(folder)


def test_tensors_of_other_types_beside_it(folder):
    """A file may have further tensors, even of types that the package does not know, because they are not read."""
    said = header(SHAPES)
    end = said[DOWN]["data_offsets"][1]
    said["other"] = {"dtype": "F4", "shape": [3, 7], "data_offsets": [end, end + 11]}
    write(folder / "model.safetensors", said, end + 11)
    assert load_layer(folder).experts == 4


@pytest.mark.parametrize("digits", [10, 5000])
def test_layer_numbers_of_many_digits(folder, digits):
    write(folder / "model.safetensors", header({f"model.layers.{'9' * digits}.mlp.gate.weight": [4, 8]}))
    with refused("path: expected layer numbers of at most 9 digits, got model.layers.999"):
        load_layer(folder)


def test_expert_numbers_of_many_digits(folder):
    write(folder / "model.safetensors", header(SHAPES | {f"{BLOCK}.experts.{'9' * 5000}.up_proj.weight": [1]}))
    with refused(f"{BLOCK}: expected a router and routed experts alone"):
        load_layer(folder)


@pytest.mark.parametrize(
    "name", ["\ud800", "\x1b[2J", "a" * 100_000, "\0"], ids=["surrogate", "escapes", "long", "NUL"]
)
def test_names_that_cannot_be_shown(folder, name):
    write(folder / "model.safetensors", header({f"{name}.layers.1.mlp.gate.weight": [4]}))
    with refused("layers.1.mlp", "expected a non-empty array [E, H]", "got shape [4]"):
        load_layer(folder)


# ---- sizes that are claimed and not stored ---------------------------------------------------------------------------

MANY = 2**34


@pytest.mark.parametrize(
    ("shapes", "parts"),
    [
        ({ROUTER: [MANY]}, (ROUTER, "expected a non-empty array [E, H]")),
        ({ROUTER: [4, MANY]}, (f"{BLOCK}.experts.0.up_proj.weight", "no tensor")),
        ({ROUTER: [MANY, 1]}, (f"{BLOCK}.experts.0.up_proj.weight", "no tensor")),
        ({ROUTER: [MANY, 1], GATE_UP: [4, 12, 8], DOWN: [4, 8, 6]}, ("down_proj", f"expected shape [{MANY}, 1, I]")),
        (SHAPES | {DOWN: [4, 8, MANY]}, ("gate_up_proj", f"expected shape [4, {2 * MANY}, 8]")),
        (SHAPES | {GATE_UP: [MANY, 12, 8]}, ("gate_up_proj", "expected shape [4, 12, 8]", f"got [{MANY}, 12, 8]")),
        ({ROUTER: [4, MANY], GATE_UP: [4, 2, MANY], DOWN: [4, MANY, 1]}, ("hidden size", "expected 8")),
    ],
    ids=str,
)
def test_a_large_tensor_is_not_read_before_its_shape_is_known_to_fit(folder, shapes, parts):
    write(folder / "model.safetensors", header(shapes))

    def load() -> None:
        with refused(*parts):
            load_layer(folder)

    assert grown(load) < 2**24


def test_experts_of_other_shapes_are_not_read(folder):
    names = ("gate_proj", "up_proj", "down_proj")
    shapes = {f"{BLOCK}.experts.{i}.{name}.weight": [MANY, 8] for i in range(4) for name in names}
    write(folder / "model.safetensors", header({ROUTER: [4, 8]} | shapes, "BF16", 2))
    with refused(f"{BLOCK} down_proj", f"expected shape [4, 8, I], got [4, {MANY}, 8]"):
        load_layer(folder)


LARGE = {ROUTER: [2**20, 8], GATE_UP: [2**20, 2**15, 8], DOWN: [2**20, 8, 2**14]}


def test_a_layer_larger_than_the_machine(folder, small_machine):
    """The file's header is consistent, and the file takes only a few blocks on the disk: only the machine's memory is
    too small."""
    write(folder / "model.safetensors", header(LARGE, "BF16", 2))
    needed = 2**20 * 2**15 * 8 * 2
    with refused(GATE_UP, f"expected memory for 512 GiB ({needed} bytes) of {folder}", "got the 16.0 GiB that this"):
        load_layer(folder)


@pytest.mark.parametrize("layout", ["fused", "per expert"])
def test_an_allocation_that_fails(folder, layout, little_memory):
    """The layer takes 3 GiB, which the machine might have, but this process may not allocate that much."""
    if layout == "fused":
        shapes, first = {ROUTER: [4, 8], GATE_UP: [4, 2**25, 8], DOWN: [4, 8, 2**24]}, GATE_UP
    else:
        names = {"gate_proj": [2**24, 8], "up_proj": [2**24, 8], "down_proj": [8, 2**24]}
        shapes = {f"{BLOCK}.experts.{i}.{name}.weight": shape for i in range(4) for name, shape in names.items()}
        shapes, first = {ROUTER: [4, 8]} | shapes, f"{BLOCK}.experts.0.gate_proj.weight and 7 more"
    write(folder / "model.safetensors", header(shapes, "F16", 2))
    with refused(f"{first}: expected memory for 2.0 GiB ({2**31} bytes) of {folder}", "got none"):
        load_layer(folder)


def test_hidden_states_larger_than_memory(tmp_path, small_machine):
    path = write(tmp_path / "states.safetensors", header({"hidden_states": [MANY, 8]}))
    with refused(f"hidden_states: expected memory for 512 GiB ({MANY * 32} bytes) of {path}", "got"):
        load_hidden_states(path)


def test_a_header_s_memory_that_fails(folder, monkeypatch):
    def out_of_memory(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(files, "parsed", out_of_memory)
    with refused("path: expected readable JSON at", "got more than there is memory for"):
        load_layer(folder)


SHORTENED = """
import os, sys
import flashmoe.checkpoint
from flashmoe.checkpoint import planned
path = sys.argv[1]
allocated = planned._allocated
def shorten(array):
    os.truncate(path, os.path.getsize(path) - 8)
    return allocated(array)
planned._allocated = shorten
try:
    flashmoe.checkpoint.load_layer(path)
except flashmoe.CheckpointError as error:
    print(error)
"""


def test_a_file_that_is_shortened_while_it_is_read(folder):
    """The process would end with SIGBUS if it had mapped the file."""
    path = folder / "model.safetensors"
    done = subprocess.run([sys.executable, "-c", SHORTENED, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"path: expected a complete safetensors file at {path}, got a file that ends within '{DOWN}'" in done.stdout


# ---- the config ------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 6}


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", ["8", [8], {"a": 8}, True, 8.0, -8, float("nan"), float("inf"), 10**4000, 1e400])
def test_a_size_of_the_config_that_is_none(folder, key, value):
    (folder / "config.json").write_text(json.dumps(SIZES | {"num_experts_per_tok": 2, key: value}))
    with refused(f"{BLOCK} {key.replace('_', ' ')}: expected an integer in config.json's {key}, got"):
        load_layer(folder)


@pytest.mark.parametrize("key", SIZES)
def test_a_size_of_the_config_that_is_not_the_layer_s(folder, key):
    said = SIZES | {"num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(said | {key: SIZES[key] + 1}))
    with refused(f"expected {SIZES[key] + 1}, the {key} of config.json, got {SIZES[key]}"):
        load_layer(folder)
    for same in (said, said | {key: None}, said | {"intermediate_size": 99}):
        (folder / "config.json").write_text(json.dumps(same))
        assert load_layer(folder).experts == 4


def test_the_intermediate_size_of_mixtral_is_its_experts(folder):
    said = {"model_type": "mixtral", "num_experts_per_tok": 2, "intermediate_size": 7}
    (folder / "config.json").write_text(json.dumps(said))
    with refused("intermediate size: expected 7, the intermediate_size of config.json, got 6"):
        load_layer(folder)


@pytest.mark.parametrize("key", ["num_experts_per_tok", "norm_topk_prob", "hidden_act"])
@pytest.mark.parametrize("value", ["x", [[]], {"a": {}}, 1.5, -1, float("nan"), 10**4000, "\ud800", "a" * 10**6])
def test_a_rule_of_another_type(folder, key, value):
    (folder / "config.json").write_text(json.dumps({"num_experts_per_tok": 2, key: value}))
    with refused("expected", "got"):
        load_layer(folder)


def test_infinity_where_it_is_not_read(folder):
    """Configs of some models have Infinity in fields that the package does not read."""
    (folder / "config.json").write_text('{"num_experts_per_tok": 2, "time_step_limit": [0.0, Infinity]}')
    assert load_layer(folder).top_k == 2
