#include "cuda/side_copies.h"

#include <cstring>

namespace flashmoe::cuda {

SideCopies::Means& SideCopies::means() {
  if (!means_) means_.emplace(device_);
  return *means_;
}

void SideCopies::write(void* to, const void* from, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  Means& m = means();
  std::memcpy(m.page.host<void>(), from, bytes);
  m.stream.upload(to, m.page.host<void>(), bytes);
  m.stream.wait();
}

void SideCopies::read(void* to, const void* from, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const Device::Use use(device_);
  Means& m = means();
  m.stream.download(m.page.host<void>(), from, bytes);
  m.stream.wait();
  std::memcpy(to, m.page.host<void>(), bytes);
}

}  // namespace flashmoe::cuda
