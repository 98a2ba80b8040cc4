// The kernel for a few tokens of a rank that is alone: one instance of it (spec/build.h), which python/flashmoe/jit.py
// compiles on first use.
#include "flashmoe/sm90/decode/alone.cuh"

using Kernel = flashmoe::sm90::Alone;
#include "few.cuh"

static_assert(!flashmoe::kBuild.group);
