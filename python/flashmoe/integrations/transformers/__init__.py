"""FlashMoE in models of Hugging Face's Transformers, 5.17 to 5.24; see docs/transformers.md.

Importing this package registers the experts implementation ``"flashmoe"``::

    import flashmoe.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="flashmoe")

or, for a model that is already loaded, ``model.set_experts_implementation("flashmoe")``. The model keeps its
parameters, their names and its router; `flashmoe.moe` computes only its routed experts. If `flashmoe.moe` cannot
compute the routed experts of a model, they are refused when the model is given the implementation ``"flashmoe"``
(`check`), and again when they are called; the error names the class and the attribute. From release 5.23 on, an
implementation of expert parallelism named ``"flashmoe"`` is registered, too: see
`flashmoe.integrations.transformers.expert_parallel`.
"""

from __future__ import annotations

from ._release import INSTALLED, NEWEST, OLDEST, WITH_EXPERT_PARALLELISM
from .check import check, register_check
from .experts import experts_forward, register
from .fuse import fuse
from .mxfp4 import load_mxfp4
from .mxfp4 import register as register_mxfp4
from .parallel import load_parallel, parallelize
from .recognise import ExpertsOptions, recognise

register()
register_check()
register_mxfp4()
if INSTALLED >= WITH_EXPERT_PARALLELISM:
    from . import expert_parallel

    expert_parallel.register()

__all__ = [
    "NEWEST",
    "OLDEST",
    "ExpertsOptions",
    "check",
    "experts_forward",
    "fuse",
    "load_mxfp4",
    "load_parallel",
    "parallelize",
    "recognise",
]
