"""The tests that need a GPU: skipped by name where there is none. Kernels are compiled before the first of them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import evidence  # which makes the benchmarks' modules importable
import pytest
import torch
from flashmoe import jit, spec
from flashmoe.errors import FlashMoEError
from harness import head, nvidia_smi, result_path
from layers import DTYPES, SEED
from leaves import OTHER_KERNELS
from ranks import RANKS_A_GPU

HERE = Path(__file__).resolve().parent
PUT = [(dtype, "swiglu") for dtype in DTYPES] + [("bfloat16", "gelu"), ("float32", "gelu")]
"""Dtypes and activations of test_group.py."""
IN_GROUP = [("bfloat16", each, False) for each in ("swiglu", "gelu", "relu", "clamped_swiglu")]
IN_GROUP += [("bfloat16", "swiglu", True), ("bfloat16", "clamped_swiglu", True), ("float16", "swiglu", False)]
IN_GROUP += [("float32", "swiglu", False)]
"""Dtypes, activations and layouts of test_training_group.py."""
OTHERS = [{"on_input": True}, {"sliced": True}, {"on_input": True, "sliced": True}]
OTHERS_IN_FLOAT16 = [("swiglu", False, each) for each in OTHERS[:2]] + [("swiglu", True, each) for each in OTHERS[1:]]
OTHERS_IN_FLOAT16 += [("relu", False, OTHERS[1]), ("gelu", False, OTHERS[0])]
OTHERS_IN_FLOAT16 += [("clamped_swiglu", True, each) for each in OTHERS[:2]]
OTHERS_IN_FLOAT32 = [("swiglu", each) for each in OTHERS] + [("relu", OTHERS[1]), ("gelu", OTHERS[0])]
OTHERS_IN_GROUP = [("bfloat16", "swiglu", each) for each in OTHERS]
OTHERS_IN_GROUP += [("bfloat16", "clamped_swiglu", OTHERS[1] | {"transposed": True})]
OTHERS_IN_GROUP += [("float32", "swiglu", each) for each in ({"exact": True}, OTHERS[0], OTHERS[1])]
OTHERS_IN_GROUP += [("float32", "swiglu", {"exact": True} | OTHERS[1])]
"""Types, activations and what else their kernels are told of in test_training_group.py."""
FEW_IN_FP8 = [("bfloat16", "swiglu"), ("bfloat16", "silu"), ("float16", "swiglu")]
"""Dtypes and activations of test_few_group_fp8.py."""
PUT_TRANSPOSED = [("bfloat16", "clamped_swiglu"), ("float16", "swiglu")]


def missing() -> str | None:
    """What keeps the tests from running; None: nothing does."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"no CUDA device of compute capability 9.0, but {torch.cuda.get_device_name()}"
    try:
        jit.find_nvcc()
    except FlashMoEError as error:
        return str(error)
    return None


def here(items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if HERE in item.path.parents]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if here(items) and (reason := missing()):
        for item in here(items):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Names the device, and compiles what the tests will ask for: no test's time limit has room for that."""
    if not here(session.items) or missing() or session.config.option.collectonly:
        return
    driver = (nvidia_smi("driver_version").split() or ["?"])[0]
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    terminal.write_line(
        f"{torch.cuda.get_device_name()}, {memory:.0f} GiB, driver {driver}, "
        f"torch {torch.__version__}, {jit.find_nvcc()}; FLASHMOE_SEED={SEED}"
    )
    variants = asked_for()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        list(pool.map(jit.compile_kernel, variants))
    if folder := os.environ.get("FLASHMOE_EVIDENCE"):
        gpus, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        origin = {
            "device": name + (f" x{gpus}" if gpus > 1 else ""),
            "driver": driver,
            "torch": torch.__version__,
            "ranks_a_gpu": RANKS_A_GPU,
            "commit": head(),
            "kernels": evidence.kernels(variants),
            "command": "make test-gpu",
        }
        path = Path(folder) / result_path("tests", name, gpus).name
        session.config.pluginmanager.register(evidence.Evidence(evidence.GPU, path, origin))


def asked_for() -> list[jit.Variant]:
    """The kernels that the tests load, on this machine."""
    alone: list[dict[str, Any]] = [{"dtype": dtype} for dtype in DTYPES] + [{"dtype": "float32", "exact": True}]
    alone += [{"dtype": dtype, "transposed": True} for dtype in jit.TRANSPOSED]
    alone += [{"dtype": dtype, which: True} for which in ("quantised", "mxfp4") for dtype in jit.BESIDE_QUANTISED]
    variants = [
        variant
        for of in alone
        for activation in spec.ACTIVATIONS
        for variant in jit.variants_alone(**of, activation=activation)
    ]
    variants += jit.variants_alone(trace=True)
    trained = [(dtype, each, False) for dtype in jit.TRAINED for each in spec.ACTIVATIONS]
    trained += [("bfloat16", each, True) for each in spec.ACTIVATIONS] + [("float16", "clamped_swiglu", True)]
    variants += [
        jit.Variant(dtype, activation, transposed=transposed, **{which: True})
        for dtype, activation, transposed in trained
        for which in ("keeps", "backward")
    ]
    variants += [
        jit.Variant("bfloat16", activation, transposed=transposed, **{which: True}, **other)
        for activation in OTHER_KERNELS
        for transposed in (False, True)
        for other in OTHERS
        for which in ("keeps", "backward")
    ]
    variants += [
        jit.Variant("float16", activation, transposed=transposed, **{which: True}, **other)
        for activation, transposed, other in OTHERS_IN_FLOAT16
        for which in ("keeps", "backward")
    ]
    variants += [
        jit.Variant("float32", activation, exact=exact, **{which: True}, **other)
        for activation, other in OTHERS_IN_FLOAT32
        for exact in (False, True)
        for which in ("keeps", "backward")
    ]
    variants += [
        jit.Variant("float32", activation, exact=True, **{which: True})
        for activation in spec.ACTIVATIONS
        for which in ("keeps", "backward")
    ]
    if torch.cuda.device_count() * RANKS_A_GPU > 1:
        variants += [
            jit.Variant(dtype, activation, transposed=transposed, group=True, **{which: True})
            for dtype, activation, transposed in IN_GROUP
            for which in ("keeps", "backward")
        ]
        variants += [
            jit.Variant(dtype, activation, group=True, **{which: True}, **other)
            for dtype, activation, other in OTHERS_IN_GROUP
            for which in ("keeps", "backward")
        ]
        variants += [jit.Variant(dtype, machines=True) for dtype in DTYPES]
        variants += [jit.Variant(activation=each, few=True, group=True) for each in ("swiglu", "gelu")]
        variants += [jit.Variant(*each, quantised=True, few=True, group=True) for each in FEW_IN_FP8]
        variants += [jit.Variant(machines=True, quantised=True)]
        variants += [jit.Variant(*each, rdma=True) for each in PUT]
        variants += [jit.Variant(*each, rdma=True, transposed=True) for each in PUT_TRANSPOSED]
    return variants


@pytest.fixture(scope="session", autouse=True)
def exact_references() -> None:
    """No TF32 in PyTorch's own products: they are what is compared with."""
    torch.backends.cuda.matmul.allow_tf32 = False
