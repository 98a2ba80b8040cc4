"""Read one mixture-of-experts layer from a Hugging Face checkpoint.

Needs numpy and ml_dtypes; neither torch nor transformers. Only the tensors of the layer that is asked for are read,
once all that the files say of them is known to fit together: until then nothing of the size that a file claims is
allocated. How the layer computes, `flashmoe.checkpoint.architectures` says, by the ``model_type`` of ``config.json``.
Names are understood as they are found, in a block ``….mlp``, ``….block_sparse_moe`` or ``….feed_forward``:

* router: ``gate.weight`` or ``router.weight``
* experts, merged: ``experts.gate_up_proj``, ``experts.down_proj``
* experts, one by one: ``experts.N.{gate_proj,up_proj,down_proj}.weight``, or Mixtral's ``experts.N.{w1,w3,w2}.weight``

* a shared expert: ``shared_expert.{gate_proj,up_proj,down_proj}.weight`` and perhaps ``shared_expert_gate.weight``, or
  ``shared_experts.``

* of matrices in FP8 their scales: ``….weight_scale_inv`` or ``….weight_scale``, merged ``….gate_up_proj_scale_inv``
* experts in MXFP4, merged, as gpt-oss has them: ``experts.gate_up_proj_blocks``, ``….gate_up_proj_scales``

Experts without a gate have ``up_proj`` and ``down_proj`` alone. A shared expert that `flashmoe.moe` does not take is
left out, and named.
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
