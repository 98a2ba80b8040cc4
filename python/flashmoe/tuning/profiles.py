"""Measured profiles: a JSON file of what `flashmoe tune` found fastest, and the choice that a context makes from it.

The file is ``$FLASHMOE_PROFILES``, else ``profiles.json`` in the folder of compiled kernels. It is replaced as a whole,
so a reader sees it before a change or after it. It is changed under a lock, so no writer undoes another's change.
`storage` makes sure that no other user has written it. The package brings another file, ``measured.json``, with
profiles of known models on several GPUs. It is used if the user's file has no profile for a layer.

Ranks may differ in the order of their tasks, but not in the return mode. `lookup` depends only on the file and on what
the ranks have in common, so ranks that read one file agree. If they do not (each has a file of its own, or the file
changes while they start), the first call fails with a `GroupError` that names the mode of each rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from .. import jit
from ..errors import FlashMoEError
from ..spec import MAX_EXPERTS, MAX_RANKS, MAX_TOKENS, MAX_WIDTH, bounded
from ..system.foreign import clipped, parsed, shown
from ..system.storage import Folder

VERSION = 1
MOST_BYTES = 2**24
"""The most bytes of the file: tens of thousands of profiles."""
LOCK_SECONDS = 60.0
"""How long to wait for another process that changes the file. A change takes milliseconds."""
_REMEDY = "set FLASHMOE_PROFILES to a file in a folder of your own"

_log = logging.getLogger("flashmoe")
_noticed: set[str] = set()


@dataclass(frozen=True)
class Setting:
    """What a group of contexts runs on, and what it is made for."""

    device: str
    """The GPU's name, as the driver gives it."""
    ranks: int
    dtype: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int
    """Most tokens of a rank."""

    def in_bucket(self) -> Setting:
        """The setting with `tokens` rounded up to a power of two. Profiles are stored for such settings."""
        return replace(self, tokens=bucket(self.tokens))

    def __str__(self) -> str:
        sizes = f"H {self.hidden}, I {self.intermediate}, E {self.experts}, K {self.top_k}"
        return f"{self.device} x {self.ranks}, {sizes}, {self.dtype}, {self.tokens} tokens a rank"


@dataclass(frozen=True)
class Record:
    """A profile in the file, and the setting for which it was measured."""

    setting: Setting
    """Its number of tokens is a power of two."""
    activation: str
    profile: dict[str, int | str]
    """Values by the names of ``flashmoe.tuning.knobs.PROFILE``, and ``return_mode``. What is not named is as built
    in."""
    milliseconds: float
    """The median time of a call with the profile."""
    built_in_milliseconds: float
    """The median time of a call with the built-in order, measured in turn with the profile."""


def bucket(tokens: int) -> int:
    """The least power of two that is not less than `tokens`."""
    return 1 << max(0, tokens - 1).bit_length()


def path() -> Path:
    """The path of the file, which need not exist."""
    given = os.environ.get("FLASHMOE_PROFILES")
    return Path(given) if given else jit.cache_folder() / "profiles.json"


def read() -> list[Record]:
    """All records, in the order in which they were stored. Raises `FlashMoEError`, which names the file, if the file
    cannot be read, or if others can have written it."""
    file = path()
    try:
        with _folder(file, make=False) as folder:
            return _read(file, folder)
    except FileNotFoundError:
        return []


def store(*records: Record) -> Path:
    """Add `records` to the file, in place of records for the same setting and activation. Returns the file's path.

    Raises `FlashMoEError`, which names the file, if the file cannot be read or written, or if others can write to it.
    """
    file = path()
    with _folder(file) as folder, folder.locked(f"{file.name}.lock", LOCK_SECONDS) as alone:
        if not alone:
            raise FlashMoEError(f"profiles: cannot lock {file}.lock: its file system has no locks; {_REMEDY}")
        folder.sweep(f"{file.name}.")
        replaced = {(record.setting, record.activation) for record in records}
        kept = [record for record in _read(file, folder) if (record.setting, record.activation) not in replaced]
        content = {"version": VERSION, "profiles": [_flat(record) for record in (*kept, *records)]}
        folder.replace(file.name, json.dumps(content, indent=1).encode())
    return file


@functools.cache
def shipped() -> tuple[Record, ...]:
    """The records that come with the package."""
    content = parsed(Path(__file__).with_name("measured.json").read_bytes())
    return tuple(_record(each) for each in content["profiles"])


def lookup(setting: Setting) -> dict[str, int | str]:
    """The profile that is stored for `setting`, with its tokens rounded up to a power of two. If there is none, the
    profile that is stored for the nearest number of tokens (of two equally near ones the larger), with a notice in the
    log. If none is stored for any number of tokens, the package's own profile for exactly this number, else an empty
    one. A context does not know its activation: if profiles for several activations are stored, the last one stored is
    taken. Raises `FlashMoEError` as `read` does."""
    setting = setting.in_bucket()
    alike = [record for record in read() if replace(record.setting, tokens=setting.tokens) == setting]
    if not alike:
        return next((dict(record.profile) for record in shipped() if record.setting == setting), {})
    nearest = min(reversed(alike), key=lambda record: _distance(record.setting.tokens, setting.tokens))
    if nearest.setting.tokens != setting.tokens:
        taken = f"taking that for {nearest.setting.tokens}"
        notice(logging.INFO, f"profile: none measured for {setting}; {taken} (see flashmoe tune)")
    return nearest.profile


def notice(level: int, message: str) -> None:
    """Log `message`, once in this process."""
    if message not in _noticed:
        _noticed.add(message)
        _log.log(level, message)


def _folder(file: Path, make: bool = True) -> contextlib.AbstractContextManager[Folder]:
    return Folder.at(file.parent, "profiles", _REMEDY, make)


def _read(file: Path, folder: Folder) -> list[Record]:
    try:
        content = parsed(folder.read(file.name, MOST_BYTES))
        version = content["version"]
        if type(version) is not int or version != VERSION:
            raise ValueError(f"expected version {VERSION}, got {shown(version)}")
        return [_record(each) for each in content["profiles"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, LookupError, MemoryError) as error:
        what = f"{type(error).__name__}: {clipped(error)}"
        raise FlashMoEError(f"profiles: cannot read {file} ({what}); remove it and run flashmoe tune again") from error


_MOST = {
    "ranks": MAX_RANKS,
    "hidden": MAX_WIDTH,
    "intermediate": MAX_WIDTH,
    "experts": MAX_EXPERTS,
    "top_k": MAX_EXPERTS,
    "tokens": MAX_TOKENS + 1,  # a power of two, to which `bucket` rounds up
}
"""The largest sizes that a context can have; the least is 1."""


def _distance(tokens: int, wanted: int) -> tuple[int, int]:
    """How far `tokens` is from `wanted`, both powers of two. Of two equally far ones, the larger counts as nearer."""
    return abs(tokens.bit_length() - wanted.bit_length()), -tokens


def _flat(record: Record) -> dict[str, Any]:
    """A record as the file has it: the setting's fields beside the others."""
    flat = asdict(record)
    return flat.pop("setting") | flat


def _record(flat: dict[str, Any]) -> Record:
    """The inverse of `_flat`, with checks of names, types and sizes. Raises `ValueError`, `TypeError` or `KeyError` if
    one is wrong."""
    flat = dict(flat)
    setting = _typed(Setting, {field.name: flat.pop(field.name) for field in fields(Setting)})
    record = _typed(Record, {"setting": setting, **flat})
    for name, most in _MOST.items():
        bounded(name, getattr(setting, name), 1, most)
    if setting.tokens != bucket(setting.tokens):
        raise ValueError(f"tokens: expected a power of two, got {setting.tokens}")
    for name in ("milliseconds", "built_in_milliseconds"):
        if not 0 <= (spent := getattr(record, name)) < math.inf:  # Python's JSON parser accepts NaN and Infinity
            raise ValueError(f"{name}: expected a time, got {spent}")
    if odd := [name for name, value in record.profile.items() if type(value) not in (int, str)]:
        raise ValueError(f"profile: expected numbers and names, got {shown(record.profile[odd[0]])} of {shown(odd[0])}")
    return record


def _typed(kind: type, values: dict[str, Any]) -> Any:
    made = kind(**values)
    for name, hint in get_type_hints(kind).items():
        expected = get_origin(hint) or hint
        if type(values[name]) is not expected:  # true is an instance of int
            raise ValueError(f"{name}: expected {expected.__name__}, got {shown(values[name])}")
    return made
