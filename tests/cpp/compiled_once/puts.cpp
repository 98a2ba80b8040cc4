#include "../compiled_once.h"

namespace flashmoe::test {

template uint32_t Rank<PutPlatform<cpu::CpuPlatform>>::run(const std::vector<Problem>&);
template uint32_t Rank<PutPlatform<WarpPlatform<4>>>::run(const std::vector<Problem>&);

}  // namespace flashmoe::test
