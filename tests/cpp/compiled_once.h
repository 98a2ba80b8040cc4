// Ranks of the platforms on which several tests run whole calls. Their actors are most of what such a test compiles, and are
// compiled once, in the folder of this name.
#pragma once

#include "abstract_group.h"

namespace flashmoe::test {

extern template uint32_t Rank<cpu::CpuPlatform>::run(const std::vector<Problem>&);
extern template uint32_t Rank<WarpPlatform<4>>::run(const std::vector<Problem>&);
extern template uint32_t Rank<PutPlatform<cpu::CpuPlatform>>::run(const std::vector<Problem>&);
extern template uint32_t Rank<PutPlatform<WarpPlatform<4>>>::run(const std::vector<Problem>&);

}  // namespace flashmoe::test
