// The fused kernel of the forward pass that keeps what its gradients need.
#include "flashmoe/sm90/gradients/keeping.cuh"

using Pass = flashmoe::sm90::Keeping;
#include "fused.cuh"

static_assert(flashmoe::kBuild.keeps);
