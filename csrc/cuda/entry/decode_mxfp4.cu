// The kernel for a few tokens with experts in mxfp4, of a rank that is alone.
#include "flashmoe/sm90/decode/mxfp4.cuh"

#include "decode.cu"

static_assert(flashmoe::kBuild.mxfp4);
