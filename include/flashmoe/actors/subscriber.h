// Subscriber: watches the signals that arrive in this rank's heap. From packets it forms tiles, unless the rank has
// formers beside the OS actor. Return signals tell it when all results have come home.
//
// Run by the OS warp; every lane keeps the same private members.
#pragma once

#include "flashmoe/protocol/arrivals.h"
#include "flashmoe/protocol/tile_former.h"

namespace flashmoe {

template <class P>
class Subscriber {
 public:
  // Shared memory, uninitialised.
  struct Memory {
    Source* sources;      // [R]
    FormerMemory former;  // serves no expert if formers run beside the OS actor
  };

  FLASHMOE_FN Subscriber(const Call& call, const Memory& memory)
      : c_(call), arrivals_(call, memory.sources), former_(call, memory.former) {}

  // Looks once at everything awaited; true if anything new was there. All lanes.
  FLASHMOE_FN bool step() {
    bool moved = false;
    if (!finished_) {
      moved = arrivals_.step([&](uint32_t p, uint32_t b, uint32_t n) { former_.consume(p, b, n); },
                             [&](uint32_t p) { close(p); });
      if (arrivals_.stranger() < c_.shape.ranks && P::lane() == 0) {
        const uint32_t p = arrivals_.stranger();
        post_fault<P>(c_, {.kind = FaultKind::kDisagree, .actor = Actor::kOs, .awaited = p, .culprit = p});
      }
      if (arrivals_.complete()) {
        former_.finish();
        former_.report();
        finished_ = true;
        moved = true;
      }
    }
    // It does not look for returns sooner: before all packets are here, hardly anything returns, and each look would
    // delay the packets, for which tasks wait.
    if (finished_) moved |= find_returns();
    return moved;
  }

  // Every packet of every rank is here.
  FLASHMOE_FN bool complete() const { return finished_; }
  // The number of return groups, from the first on, that are back from every rank.
  FLASHMOE_FN uint32_t returned() const { return returned_; }

  // What is missing, for a wait that expired. One lane.
  FLASHMOE_FN Fault missing() const {
    Fault r{.kind = FaultKind::kLocal, .actor = Actor::kOs, .awaited = c_.rank};
    for (uint32_t p = 0; p < c_.shape.ranks; ++p) {
      const Source& s = arrivals_.source(p);
      if (s.blocks == Source::kUnheard) {
        return expected(r, FaultKind::kCallSignal, p, 0, c_.call_signal(c_.rank, p));
      }
      if (s.next < s.blocks) {
        return expected(r, FaultKind::kPacket, p, s.next, c_.packet_signal(c_.rank, p, s.next));
      }
    }
    if (c_.blocks() == 0) return r;
    for (uint32_t q = 0; q < c_.shape.ranks; ++q) {
      if (returned_ < c_.policy.groups && !has_returned(q, returned_)) {
        uint32_t from = q;
        if constexpr (SpansMachines<P>) from = c_.machines->returner(c_.rank, q);
        return expected(r, FaultKind::kReturn, from, returned_, c_.return_signal(c_.rank, from, returned_));
      }
    }
    return r;
  }

 private:
  // Source p has no more packets.
  FLASHMOE_FN void close(uint32_t p) {
    former_.close(p);
    // A rank without experts owes nothing, and signals this to p, but only when p is in this call. Before, p might
    // still wait for the return signal of the call before, which this one overwrites.
    if (c_.shape.local_experts != 0) return;
    for (uint32_t g = P::lane(); g < c_.policy.groups; g += P::kLanes) signal_return<P>(c_, p, g);
  }

  FLASHMOE_FN Fault expected(Fault r, FaultKind kind, uint32_t from, uint32_t index, const uint64_t* signal) const {
    r.kind = kind;
    r.awaited = from;
    r.index = index;
    r.expected = c_.epoch;
    r.seen = Signal::epoch(P::load_relaxed(signal));
    return r;
  }

  FLASHMOE_FN bool has_returned(uint32_t q, uint32_t g) const {
    if constexpr (SpansMachines<P>) q = c_.machines->returner(c_.rank, q);
    return Signal::epoch(P::poll(c_.return_signal(c_.rank, q, g), kSystem)) == c_.epoch;
  }

  // Return groups complete in order, or nearly, so only the next one is looked at. A rank without tokens awaits none.
  FLASHMOE_FN bool find_returns() {
    if (c_.blocks() == 0) returned_ = c_.policy.groups;
    const uint32_t before = returned_;
    while (returned_ < c_.policy.groups) {
      bool all = true;
      for (uint32_t q = P::lane(); q < c_.shape.ranks; q += P::kLanes) all &= has_returned(q, returned_);
      if (P::ballot(!all) != 0) break;
      ++returned_;  // not acquired: whoever combines the rows looks for itself
    }
    return returned_ != before;
  }

  const Call& c_;
  Arrivals<P, kPacketsOfLane, 8> arrivals_;
  TileFormer<P, kPacketsOfLane> former_;
  uint32_t returned_ = 0;
  bool finished_ = false;
};

}  // namespace flashmoe
