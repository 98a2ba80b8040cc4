"""How experts' weights are stored.

* `scales`: the scales of quantised weights: which shapes they have, and what the shapes say
* `shares`: which parts of the tensors of all experts belong to some experts, or to some slices
* `tensor_file`: tensors in a safetensors file

`flashmoe.checkpoint` reads whole layers, `flashmoe.slices` cuts experts and `flashmoe.quantize` quantises them.
"""
