"""How a rank of a suite joins the process group of PyTorch's that baselines need."""

from __future__ import annotations

import os
import socket

from .programs import program


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join(engine: str, rank: int, ranks: int, port: int | None = None) -> None:
    """In a rank's process, once. What torchrun tells its processes, these are told too. `port`: where ranks meet; None
    for a rank alone."""
    import torch.distributed as dist

    port = free_port() if port is None else port
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in told.items()})
    harness = program("harness")
    if engine == "cpu":
        dist.init_process_group("gloo")
    elif ranks == 1 or harness.ranks_a_gpu(ranks) == 1:
        harness.join()
    else:  # NCCL refuses two ranks on one GPU
        import torch

        torch.cuda.set_device(rank // harness.ranks_a_gpu(ranks))
        dist.init_process_group("gloo")
