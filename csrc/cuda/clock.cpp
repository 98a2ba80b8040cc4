#include "cuda/clock.h"

#include <atomic>

#include "host/clock.h"

namespace flashmoe::cuda {
namespace {

constexpr uint32_t kReadings = 64;  // many, because the first includes the kernel's launch, and others may be delayed
constexpr uint64_t kPatienceNs = 2'000'000'000;

}  // namespace

ClockReading read_clock(const Device& device, const Kernels& kernels, DriverStream stream) {
  const MappedPage memory(device);
  auto* const page = memory.host<gpu::ClockPage>();
  kernels.launch_clock(memory.mapped<gpu::ClockPage>(), kReadings, kPatienceNs, stream);
  ClockReading best{0, 0, ~uint64_t{0}};
  for (uint64_t n = 1; n <= kReadings; ++n) {
    const uint64_t before = host::monotonic_ns();
    std::atomic_ref(page->asked).store(n, std::memory_order_release);
    uint64_t after;
    bool answered;
    do {
      answered = std::atomic_ref(page->answered).load(std::memory_order_acquire) >= n;
      after = host::monotonic_ns();
    } while (!answered && after - before < kPatienceNs);
    if (!answered) {
      device.synchronize();  // the kernel must not outlive its page
      throw Error(Error::Kind::kOther, "trace: the device does not say what time it is");
    }
    // The device answered at some time between `before` and `after`.
    if (const uint64_t error = (after - before + 1) / 2; error < best.error_ns) {
      best = {before + (after - before) / 2, page->device_ns, error};
    }
  }
  device.synchronize();
  return best;
}

}  // namespace flashmoe::cuda
