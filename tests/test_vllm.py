"""FlashMoE in vLLM, as far as it can be tried without vLLM; the rest is in tests/integrations/."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from flashmoe import InvalidArgument
from flashmoe.contexts.growing import Shape, growing_context
from flashmoe.integrations.vllm import recognise, register

ADVICE = "set VLLM_PLUGINS to the plugins that are to be loaded, without flashmoe"


def config(parallel: dict[str, object] | None = None, activation: str = "silu", **options: object) -> SimpleNamespace:
    """As vLLM's `FusedMoEConfig` of a layer that is computed, but for these."""
    one_rank = dict.fromkeys(("tp_size", "dp_size", "pcp_size", "ep_size", "sp_size"), 1) | {"enable_eplb": False}
    usual = {
        "num_experts": 16,
        "num_local_experts": 16,
        "in_dtype": "torch.bfloat16",
        "moe_backend": "auto",
        "is_lora_enabled": False,
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
    }
    return SimpleNamespace(
        moe_parallel_config=SimpleNamespace(**one_rank | (parallel or {})),
        activation=SimpleNamespace(value=activation),
        **usual | options,
    )


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True, text=True)


def test_vllm_finds_the_plugin():
    (found,) = entry_points(group="vllm.general_plugins", name="flashmoe")
    assert found.load() is register


def test_importing_the_plugin_imports_no_vllm():
    program = "import sys, flashmoe.integrations.vllm\nprint([name for name in sys.modules if name.startswith('vllm')])"
    ended = run_program(program)
    assert ended.stdout.strip() == "[]", ended.stderr


WITHOUT_VLLM = """import sys; from types import SimpleNamespace; sys.modules['vllm'] = {}
from flashmoe.integrations.vllm import register; register(); print("went on")"""


def test_no_vllm_is_refused():
    ended = run_program(WITHOUT_VLLM.format("None"))
    assert ended.returncode == 1
    expected = "ImportError: flashmoe.integrations.vllm: expected vLLM 0.32 to 0.33, got none (import of vllm halted; "
    assert ended.stderr.strip().splitlines()[-1].startswith(expected)


@pytest.mark.parametrize("release", ["0.31.2", "0.34.0rc1+cpu", "dev"])
def test_vllm_is_left_as_it_is_in_another_release(release, monkeypatch):
    program = WITHOUT_VLLM.format(f"SimpleNamespace(__version__={release!r})")
    ended = run_program(program)
    assert (ended.returncode, ended.stdout.strip()) == (0, "went on")
    expected = (
        f"UserWarning: flashmoe.integrations.vllm: expected vLLM 0.32 to 0.33, got {release}, which has not been tried"
        ": FlashMoE leaves vLLM as it is; with FLASHMOE_UNTRIED=1 it does not"
    )
    assert [line.partition(": ")[2] for line in ended.stderr.splitlines() if "UserWarning" in line] == [expected]
    monkeypatch.setenv("FLASHMOE_UNTRIED", "1")
    ended = run_program(program)
    assert "No module named 'vllm.envs'" in ended.stderr and "UserWarning" not in ended.stderr  # as there is none


REFUSED = {
    **{f"{name} of 2": (config({name: 2}), f"{name}: expected 1, got 2") for name in recognise.PARALLEL},
    "expert load balancing": (config({"enable_eplb": True}), "enable_eplb: expected False, got True"),
    "a kernel of vLLM's": (config(moe_backend="triton"), "moe_backend: expected 'auto', got 'triton'"),
    "LoRA": (config(is_lora_enabled=True), "is_lora_enabled: expected False, got True"),
    "a share": (config(num_local_experts=8), "num_local_experts: expected all 16 experts, got 8"),
    "float64": (config(in_dtype="torch.float64"), "in_dtype: expected one of float32, bfloat16, float16, got float64"),
    **{
        name: (config(activation=name), f"activation: expected one of {', '.join(recognise.ACTIVATIONS)}, got {name}")
        for name in ("relu2", "situ", "swiglustep", "silu_no_mul", "gelu_no_mul", "relu2_no_mul")
    },
    **{
        f"{name} with a limit": (
            config(activation=name, swiglu_limit=7.0),
            f"swiglu_limit: expected None with {name}, got 7.0",
        )
        for name in ("gelu", "gelu_tanh")
    },
    "swigluoai of another limit": (
        config(activation="swigluoai", swiglu_limit=10.0),
        "swiglu_limit, swiglu_alpha, swiglu_beta: expected (7.0, 1.702, 1.0) with swigluoai, got (10.0, 1.702, 1.0)",
    ),
    "no limit": (
        config(activation="swigluoai_uninterleave"),
        "swiglu_limit: expected a number with swigluoai_uninterleave, got None",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_by_name(case):
    layer, message = REFUSED[case]
    with pytest.raises(InvalidArgument) as refused:
        recognise.check(layer)
    assert str(refused.value) == f"{message}; FlashMoE does not compute these experts in vLLM, {ADVICE}"


def test_experts_in_another_fp8_are_refused_by_name():
    computed = {"weight_block_size": [128, 128], "activation_scheme": "dynamic", "store_dtype": None}
    computed["is_checkpoint_fp8_serialized"] = True
    recognise.check_fp8(SimpleNamespace(**computed))
    for name, other in (("weight_block_size", None), ("activation_scheme", "static"), ("store_dtype", "mxfp4")):
        with pytest.raises(InvalidArgument) as refused:
            recognise.check_fp8(SimpleNamespace(**computed | {name: other}))
        message = f"{name}: expected {computed[name]!r}, got {other!r}"
        assert str(refused.value) == f"{message}; FlashMoE does not compute these experts in vLLM, {ADVICE}"


def test_activations_by_their_names_in_vllm():
    assert recognise.ACTIVATIONS == ("silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave")
    for name, expected in (("silu", "swiglu"), ("gelu", "geglu"), ("gelu_tanh", "geglu_tanh")):
        assert recognise.activation_of(name, None, None, None) == {"activation": expected}


@pytest.mark.parametrize("activation", recognise.ACTIVATIONS)
def test_what_is_computed_is_not_refused(activation):
    recognise.check(config(activation=activation, swiglu_limit=None if activation.startswith("gelu") else 7.0))


def test_a_context_that_grows_has_one_number_in_all_processes():
    """vLLM keeps compiled models on disk, and the number is a constant in them."""
    shapes = [Shape(None, "float32", 16, 8, 4, 2), Shape(None, "float32", 16, 8, 4, 3)]
    held = [growing_context(shape) for shape in shapes]
    numbers = [each.number for each in held]
    program = f"from flashmoe.contexts.growing import *\nprint(growing_context({shapes[1]!r}).number)"
    assert int(run_program(program).stdout) == numbers[1]
    assert len(set(numbers)) == 2 and all(2**62 <= each < 2**63 for each in numbers)
