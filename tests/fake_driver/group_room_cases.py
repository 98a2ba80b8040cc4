"""Forward passes of several ranks that keep: the memory is allocated before the host knows how many rows there are."""

from __future__ import annotations

import json
from typing import NamedTuple

import flashmoe
import numpy as np
import pytest
import torch
from fake_gpu import SIZES, E, H, I, K, driver, launched, on_gpu
from fake_group import kept_by_halves, on_ranks, pretend, rows_of_halves
from flashmoe.spec import Options
from flashmoe.spec.tensors import Tensors

STAYS, MOVES_AGAIN = "call count record move wait ", "call count record move wait move "
IN_TURN = [
    ((100, 37), MOVES_AGAIN),  # there is no earlier call from which to guess the rows
    ((100, 37), STAYS),
    ((102, 38), STAYS),
    ((93, 36), STAYS),
    ((600, 300), MOVES_AGAIN),
    ((600, 300), STAYS),
    ((560, 290), STAYS),
    ((40, 20), MOVES_AGAIN),
    ((40, 20), STAYS),
    ((0, 0), MOVES_AGAIN),
    ((0, 0), STAYS),
    ((1, 0), MOVES_AGAIN),
    ((100, 37), MOVES_AGAIN),
]
"""Calls of a layer, in order: the tokens of each rank, and what the host does, as the fake driver logs it."""


@pytest.mark.parametrize("redispatch", [False, True])
def test_what_is_kept_has_room_before_it_is_counted(cubin, redispatch):
    """If a call's rows suit the room that earlier calls of the layer needed, they are moved once, and the host only
    waits until they are counted. Otherwise they are moved a second time. Each of two layers has its own room."""
    calls = [each for tokens, _ in IN_TURN for each in ((0, tokens), (1, (250, 410)))]
    found = on_ranks(keep_in_turn, [(cubin, calls, redispatch)] * 2)
    for rank, of_rank in enumerate(found):
        rooms = [[0, 0, 0], [0, 0, 0]]
        expected = [log for _, first in IN_TURN for log in (first, STAYS)]
        expected[1] = MOVES_AGAIN
        for n, ((layer, tokens), done, log) in enumerate(zip(calls, of_rank, expected, strict=True)):
            rows, received = rows_of_halves(tokens, rank)
            needed = [rows, received * (not redispatch), max(tokens)]
            if log == MOVES_AGAIN:
                rooms[layer] = [count + count // 16 for count in needed]
            room = rooms[layer] if log == STAYS else needed
            assert done.log == log, (n, tokens, rank)
            assert done.counted == [rows, received, n + 1, *room]
            at_x, at_numbers, at_first, at_ids = kept_by_halves(room)
            size = at_ids + 8 * tokens[rank] * K
            assert done.bytes == size <= 1.25 * (kept_by_halves(needed)[-1] + 8 * tokens[rank] * K)
            assert done.move == [0, -done.kept if redispatch else at_x, at_numbers, at_first, *room, done.move[-1]]
            assert done.move[-1] == 132 + room[0] // 256 + min(E // 2, room[0])
            if log == STAYS and tokens[rank] != 0:  # the call wrote its routing where it is kept
                assert done.ids_at == at_ids
            assert done.ids == [[(t + k) % E for k in range(K)] for t in range(tokens[rank])]
            assert done.weights == [[1.0, 0.5, np.float32(1 / 3), 0.25]] * tokens[rank]


class Kept(NamedTuple):
    """What a call keeps. Addresses are counted from the beginning of the kept tensor."""

    counted: list[int]
    bytes: int
    kept: int
    """The address of the kept tensor."""
    move: list[int]
    """What the last launch that moves rows was told."""
    ids_at: int
    """Where the call was told to write the ids of the chosen experts."""
    log: str
    ids: list[list[int]]
    weights: list[list[float]]


def keep_in_turn(rank, ranks, name, environment, cubin, calls, redispatch):
    """What each of `calls` keeps. A call is given by its layer, one of two, and the tokens of all ranks."""
    pretend([rank], cubin, environment)
    who = {"device": rank, "rank": rank, "ranks": ranks, "name": name, "redispatch": redispatch}
    found = []
    with flashmoe.Context(engine="cuda", timeout=20.0, **who, **SIZES) as made:
        layers = [(on_gpu(E // ranks, 2 * I, H), on_gpu(E // ranks, H, I)) for _ in range(2)]
        options = Options(placement=made.placement)
        for layer, of_all in calls:
            tokens = of_all[rank]
            routing = on_gpu(tokens, K, dtype=torch.int32), on_gpu(tokens, K, dtype=torch.float32)
            gate_up, down = layers[layer]
            tensors = Tensors(on_gpu(tokens, H), gate_up, down)._replace(topk_ids=routing[0], topk_weights=routing[1])
            driver.fake_log()
            _, kept, counted = made._engine.call_and_keep(tensors, options)
            log, at = driver.fake_log().decode(), kept.data_ptr()
            move, ids_at = json.loads(driver.fake_last_move()), launched()["kept_ids"]
            each, end = 4 * tokens * K, kept.numel()  # the routing comes last
            ids = kept[end - 2 * each : end - each].view(torch.int32).view(tokens, K)
            weights = kept[end - each :].view(torch.float32).view(tokens, K)
            places = [each - at for each in move[:4]] + move[4:]
            read = ids.tolist(), weights.tolist()
            found.append(Kept(counted.tolist(), kept.numel(), at, places, ids_at - at, log, *read))
    return found
