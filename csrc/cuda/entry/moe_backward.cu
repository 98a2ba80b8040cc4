// The fused kernel of the backward pass.
#include "flashmoe/sm90/gradients/backward.cuh"

using Pass = flashmoe::sm90::Backward;
#include "fused.cuh"

static_assert(flashmoe::kBuild.backward);
