"""The error of a wrong call says what is wrong: the argument, what was expected, and what was got."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe import InvalidArgument, cli
from flashmoe.checkpoint import load_hidden_states, load_layer, shipped_layer, tensor_files
from flashmoe.errors import CheckpointError, HeapError
from flashmoe.launch import run_ranks
from flashmoe.quantize import (
    dequantize,
    dequantize_mxfp4,
    quantize_checkpoint,
    quantize_layer,
    quantize_mxfp4,
    quantize_rows,
    quantize_weights,
)
from safetensors.numpy import save_file

LIMITS = {"max_tokens": 64, "hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2}


@pytest.fixture(scope="module")
def ctx() -> Iterator[flashmoe.Context]:
    with flashmoe.Context(**LIMITS, dtype="float32", processors=1) as ctx:
        yield ctx


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def arguments(**changes: Any) -> dict[str, Any]:
    made = {"x": numbers(16, 64), "gate_up_proj": numbers(8, 64, 64), "down_proj": numbers(8, 64, 32)}
    return made | {"router": numbers(8, 64), "top_k": 2} | changes


CALLS = {
    "no router": (
        {"router": None, "top_k": None},
        "router: expected a router, or topk_ids and topk_weights, got none of them",
    ),
    "too many tokens": (
        {"x": numbers(65, 64)},
        "x: expected at most max_tokens=64 tokens, the context's limit, got T=65",
    ),
    "x of another width": (
        {"x": numbers(16, 32)},
        "x: expected [T, H=64] float32, as gate_up_proj and down_proj have it, got [16, 32] float32",
    ),
    "x of another width, transposed": (
        {
            "x": numbers(16, 32),
            "gate_up_proj": numbers(8, 64, 64),
            "down_proj": numbers(8, 32, 64),
            "transposed": True,
        },
        "x: expected [T, H=64] float32, as gate_up_proj and down_proj have it, got [16, 32] float32",
    ),
    "matrices that took places": (
        {"gate_up_proj": numbers(8, 64, 32), "down_proj": numbers(8, 64, 64)},
        "gate_up_proj: expected [El=8, 2I=128, H=64] float32, got [8, 64, 32] float32",
    ),
    "a larger K": ({"top_k": 3}, "top_k: expected at most 2, the context's limit, got 3"),
    **{
        f"{name}={value}": (
            {"activation": "clamped_swiglu", name: value},
            f"{name}: expected a finite number of float32",
        )
        for name in ("routed_scale", "limit", "alpha", "up_offset")
        for value in (1e300, -1e300, 3.5e38, float("nan"), float("inf"), 10**400)
    },
    "alpha that float32 has not": (
        {"activation": "clamped_swiglu", "alpha": 1e-60},
        "alpha: expected a finite number of float32 > 0, got 1e-60",
    ),
}


@pytest.mark.parametrize(("changes", "message"), CALLS.values(), ids=CALLS)
def test_a_call(ctx, changes, message):
    with pytest.raises(InvalidArgument) as refused:
        flashmoe.moe(ctx, **arguments(**changes))
    assert message in str(refused.value)
    assert flashmoe.moe(ctx, **arguments()).shape == (16, 64)


OF_ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a list": ("x", {"x": [[1.0] * 64]}),
    "a vector": ("x", {"x": numbers(64)}),
    "x in float64": ("x", {"x": numbers(16, 64).astype(np.float64)}),
    "x in int32": ("x", {"x": np.zeros((16, 64), np.int32)}),
    "strided x": ("x", {"x": numbers(16, 128)[:, ::2]}),
    "x of another type": ("gate_up_proj", {"x": numbers(16, 64).astype(np.float16)}),
    "no first matrix": ("gate_up_proj", {"gate_up_proj": None}),
    "a matrix of one expert": ("gate_up_proj", {"gate_up_proj": numbers(64, 64)}),
    "down of one axis too many": ("down_proj", {"down_proj": numbers(1, 8, 64, 32)}),
    "fewer experts in down": ("down_proj", {"down_proj": numbers(7, 64, 32)}),
    "down in bfloat16": ("down_proj", {"down_proj": numbers(8, 64, 32).astype(ml_dtypes.bfloat16)}),
    "a router of another width": ("router", {"router": numbers(8, 32)}),
    "a router as a vector": ("router", {"router": numbers(64)}),
    "no top_k": ("top_k", {"top_k": None}),
    "top_k of 0": ("top_k", {"top_k": 0}),
    "top_k above E": ("top_k", {"top_k": 9}),
    "top_k as a float": ("top_k", {"top_k": 2.0}),
    "a bias of another length": ("gate_up_bias", {"gate_up_bias": numbers(8, 63)}),
    "a bias in float64": ("down_bias", {"down_bias": np.zeros((8, 64))}),
    "a router's bias of another length": ("router_bias", {"router_bias": numbers(7)}),
    "choice_bias in float16": ("choice_bias", {"choice_bias": numbers(8).astype(np.float16)}),
    "a bias without its router": (
        "router_bias",
        {
            "router": None,
            "top_k": None,
            "router_bias": numbers(8),
            "topk_ids": np.zeros((16, 2), np.int32),
            "topk_weights": numbers(16, 2),
        },
    ),
    "a router and ids": ("router", {"topk_ids": np.zeros((16, 2), np.int32), "topk_weights": numbers(16, 2)}),
    "ids in float32": (
        "topk_ids",
        {"router": None, "top_k": None, "topk_ids": numbers(16, 2), "topk_weights": numbers(16, 2)},
    ),
    "ids without weights": (
        "topk_weights",
        {"router": None, "top_k": None, "topk_ids": np.zeros((16, 2), np.int32)},
    ),
    "weights of other tokens": (
        "topk_weights",
        {
            "router": None,
            "top_k": None,
            "topk_ids": np.zeros((16, 2), np.int32),
            "topk_weights": numbers(15, 2),
        },
    ),
    "half a shared expert": ("shared_down", {"shared_gate_up": numbers(64, 64)}),
    "scales of float32 weights": ("gate_up_scale", {"gate_up_scale": numbers(8, 1, 1)}),
    "load in int32": ("load", {"load": np.zeros(8, np.int32)}),
    "load of another length": ("load", {"load": np.zeros(7, np.int64)}),
    "logits of other tokens": ("router_logits", {"router_logits": numbers(15, 8)}),
    "an activation that there is not": ("activation", {"activation": "mish"}),
    "a score that there is not": ("score", {"score": "max"}),
    "a return mode that there is not": ("return_mode", {"return_mode": "fast"}),
    "no capacity": ("capacity_factor", {"capacity_factor": 0.0}),
    "a placement of other experts": ("placement", {"placement": [0] * 7}),
    "a rank that there is not": ("placement", {"placement": [0] * 7 + [3]}),
    "groups that do not divide E": ("groups", {"groups": 3}),
    "slices of a lone rank": ("slices", {"slices": 2, "router": numbers(4, 64)}),
    "an alpha without its activation": ("alpha", {"alpha": 2.0}),
    "a trace that is no truth": ("trace", {"trace": np.ones(2)}),
}


@pytest.mark.parametrize("has_context", [True, False], ids=["context", "none"])
@pytest.mark.parametrize(("argument", "changes"), OF_ARGUMENTS.values(), ids=OF_ARGUMENTS)
def test_a_message_names_argument_expected_and_got(ctx, has_context, argument, changes):
    with pytest.raises(InvalidArgument, match=rf"^{argument}: expected .+, got .+"):
        flashmoe.moe(*([ctx] if has_context else []), **arguments(**changes))


def test_numbers_that_float32_has(ctx):
    largest = float(np.finfo(np.float32).max)
    y = flashmoe.moe(ctx, **arguments(routed_scale=1e-38))
    assert np.abs(y).max() < 1e-30
    flashmoe.moe(ctx, **arguments(routed_scale=-largest, activation="clamped_swiglu", limit=largest, alpha=2.0**-149))


def test_a_call_beyond_the_limits_is_both_errors(ctx):
    """The error is an `InvalidArgument`, because an argument is too large, and a `HeapError`, because the context's
    memory is too small for the call."""
    for kind in (InvalidArgument, HeapError, ValueError):
        with pytest.raises(kind):
            flashmoe.moe(ctx, **arguments(x=numbers(65, 64)))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("topk", "top_k"),
        ("TopK", "top_k"),
        ("normalize", "renormalize"),
        ("gate_up", "gate_up_proj"),
        ("topk_id", "topk_ids"),
        ("capacity", "capacity_factor"),
        ("shared_gateup", "shared_gate_up"),
    ],
)
def test_a_keyword_that_there_is_not(ctx, given, meant):
    with pytest.raises(TypeError) as refused:
        flashmoe.moe(ctx, **arguments(**{given: 2}))
    assert isinstance(refused.value, InvalidArgument)
    assert str(refused.value) == f"moe() got an unexpected keyword argument {given!r}; did you mean {meant!r}?"


def test_keywords_of_other_functions(ctx):
    from flashmoe.nn import MoE

    sizes = {name: size for name, size in LIMITS.items() if name != "max_tokens"}
    layer, _ = shipped_layer()
    for call, function, given, meant in (
        (lambda: flashmoe.Context(**LIMITS, topk=2), "Context", "topk", "top_k"),
        (lambda: flashmoe.Context(**LIMITS, max_token=2), "Context", "max_token", "max_tokens"),
        (lambda: MoE(ctx, **sizes, routedscale=2), "MoE", "routedscale", "routed_scale"),
        (lambda: MoE.from_layer(ctx, layer, exakt=True), "MoE.from_layer", "exakt", "exact"),
    ):
        with pytest.raises(TypeError) as refused:
            call()
        assert str(refused.value) == (
            f"{function}() got an unexpected keyword argument {given!r}; did you mean {meant!r}?"
        )


def test_nn_is_there_without_an_import_of_its_own():
    code = "import flashmoe, sys; assert 'torch' not in sys.modules; print(flashmoe.nn.MoE.__name__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "MoE\n"


# ---- ranks -----------------------------------------------------------------------------------------------------------


def answer(rank: int, ranks: int, name: str, *args: Any) -> int:
    return rank


def test_what_ranks_are_sent():
    for fn, args, message in (
        (lambda *_: 0, [(), ()], "fn: expected a function that is defined at the top level of a module, got "),
        (
            answer,
            [(), (threading.Lock(),)],
            r"per_rank_args\[1\]: expected a tuple of what can be pickled, got TypeError",
        ),
        (answer, [5, ()], r"per_rank_args\[0\]: expected a tuple of arguments, got int"),
        (5, [(), ()], "fn: expected a function, got int"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            run_ranks(2, fn, args)


def _outside_of_a_group(rank: int, ranks: int, name: str, store: str) -> list[str]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group, said = dist.new_group([0]), []
    for given in (group, "all"):
        try:
            with flashmoe.Context.from_torch(given, **LIMITS, dtype="float32") as ctx:
                said.append(f"rank {ctx.rank} of {ctx.ranks}")
        except flashmoe.FlashMoEError as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    return said


def test_a_process_group_of_others(tmp_path):
    pytest.importorskip("torch")
    first, second = run_ranks(2, _outside_of_a_group, [(str(tmp_path / "store"),)] * 2, timeout=120)
    no_group = "InvalidArgument: group: expected a process group or None, got str"
    assert first == ["rank 0 of 1", no_group]
    assert second == ["InvalidArgument: group: expected a process group that this rank is in, got another", no_group]


# ---- quantised weights -----------------------------------------------------------------------------------------------

FP8 = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
OF_ROWS = "matrices: expected [..., rows, columns], at least 1 of each"
BLOCKS, SCALES = np.zeros((2, 3, 16), np.uint8), np.zeros((2, 3), np.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_weights(np.float32(5)), f"{OF_ROWS}, got []"),
        (lambda: quantize_weights(numbers(5)), f"{OF_ROWS}, got [5]"),
        (lambda: quantize_weights(np.zeros((2, 0, 5))), f"{OF_ROWS}, got [2, 0, 5]"),
        (lambda: quantize_weights(np.zeros((2, 5, 0))), f"{OF_ROWS}, got [2, 5, 0]"),
        (lambda: quantize_weights("x"), "matrices: expected an array of numbers, got str"),
        (lambda: quantize_weights([[1], [2, 3]]), "matrices: expected an array of numbers, got list"),
        (
            lambda: quantize_weights(np.zeros((2, 2), complex)),
            "matrices: expected an array of numbers, got ndarray: they are of complex128",
        ),
        (lambda: quantize_weights(numbers(4, 4), halves=0), "halves: expected an integer in [1, 4], got 0"),
        (lambda: quantize_rows(np.float32(5)), "x: expected [..., n], at least 1 of each, got []"),
        (lambda: quantize_mxfp4(np.float32(5)), "matrices: expected [..., n], at least 1 of each, got []"),
        (lambda: dequantize(FP8[0], np.ones(1)), "elements: expected [..., rows, columns]"),
        (
            lambda: dequantize(FP8, np.ones((3, 3))),
            "scale: expected [1, 1] or [4, 1] or [1, 1] of elements [4, 4], got [3, 3]",
        ),
        (
            lambda: dequantize_mxfp4(BLOCKS[..., :8], SCALES),
            "blocks: expected [..., n / 32, 16] uint8, got [2, 3, 8] uint8",
        ),
        (
            lambda: dequantize_mxfp4(BLOCKS, SCALES[:1]),
            "scales: expected [2, 3] uint8, one for each of the blocks, got [1, 3] uint8",
        ),
    ],
)
def test_arrays_to_quantise(call, message):
    with pytest.raises(InvalidArgument) as refused:
        call()
    assert message in str(refused.value)


def test_no_matrices_at_all():
    """A rank without experts has matrices of 0 experts."""
    elements, scale = quantize_weights(np.zeros((0, 4, 6)))
    assert elements.shape == (0, 4, 6) and scale.shape == (0, 1, 1)
    assert dequantize(elements, scale).shape == (0, 4, 6)


def test_a_nan_is_named_by_tensor_and_file(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    weights = {
        f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight": numbers(*shape)
        for expert in range(2)
        for name, shape in (("gate", (4, 8)), ("up", (4, 8)), ("down", (8, 4)))
    }
    wrong = "model.layers.0.mlp.experts.1.up_proj.weight"
    weights[wrong][2, 3] = np.nan
    save_file(weights | {"model.layers.0.mlp.gate.weight": numbers(2, 8)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts_per_tok": 1}')
    with pytest.raises(InvalidArgument) as refused:
        quantize_checkpoint(source, tmp_path / "target")
    file = source / "model.safetensors"
    assert str(refused.value) == f"{wrong} in {file}: expected finite numbers, got others among them"


def test_a_nan_is_named_by_the_layers_tensor():
    layer, _ = shipped_layer()
    layer.down_proj[1, 2, 3] = np.inf
    with pytest.raises(InvalidArgument, match=r"^layer: down_proj: expected finite numbers"):
        quantize_layer(layer)


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_a_path_from_home(monkeypatch, tmp_path):
    asset = Path(flashmoe.__file__).parent / "assets"
    (tmp_path / "model").symlink_to(asset / "tiny-qwen3-moe")
    (tmp_path / "states.safetensors").symlink_to(asset / "tiny-qwen3-moe-hidden-states.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    layer, states = shipped_layer()
    assert load_layer("~/model", 1).experts == layer.experts
    assert load_hidden_states("~/states.safetensors").shape == states.shape
    assert list(tensor_files("~/model")) == list(tensor_files(tmp_path / "model"))
    quantize_checkpoint("~/model", "~/made")
    assert (tmp_path / "made" / "config.json").exists()


def test_a_model_of_a_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"):
        for read in (load_layer, tensor_files, lambda path: quantize_checkpoint(path, "made")):
            with pytest.raises(CheckpointError) as refused:
                read(name)
            if read in (load_layer, tensor_files):
                assert str(refused.value).startswith("path: expected a local folder or .safetensors file")
                assert str(refused.value).endswith(f"got {name}, which is neither")
    with pytest.raises(CheckpointError, match="no such file"):
        load_layer("some/model.safetensors")
    for path in (5, None, "~nobody-has-this-name/x"):
        with pytest.raises(CheckpointError, match="path: expected a path, got"):
            load_layer(path)


@pytest.mark.parametrize("file", ["/dev/zero", "/dev/null", "/", "pipe", "large"])
def test_files_that_are_no_list_of_loads(capsys, tmp_path, file):
    path = Path(file) if file.startswith("/") else tmp_path / file
    if file == "pipe":
        os.mkfifo(path)
    if file == "large":
        with open(path, "wb") as made:
            made.truncate(1 << 40)
    assert cli.main(["balance", str(path)]) == 2
    kind = {"pipe": "a pipe", "large": f"{1 << 40} bytes, which are more than", "/": "a folder"}.get(file, "a device")
    assert f"FILE: expected {path} to have a number for each expert, got {kind}" in capsys.readouterr().err


def test_memory_that_there_is_not(capsys, monkeypatch):
    from flashmoe.cli import run

    monkeypatch.setattr(run, "shipped_workload", lambda request: np.empty((1 << 50,), np.float32))
    assert cli.main(["run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: memory: expected as much as the command's sizes need, got less: Unable to allocate 4.0"
    )
    assert len(said.splitlines()) == 1


# ---- interrupts ------------------------------------------------------------------------------------------------------

_IMPORTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

def used():
    import flashmoe
    flashmoe.Context(max_tokens=8, hidden=8, intermediate=8, experts=2, top_k=1).close()

sys.meta_path.insert(0, Interrupting())
try:
    used()
    print("not interrupted", end=", ")
except KeyboardInterrupt:
    print("interrupted", end=", ")
print("handler", signal.getsignal(signal.SIGINT) is signal.default_int_handler, end=", ")
try:
    used()
    print("then used")
except BaseException as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("module", ["numpy._core.multiarray", "numpy.linalg", "flashmoe.contexts.context", "tvm_ffi"])
def test_an_interrupt_while_modules_are_imported(module):
    """An interrupt takes effect only when the imports are over, because NumPy cannot be imported again after its import
    has stopped half way."""
    done = subprocess.run([sys.executable, "-c", _IMPORTED, module], capture_output=True, text=True)
    assert done.stdout == "interrupted, handler True, then used\n", done.stderr


def test_imports_in_another_thread():
    """Imports in another thread leave the handler of SIGINT as it was. The code sets a handler first, because a
    script's background job begins with one that ignores SIGINT."""
    code = "import signal, threading\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "t = threading.Thread(target=lambda: __import__('flashmoe'))\nt.start()\nt.join()\n"
    code += "import flashmoe\nhandler = signal.getsignal(signal.SIGINT)\n"
    code += "print(flashmoe.moe.__name__, handler is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "moe True\n", done.stderr
