// The host's part in calls that some rank refuses (flashmoe/protocol/refusal.h). A rank that has begun such a call ends
// it on the device (gpu/refused.cuh).
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "cuda/context.h"
#include "host/clock.h"
#include "host/fault_message.h"
#include "host/interrupt.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;

constexpr auto kBetweenLooks = std::chrono::microseconds(100);

static_assert(gpu::kMaxRanks * sizeof(FaultRecord) <= MappedPage::kBytes);

}  // namespace

void Context::refuse(const std::string& reason, DriverStream stream) {
  const std::lock_guard lock(mutex_);
  if (!may_refuse(common_.limits) || broken_ || device_.is_captured(stream)) return;
  const Device::Use use(device_);
  await_peers(stream);
  check(driver().cuStreamSynchronize(stream), "cannot wait for the calls before");
  if (std::atomic_ref(fault_page_.host<HostFault>()->posted).load(std::memory_order_acquire) != 0) return;
  ++calls_;
  const Call c = call_on_host();
  uint64_t* const calls = &c.control()->calls.value;
  uint64_t epoch = 0;
  copies_.read(&epoch, calls, sizeof(epoch));
  ++epoch;
  copies_.write(calls, &epoch, sizeof(epoch));
  const uint64_t none = 0;  // the refused call would have zeroed these words for the next call (clear_tickets)
  const uint64_t next = (epoch & 1) ^ 1;
  copies_.write(&c.control()->reduces[next].value, &none, sizeof(none));
  copies_.write(&c.control()->sends[next].value, &none, sizeof(none));
  copies_.write(&c.status(c.rank)->entered, &epoch, sizeof(epoch));
  const std::string text = host::shortened(reason, kReasonBytes - 1);
  const Reasons reasons = cuda_reasons(common_.limits);
  for (uint32_t i = 1; i <= c.shape.ranks; ++i) {  // this rank's heap last, because the other ranks may be waiting for
                                                   // this refusal
    const uint32_t q = (c.rank + i) % c.shape.ranks;
    copies_.write(reasons.of(c.memory.heaps[q], c.rank), text.c_str(), text.size() + 1);
    copies_.write(&c.fault(q, c.rank)->posted, &epoch, sizeof(epoch));
    copies_.write(&c.fault(q, c.rank)->left, &epoch, sizeof(epoch));
  }
  refused_ = epoch;
}

// A Call from which the host computes addresses in heaps and in the workspace.
Call Context::call_on_host() const {
  Call c = common_.call;
  c.memory.heaps = group_->heaps();
  return c;
}

// The sum of the progress words of all ranks.
uint64_t Context::progress_of_all(const Call& c) {
  uint64_t sum = 0;
  for (uint32_t p = 0; p < c.shape.ranks; ++p) {
    uint64_t progress = 0;
    copies_.read(&progress, &c.status(p)->progress, sizeof(progress));
    sum += progress;
  }
  return sum;
}

// Called before the next call if this rank has refused one: waits until all ranks have left the refused call. (Ranks
// that have begun that call wait on the device.)
void Context::await_peers(DriverStream stream) {
  if (refused_ == 0) return;
  device_.refuse_capture(stream, "a call behind one that was refused");
  const Call c = call_on_host();
  std::vector<FaultRecord> records(c.shape.ranks);
  uint64_t since = host::monotonic_ns(), progress = progress_of_all(c);
  uint32_t p = 0;
  while (true) {
    copies_.read(records.data(), c.fault(c.rank, 0), records.size() * sizeof(FaultRecord));
    for (const FaultRecord& record : records) {
      if (record.posted == FaultRecord::kFailed) throw_fault(read_fault(record.fault));
    }
    while (p < c.shape.ranks && records[p].left >= refused_) ++p;
    if (p == c.shape.ranks) break;
    host::check_interrupt();
    const uint64_t now = host::monotonic_ns();
    if (c.policy.timeout_ns != 0 && now - since > c.policy.timeout_ns) {
      const uint64_t later = progress_of_all(c);
      if (later == progress) {
        throw_fault(read_fault({.kind = FaultKind::kLeft,
                                .rank = c.rank,
                                .awaited = p,
                                .culprit = p,
                                .expected = refused_,
                                .epoch = refused_}));
      }
      progress = later;
      since = now;
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  refused_ = 0;
}

// Reads what the device hands over (gpu/leave.cuh) when a kernel of this rank ends with a fault. Here no kernel runs,
// so the host reads it.
HostFault Context::read_fault(const Fault& fault) {
  Call c = call_on_host();
  c.epoch = fault.epoch;
  HostFault to{};
  to.fault = fault;
  copies_.read(&to.entered, &c.status(fault.culprit)->entered, sizeof(to.entered));
  copies_.read(&to.mine, c.call_config(fault.rank, fault.rank), sizeof(CallConfig));
  copies_.read(&to.theirs, c.call_config(fault.rank, fault.awaited), sizeof(CallConfig));
  return to;
}

// Takes the error of a call that another rank has refused, if the host does not know of the refusal yet.
std::optional<Error> Context::take_refusal() {
  auto* const record = fault_page_.host<HostFault>();
  const uint64_t last = std::atomic_ref(record->last_refused).load(std::memory_order_acquire);
  if (last <= told_of_) return std::nullopt;
  const std::atomic_ref refused(record->refused);
  const uint64_t first = refused.load(std::memory_order_acquire);
  told_of_ = max_of(first, last);
  if (first == 0) {  // the device found an earlier refusal in the page, which the host has raised since
    return Error(Error::Kind::kGroup, concat("a rank refused call ", last,
                                             "; its reason is lost, since the host had not read an earlier one"));
  }
  const Error error = host::refusal_error(record->refuser, first, record->reason, told_of_);
  refused.store(0, std::memory_order_release);  // from now on the kernel may leave the next refusal here
  return error;
}

}  // namespace flashmoe::cuda
