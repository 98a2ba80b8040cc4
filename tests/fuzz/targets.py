"""What is fuzzed: each target takes bytes, and accepts them, or refuses them with an error of the package.

Anything else is a finding: another exception, a crash, a hang, a message that cannot be printed, memory that grows with
what an input claims, and, if the input is accepted, values that are not those of the file or of the memory.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import capsules
import flashmoe
import numpy as np
from flashmoe import checkpoint
from flashmoe.checkpoint import planned
from flashmoe.checkpoint.architectures import ARCHITECTURES
from flashmoe.errors import FlashMoEError
from flashmoe.spec import ENCODINGS, GATED
from flashmoe.tuning import knobs, profiles
from foreign_tensors import Foreign
from json_mutations import Object
from problems import random_problem

MACHINE = 2**25
"""Bytes of memory that the package is told the machine has, so that it refuses every input with a large layer."""
MOST_GROWTH = 2 * MACHINE
"""Bytes that the peak of the memory may grow by in one run."""
MOST_MESSAGE = 4000
"""The most characters of an error's message."""


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    words: tuple[str, ...]
    """Names and strings that mean something in an input."""
    repair: Callable[[Any, random.Random], None] | None = None
    """See `json_mutations.mutated`."""


def checked(target: Target, data: bytes) -> None:
    """Run the target once. If there is a finding, raises `AssertionError`, or the exception that is the finding."""
    before = _peak()
    target.run(data)
    grown = _peak() - before
    assert grown <= MOST_GROWTH, f"expected at most {MOST_GROWTH} bytes more at the peak, got {grown}"


def _peak() -> int:
    """The peak of this program's memory, in bytes. (getrusage would count the process that started it, too.)"""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _refused(act: Callable[[], Any]) -> Any:
    """What `act` returns, or None if it raises an error of the package, whose message is checked."""
    try:
        return act()
    except FlashMoEError as error:
        message = str(error)
        assert message.isprintable(), f"expected a message that can be printed, got {message!r}"
        assert len(message) <= MOST_MESSAGE, f"expected at most {MOST_MESSAGE} characters, got {len(message)}"
        return None


# ---- checkpoints -----------------------------------------------------------------------------------------------------

SIZES = {"hidden": 8, "intermediate": 6, "experts": 4}
FUSED = {"gate.weight": [4, 8], "experts.gate_up_proj": [4, 12, 8], "experts.down_proj": [4, 8, 6]}
UNGATED = {"gate.weight": [4, 8], "experts.up_proj": [4, 6, 8], "experts.down_proj": [4, 8, 6]}
_LAYOUTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
NAMES = tuple(f"experts.{i}.{name}.weight" for i in (0, 1, 3, 4) for names in _LAYOUTS for name in names)
NAMES += (*FUSED, "experts.up_proj", "shared_expert.up_proj.weight")
NAMES += tuple(f"experts.{name}_{what}" for name in ("gate_up_proj", "down_proj") for what in ("blocks", "scales"))
BLOCKS = ("model.layers.0.mlp", "model.layers.1.mlp", "model.layers.1.block_sparse_moe", "layers.99999999999.mlp")
TENSORS = tuple(f"{block}.{name}" for block in BLOCKS for name in NAMES)
_ELEMENT = {"F32": 4, "F16": 2, "BF16": 2}


def _checked_layer(layer: checkpoint.MoELayer | None) -> None:
    """Checks the shapes, types and bytes of a layer that was accepted."""
    if layer is None:
        return
    E, H, I = layer.experts, layer.hidden, layer.intermediate
    rows = 2 * I if layer.activation in GATED else I
    encoding = ENCODINGS.get(layer.weight_dtype)
    of_matrices = np.dtype(layer.dtype if encoding is None else encoding.stored)
    shapes = (E, rows, H), (E, H, I)
    assert layer.router.shape == (E, H) and 1 <= layer.top_k <= E and type(layer.renormalize) is bool
    matrices = (layer.gate_up_proj, layer.down_proj)
    assert [each.shape for each in matrices] == [encoding.elements(each) if encoding else each for each in shapes]
    assert layer.router.nbytes + sum(each.nbytes for each in matrices) <= MACHINE
    assert layer.router.flags.c_contiguous
    assert all(each.dtype == of_matrices and each.flags.c_contiguous for each in matrices)


def write_tensors(path: Path, shapes: dict[str, list[int]], dtype: str = "BF16") -> None:
    header = Object([name, Object([["dtype", dtype], ["shape", shape]])] for name, shape in shapes.items())
    header = {name: dict(map(tuple, said)) for name, said in _with_offsets(header)}
    text = json.dumps(header).encode()
    end = max(said["data_offsets"][1] for said in header.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def _with_offsets(root: Any, chance: random.Random | None = None) -> Any:
    """Sets the offsets in a header so that its tensors follow one another, each with the bytes of its shape."""
    begin = 0
    for _, said in root if isinstance(root, Object) else ():
        if not isinstance(said, Object):
            continue
        found = dict(map(tuple, said))
        shape, element = found.get("shape"), _ELEMENT.get(str(found.get("dtype")), 1)
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            continue
        end = begin + element * int(np.prod(shape, dtype=object))
        said[:] = [pair for pair in said if pair[0] != "data_offsets"] + [["data_offsets", [begin, end]]]
        begin = end
    return root


def _header(folder: Path) -> Target:
    """An input is the JSON of a header: the file gets its length before it, and behind it the bytes that it claims. An
    input that does not begin with `{` is a whole file."""
    path = folder / "header" / "model.safetensors"
    path.parent.mkdir()

    def run(data: bytes) -> None:
        ends = [int(end) for end in re.findall(rb"\[\s*\d{1,18}\s*,\s*(\d{1,18})\s*\]", data)]
        with path.open("wb") as file:
            if data.startswith(b"{"):
                file.write(len(data).to_bytes(8, "little") + data)
                # At most 10 terabytes, since file systems let no file claim many more.
                file.truncate(8 + len(data) + min(max(ends, default=0), 10**13))
            else:
                file.write(data)
        for layer, activation in ((None, None), (0, "relu"), (1, "relu")):
            load = partial(checkpoint.load_layer, path, layer, top_k=1, activation=activation)
            _checked_layer(_refused(load))
        _refused(lambda: checkpoint.load_hidden_states(path))

    words = (*TENSORS, "hidden_states", "__metadata__", "dtype", "shape", "data_offsets", *_ELEMENT, "F64", "F8_E4M3")
    return Target(run, words, lambda root, chance: _with_offsets(root))


def _index(folder: Path) -> Target:
    """An input is model.safetensors.index.json, in a folder with two shards and other files."""
    folder = folder / "index"
    folder.mkdir()
    write_tensors(folder / "fused.safetensors", {f"{BLOCKS[0]}.{name}": shape for name, shape in FUSED.items()})
    experts = {"w1": [6, 8], "w3": [6, 8], "w2": [8, 6]}
    single = {f"{BLOCKS[2]}.experts.{i}.{name}.weight": shape for i in range(4) for name, shape in experts.items()}
    write_tensors(folder / "single.safetensors", {f"{BLOCKS[2]}.gate.weight": [4, 8], **single})
    write_tensors(folder.parent / "beside.safetensors", {f"{BLOCKS[0]}.{name}": [4, 8] for name in FUSED})
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "nothing").symlink_to("nowhere")

    def run(data: bytes) -> None:
        (folder / "model.safetensors.index.json").write_bytes(data)
        for layer in (None, 0, 1):
            _checked_layer(_refused(partial(checkpoint.load_layer, folder, layer, top_k=2)))

    files = tuple(path.name for path in folder.iterdir())
    return Target(run, (*TENSORS, *files, "../beside.safetensors", str(folder), "weight_map", "metadata"))


def _config(folder: Path) -> Target:
    """An input is config.json, beside a file with two layers: one with gates, one without."""
    folder = folder / "config"
    folder.mkdir()
    shapes = {f"{BLOCKS[0]}.{name}": shape for name, shape in FUSED.items()}
    write_tensors(
        folder / "model.safetensors", shapes | {f"{BLOCKS[1]}.{name}": shape for name, shape in UNGATED.items()}
    )

    def run(data: bytes) -> None:
        (folder / "config.json").write_bytes(data)
        for layer in (0, 1):
            _checked_layer(_refused(partial(checkpoint.load_layer, folder, layer)))

    keys = ("hidden_size", "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
    keys += ("intermediate_size", "num_experts_per_tok", "norm_topk_prob", "hidden_act", "model_type", "text_config")
    keys += ("n_group", "topk_group", "routed_scaling_factor", "scoring_func", "topk_method", "swiglu_limit")
    return Target(run, (*keys, *ARCHITECTURES, "silu", "swish", "gelu", "relu", "relu2", "swiglu"))


# ---- profiles --------------------------------------------------------------------------------------------------------

SETTING = profiles.Setting("Fake", 4, "bfloat16", 2048, 768, 128, 8, 8192)
RECORD = profiles.Record(SETTING, "swiglu", {"raster": 4, "return_mode": "reduced"}, 1.25, 1.5)


def _profiles(folder: Path) -> Target:
    """An input is the file of measured profiles. It is read, looked up as a context does, and gets another profile."""
    path = folder / "profiles" / "profiles.json"
    path.parent.mkdir(mode=0o700)
    os.environ["FLASHMOE_PROFILES"] = str(path)
    logging.getLogger("flashmoe").setLevel(logging.CRITICAL)  # it warns if stored profiles are not used

    def run(data: bytes) -> None:
        path.write_bytes(data)
        path.chmod(0o600)
        profiles._noticed.clear()
        found = _refused(profiles.read)
        profile, mode = knobs.stored_profile(SETTING)
        assert set(profile) <= set(knobs.PROFILE) and mode in (None, "direct", "reduced", "auto")
        stored = _refused(lambda: profiles.store(RECORD))
        assert (stored is None) == (found is None)
        if found is None:
            assert path.read_bytes() == data  # a file that cannot be read is not overwritten
        else:
            kept = [each for each in found if (each.setting, each.activation) != (SETTING, "swiglu")]
            assert profiles.read() == [*kept, RECORD]

    fields = ("version", "profiles", "device", "ranks", "dtype", "hidden", "intermediate", "experts", "top_k", "tokens")
    fields += ("activation", "profile", "milliseconds", "built_in_milliseconds", "setting", "return_mode")
    return Target(run, (*fields, *knobs.PROFILE, "Fake", "bfloat16", "swiglu", "direct", "reduced", "auto"))


# ---- DLPack ----------------------------------------------------------------------------------------------------------

CALL = {"hidden": 16, "intermediate": 12, "experts": 6, "top_k": 2}
FOREIGN = (
    "gate_up_proj",
    "down_proj",
    "router",
    "router_bias",
    "gate_up_bias",
    "down_bias",
    "topk_ids",
    "topk_weights",
    "load",
    "router_logits",
)
_DTYPES = {(0, 32, 1): np.int32, (0, 64, 1): np.int64, (2, 32, 1): np.float32}


def _dlpack(folder: Path) -> Target:
    """An input describes a foreign tensor (see `foreign_tensors.Foreign`), and names an argument of a call for it."""
    given = {fused: random_problem(1, [8], fused=fused, biases=(fused, True, True), **CALL) for fused in (True, False)}
    context: list[flashmoe.Context] = []

    def call(name: str, tensor: Any) -> Any:
        arguments = given[not name.startswith("topk_")].arguments(0)
        return _refused(lambda: flashmoe.moe(context[0], **arguments | {name: tensor}))

    def renew() -> None:
        """Makes a new context if the old one has ended because of values: a wrong id, or a logit that is not finite."""
        if context and call("activation", "swiglu") is None:
            context.pop().close()
        if not context:
            context.append(flashmoe.Context(max_tokens=8, dtype="float32", processors=2, timeout=20, **CALL))

    def run(data: bytes) -> None:
        try:
            said = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(said, dict) or said.get("argument") not in FOREIGN:
            return
        name, tensor = said["argument"], Foreign(said)
        y = call(name, tensor)
        if y is None:
            renew()
        else:
            left = np.frombuffer(tensor.bytes, _DTYPES[tensor.type]).reshape(tensor.sizes)
            array = left.copy()
            assert np.array_equal(y, call(name, array), equal_nan=True)
            if name == "load":
                assert (array - left).sum() == 8 * CALL["top_k"]
            else:  # both got the same logits, or the call does not write to the argument
                assert np.array_equal(array, left, equal_nan=True)
        if tensor.name == b"dltensor" and tensor.deleter and capsules.exported:
            gc.collect()
            assert not capsules.exported, "expected every capsule to be given back"
        capsules.exported.clear()

    renew()
    assert call("activation", "swiglu") is not None
    words = (
        "argument",
        "data",
        "shift",
        "byte_offset",
        "device",
        "type",
        "shape",
        "strides",
        "ndim",
        "name",
        "deleter",
    )
    return Target(run, (*words, *FOREIGN, "start", "end", "dltensor", "dltensor_versioned", "used_dltensor", "fill"))


MAKERS: dict[str, Callable[[Path], Target]] = {
    "header": _header,
    "index": _index,
    "config": _config,
    "profiles": _profiles,
    "dlpack": _dlpack,
}


@contextlib.contextmanager
def made(name: str) -> Iterator[Target]:
    """A target, with a folder of its own."""
    planned.machine_bytes = lambda: MACHINE
    with tempfile.TemporaryDirectory() as folder:
        yield MAKERS[name](Path(folder))
