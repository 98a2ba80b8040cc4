"""The layer that most suites measure: random weights, and the same inputs for it and for everything beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .expected import sampled_error
from .joining import processors
from .run import Run
from .shapes import SHAPES

if TYPE_CHECKING:
    import torch

    import flashmoe

BOUNDS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-8, "exact": 2.0**-18}
"""The most that a result may differ from float64's, relative to the norm. Three things are rounded on the way, by at
most half a unit in the last place each: the intermediate row, each weighted row and their sum. bfloat16 has 8
significant bits, float16 has 11. On a GPU, the factors of float32 products lose all but 10 bits of their mantissas: up
to 2^-10 of each of the four factors of the two products. "exact" is float32 that is multiplied without this loss."""
TURNS = 4
"""The number of batches that calls take in turn, so that a call's batch is not still in the L2 from the call before."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer over all ranks together, and the tokens of each rank."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str
    tokens: int
    dtype: str = "bfloat16"
    exact: bool = False

    @classmethod
    def of(cls, shape: str | None = None, **sizes: Any) -> Sizes:
        """The sizes of a shape of `SHAPES`, except those that `sizes` gives; or of `sizes` alone."""
        if shape is None:
            return cls(**sizes)
        hidden, intermediate, experts, top_k, activation, _ = SHAPES[shape]
        tokens = sizes.pop("tokens")
        return replace(cls(hidden, intermediate, experts, top_k, activation, tokens), **sizes)

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    @property
    def flops(self) -> int:
        """Operations of the experts' GEMMs for a rank's tokens."""
        return self.tokens * self.top_k * (3 if self.gated else 2) * 2 * self.hidden * self.intermediate


class Layer:
    """One rank's share of the layer: batches ``xs`` [T, H], the router [E, H], ``w1`` [El, I or 2I, H] and ``w2`` [El,
    H, I] of its own experts, and a context with the built-in order of tasks, except for what `profile` sets. With
    `like`, it is a further layer of a model: its weights differ, but it uses the batches and the context of `like`."""

    def __init__(
        self,
        run: Run,
        sizes: Sizes,
        profile: dict[str, int] | None = None,
        like: Layer | None = None,
        number: int = 0,
        **context: Any,
    ) -> None:
        import torch

        from flashmoe.placement import contiguous, local_experts

        self.run, self.sizes = run, sizes
        self.own = local_experts(contiguous(sizes.experts, run.ranks), run.rank)
        make = {"device": run.device, "dtype": getattr(torch, sizes.dtype)}
        rows = sizes.intermediate * (2 if sizes.gated else 1)
        self.w1 = torch.empty(len(self.own), rows, sizes.hidden, **make)
        self.w2 = torch.empty(len(self.own), sizes.hidden, sizes.intermediate, **make)
        for i, expert in enumerate(self.own):  # an expert's weights do not depend on the number of ranks
            generator = torch.Generator(run.device).manual_seed(1000 * (number + 1) + expert)
            for matrix in (self.w1[i], self.w2[i]):
                matrix.normal_(std=matrix.shape[-1] ** -0.5, generator=generator)
        self.tensors = {"gate_up_proj": self.w1, "down_proj": self.w2}
        generator = torch.Generator(run.device).manual_seed(1 + 500_000 * number)
        self.router = torch.randn(sizes.experts, sizes.hidden, generator=generator, **make) * sizes.hidden**-0.5
        # `measure.passes` reads these attributes.
        self.experts, self.top_k, self.activation = sizes.experts, sizes.top_k, sizes.activation
        self._owns_context = like is None
        if like is not None:
            self.xs, self.context = like.xs, like.context
            return
        generator.manual_seed(2 + run.rank)
        self.xs = [torch.randn(sizes.tokens, sizes.hidden, generator=generator, **make) for _ in range(TURNS)]
        self.context = _context(run, sizes, profile or {}, context)

    def __call__(self, i: int, **options: Any) -> torch.Tensor:
        return self.of(self.xs[i % TURNS], **options)

    def of(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """The result [T, H] for x [T, H], which has no more tokens than the layer's batches."""
        import flashmoe

        return flashmoe.moe(
            self.context,
            x,
            **self.tensors,
            router=self.router,
            top_k=self.top_k,
            activation=self.activation,
            exact=self.sizes.exact,
            **options,
        )

    @property
    def bound(self) -> float:
        on_cpu = self.sizes.dtype == "float32" and self.run.engine == "cpu"
        return BOUNDS["exact" if self.sizes.exact or on_cpu else self.sizes.dtype]

    def error(self, y: torch.Tensor) -> float:
        """The error of `y`, the result for batch 0, against float64 with routing in float32. A few tokens of each rank
        are compared."""
        return sampled_error(self.xs[0], y, self.router, self.own, self.w1, self.w2, self.top_k, self.sizes.gated)

    def checked(self) -> dict[str, Any]:
        """Calls the layer once, and checks the result. Raises `Voided` if the error is too large."""
        y = self(0)
        self.context.synchronize()
        return self.run.check(self.error(y), self.bound, "flashmoe's rows of sampled tokens, beside float64's")

    def close(self) -> None:
        import torch.distributed as dist

        if not self._owns_context:
            return
        self.context.synchronize()
        dist.barrier()  # no rank may close its context while another rank's call still waits for this rank
        self.context.close()

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


class Quantised(Layer):
    """The layer with its experts in e4m3, with a scale for each block of 128 x 128. ``w1`` and ``w2`` are the same
    matrices after quantisation, in the layer's type."""

    def __init__(self, run: Run, sizes: Sizes, **further: Any) -> None:
        import torch

        from .quantised import by_block

        super().__init__(run, sizes, weight_dtype="float8_e4m3fn", **further)
        self.tensors = {}
        for name, matrices in (("gate_up", self.w1), ("down", self.w2)):
            pairs = [by_block(each) for each in matrices]
            for matrix, (ours, scale) in zip(matrices, pairs, strict=True):
                matrix.copy_(ours.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1))
            self.tensors[f"{name}_proj"] = torch.stack([ours for ours, _ in pairs])
            self.tensors[f"{name}_scale"] = torch.stack([scale for _, scale in pairs])
        if not self._owns_context:  # a model's further layers are not checked; w1 and w2 would triple their memory
            del self.w1, self.w2

    @property
    def bound(self) -> float:
        """The rows of both products are rounded to e4m3, too. With its four significant bits, a row is off by up to
        2^-4 each time."""
        return 2.0**-3


def _context(run: Run, sizes: Sizes, profile: dict[str, int], further: dict[str, Any]) -> flashmoe.Context:
    import torch

    import flashmoe

    blocks: int | None = 1
    if run.engine == "cuda":
        torch.cuda.empty_cache()  # the context cannot use the memory that PyTorch caches
        blocks = processors(run.ranks)
    return flashmoe.Context.from_torch(
        engine=run.engine,
        profile=profile,
        max_tokens=sizes.tokens,
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        experts=sizes.experts,
        top_k=sizes.top_k,
        dtype=sizes.dtype,
        **{"processors": blocks, **further},
    )
