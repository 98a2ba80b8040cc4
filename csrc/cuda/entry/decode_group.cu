// The kernel for a few tokens of a rank of a group: one instance of it (spec/build.h), which python/flashmoe/jit.py
// compiles on first use.
#include "flashmoe/sm90/decode/group.cuh"

using Kernel = flashmoe::sm90::InGroup;
#include "few.cuh"

static_assert(flashmoe::kBuild.group);
