// The fused kernel of calls for inference: one instance of it (spec/build.h), which python/flashmoe/jit.py compiles on
// first use.
#include "flashmoe/sm90/roles/pass.cuh"

using Pass = flashmoe::sm90::Inference;
#include "fused.cuh"

static_assert(!flashmoe::kBuild.trains());
