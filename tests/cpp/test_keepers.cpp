// Backward passes among several ranks, as a GPU runs them: with keepers, which copy other ranks' rows before these are returned,
// and sources in turn, so that an expert's rows are in canonical order. Whole calls, whose rows each next one overwrites: a keeper
// that nobody waited for would find those.
//
// With lanes of tests' own alone, since the library is compiled for the program of the layer.
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
