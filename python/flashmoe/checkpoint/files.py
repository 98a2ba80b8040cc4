"""The files of a checkpoint, and the tensors that their headers name. No byte of a tensor is read here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..system.foreign import REFUSALS, checkpoint_error, parsed, read, reason, shown
from ..weights.tensor_file import DTYPES, MOST_HEADER_BYTES, WEIGHTS, Stored, TensorFile, read_header

MOST_INDEX_BYTES = MOST_HEADER_BYTES
"""The most bytes of an index: as many as of a header, because both name the same tensors."""
MOST_CONFIG_BYTES = 2**24
"""The most bytes of a config.json: ten times as many as the largest have, which name thousands of classes."""
_NAME_ON_A_HUB = r"[\w-][\w.-]*/[\w.-]*[\w-](?<!\.safetensors)"
"""Matches names of models on hubs: who published the model, and its own name."""
SCALE_ENDS = ("_scale_inv", "_scale")
"""What follows the name of a matrix in the name of its scales."""


def local_path(path: str | Path, name: str = "path") -> Path:
    """`path`, an argument called `name`, as a path of this machine; ``~`` is the user's home. Raises
    `CheckpointError`."""
    try:
        return Path(path).expanduser()
    except (TypeError, RuntimeError) as error:  # TypeError: no path; RuntimeError: a user without a home
        raise checkpoint_error(name, "a path", f"{shown(path)}: {error}") from None


def tensor_files(path: str | Path) -> dict[str, Path]:
    """The names of a checkpoint's tensors, each with the file that has the tensor; `path` as in `load_layer`. Files
    that an index names are not opened. Raises `CheckpointError` as `load_layer` does."""
    return StoredTensors.find(local_path(path)).files


def tensor_headers(path: str | Path) -> dict[Path, TensorFile]:
    """A checkpoint's files, and what each of them holds; `path` and errors as in `load_layer`."""
    return {file: header_of(file) for file in dict.fromkeys(tensor_files(path).values())}


def read_config(folder: Path) -> dict[str, Any]:
    """All of config.json. Raises `CheckpointError`."""
    return read_json(folder / "config.json", MOST_CONFIG_BYTES)


def model_config(folder: Path) -> dict[str, Any] | None:
    """The language model's part of config.json; None if there is no such file."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        return None
    config = read_json(path, MOST_CONFIG_BYTES)
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


@contextmanager
def expecting(what: str) -> Iterator[None]:
    """Turns every way in which reading a file can fail into a `CheckpointError`."""
    try:
        yield
    except REFUSALS as error:
        raise checkpoint_error("path", what, reason(error)) from error


def header_of(path: Path) -> TensorFile:
    with expecting(f"a complete safetensors file at {path}"):
        return read_header(path)


class StoredTensors:
    """The tensors of one checkpoint, by name. The header of a file is read when a tensor in it is asked for."""

    def __init__(self, origin: Path, files: dict[str, Path]):
        self._origin = origin
        self._files = files
        self._headers: dict[Path, TensorFile] = {}

    @classmethod
    def find(cls, path: Path) -> StoredTensors:
        """List what a safetensors file or a checkpoint folder holds, without reading any tensor."""
        if not os.path.isdir(path):
            if not os.path.lexists(path) and re.fullmatch(_NAME_ON_A_HUB, str(path)):
                expected = "a local folder or .safetensors file; a checkpoint of a hub is to be downloaded before"
                raise checkpoint_error("path", expected, f"{path}, which is neither")
            return cls._of_file(path)
        index, file = path / "model.safetensors.index.json", path / "model.safetensors"
        # lexists: a link to nothing is a file that cannot be read, not a missing file.
        if os.path.lexists(index):
            return cls._of_index(index)
        if os.path.lexists(file):
            return cls._of_file(file)
        raise checkpoint_error("path", f"{file.name} or {index.name} in {path}", "a folder with neither")

    @classmethod
    def _of_file(cls, path: Path) -> StoredTensors:
        header = header_of(path)
        made = cls(path, dict.fromkeys(header.tensors, path))
        made._headers[path] = header
        return made

    @classmethod
    def _of_index(cls, index: Path) -> StoredTensors:
        shards = read_json(index, MOST_INDEX_BYTES).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise checkpoint_error("weight_map", f"an object of tensor names to file names in {index}", shown(shards))
        for shard in shards.values():
            if shard in ("", ".", "..") or "/" in shard or "\0" in shard:  # an index must not lead out of its folder
                raise checkpoint_error("weight_map", f"plain file names in {index}", shown(shard))
        return cls(index, {name: index.parent / shard for name, shard in shards.items()})

    @property
    def names(self) -> list[str]:
        return list(self._files)

    @property
    def files(self) -> dict[str, Path]:
        return dict(self._files)

    def scale_of(self, name: str) -> str:
        """The name of the scales of the matrix `name`, which is in FP8."""
        return next((name + end for end in SCALE_ENDS if name + end in self._files), name + SCALE_ENDS[0])

    def stored(self, name: str, dtypes: Iterable[str] = tuple(DTYPES)) -> Stored:
        """What a file's header says of the tensor `name`. Raises `CheckpointError` unless its dtype is one of
        `dtypes`."""
        path = self._files.get(name)
        if path is None:
            raise checkpoint_error("path", f"a tensor {name} in {self._origin}", "no tensor of that name")
        if path not in self._headers:
            self._headers[path] = header_of(path)
        stored = self._headers[path].tensors.get(name)
        if stored is None:
            raise checkpoint_error("path", f"a tensor {name} in {path}", "no tensor of that name")
        if stored.dtype not in dtypes:
            raise checkpoint_error(f"{name} dtype", f"one of {', '.join(dtypes)}", stored.dtype)
        return stored

    def matrix(self, name: str) -> Stored:
        """As `stored`, for experts' matrices, which may also be in FP8."""
        return self.stored(name, WEIGHTS)


def read_json(path: Path, most: int) -> dict[str, Any]:
    with expecting(f"readable JSON at {path}"):
        content = parsed(read(path, most))
    if not isinstance(content, dict):
        raise checkpoint_error("path", f"a JSON object at {path}", type(content).__name__)
    return content
