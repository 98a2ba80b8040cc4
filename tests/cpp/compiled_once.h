// The ranks of those Platforms on which several tests run whole calls. The actors of ranks are most of what such a
// test would compile. So they are compiled once for all these tests, in the folder compiled_once.
#pragma once

#include "abstract_group.h"

namespace flashmoe::test {

extern template uint32_t Rank<cpu::CpuPlatform>::run(const std::vector<Problem>&);
extern template uint32_t Rank<WarpPlatform<4>>::run(const std::vector<Problem>&);
extern template uint32_t Rank<PutPlatform<cpu::CpuPlatform>>::run(const std::vector<Problem>&);
extern template uint32_t Rank<PutPlatform<WarpPlatform<4>>>::run(const std::vector<Problem>&);

}  // namespace flashmoe::test
