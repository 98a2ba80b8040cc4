"""Small random models, one for each modeling file of the installed Transformers that has experts.

The files are found by their sources. A configuration begins with the defaults of its class, and `SMALL` replaces the
sizes in it by their names. `OWN` has what single models need besides.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

MODELS = Path(transformers.__file__).parent / "models"
OF_EXPERTS = re.compile(r"(Experts|MoE|Moe|M[Oo][Ee]Block|MoELayer)$")
"""Matches the ends of the names of classes that hold experts."""

VOCABULARY = 256
SIZES = {
    64: "hidden_size intermediate_size d_model d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim",
    32: """moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
           shared_intermediate_size moe_shared_intermediate_size moe_latent_size expert_ffn_hidden_size q_lora_rank
           router_hidden_size sliding_window attention_chunk_size""",
    16: """head_dim d_kv v_head_dim qk_head_dim global_head_dim swa_head_dim swa_v_head_dim linear_key_head_dim
           linear_value_head_dim linear_head_dim index_head_dim kv_lora_rank o_lora_rank hidden_size_per_layer_input
           mamba_d_head mamba_d_state mamba_head_dim ssm_state_size mamba_chunk_size""",
    8: """num_experts num_local_experts n_routed_experts moe_num_experts chunk_size qk_rope_head_dim qk_nope_head_dim
          mamba_dt_rank mamba_n_heads mamba_num_heads index_topk""",
    4: """num_attention_heads num_heads n_heads swa_num_attention_heads encoder_attention_heads decoder_attention_heads
          linear_num_value_heads linear_num_heads""",
    2: """num_hidden_layers num_layers encoder_layers decoder_layers num_decoder_layers n_layers num_experts_per_tok
          num_experts_per_token experts_per_token moe_topk moe_k moe_top_k moe_router_topk top_k_experts n_group
          num_expert_group num_key_value_heads num_global_key_value_heads swa_num_key_value_heads linear_num_key_heads
          index_n_heads o_groups mamba_expand eos_token_id""",
    1: """topk_group first_k_dense_replace num_dense_layers n_shared_experts num_shared_experts mamba_n_groups n_groups
          bos_token_id decoder_start_token_id""",
    0: "pad_token_id",
    VOCABULARY: "vocab_size vocab_size_per_layer_input max_position_embeddings",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
"""Sizes and ids of special tokens, by the names that configurations have for them."""

PER_HEAD = {"num_key_value_heads": 4}  # attention in which each head has keys of its own
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    "axk1": {**PER_HEAD, "head_dim": 8},
    "axk2": PER_HEAD,
    "bailing_hybrid": {**PER_HEAD, "layer_group_size": 2},
    "beam": SPARSE,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32},
    },
    "deepseek_ocr2": {**PER_HEAD, **SPARSE, "num_experts_per_tok": 2},
    "deepseek_v2": {**PER_HEAD, "num_experts_per_tok": 2},
    "deepseek_v3": {**PER_HEAD, "head_dim": 8},
    "deepseek_v32": PER_HEAD,
    "diffusion_gemma": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {**PER_HEAD, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": PER_HEAD,
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [32, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "glm4_moe_lite": PER_HEAD,
    "glm4v_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
    "glm5_next": {**PER_HEAD, **SPARSE, **LINEAR, "qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 2},
    "glm_moe_dsa": PER_HEAD,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
    },
    "kimi_linear": {**PER_HEAD, **LINEAR},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "longcat_flash": {**PER_HEAD, "head_dim": 8},
    "mistral4": PER_HEAD,
    "mistral_large4": PER_HEAD,
    "muse_spark": {"moe_hidden_size": 64},
    "nllb_moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "qwen3_5_moe": LINEAR,
    "qwen3_next": LINEAR,
    "qwen4_exp": {
        **LINEAR,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p7": SPARSE,
    "switch_transformers": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
    "unlimited_ocr": PER_HEAD,
    "vitpose_backbone": {"num_experts": 2, "part_features": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""By folder: what the configuration of its model has besides `SMALL`."""

MODEL = {
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeTextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
}
"""By folder: the model class to be tested, if the folder has several that would do."""


def classes_of_experts(folder: str) -> list[str]:
    """The classes of a folder's modeling file that hold experts, in the file's order."""
    tree = ast.parse((MODELS / folder / f"modeling_{folder}.py").read_text())
    return [each.name for each in tree.body if isinstance(each, ast.ClassDef) and OF_EXPERTS.search(each.name)]


@cache
def folders() -> list[str]:
    """The folders of Transformers whose modeling file has experts, sorted."""
    found = [path.parent.name for path in MODELS.glob("*/modeling_*.py") if path.stem == f"modeling_{path.parent.name}"]
    return sorted(folder for folder in found if classes_of_experts(folder))


def is_on_interface(folder: str) -> bool:
    """Whether the folder's modeling file has experts on Transformers' experts interface."""
    file = MODELS / folder / f"modeling_{folder}.py"
    return file.is_file() and "@use_experts_implementation" in file.read_text()


def class_of(folder: str) -> type[PreTrainedModel]:
    """The class to be tested: a model with a head for text, else a text model without a head, else another model."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    if folder in MODEL:
        return getattr(module, MODEL[folder])
    names = [each for each in module.__all__ if "PreTrained" not in each]
    for ending in ("ForCausalLM", "TextModel", "ForTokenClassification", "ForConditionalGeneration", "Backbone"):
        if fitting := [each for each in names if each.endswith(ending)]:
            return getattr(module, fitting[0])
    raise LookupError(f"{folder}: expected a model, got {names}")


def small_config(kind: type[PretrainedConfig], own: Mapping[str, Any]) -> PretrainedConfig:
    """A configuration of `kind` with those sizes of `SMALL` that `kind` has, and with `own`."""
    default = kind()
    said = default.to_dict()
    aliases = getattr(kind, "attribute_map", {})
    known = {name: value for name, value in SMALL.items() if name in said and name not in aliases}
    sizes = {name: value for name, value in known.items() if type(said[name]) is int or name.endswith("_token_id")}
    return kind(**{**sizes, **own})


def small_model(folder: str) -> PreTrainedModel:
    """The folder's model with random weights, in float32, for inference. The weights are so large that a matrix's
    product is about as large as the row it multiplies, so that experts matter beside the residual stream."""
    kind = class_of(folder)
    config = small_config(kind.config_class, OWN.get(folder, {}))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
            elif "bias" in name or not parameter.isfinite().all():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.3)
            elif name.endswith("tid2eid"):  # the experts of each token of the vocabulary
                scores = torch.rand(len(buffer), SMALL["num_experts"], generator=generator)
                buffer.copy_(scores.topk(buffer.shape[1]).indices)
    return model
