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
      // Both configurations are read in the heap of the rank that found the fault, since it has compared them there.
      // The other rank may have none in its own heap yet, because its sender may send its configuration to peers before
      // its OS actor writes it at home. (After other faults, even the finder's heap may lack a configuration.)
      record.mine = *c.call_config(fault.rank, fault.rank);
      record.theirs = *c.call_config(fault.rank, fault.awaited);
    }
    return record;
  }
  return std::nullopt;
}

}  // namespace flashmoe::cpu
