// What keeps other ranks waiting while this rank's host is at work inside a call, as where it compiles the call's kernel:
// their waits end when no rank's progress has grown for a timeout, and this rank has no kernel yet that makes progress.
#pragma once

#include <mutex>
#include <optional>

#include "cuda/device.h"

namespace flashmoe::cuda {

class Pulse {
 public:
  // progress: this rank's word (Status), which its kernels count up from what they find, in memory of the device.
  Pulse(const Device& device, uint64_t* progress) : device_(device), progress_(progress) {}

  // Makes the word another one, in a stream of its own: a kernel of this rank may be running, and may wait for others.
  void beat();

 private:
  struct Means {
    explicit Means(const Device& device) : page(device), stream(device) {}
    MappedPage page;
    Stream stream;
  };

  const Device& device_;
  uint64_t* const progress_;
  std::mutex mutex_;
  std::optional<Means> means_;  // once there was a beat
};

}  // namespace flashmoe::cuda
