"""``flashmoe run`` in processes that a launcher has started, on one machine or several: each is a rank, and rank 0
reports."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import GroupError, InvalidArgument
from ..groups import launcher
from ..groups.launcher import Launched
from ..placement import local_experts
from ..report import CallReport
from ..system.foreign import shown
from .workload import Workload

_NAME, _TIMEOUT = "flashmoe-run", 60.0
_ARRAYS = ("topk_ids", "topk_weights")
"""The arrays of a report. All its other values are plain ones."""


def place_of(engine: str, ranks: int | None) -> Launched | None:
    """This process's rank among a launcher's processes; None if it is alone. Raises `InvalidArgument` for options that
    several processes cannot have."""
    place = launcher.launched()
    if place is None or place.ranks == 1:
        return None
    if engine == "cuda":
        raise InvalidArgument("--engine: expected cpu in the processes of a launcher, got cuda")
    if ranks not in (None, place.ranks):
        raise InvalidArgument(f"--ranks: expected none, or {place.ranks} as in WORLD_SIZE, got {ranks}")
    return place


def call(
    workload: Workload, place: Launched, call_on_rank: Callable[..., tuple[np.ndarray, dict[str, Any]]]
) -> tuple[list[np.ndarray], list[CallReport]]:
    """Run this rank's part of the workload, by `run.call_on_rank`. Returns, on every rank, the results [T_p, H] and
    reports of all ranks."""
    meet = launcher.meet_of_environment()
    if meet is None:
        raise InvalidArgument(
            f"{launcher.ADDRESS}: expected where the ranks meet, host:port, or MASTER_ADDR and MASTER_PORT, got none"
        )
    settings = {**workload.limits, "placement": workload.placement, "engine": "cpu", "rendezvous": meet}
    layer = workload.layer.with_experts(local_experts(workload.placement, place.rank))
    y, report = call_on_rank(place.rank, place.ranks, _NAME, settings, layer, workload.tokens[place.rank])
    meeting = meet(f"{_NAME}-results", place.rank, place.ranks, _TIMEOUT)
    try:
        said = meeting.exchange("results", {"y": _packed(y.view(np.uint8)), "report": _plain(report)})
    finally:
        meeting.close()
    results, reports = [], []
    for rank, (each, x) in enumerate(zip(said, workload.tokens, strict=True)):
        try:
            results.append(_unpacked(each["y"]).view(x.dtype).reshape(x.shape))
            reports.append(CallReport.from_dict(_report(each["report"])))
        except Exception as error:  # of any type: anybody can write to a store, so the values may be anything
            raise GroupError(f"results: expected a result and a report of rank {rank}, got {shown(each)}") from error
    return results, reports


def _plain(report: dict[str, Any]) -> dict[str, Any]:
    return {name: _packed(value) if name in _ARRAYS else value for name, value in report.items()}


def _report(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: _unpacked(value) if name in _ARRAYS else value for name, value in plain.items()}


def _packed(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _unpacked(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
