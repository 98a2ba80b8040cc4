"""How a rank of a suite joins PyTorch's process group, which baselines need."""

from __future__ import annotations

import os
import socket

from .programs import program


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join(engine: str, rank: int, ranks: int, port: int | None = None) -> None:
    """Called once in a rank's process. Sets the same variables that torchrun sets for its processes. `port`: where
    ranks meet; None for a rank that is alone."""
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
