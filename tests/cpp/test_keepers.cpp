// Backward passes among several ranks, as GPUs run them: keepers copy the rows of other ranks before the results of
// these rows are returned, and sources are taken in turn, so that an expert's rows are in canonical order. Each call
// overwrites the rows of the call before. So if nobody waited for a keeper, the keeper would find the rows of the
// next call.
//
// Only with lanes that are threads (warp_platform.h), because the CPU engine's library is compiled for the program of
// a forward pass.
#define FLASHMOE_GROUP    1
#define FLASHMOE_BACKWARD 1
#include "lane_calls.h"

int main() {
  using namespace flashmoe::test;
  for (const uint64_t seed : {1, 2}) {
    run_calls<WarpPlatform<2>>("2 lanes", limits(4, 2), 12, seed, {.formers = 2, .keepers = 3});
    run_calls<WarpPlatform<4>>("4 lanes", limits(3, 1), 12, seed, {.formers = 3, .keepers = 1});
  }
  run_calls<WarpPlatform<4>>("4 lanes", wide(), 8, 6, {.formers = 2, .keepers = 2});
  run_calls<WarpPlatform<4>>("4 lanes", dense(), 8, 9, {.formers = 1, .keepers = 4});
  run_calls<WarpPlatform<8>>("8 lanes", limits(2, 1), 8, 10, {.formers = 1, .keepers = 5});
  run_calls<WarpPlatform<32>>("32 lanes", narrow(2), 3, 18, {.formers = 1, .keepers = 1});
}
