// The kernel for a few tokens with experts in e4m3, of a rank that is alone.
#include "flashmoe/sm90/decode/fp8.cuh"

#include "decode.cu"

static_assert(flashmoe::kBuild.quantised);
