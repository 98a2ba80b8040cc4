"""Computes layers of many kinds with the installed flashmoe, and hashes the results: the worker of same_bits.py.

    python benchmarks/bits.py cpu|gpu|group|rdma-bfloat16|rdma-float32 OUT.json

Of the package, only its public functions are used here, so that this file runs unchanged with versions whose insides
differ. PyTorch draws the inputs from a seed that is made from the layer's name. Each layer is called twice: a version
that differs between its own two calls can thus be told from one that differs from the other version.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import flashmoe
import torch
from bits_layers import PUT, SHARING, WAYS, Layer, cpu_layers, gpu_layers, group_layers
from flashmoe.launch import run_ranks

PATIENCE = {"cpu": 300.0, "cuda": 60.0}
"""The contexts' timeout in seconds, by engine. It is longer on the CPU, which other programs may keep busy."""
LONGEST = {"cpu": 1500.0, "cuda": 500.0}
"""The most seconds that all layers of a group of ranks may take together, by engine."""
FEW_CORES = 2
"""The processors of a rank of the CPU engine that is alone. The number is fixed, so that it does not depend on the
machine."""


Tensors = dict[str, torch.Tensor]


def draw(layer: Layer, device: str) -> Tensors:
    """The inputs and weights of all ranks together. Their sizes are chosen so that results are about as large as 1."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(layer.name.encode()))
    tokens, experts = sum(layer.tokens), layer.experts

    def normal(*shape: int, size: float = 1.0) -> torch.Tensor:
        made = torch.empty(shape, dtype=getattr(torch, layer.dtype), device=device)
        for part in made if len(shape) == 3 else [made]:  # one expert at a time: float32 copies of all would be large
            part.copy_(torch.randn(part.shape, generator=generator, device=device).mul_(size))
        return made

    rows = layer.inner * (2 if layer.activation == "swiglu" else 1)
    order = torch.randperm(experts, generator=generator, device=device)
    preference = layer.skew * torch.linspace(0.0, 1.0, experts, device=device)[order]
    tensors = {
        "x": normal(tokens, layer.hidden),
        "gate_up_proj": normal(experts, rows, layer.hidden, size=layer.hidden**-0.5),
        "down_proj": normal(experts, layer.hidden, layer.inner, size=layer.inner**-0.5),
    }
    if layer.biases:
        tensors |= {"gate_up_bias": normal(experts, rows), "down_bias": normal(experts, layer.hidden)}
    if layer.given:
        noise = torch.rand(tokens, experts, generator=generator, device=device).clamp_(1e-6, 1 - 1e-6)
        likely = preference - torch.log(-torch.log(noise))
        tensors["topk_ids"] = likely.topk(layer.top_k, 1).indices.to(getattr(torch, layer.given))
        tensors["topk_weights"] = torch.rand(tokens, layer.top_k, generator=generator, device=device) * 3.0 - 1.0
        return tensors
    tensors["router"] = normal(experts, layer.hidden, size=2.0 * layer.hidden**-0.5)
    if layer.biases or layer.skew:
        tensors["router_bias"] = (preference + normal(experts).float() * 0.5).to(tensors["x"].dtype)
    return tensors


def share(layer: Layer, whole: Tensors, rank: int, local: list[int]) -> dict[str, Any]:
    """The rank's arguments of `flashmoe.moe`: its tokens, and the weights of the experts `local`."""
    rows = slice(sum(layer.tokens[:rank]), sum(layer.tokens[: rank + 1]))
    own: dict[str, Any] = {}
    for name, tensor in whole.items():
        if name in ("x", "topk_ids", "topk_weights"):
            own[name] = tensor[rows].contiguous()
        elif name.startswith("router"):
            own[name] = tensor
        else:
            own[name] = tensor[local]
    if layer.strided:
        apart = own["x"].new_zeros(layer.tokens[rank], layer.hidden + 64)
        apart[:, : layer.hidden] = own["x"]
        own["x"] = apart[:, : layer.hidden]
    if layer.given:
        own["placement"] = layer.owners()  # without a router, only the placement says how many experts there are
    else:
        own["top_k"] = layer.top_k
    return own | {"activation": layer.activation} | layer.options


def as_numpy(tensor: torch.Tensor) -> Any:
    """A NumPy array of the tensor's memory."""
    import ml_dtypes

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def digest(*arrays: Any) -> str:
    """A hash of the arrays' bytes."""
    sha = hashlib.sha256()
    for array in arrays:
        if isinstance(array, torch.Tensor):
            array = array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        sha.update(array.tobytes())
    return sha.hexdigest()


def sampled(tensors: Tensors) -> str:
    """A hash of some of the elements of each input. It shows if two processes have drawn other random numbers, because
    then all numbers that are drawn later are others too."""
    flat = [tensor.flatten() for _, tensor in sorted(tensors.items())]
    return digest(*(each[:: max(1, len(each) // 4096)] for each in flat))


def in_context(ctx: flashmoe.Context, layer: Layer, rank: int, device: str) -> dict[str, Any]:
    """Hashes of one layer's inputs, output and routing on this rank, and whether all its calls had the same hashes
    ("steady")."""
    whole = draw(layer, device)
    own = share(layer, whole, rank, ctx.local_experts(layer.owners()))
    if device == "cpu" and layer.dtype != "float16":  # float16 layers are called with PyTorch's tensors
        own = {name: as_numpy(each) if isinstance(each, torch.Tensor) else each for name, each in own.items()}
    seen = []
    for _ in range(2):
        y = flashmoe.moe(ctx, **own)
        ctx.synchronize()
        report = ctx.last_call
        routing = digest(report.topk_ids, report.topk_weights) + f" {report.dropped} dropped"
        seen.append({"y": digest(y), "routing": routing})
    if layer.graph:
        seen.append({**seen[0], "y": digest(replayed(ctx, own))})
    return {"inputs": sampled(whole), **seen[0], "steady": all(each == seen[0] for each in seen)}


def replayed(ctx: flashmoe.Context, own: dict[str, Any]) -> torch.Tensor:
    """The output of a replay of a graph that was captured from the call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = flashmoe.moe(ctx, **own)
    y.zero_()
    graph.replay()
    ctx.synchronize()
    return y


def limits(layers: list[Layer]) -> dict[str, int]:
    """The sizes of a context that has room for all of these layers."""
    return {
        "max_tokens": max(1, *(count for layer in layers for count in layer.tokens)),
        "hidden": max(layer.hidden for layer in layers),
        "intermediate": max(layer.inner for layer in layers),
        "experts": max(layer.experts for layer in layers),
        "top_k": max(layer.top_k for layer in layers),
    }


def by_context(layers: list[Layer]) -> Iterator[list[Layer]]:
    def key(layer: Layer) -> str:
        return json.dumps([layer.dtype, layer.context], sort_keys=True)

    for _, group in itertools.groupby(sorted(layers, key=key), key):
        yield list(group)


def on_rank(rank: int, ranks: int, name: str, engine: str, layers: list[Layer]) -> dict[str, dict[str, Any]]:
    """Hashes of this rank's results, by layer."""
    results = {}
    device, settings = "cpu", {"processors": FEW_CORES if ranks == 1 else 1}
    if engine == "cuda":
        torch.cuda.set_device(0)
        device, settings = "cuda", {"device": 0, "profile": {}}
        if ranks > 1:  # the ranks share the GPU: each gets an equal, even number of thread blocks
            blocks = torch.cuda.get_device_properties(0).multi_processor_count // SHARING // 2 * 2
            settings["processors"] = blocks
    with ExitStack() as stack:
        for number, group in enumerate(by_context(layers)):
            sizes = {
                **limits(group),
                "dtype": group[0].dtype,
                "timeout": PATIENCE[engine],
                **settings,
                **group[0].context,
            }
            made = {"rank": rank, "ranks": ranks, "name": f"{name}-{number}"} if ranks > 1 else {}
            context = flashmoe.Context(engine=engine, **made, **sizes)
            if ranks > 1:
                stack.enter_context(context)  # stays open to the end: others may still be in a call with this rank
            for layer in group:
                results[layer.name] = in_context(context, layer, rank, device)
            if ranks == 1:
                context.close()
            if engine == "cuda":
                torch.cuda.empty_cache()  # contexts' memory does not come from PyTorch's cache
    return results


# ---- the suites ------------------------------------------------------------------------------------------------------


def on_group(ranks: int, engine: str, layers: list[Layer]) -> dict[str, dict[str, Any]]:
    """The results of all ranks together, by layer. Each hash is a hash over the ranks' hashes."""
    by_rank = run_ranks(ranks, on_rank, [(engine, layers)] * ranks, timeout=LONGEST[engine])
    joined: dict[str, dict[str, Any]] = {}
    for layer in layers:
        of_layer = [results[layer.name] for results in by_rank]
        joined[layer.name] = {"steady": all(each["steady"] for each in of_layer)}
        for part in ("inputs", "y", "routing"):
            joined[layer.name][part] = hashlib.sha256("".join(each[part] for each in of_layer).encode()).hexdigest()
    return joined


def cpu() -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for ranks in (1, 2, 4, 8):
        results |= on_group(ranks, "cpu", cpu_layers(ranks))
    return results


def gpu() -> dict[str, dict[str, Any]]:
    return on_rank(0, 1, "", "cuda", gpu_layers())


def group() -> dict[str, dict[str, Any]]:
    return on_group(SHARING, "cuda", group_layers())


def compile_rdma(dtype: str) -> dict[str, dict[str, Any]]:
    """Makes one small call of two ranks, to have its kernel compiled: `flashmoe compile` has no option for the kernels
    with NVSHMEM's puts."""
    layer = Layer(f"{dtype} by puts", (16, 16), 64, 64, 4, 2, dtype, context=WAYS["rdma"])
    return on_group(2, "cuda", [layer])


SUITES: dict[str, Callable[[], dict[str, dict[str, Any]]]] = {
    "cpu": cpu,
    "gpu": gpu,
    "group": group,
    **{f"rdma-{dtype}": lambda dtype=dtype: compile_rdma(dtype) for dtype in PUT},
}


def main() -> None:
    suite, out = sys.argv[1:]
    results = {"package": flashmoe.__file__, "torch": torch.__version__, "layers": SUITES[suite]()}
    pathlib.Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
