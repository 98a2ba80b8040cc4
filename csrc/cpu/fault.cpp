#include "cpu/fault.h"

#include "cpu/platform.h"

namespace flashmoe::cpu {

std::optional<HostFault> posted_fault(const Call& c) {
  for (uint32_t i = 0; i < c.shape.ranks; ++i) {
    const FaultRecord* posted = c.fault(c.rank, (c.rank + i) % c.shape.ranks);
    if (CpuPlatform::load_acquire(&posted->posted, kSystem) != FaultRecord::kFailed) continue;
    const Fault& fault = posted->fault;
    HostFault record{};
    record.posted = 1;
    record.fault = fault;
    record.entered = CpuPlatform::load_acquire(&c.status(fault.culprit)->entered, kSystem);
    if (fault.kind == FaultKind::kDisagree) {
      // Both are read from the heap of the rank that found the fault, which had read them there. In the other rank's
      // own heap the configuration may not be written yet: that rank's sender may tell the peers before its OS actor
      // begins. (After other faults even the finder's heap may lack one.)
      record.mine = *c.call_config(fault.rank, fault.rank);
      record.theirs = *c.call_config(fault.rank, fault.awaited);
    }
    return record;
  }
  return std::nullopt;
}

}  // namespace flashmoe::cpu
