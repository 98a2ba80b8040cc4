"""Return groups: the groups of columns in which rows of results go home."""

from __future__ import annotations

import flashmoe
import numpy as np
from fake_gpu import SIZES, E, I, K, launched, on_gpu
from fake_group import on_ranks, pretend
from flashmoe import _ffi


def test_return_groups():
    groups = _ffi.library().cuda_return_groups
    for columns in (*range(1, 200), 8192):
        for mode in (0, 1):
            assert list(groups(columns, mode, True)) == [0, columns]
            first = list(groups(columns, mode, False))
            sizes = np.diff(first)
            assert first[0] == 0 and first[-1] == columns and (sizes > 0).all()
            if mode == 0:
                assert len(sizes) == min(columns, 2) and sizes[-1] == columns // 2 + (columns == 1)
            elif columns >= 8:  # the last group is small, since everybody waits for it
                assert len(sizes) == 5 and sizes[-1] <= columns // 8 and sizes[0] >= columns // 4


def test_a_rank_alone_has_one_return_group():
    """It has one, however large its call is."""
    with flashmoe.Context(engine="cuda", **{**SIZES, "hidden": 2048}) as wide:
        weights = [on_gpu(E, 2 * I, 2048), on_gpu(E, 2048, I)]
        for tokens in (100, 4000):
            flashmoe.moe(wide, on_gpu(tokens, 2048), *weights, router=on_gpu(E, 2048), top_k=K)
            assert launched()["groups"] == [0, 8]


def test_one_return_group_by_puts(cubin):
    sizes = {"max_tokens": 64, "return_mode": "reduced"}
    for transport, several in (("auto", True), ("rdma", False)):
        seen, _ = on_ranks(groups_of, [({**sizes, "transport": transport}, cubin)] * 2)
        assert (len(seen) > 2) == several


def groups_of(rank, ranks, name, environment, changes, cubin):
    """The return groups of a call of many columns."""
    pretend([rank], cubin, environment)
    settings = {"timeout": 20.0, **SIZES, **changes, "hidden": 2048}
    with flashmoe.Context(engine="cuda", device=rank, rank=rank, ranks=ranks, name=name, **settings) as made:
        weights = [on_gpu(E // ranks, 2 * I, 2048), on_gpu(E // ranks, 2048, I)]
        flashmoe.moe(made, on_gpu(10, 2048), *weights, router=on_gpu(E, 2048), top_k=K)
        return launched()["groups"]
