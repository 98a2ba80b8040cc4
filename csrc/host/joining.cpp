#include "host/joining.h"

#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "host/agreement.h"
#include "host/clock.h"
#include "host/interrupt.h"
#include "host/text.h"

namespace flashmoe::host {
namespace {

using Kind = Error::Kind;

// A rank that gives up because of a disagreement stays for this long, so that its peers see it. They look every
// millisecond.
constexpr uint64_t kFarewellNs = 5'000'000'000;
// Every kRarely-th look also checks whether the process of a peer has ended, and whether this process is interrupted.
constexpr uint32_t kRarely = 32;

uint32_t checked_ranks(uint32_t ranks) {
  if (ranks <= ControlPage::kMostRanks) return ranks;
  throw Error(Kind::kInvalidArgument, concat("ranks: expected at most ", ControlPage::kMostRanks, ", got ", ranks));
}

}  // namespace

Joining::Joining(const std::string& name, uint32_t rank, std::vector<uint32_t> members, const Limits& limits,
                 uint64_t heap_bytes, uint64_t timeout_ns)
    : name_(name),
      rank_(rank),
      members_(std::move(members)),
      limits_(limits),
      bytes_(kPageBytes + heap_bytes),
      timeout_ns_(timeout_ns),
      began_ns_(monotonic_ns()),
      deadline_(timeout_ns == 0 ? UINT64_MAX : began_ns_ + timeout_ns),
      files_(checked_ranks(limits.ranks)),
      pages_(limits.ranks),
      own_(name, rank, limits, bytes_, deadline_),
      counted_(limits.ranks) {
  pages_[rank] = own_.take_page();
}

std::vector<Mapping> Joining::join() {
  try {
    meet();
  } catch (const Error& e) {
    leave(e.kind, e.what());
    throw;
  } catch (...) {
    leave(Kind::kOther, "it was interrupted");
    throw;
  }
  return std::move(pages_);
}

void Joining::meet() {
  pages_[rank_] = own_.map_whole();
  set_state(ControlPage::kReady);
  open_peers();
  reach(ControlPage::kSawAll);
  for (const uint32_t p : members_) check_agreement(p);
  for (const uint32_t p : members_) {
    if (p != rank_) pages_[p] = map_peer(name_, p, files_[p], bytes_);
  }
  files_.clear();
  own_.remove_name();
  reach(ControlPage::kJoined);
}

Error Joining::error(Kind kind, const std::string& what) const {
  return {kind, concat("group '", name_, "'", what)};
}

// ---- Meeting ----------------------------------------------------------------------------------------------

void Joining::open_peers() {
  while (true) {
    uint32_t missing = limits_.ranks;  // the first member that is missing
    for (size_t i = members_.size(); i-- > 0;) {
      const uint32_t p = members_[i];
      if (p != rank_ && page(p) == nullptr && !try_open(p)) missing = p;
    }
    if (missing == limits_.ranks) missing = in_another_round();
    if (missing == limits_.ranks) return;
    pause(missing, "did not join");
  }
}

// Opens a peer's segment. Returns whether the peer is there.
bool Joining::try_open(uint32_t p) {
  PeerSegment found = open_peer(name_, p);
  if (found.file.get() < 0) return false;
  pages_[p] = std::move(found.page);
  const uint64_t attempt = page(p)->attempt;
  if (is_gone(page(p)->process) || goes_with_another(p)) {  // another process or attempt may replace it
    pages_[p] = Mapping();
    return false;
  }
  if (std::exchange(counted_[p], attempt) != attempt) {
    std::atomic_ref(page(p)->seen_by).fetch_add(1, std::memory_order_relaxed);
  }
  // Which ranks to wait for depends on the number of ranks. Everything else can be compared when all are there.
  if (page(p)->limits.ranks != limits_.ranks) check_agreement(p);
  if (failed_before(p)) {
    check_agreement(p);
    pages_[p] = Mapping();
    return false;
  }
  files_[p] = std::move(found.file);
  std::atomic_ref(page(rank_)->met[p]).store(attempt);
  return true;
}

// Whether a peer has met an earlier attempt of this rank to join. That attempt has failed, or its process is one that
// this process replaces.
bool Joining::goes_with_another(uint32_t p) const {
  const uint64_t met = std::atomic_ref(page(p)->met[rank_]).load(std::memory_order_relaxed);
  return met != 0 && met != page(rank_)->attempt;
}

// Whether a peer has given up for a cause that arose before this attempt began. Such a failure belongs to the earlier
// attempts. If it ended every attempt that meets it, ranks that all try again would pass one failure to one another for
// ever.
bool Joining::failed_before(uint32_t p) const {
  return state(p) == ControlPage::kFailed && page(p)->cause_ns < began_ns_;
}

// Finds a rank p that has met another attempt of some rank q than this rank sees. If there is none, returns the number
// of ranks. One of q's two attempts has failed. A rank that went on with the failed attempt would fail too, although
// all ranks could meet anew. (A rank that has gone on waits for all ranks that it has met.)
uint32_t Joining::in_another_round() const {
  for (const uint32_t p : members_) {
    for (const uint32_t q : members_) {
      // Sequentially consistent, like the store in try_open(). So if two ranks look at once, one of them sees what the
      // other has met.
      const uint64_t met = p == q ? 0 : std::atomic_ref(page(p)->met[q]).load();
      if (met != 0 && met != page(q)->attempt) return p;
    }
  }
  return limits_.ranks;
}

void Joining::forget(uint32_t p) {
  std::atomic_ref(page(rank_)->met[p]).store(0, std::memory_order_relaxed);
  pages_[p] = Mapping();
}

void Joining::check_agreement(uint32_t p) {
  std::string differs = difference(limits_, rank_, page(p)->limits, p);
  if (differs.empty() && page(p)->bytes != bytes_) {
    differs = concat("engine or version, by the bytes that a rank shares: rank ", rank_, " has ", bytes_, ", rank ", p,
                     " has ", page(p)->bytes);
  }
  if (differs.empty()) return;
  disagrees_ = true;
  throw error(Kind::kGroup, concat(" disagrees on ", differs));
}

// ---- Waiting for one another ------------------------------------------------------------------------------

// Says that this rank has reached a state, and waits until all members have reached it.
void Joining::reach(ControlPage::State s) {
  set_state(s);
  for (const uint32_t p : members_) await_state(p, s);
}

void Joining::await_state(uint32_t p, ControlPage::State wanted) {
  while (state(p) < wanted || state(p) == ControlPage::kFailed) pause(p, "did not finish joining");
  if (p != rank_) check_peer(p);
}

// Looks at the peers that are there, then sleeps for a millisecond.
void Joining::pause(uint32_t p, const char* what) {
  if (++looks_ % kRarely == 0) check_interrupt();
  for (uint32_t q = 0; q < limits_.ranks; ++q) {
    if (q != rank_ && page(q) != nullptr) check_peer(q);
  }
  if (monotonic_ns() > deadline_) {
    throw error(Kind::kPeerTimeout, concat(": rank ", p, " ", what, " within ", static_cast<double>(timeout_ns_) * 1e-9,
                                           " s (rank ", rank_, " waited)"));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// A peer that has given up or died ends the joining of all ranks. They may try again together.
void Joining::check_peer(uint32_t q) {
  if (goes_with_another(q)) {
    if (state(rank_) < ControlPage::kSawAll) return forget(q);
    cause_ns_ = began_ns_;
    throw error(Kind::kGroup, concat(": rank ", q, " joins with an earlier attempt of rank ", rank_));
  }
  const uint32_t reached = state(q);
  if (reached == ControlPage::kFailed) {
    check_agreement(q);
    if (failed_before(q) && state(rank_) < ControlPage::kSawAll) return forget(q);
    cause_ns_ = page(q)->cause_ns;
    const Kind kind = page(q)->failure_kind;
    const std::string why = text_of_another(page(q)->failure, sizeof(ControlPage::failure));
    if (kind == Kind::kPeerTimeout || kind == Kind::kGroup) throw Error(kind, why);
    throw error(Kind::kGroup, concat(": rank ", q, " failed to join: ", why));
  }
  if (reached < ControlPage::kJoined && looks_ % kRarely == 0 && is_gone(page(q)->process)) {
    throw error(Kind::kPeerTimeout, concat(": rank ", q, " did not finish joining: ", obituary_of(page(q)->process),
                                           " (rank ", rank_, " waited)"));
  }
}

// ---- Leaving ----------------------------------------------------------------------------------------------

// Tells the peers that this rank gives up, and why. Then cleans up.
void Joining::leave(Kind kind, const char* why) {
  page(rank_)->cause_ns = cause_ns_ != 0 ? cause_ns_ : monotonic_ns();
  page(rank_)->failure_kind = kind;
  std::snprintf(page(rank_)->failure, sizeof(ControlPage::failure), "%s", why);
  set_state(ControlPage::kFailed);
  if (disagrees_) await_witnesses();
  own_.remove_name();
  remove_names_of_the_dead(name_, limits_.ranks);
}

// Both sides should see a disagreement. So this rank waits until every peer has opened its segment. If ranks disagree
// on the number of ranks, only as many are awaited as the smallest number says.
void Joining::await_witnesses() const {
  uint32_t ranks = static_cast<uint32_t>(members_.size());
  for (const Mapping& m : pages_) {
    if (m.base() != nullptr) ranks = min_of(ranks, page_of(m)->limits.ranks);
  }
  const uint64_t end = min_of(deadline_, monotonic_ns() + kFarewellNs);
  auto seen_by = [&] { return std::atomic_ref(page(rank_)->seen_by).load(std::memory_order_relaxed); };
  while (seen_by() + 1 < ranks && monotonic_ns() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace flashmoe::host
