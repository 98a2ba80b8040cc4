"""gpt-oss with its experts in MXFP4, as its checkpoints have them: `load_mxfp4`.

Without this module, Transformers either computes such experts with kernels of the Hub, which need another layout of the
weights, or converts them to bfloat16 when it loads them. This module adds a quantisation method of its own, with which
Transformers' loader leaves the experts in the uint8 parameters that `flashmoe.moe` takes: ``gate_up_proj_blocks``,
``gate_up_proj_scales`` and the two of ``down_proj``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
import transformers
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...errors import CheckpointError, InvalidArgument
from ...spec import ENCODINGS, MXFP4
from ...weights.scales import scale_shape
from .experts import NAME, always_here, experts_modules
from .parallel import M, class_of
from .recognise import recognise

if TYPE_CHECKING:
    from .parallel import NamedModel

METHOD = "flashmoe_mxfp4"
PUBLISHED = "mxfp4"
"""The method's name in checkpoints."""


@overload
def load_mxfp4(path: str | Path, *, model_class: None = None, **options: Any) -> NamedModel: ...
@overload
def load_mxfp4(path: str | Path, *, model_class: type[M], **options: Any) -> M: ...
def load_mxfp4(
    path: str | Path, *, model_class: type[transformers.PreTrainedModel] | None = None, **options: Any
) -> transformers.PreTrainedModel:
    """The model of a checkpoint of gpt-oss whose experts are in MXFP4. They stay in MXFP4, and `flashmoe.moe` computes
    them, whatever implementation is chosen later. If the model is saved, its experts are in MXFP4 again. The model
    cannot be trained.

    Parameters
    ----------
    path:
        The checkpoint's folder. Nothing is downloaded.
    model_class:
        Default: the class of Transformers that the configuration names.
    options:
        Of the class's ``from_pretrained``, such as `dtype`.

    Raises
    ------
    InvalidArgument
        The configuration does not name MXFP4, or the model's experts are not gpt-oss's.
    CheckpointError
        The checkpoint lacks tensors of experts.

    Examples
    --------
    A random model, with the sizes of gpt-oss made small, is saved, quantised and loaded.

    >>> import tempfile, transformers
    >>> from flashmoe.integrations.transformers import load_mxfp4
    >>> from flashmoe.quantize import quantize_checkpoint
    >>> sizes = dict(num_hidden_layers=1, hidden_size=64, intermediate_size=32, num_local_experts=4, vocab_size=100)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).save_pretrained(f"{folder}/plain")
    ...     quantize_checkpoint(f"{folder}/plain", f"{folder}/mxfp4", "mxfp4")
    ...     model = load_mxfp4(f"{folder}/mxfp4")
    >>> model.model.layers[0].mlp.experts.down_proj_blocks.shape
    torch.Size([4, 64, 1, 16])
    """
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    said = getattr(config, "quantization_config", None) or {}
    if said.get("quant_method") != PUBLISHED:
        raise InvalidArgument(
            f"path: expected a checkpoint with quant_method {PUBLISHED!r}, got {said.get('quant_method')!r} in {path}"
        )
    config.quantization_config = said | {"quant_method": METHOD}
    kind = model_class or class_of(config)
    how = {"experts_implementation": NAME, "output_loading_info": True, **options}
    model, info = kind.from_pretrained(path, config=config, **how)
    if missing := sorted(name for name in info["missing_keys"] if ".experts." in name):
        raise CheckpointError(f"path: expected all tensors of experts in {path}, got none for {missing[:4]}")
    return model


class Mxfp4ExpertsConfig(QuantizationConfigMixin):
    """The quantisation configuration of a model that `load_mxfp4` has loaded. It is saved under the published name."""

    def __init__(self, modules_to_not_convert: list[str] | None = None, **_: Any) -> None:
        self.quant_method = METHOD
        self.modules_to_not_convert = modules_to_not_convert

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": PUBLISHED, "modules_to_not_convert": self.modules_to_not_convert}


class Mxfp4ExpertsQuantizer(HfQuantizer):
    """Gives a model's experts the parameters that the checkpoint has, before they are loaded."""

    def _process_model_before_weight_loading(self, model: transformers.PreTrainedModel, **_: Any) -> Any:
        modules = experts_modules(model)
        if not modules:
            raise InvalidArgument(f"{type(model).__name__}: expected experts on Transformers' interface, got none")
        for module in modules:
            _take_blocks(module)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def register() -> None:
    """Makes the method known to Transformers. Idempotent."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(Mxfp4ExpertsConfig)
        register_quantizer(METHOD)(Mxfp4ExpertsQuantizer)


def _take_blocks(module: torch.nn.Module) -> None:
    """Replaces the matrices of an experts module by parameters that hold them in MXFP4. Raises `InvalidArgument`."""
    options, encoding = recognise(module), ENCODINGS[MXFP4]
    if not options.how.transposed or options.gate_up_scale is not None:
        raise InvalidArgument(f"{type(module).__name__}: expected the experts of gpt-oss, got others")
    for name in (options.gate_up, options.down):
        whole = getattr(module, name)
        experts, columns, rows = whole.shape
        shape = (experts, rows, columns)
        delattr(module, name)
        shapes = encoding.elements(shape), scale_shape(encoding, "block", shape, 1)
        for suffix, of_this in zip(encoding.suffixes, shapes, strict=True):
            data = torch.empty(of_this, dtype=torch.uint8, device=whole.device)
            module.register_parameter(name + suffix, torch.nn.Parameter(data, requires_grad=False))
    module._is_hf_initialized = True  # the model must not initialise the parameters that were deleted here
    always_here(module)
