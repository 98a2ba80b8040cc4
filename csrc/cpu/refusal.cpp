// A context's part in calls that some rank refuses (flashmoe/protocol/refusal.h).
#include <algorithm>
#include <cstring>

#include "cpu/context.h"
#include "host/fault_message.h"
#include "host/interrupt.h"
#include "host/text.h"

namespace flashmoe::cpu {
namespace {

// How often the calling thread, while it waits, asks whether it is interrupted.
constexpr uint64_t kAskEveryNs = 50'000'000;

}  // namespace

void Context::refuse(const std::string& reason) {
  if (call_.shape.ranks == 1) return;
  {
    const std::lock_guard lock(mutex_);
    // This thread is within a call, and its signal handler has tried to make another one. The group knows nothing of
    // that one (Turn throws), so the other ranks are told nothing.
    if (caller_ == std::this_thread::get_id()) return;
  }
  const Turn one_at_a_time(*this);
  if (broken_) return;
  await_peers();
  ++call_.epoch;
  const std::string text = host::shortened(reason, kReasonBytes - 1);
  const uint32_t self = call_.rank;
  CpuPlatform::store_release(&call_.status(self)->entered, call_.epoch, kDevice);
  for (uint32_t i = 1; i <= call_.shape.ranks; ++i) {  // this rank's heap last, because the other ranks may be waiting
                                                       // for this refusal
    const uint32_t q = (self + i) % call_.shape.ranks;
    uint8_t* const heap = call_.memory.heaps[q];
    char* const to = reasons_.of(heap, self);
    std::memcpy(to, text.c_str(), text.size() + 1);
    group_->tell(q, to, text.size() + 1, &call_.fault(q, self)->posted, call_.epoch);
  }
  leave_refused();
}

// Tells all ranks that this rank has nothing more to do with the call that was refused.
void Context::leave_refused() {
  refused_ = true;
  for (uint32_t i = 1; i <= call_.shape.ranks; ++i) {
    const uint32_t q = (call_.rank + i) % call_.shape.ranks;
    uint64_t* const at = &call_.fault(q, call_.rank)->left;
    group_->tell(q, at, 0, at, call_.epoch);
  }
}

// Called before the next call. If the last call was refused, waits until all ranks have left it, and clears what this
// rank's actors have left half done.
void Context::await_peers() {
  if (!refused_) return;
  make_workspace();
  machines_.clear();
  GroupLiveness<ContextPlatform> live(call_, seen_.data());
  const uint32_t ranks = call_.shape.ranks;
  uint32_t p = 0;
  uint64_t asked = 0;
  const auto look = [&] {
    while (p < ranks && CpuPlatform::load_acquire(&call_.fault(call_.rank, p)->left, kSystem) >= call_.epoch) ++p;
    if (p == ranks) return Step::kDone;
    throw_posted_fault();
    if (const uint64_t now = monotonic_ns(); now - asked > kAskEveryNs) {
      asked = now;
      host::check_interrupt();
    }
    return Step::kIdle;
  };
  if (wait_until<ContextPlatform>(call_, look, live) != WaitEnd::kDone) {
    broken_ = true;
    HostFault record{};
    record.fault = {.kind = FaultKind::kLeft,
                    .rank = call_.rank,
                    .awaited = p,
                    .culprit = live.culprit(p),
                    .expected = call_.epoch,
                    .epoch = call_.epoch};
    const uint32_t culprit = record.fault.culprit;
    record.entered = CpuPlatform::load_acquire(&call_.status(culprit)->entered, kSystem);
    throw host::fault_error(record, {call_.rank, call_.policy.timeout_ns, group_->obituary(culprit)});
  }
  refused_ = false;
}

// If another rank's refusal aborted the call, throws an error with that rank's reason. The context can be used again.
void Context::throw_refusal() {
  const uint32_t p = refuser<CpuPlatform>(call_);
  if (p == call_.shape.ranks) return;
  const host::Error error = host::refusal_error(p, call_.epoch, reasons_.of(call_.memory.heaps[call_.rank], p));
  leave_refused();  // only after the text is read: another refusal may overwrite it
  throw error;
}

}  // namespace flashmoe::cpu
