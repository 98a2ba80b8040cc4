"""Mutations of JSON whose results are JSON again, so that they get past the parser. Some results have a name twice in
an object, or as much depth or as many digits as the parser's limits allow, or more."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any


class Object(list):
    """A JSON object, as [name, value] lists, since a name may be there twice."""


class Text(str):
    """A value that `dump` writes as it is: JSON text, or text that only looks like it."""


NUMBERS = (0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 64, 127, 255, 1024, 4096, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**40)
NUMBERS += (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64)
TEXTS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "1.5",
    "-0.0",
    "4.0",
    "9" * 4300,
    "9" * 4301,
    "true",
    "null",
    '"\\ud800"',
)
STRINGS = ("", ".", "..", "/", "../", "\0", "\x1b[2J", "é", "\U0001f600", "a" * 300, "9" * 5000, " ")
DEPTHS = (1, 2, 16, 64, 900, 1000, 3000)
MOST_CHANGES = 4


def parse(data: bytes) -> Any:
    """Raises `ValueError` or `RecursionError`."""
    return json.loads(data.decode(), object_pairs_hook=lambda pairs: Object(map(list, pairs)))


def dump(node: Any) -> str:
    if isinstance(node, Text):
        return node
    if isinstance(node, Object):
        return "{" + ", ".join(f"{json.dumps(name)}: {dump(value)}" for name, value in node) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(dump, node)) + "]"
    return json.dumps(node)


def mutated(
    data: bytes, seed: int, words: Sequence[str], repair: Callable[[Any, random.Random], None] | None
) -> bytes | None:
    """`data` with a few changes; None if it is no JSON. `words` are names and strings that mean something to a target.
    `repair` makes a document consistent again after the changes; it is called in 7 cases of 10."""
    chance = random.Random(seed)
    try:
        root = [parse(data)]
        for _ in range(chance.randint(1, MOST_CHANGES)):
            chance.choice(_CHANGES)(_slots(root), chance, words)
        if repair is not None and chance.random() < 0.7:
            repair(root[0], chance)
        return dump(root[0]).encode()
    except (ValueError, RecursionError, IndexError, OverflowError):
        return None


Slot = tuple[list, int]
"""A list, and the index of one of its items. The item is a value, or in an `Object` a [name, value] list."""


def _slots(root: list) -> list[Slot]:
    found: list[Slot] = []
    open_lists = [root]
    while open_lists:
        into = open_lists.pop()
        for i, item in enumerate(into):
            found.append((into, i))
            value = item[1] if isinstance(into, Object) else item
            if isinstance(value, list):
                open_lists.append(value)
    return found


def _value(slot: Slot) -> Any:
    into, i = slot
    return into[i][1] if isinstance(into, Object) else into[i]


def _set(slot: Slot, value: Any) -> None:
    into, i = slot
    if isinstance(into, Object):
        into[i][1] = value
    else:
        into[i] = value


def _any_value(chance: random.Random, words: Sequence[str]) -> Any:
    kind = chance.randrange(7)
    if kind == 0:
        return chance.choice(NUMBERS) * chance.choice((1, 1, 1, -1))
    if kind == 1:
        return Text(chance.choice(TEXTS))
    if kind == 2:
        return chance.choice(STRINGS)
    if kind == 3:
        return chance.choice((None, True, False))
    if kind == 4:
        return chance.choice((list, Object))()
    return chance.choice(words)


def _replace(slots: list[Slot], chance: random.Random, words: Sequence[str]) -> None:
    _set(chance.choice(slots), _any_value(chance, words))


def _alter(slots: list[Slot], chance: random.Random, words: Sequence[str]) -> None:
    """Changes a number or a string a little, inserts a number into a list, or negates true, false or null."""
    slot = chance.choice(slots)
    value = _value(slot)
    if isinstance(value, bool) or value is None:
        _set(slot, not value)
    elif isinstance(value, int | float):
        _set(
            slot, chance.choice((value + 1, value - 1, value * 2, -value, value * 1.0, value + chance.choice(NUMBERS)))
        )
    elif isinstance(value, Text):
        _set(slot, Text(chance.choice(TEXTS)))
    elif isinstance(value, str):
        at, extra = chance.randint(0, len(value)), chance.choice(STRINGS + tuple(words))
        _set(slot, chance.choice((value[:at] + extra + value[at:], value[:at], value[at:], value.swapcase())))
    elif not isinstance(value, Object):
        value.insert(chance.randint(0, len(value)), chance.choice(NUMBERS))


def _remove(slots: list[Slot], chance: random.Random, words: Sequence[str]) -> None:
    into, i = chance.choice(slots[1:])
    del into[i]


def _double(slots: list[Slot], chance: random.Random, words: Sequence[str]) -> None:
    """Inserts an item into its list once more. In an object, its name is then there twice."""
    into, i = chance.choice(slots[1:])
    into.insert(chance.randint(0, len(into)), list(into[i]) if isinstance(into, Object) else into[i])


def _rename(slots: list[Slot], chance: random.Random, words: Sequence[str]) -> None:
    into, i = chance.choice([slot for slot in slots if isinstance(slot[0], Object)])
    into[i][0] = chance.choice((chance.choice(words), into[i][0] + chance.choice(STRINGS), chance.choice(STRINGS)))


def _copy(slots: list[Slot], chance: random.Random, words: Sequence[str]) -> None:
    """Copies a value to another place, through text, because the value might contain that place."""
    _set(chance.choice(slots), parse(dump(_value(chance.choice(slots))).encode()))


def _add(slots: list[Slot], chance: random.Random, words: Sequence[str]) -> None:
    into, _ = chance.choice(slots[1:])
    value = _any_value(chance, words)
    into.append([chance.choice(words), value] if isinstance(into, Object) else value)


def _nest(slots: list[Slot], chance: random.Random, words: Sequence[str]) -> None:
    slot, depth = chance.choice(slots), chance.choice(DEPTHS)
    before, after = chance.choice((("[", "]"), ('{"a": ', "}")))
    _set(slot, Text(before * depth + dump(_value(slot)) + after * depth))


_CHANGES = (_replace, _replace, _alter, _alter, _alter, _remove, _double, _rename, _copy, _add, _nest)
