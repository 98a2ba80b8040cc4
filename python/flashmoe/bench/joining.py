"""How a rank joins PyTorch's process group, and its share of a GPU."""

from __future__ import annotations

import os
import socket


def ranks_a_gpu(ranks: int) -> int:
    """The number of ranks that use one GPU: 1, unless there are fewer GPUs than ranks (FLASHMOE_SHARE_GPUS)."""
    import torch

    return -(-ranks // torch.cuda.device_count())


def processors(ranks: int) -> int | None:
    """The number of thread blocks that a context is given. None: as many as fit. Ranks that share a GPU get an equal,
    even number each."""
    import torch

    sharing = ranks_a_gpu(ranks)
    return None if sharing == 1 else torch.cuda.get_device_properties(0).multi_processor_count // sharing // 2 * 2


def join_gpus() -> int:
    """Joins PyTorch's process group as torchrun's variables say, with the GPU whose number is the rank. Returns the
    rank."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    return rank


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join(engine: str, rank: int, ranks: int, port: int | None = None) -> None:
    """Joins PyTorch's process group; called once in a rank's process. Sets the same variables that torchrun sets for
    its processes. `port`: the port at which the ranks meet; None for a rank that is alone."""
    import torch.distributed as dist

    port = free_port() if port is None else port
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in told.items()})
    if engine == "cpu":
        dist.init_process_group("gloo")
    elif ranks == 1 or ranks_a_gpu(ranks) == 1:
        join_gpus()
    else:  # NCCL refuses two ranks on one GPU
        import torch

        torch.cuda.set_device(rank // ranks_a_gpu(ranks))
        dist.init_process_group("gloo")
