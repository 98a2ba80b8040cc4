#include "cpu/policy.h"

#include <algorithm>
#include <bit>

namespace flashmoe::cpu {

uint32_t log2_token_block(uint32_t tokens, uint32_t processors, uint32_t entries_per_token) {
  uint32_t block = kMaxTokenBlock;
  while (block > kMinTokenBlock && (ceil_div(tokens, block) < 2 * processors || block * entries_per_token > 0xffff)) {
    block /= 2;
  }
  return static_cast<uint32_t>(std::countr_zero(block));
}

std::array<uint32_t, kProducts> task_columns(const LayerSpec& layer, std::array<uint32_t, kProducts> most) {
  for (uint32_t n = 0; n < kProducts; ++n) {
    if (layer.quantised() && kProgram[n].epilogue == Epilogue::kActivate) most[n] = align_up(most[n], kScaleBlock);
  }
  return most;
}

bool joins_rows(const LayerSpec& layer, uint32_t ranks, uint32_t tokens) {
  return ranks == 1 && layer.return_mode == ReturnMode::kDirect && layer.capacity_factor == 0.0 &&
         layer.top_k + shared_experts(layer.shared) <= 2 && tokens <= kMaxJoinedTokens;
}

uint32_t return_groups(uint32_t columns, uint32_t wanted, uint16_t (&first)[kMaxGroups + 1]) {
  const uint32_t groups = std::clamp(wanted, 1u, std::min(kMaxGroups, columns));
  for (uint32_t g = 0; g <= groups; ++g) first[g] = static_cast<uint16_t>(columns * g / groups);
  return groups;
}

}  // namespace flashmoe::cpu
