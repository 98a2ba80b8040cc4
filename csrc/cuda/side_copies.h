// Copies between the host and the ranks' heaps. They have a stream of their own, because a kernel of this rank may be
// running and wait for others.
#pragma once

#include <mutex>
#include <optional>

#include "cuda/device/device.h"

namespace flashmoe::cuda {

class SideCopies {
 public:
  explicit SideCopies(const Device& device) : device_(device) {}

  // Copy from and to memory of the host, at most MappedPage::kBytes. Each returns when the data is there. May be called
  // from any thread.
  void write(void* to, const void* from, uint64_t bytes);
  void read(void* to, const void* from, uint64_t bytes);

 private:
  struct Means {
    explicit Means(const Device& device) : page(device), stream(device) {}
    MappedPage page;
    Stream stream;
  };
  Means& means();

  const Device& device_;
  std::mutex mutex_;
  std::optional<Means> means_;  // made by the first copy
};

}  // namespace flashmoe::cuda
