// The fused kernel of a layer that serves, one instance of it (spec/build.h), compiled on first use by python/flashmoe/jit.py.
#include "flashmoe/sm90/roles/pass.cuh"

using Pass = flashmoe::sm90::Inference;
#include "fused.cuh"

static_assert(!flashmoe::kBuild.trains());
