#include "cpu/fault.h"

#include "cpu/platform.h"

namespace flashmoe::cpu {

std::optional<HostFault> posted_fault(const Call& c) {
  for (uint32_t i = 0; i < c.shape.ranks; ++i) {
    const FaultRecord* posted = c.fault(c.rank, (c.rank + i) % c.shape.ranks);
    if (CpuPlatform::load_acquire(&posted->posted, kSystem) == 0) continue;
    const Fault& fault = posted->fault;
    HostFault record{};
    record.posted = 1;
    record.fault = fault;
    record.entered = CpuPlatform::load_acquire(&c.status(fault.culprit)->entered, kSystem);
    if (fault.kind == FaultKind::kDisagree) {
      // As the finder has them, in its own heap: it had read both. The other's own copy may not be written yet, since its
      // sender tells the peers while its OS actor has yet to begin. (Of another fault, not even the finder may have them.)
      record.mine = *c.call_config(fault.rank, fault.rank);
      record.theirs = *c.call_config(fault.rank, fault.awaited);
    }
    return record;
  }
  return std::nullopt;
}

}  // namespace flashmoe::cpu
