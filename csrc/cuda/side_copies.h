// Copies between the host and the ranks' heaps. The copies have a stream of their own, because they must not wait for
// this rank's kernel, which may run for long and wait for other ranks.
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
