// The kernel for a few tokens of a rank that is alone, one instance of it (spec/build.h), compiled on first use by python/flashmoe/jit.py.
#include "flashmoe/sm90/decode/alone.cuh"

using Kernel = flashmoe::sm90::Alone;
#include "few.cuh"

static_assert(!flashmoe::kBuild.group);
