"""Read one mixture-of-experts layer from a Hugging Face checkpoint.

Needs numpy and ml_dtypes; neither torch nor transformers. Only the tensors of the layer that is asked for are read.
Before that, everything that the files' headers say about these tensors is checked; memory of a size that a file claims
is allocated only after this check. `flashmoe.checkpoint.architectures` says how a layer computes, by the
``model_type`` of ``config.json``. Tensors may have these names, in a block ``….mlp``, ``….block_sparse_moe`` or
``….feed_forward``:

* router: ``gate.weight`` or ``router.weight``
* experts, merged: ``experts.gate_up_proj``, ``experts.down_proj``
* experts, one by one: ``experts.N.{gate_proj,up_proj,down_proj}.weight``, or Mixtral's ``experts.N.{w1,w3,w2}.weight``

* a shared expert: ``shared_expert.{gate_proj,up_proj,down_proj}.weight`` and perhaps ``shared_expert_gate.weight``, or
  ``shared_experts.``

* scales of matrices in FP8: ``….weight_scale_inv`` or ``….weight_scale``; of merged ones ``….gate_up_proj_scale_inv``
* experts in MXFP4, merged, as gpt-oss has them: ``experts.gate_up_proj_blocks``, ``….gate_up_proj_scales``

Experts without a gate have only ``up_proj`` and ``down_proj``. If `flashmoe.moe` cannot compute a layer's shared
expert, the shared expert is left out, and the layer says so (`MoELayerOf.left_out`).
"""

from .files import local_path, read_config, tensor_files, tensor_headers
from .layer import OF_EXPERTS, SHARED, MoELayer, MoELayerOf
from .loading import load_hidden_states, load_layer, shipped_layer

__all__ = [
    "OF_EXPERTS",
    "SHARED",
    "MoELayer",
    "MoELayerOf",
    "load_hidden_states",
    "load_layer",
    "local_path",
    "read_config",
    "shipped_layer",
    "tensor_files",
    "tensor_headers",
]
