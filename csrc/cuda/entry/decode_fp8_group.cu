// The kernel for a few tokens with experts in e4m3, of a rank of a group.
#include "flashmoe/sm90/decode/fp8.cuh"

#include "decode_group.cu"

static_assert(flashmoe::kBuild.quantised);
