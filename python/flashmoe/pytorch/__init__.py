"""PyTorch's side of the layer. All modules of this folder import PyTorch, so ``import flashmoe`` imports none of them.

* `operator`: ``torch.ops.flashmoe.moe``, for `flashmoe.nn` and ``torch.compile``
* `constants`: results that compiled code takes for constants
* `routing`: the router's rule in PyTorch, for a router of another type than x
* `autocast`: calls within ``torch.autocast``
* `moving`: moves rows of tensors between ranks over ``torch.distributed``
* `replicated`: tokens that several ranks hold alike
* `watched`: hooks and wrappers that somebody has put on a module

`flashmoe.nn` has the module, `flashmoe.integrations` the frameworks.
"""
