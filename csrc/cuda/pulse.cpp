#include "cuda/pulse.h"

#include <atomic>

#include "host/clock.h"

namespace flashmoe::cuda {

void Pulse::beat() {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  if (!means_) means_.emplace(device_);
  // A time is no count that a kernel has written, and no earlier beat's.
  std::atomic_ref(*means_->page.host<uint64_t>()).store(host::monotonic_ns(), std::memory_order_relaxed);
  means_->stream.upload(progress_, means_->page.host<uint64_t>(), sizeof(uint64_t));
}

}  // namespace flashmoe::cuda
