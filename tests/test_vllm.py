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

ADVICE = "unset FLASHMOE_VLLM to leave all experts to vLLM"


def config(parallel: dict[str, object] | None = None, activation: str = "silu", **options: object) -> SimpleNamespace:
    """vLLM's `FusedMoEConfig` of a layer that is computed, with these attributes changed."""
    one_rank = dict.fromkeys(("tp_size", "dp_size", "pcp_size", "ep_size", "sp_size"), 1)
    one_rank |= {"enable_eplb": False, "use_ep": False, "all2all_backend": "allgather_reducescatter"}
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


@pytest.mark.parametrize("said", [None, "", "0", "yes"])
def test_vllm_is_left_as_it_is_unless_asked(said, monkeypatch):
    monkeypatch.delenv("FLASHMOE_VLLM", raising=False)
    if said is not None:
        monkeypatch.setenv("FLASHMOE_VLLM", said)
    ended = run_program(WITHOUT_VLLM.format("SimpleNamespace(__version__='0.33.0')"))
    assert (ended.returncode, ended.stdout.strip()) == (0, "went on")
    line = "FlashMoE leaves vLLM as it is; with FLASHMOE_VLLM=1 it computes the experts"
    assert ended.stderr.splitlines() == [line]


@pytest.mark.parametrize("release", ["0.31.2", "0.34.0rc1+cpu", "dev"])
def test_vllm_is_left_as_it_is_in_another_release(release, monkeypatch):
    monkeypatch.setenv("FLASHMOE_VLLM", "1")
    program = WITHOUT_VLLM.format(f"SimpleNamespace(__version__={release!r})")
    ended = run_program(program)
    assert (ended.returncode, ended.stdout.strip()) == (0, "went on")
    expected = (
        f"flashmoe.integrations.vllm: expected vLLM 0.32 to 0.33, got {release}, which has not been tried: "
        "FlashMoE leaves vLLM as it is; with FLASHMOE_UNTRIED=1 it does not"
    )
    assert ended.stderr.splitlines() == [expected]
    monkeypatch.setenv("FLASHMOE_UNTRIED", "1")
    ended = run_program(program)
    assert "No module named 'vllm.envs'" in ended.stderr and expected not in ended.stderr  # as there is none


def test_one_process_of_vllm_s_says_so(monkeypatch):
    """Each of them loads the plugin; those behind the first are its children."""
    monkeypatch.delenv("FLASHMOE_VLLM", raising=False)
    child = (
        "import sys, multiprocessing; from types import SimpleNamespace\n"
        "sys.modules['vllm'] = SimpleNamespace(__version__='0.33.0')\n"
        "from flashmoe.integrations.vllm import register\n"
        "process = multiprocessing.get_context('fork').Process(target=register)\n"
        "process.start(); process.join(); print(process.exitcode)"
    )
    ended = run_program(child)
    assert (ended.stdout.strip(), ended.stderr) == ("0", "")


REFUSED = {
    "contexts over two ranks": (config({"pcp_size": 2}), "pcp_size: expected 1, got 2"),
    "batches over two ranks": (
        config({"dp_size": 2, "tp_size": 2}),
        "dp_size: expected 1 without --enable-expert-parallel, got 2",
    ),
    "expert load balancing alone": (
        config({"enable_eplb": True}),
        "enable_eplb: expected False without --enable-expert-parallel, got True",
    ),
    "another way to send tokens": (
        config({"use_ep": True, "ep_size": 2, "all2all_backend": "deepep_low_latency"}),
        "all2all_backend: expected one of allgather_reducescatter, passthrough, got deepep_low_latency",
    ),
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


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp_size": 2},
        {"use_ep": True, "ep_size": 2},
        {"use_ep": True, "ep_size": 2, "dp_size": 2},
        {"use_ep": True, "ep_size": 4, "dp_size": 2, "sp_size": 2, "enable_eplb": True},
        {"use_ep": True, "ep_size": 2, "all2all_backend": "passthrough"},
    ],
    ids=str,
)
def test_several_ranks_are_computed(parallel):
    recognise.check(config(parallel, num_local_experts=16 // parallel.get("ep_size", 1)))


def test_ranks_that_change_or_split_a_batch_are_refused_by_name():
    usual = {"enable_elastic_ep": False, "use_ubatching": False}
    recognise.check_engine(SimpleNamespace(**usual))
    for name in usual:
        with pytest.raises(InvalidArgument) as refused:
            recognise.check_engine(SimpleNamespace(**usual | {name: True}))
        message = f"{name}: expected False, got True"
        assert str(refused.value) == f"{message}; FlashMoE does not compute these experts in vLLM, {ADVICE}"


def refused_by(check, *said: SimpleNamespace) -> str:
    with pytest.raises(InvalidArgument) as refused:
        check(*said)
    message, _, advice = str(refused.value).partition("; ")
    assert advice == f"FlashMoE does not compute these experts in vLLM, {ADVICE}"
    return message


def test_experts_in_another_fp8_are_refused_by_name():
    computed = {"weight_block_size": [128, 128], "activation_scheme": "dynamic", "store_dtype": None}
    computed["is_checkpoint_fp8_serialized"] = True
    recognise.check_fp8(SimpleNamespace(**computed))
    recognise.check_fp8(SimpleNamespace(**computed | {"weight_block_size": None}))
    for name, other in (("activation_scheme", "static"), ("store_dtype", "mxfp4")):
        found = refused_by(recognise.check_fp8, SimpleNamespace(**computed | {name: other}))
        assert found == f"{name}: expected {computed[name]!r}, got {other!r}"
    found = refused_by(recognise.check_fp8, SimpleNamespace(**computed | {"weight_block_size": [64, 64]}))
    assert found == "weight_block_size: expected None or [128, 128], got [64, 64]"


def test_experts_of_compressed_tensors_in_another_fp8_are_refused_by_name():
    activations = SimpleNamespace(dynamic=True)
    for strategy, structure in (("block", [128, 128]), ("channel", None), ("tensor", None)):
        weights = SimpleNamespace(num_bits=8, strategy=strategy, block_structure=structure)
        recognise.check_compressed(weights, activations)
        static = SimpleNamespace(dynamic=False)
        found = refused_by(recognise.check_compressed, weights, static)
        assert found == "input_activations.dynamic: expected True, got False"
    weights = SimpleNamespace(num_bits=8, strategy="block", block_structure=[64, 128])
    found = refused_by(recognise.check_compressed, weights, activations)
    assert found == "weights.block_structure: expected [128, 128], got [64, 128]"
    weights = SimpleNamespace(num_bits=4, strategy="channel", block_structure=None)
    assert refused_by(recognise.check_compressed, weights, activations) == "weights.num_bits: expected 8, got 4"


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
