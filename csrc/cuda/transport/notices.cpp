#include "cuda/transport/notices.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>

#include "host/interrupt.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;

constexpr uint32_t kRarely = 128;  // looks between two calls of check_interrupt(): about 25 ms

}  // namespace

Notices::Notices(const std::string& name, uint32_t rank, const Limits& limits, uint64_t timeout_ns)
    : name_(name),
      rank_(rank),
      ranks_(limits.ranks),
      timeout_ns_(timeout_ns),
      deadline_(Clock::now() + std::chrono::nanoseconds(timeout_ns)),
      control_(host::join_process_group(name, rank, limits, sizeof(Notice), timeout_ns)) {}

void Notices::set_stage(Notice::Stage s) const {
  std::atomic_ref(own().stage).store(s, std::memory_order_release);
}

void Notices::fail(const char* why) const {
  std::snprintf(own().failure, sizeof(Notice::failure), "%s", why);
  std::atomic_ref(own().failed).store(1, std::memory_order_release);
}

void Notices::await(uint32_t p, Notice::Stage stage) const {
  auto reached = [&] { return std::atomic_ref(of(p).stage).load(std::memory_order_acquire); };
  for (uint32_t looks = 1; reached() < stage; ++looks) {
    if (std::atomic_ref(of(p).failed).load(std::memory_order_acquire) != 0 && reached() < stage) {
      throw Error(Error::Kind::kGroup, concat("group '", name_, "': rank ", p, " did not join: ",
                                              host::text_of_another(of(p).failure, sizeof(Notice::failure))));
    }
    if (looks % kRarely == 0) host::check_interrupt();
    const std::string gone = obituary(p);
    if (!gone.empty() || late()) {
      throw Error(Error::Kind::kPeerTimeout,
                  concat("group '", name_, "': rank ", p, " did not finish joining: ",
                         gone.empty() ? "it makes no progress" : gone, " (rank ", rank_, " waited)"));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void Notices::await_all(Notice::Stage stage) const {
  for (uint32_t p = 0; p < ranks_; ++p) await(p, stage);
}

void Notices::watch_others(const char* what) const {
  host::check_interrupt();
  for (uint32_t p = 0; p < ranks_; ++p) {
    if (const std::string gone = obituary(p); !gone.empty()) {
      throw Error(Error::Kind::kPeerTimeout, concat("group '", name_, "': rank ", p, ": ", gone));
    }
  }
  if (late()) {
    throw Error(Error::Kind::kPeerTimeout,
                concat("group '", name_, "': ", what, " did not end within ", static_cast<double>(timeout_ns_) * 1e-9,
                       " s (rank ", rank_, " waited)"));
  }
}

bool Notices::given_back_by_all(uint64_t block) const {
  for (uint32_t p = 0; p < ranks_; ++p) {
    const Notice& n = of(p);
    if (std::find(n.free, n.free + n.free_blocks, block) == n.free + n.free_blocks) return false;
  }
  return true;
}

}  // namespace flashmoe::cuda
