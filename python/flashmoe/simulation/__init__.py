"""A call of the layer in simulated time: the actors that also run on GPUs, on a virtual clock (docs/simulation.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import _ffi
from ..errors import InvalidArgument
from ..models import ModelShape
from ..trace import PHASES, Event
from ..tuning.knobs import checked_profile, order_of
from . import inputs

MOST_RANKS = 1024
MOST_TOKENS = 65536
_NIC_GB_S = 50.0


@dataclass(frozen=True)
class Simulated:
    """One simulated call. Times are in microseconds. Where ranks differ, they are the slowest rank's; but `busy_us`,
    bytes and messages are averages over ranks."""

    machines: int
    gpus: int
    """GPUs of a machine."""
    tokens: int
    """Tokens of a rank."""
    call_us: float
    exposed_us: float
    """How much sooner the call would be over if links took no time: the communication that nothing hides."""
    first_task_us: float
    last_task_us: float
    """The times from the beginning of the call to the beginning of the first task, and to the end of the last one."""
    busy_us: float
    """How long a GPU's thread blocks have tasks, on average."""
    nvlink_bytes: int
    nic_bytes: int
    nic_messages: int


def simulate(
    shape: ModelShape,
    *,
    tokens: int,
    machines: int = 1,
    gpus: int = 1,
    nic_gb_s: float = _NIC_GB_S,
    seed: int = 1,
    folded: bool | None = None,
    return_mode: str = "auto",
    profile: Mapping[str, int] | None = None,
) -> Simulated:
    """Simulate one call of a layer of this shape, bfloat16, of `tokens` tokens on each of `machines` x `gpus` GPUs.

    `nic_gb_s` is what a GPU's network interface carries each way, in GB/s. Tokens choose experts at random, by `seed`,
    each expert with the same probability. If there are several machines, the tokens of all choose alike, seen from
    their own machine. So only the first machine's ranks are simulated, unless `folded` is False. `return_mode` and
    `profile` are as in `flashmoe.Context`, by default as built in; several machines have only ``"reduced"``.
    Raises `InvalidArgument` for what cannot be simulated: see docs/simulation.md.
    """
    call = _call(shape, tokens, machines, gpus, nic_gb_s, seed)
    call["folded"] = int(machines > 1 if folded is None else folded)
    if return_mode != "auto":
        call["return_mode"] = return_mode
    machine, times = _machine(shape, tokens, nic_gb_s), inputs.task_times(shape)
    free = {"nvlink_gb_s": 0.0, "nic_gb_s": 0.0, "peer_store_us": inputs.GPU["store_us"], "network_us": 0.0}
    order = order_of({} if profile is None else checked_profile(profile))
    run = _ffi.library().simulate
    result = {str(key): value for key, value in run(call, order, machine, times).items()}
    unhindered = run(call, order, machine | free, times)["call_us"] if machines * gpus > 1 else result["call_us"]
    return Simulated(
        machines=machines,
        gpus=gpus,
        tokens=tokens,
        call_us=result["call_us"],
        exposed_us=max(result["call_us"] - unhindered, 0.0),
        first_task_us=result["first_task_us"],
        last_task_us=result["last_task_us"],
        busy_us=result["busy_us"],
        nvlink_bytes=result["nvlink_bytes"],
        nic_bytes=result["nic_bytes"],
        nic_messages=result["nic_messages"],
    )


def timeline(shape: ModelShape, *, tokens: int, gpus: int) -> list[list[Event]]:
    """What the clusters (of two thread blocks each) of each GPU do in the simulated call, and when, in the form that
    `flashmoe.trace.write_timeline` takes. The arguments are those of `simulate`, for one machine."""
    call = _call(shape, tokens, 1, gpus, _NIC_GB_S, 1) | {"spans": 1}
    machine, times = _machine(shape, tokens, _NIC_GB_S), inputs.task_times(shape)
    result = _ffi.library().simulate(call, order_of({}), machine, times)
    events: list[list[Event]] = [[] for _ in range(gpus)]
    for rank, cluster, phase, begin, end in result["spans"]:
        events[rank].append(Event(f"cluster {cluster}", PHASES[phase], begin, end, 0, 0))
    return events


def _call(
    shape: ModelShape, tokens: int, machines: int, gpus: int, nic_gb_s: float, seed: int
) -> dict[str, int | float | str]:
    """The description of a call that the library takes. Raises `InvalidArgument`."""
    for name, value, most in (
        ("tokens", tokens, MOST_TOKENS),
        ("machines", machines, MOST_RANKS),
        ("gpus", gpus, MOST_RANKS),
        ("machines x gpus", machines * gpus, MOST_RANKS),
    ):
        if not 1 <= value <= most:
            raise InvalidArgument(f"{name}: expected 1 to {most}, got {value}")
    if not nic_gb_s > 0:
        raise InvalidArgument(f"nic: expected more than 0 GB/s, got {nic_gb_s}")
    return {
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "activation": shape.activation,
        "tokens": tokens,
        "machines": machines,
        "gpus": gpus,
        "seed": seed,
        "alike": int(machines > 1),
        "folded": 0,
        "spans": 0,
    }


def _machine(shape: ModelShape, tokens: int, nic_gb_s: float) -> dict[str, float]:
    """The description of GPUs and links that the library takes."""
    return inputs.GPU | {
        "nic_gb_s": nic_gb_s,
        "network_us": inputs.NETWORK_US,
        "gate_us": inputs.gate_us(shape, tokens),
    }
