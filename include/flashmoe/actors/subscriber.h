// Subscriber: watches the signals that arrive in this rank's heap. Call signals and packets become tiles; return signals
// become combines.
//
// Run by the OS warp; every lane keeps the same private members. A step costs one load per 32 packet signals in flight
// and one per awaited return, all independent.
#pragma once

#include "flashmoe/protocol/fault.h"
#include "flashmoe/protocol/tile_former.h"

namespace flashmoe {

// What the subscriber knows of a source rank.
struct Source {
  static constexpr uint32_t kUnheard = 0xffffffffu;
  uint32_t blocks;  // packets it will send, kUnheard until its call signal
  uint32_t next;    // first packet not yet consumed
};

template <class P>
class Subscriber {
 public:
  // Shared memory, uninitialised.
  struct Memory {
    Source* sources;     // [R]
    uint32_t* combined;  // [blocks / 32, rounded up]
    typename TileFormer<P>::Memory former;
  };

  FLASHMOE_FN Subscriber(const Call& call, const Memory& memory)
      : c_(call), sources_(memory.sources), combined_(memory.combined), former_(call, memory.former) {
    for (uint32_t p = P::lane(); p < c_.ranks; p += P::kLanes) sources_[p] = {Source::kUnheard, 0};
    for (uint32_t w = P::lane(); w < ceil_div(c_.blocks(), 32u); w += P::kLanes) combined_[w] = 0;
    P::sync();
  }

  // Looks once at everything awaited; true if anything new was there. All lanes.
  FLASHMOE_FN bool step() {
    bool moved = heard_ < c_.ranks && hear_calls();
    if (!complete_) {
      moved |= consume_packets();
      if (heard_ == c_.ranks && finished_ == c_.ranks) {
        former_.flush();
        complete_ = true;
        moved = true;
      }
    }
    moved |= find_combines();
    return moved;
  }

  FLASHMOE_FN TileFormer<P>& former() { return former_; }
  // Every packet of every rank has been consumed: tiles and reduces are final.
  FLASHMOE_FN bool complete() const { return complete_; }
  FLASHMOE_FN uint32_t packets_with_entries() const { return packets_; }
  // Blocks whose combine is ready, in combine_tasks.
  FLASHMOE_FN uint32_t combines() const { return combines_; }

  // What is missing, for a wait that expired. One lane.
  FLASHMOE_FN Fault missing() const {
    Fault r{.kind = FaultKind::kLocal, .actor = Actor::kOs, .awaited = c_.rank};
    for (uint32_t p = 0; p < c_.ranks; ++p) {
      const Source& s = sources_[p];
      if (s.blocks == Source::kUnheard) {
        return expected(r, FaultKind::kCallSignal, p, 0, c_.call_signal(c_.rank, p));
      }
      if (s.next < s.blocks) {
        return expected(r, FaultKind::kPacket, p, s.next, c_.packet_signal(c_.rank, p, s.next));
      }
    }
    for (uint32_t b = 0; b < c_.blocks(); ++b) {
      for (uint32_t q = 0; q < c_.ranks; ++q) {
        if (owes(q, b)) return expected(r, FaultKind::kReturn, q, b, c_.return_signal(c_.rank, q, b));
      }
    }
    return r;
  }

 private:
  FLASHMOE_FN Fault expected(Fault r, FaultKind kind, uint32_t from, uint32_t index, const uint64_t* signal) const {
    r.kind = kind;
    r.awaited = from;
    r.index = index;
    r.expected = c_.epoch;
    r.seen = Signal::epoch(P::load_relaxed(signal));
    return r;
  }

  FLASHMOE_FN bool hear_calls() {
    bool moved = false;
    P::sync();  // other lanes may still be reading sources_ in the step before: votes order no memory
    for (uint32_t base = 0; base < c_.ranks; base += P::kLanes) {
      const uint32_t p = base + P::lane();
      bool fresh = false, empty = false;
      if (p < c_.ranks && sources_[p].blocks == Source::kUnheard) {
        const uint64_t word = P::load_acquire(c_.call_signal(c_.rank, p), kSystem);
        fresh = Signal::epoch(word) == c_.epoch && agrees(p);
        if (fresh) {
          const uint32_t payload = Signal::payload(word);
          sources_[p].blocks = ceil_div(CallPayload::tokens(payload), 1u << CallPayload::log2_block(payload));
          empty = sources_[p].blocks == 0;
        }
      }
      heard_ += count_lanes<P>(fresh);
      finished_ += count_lanes<P>(empty);
      moved |= P::ballot(fresh) != 0;
    }
    P::sync();
    return moved;
  }

  // A rank that computes something else must not be listened to: its packets mean something else.
  FLASHMOE_FN bool agrees(uint32_t p) const {
    if (c_.call_config(c_.rank, p)->hash == c_.config.hash) return true;
    post_fault<P>(c_, {.kind = FaultKind::kDisagree, .actor = Actor::kOs, .awaited = p, .culprit = p});
    return false;
  }

  // Consumes what has arrived of every source, each in block order, own rank first. A load looks at 32 packets: those
  // next in line of up to 32 sources.
  FLASHMOE_FN bool consume_packets() {
    const uint32_t width = max_of(1u, P::kLanes / c_.ranks);  // lanes per source
    const uint32_t per_load = P::kLanes / width;              // sources per load
    bool moved = false;
    for (uint32_t base = 0; base < c_.ranks; base += per_load) {
      const uint32_t i = base + P::lane() / width;
      const uint32_t p = (c_.rank + i) % c_.ranks;
      bool arrived = false;
      uint32_t entries = 0;
      if (i < c_.ranks && P::lane() / width < per_load && sources_[p].blocks != Source::kUnheard) {
        const uint32_t b = sources_[p].next + P::lane() % width;
        if (b < sources_[p].blocks) {
          const uint64_t word = P::poll(c_.packet_signal(c_.rank, p, b), kSystem);
          arrived = Signal::epoch(word) == c_.epoch;
          entries = Signal::payload(word);
        }
      }
      const uint32_t present = P::ballot(arrived);
      if (present == 0) continue;
      P::acquire_fence(kSystem);
      P::sync();
      FLASHMOE_NO_UNROLL
      for (uint32_t g = 0; g < per_load && base + g < c_.ranks; ++g) {
        moved |= consume_from((c_.rank + base + g) % c_.ranks, g * width, width, present, entries);
      }
    }
    return moved;
  }

  // Consumes the arrived packets of source p, whose signals lanes [lane, lane + width) hold.
  FLASHMOE_FN bool consume_from(uint32_t p, uint32_t lane, uint32_t width, uint32_t present, uint32_t entries) {
    const uint32_t filled = P::ballot(entries != 0) >> lane;
    const uint32_t n = min_of(lowest_bit<P>(~(present >> lane)), width);
    if (n == 0) return false;
    const uint32_t next = sources_[p].next;
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 0; i < n; i += TileFormer<P>::kBatch) {
      former_.consume(p, next + i, min_of(n - i, TileFormer<P>::kBatch), filled >> i);
    }
    packets_ += P::popcount(filled << (32 - n));
    finished_ += next + n == sources_[p].blocks;
    P::sync();
    if (P::lane() == 0) sources_[p].next = next + n;
    P::sync();
    return true;
  }

  // Whether rank q got entries of own block b and has not returned them.
  FLASHMOE_FN bool owes(uint32_t q, uint32_t b) const {
    const bool returned = Signal::epoch(P::poll(c_.return_signal(c_.rank, q, b), kSystem)) == c_.epoch;
    return (c_.awaited(b)[q / 32] >> (q % 32) & 1u) && !returned;
  }

  // Own blocks whose every return has arrived. A step looks at kLanes blocks and goes on from there in the next, so that
  // it stays short however many blocks there are.
  FLASHMOE_FN bool find_combines() {
    const uint32_t dispatched = sources_[c_.rank].blocks == Source::kUnheard ? 0 : sources_[c_.rank].next;
    if (combines_ == dispatched) return false;
    const uint32_t b = scan_ + P::lane();
    bool ready = b < dispatched && !(combined_[b / 32] >> (b % 32) & 1u);
    if (ready) {
      for (uint32_t q = 0; q < c_.ranks; ++q) ready &= !owes(q, b);
    }
    scan_ = scan_ + P::kLanes < dispatched ? scan_ + P::kLanes : 0;
    uint32_t total;
    const uint32_t place = combines_ + count_before<P>(ready, total);
    if (total == 0) return false;
    P::acquire_fence(kSystem);
    mark_combined(b, ready);
    if (ready) *c_.workspace<uint32_t>(WorkField::kCombineTasks, place) = b;
    combines_ += total;
    return true;
  }

  // Sets the bits of the lanes' blocks, which are consecutive; lane 0 writes the one or two words.
  FLASHMOE_FN void mark_combined(uint32_t b, bool ready) {
    const uint64_t bits = uint64_t{P::ballot(ready)} << (P::broadcast(b, 0) % 32);
    P::sync();
    if (P::lane() == 0) {
      combined_[b / 32] |= static_cast<uint32_t>(bits);
      if (bits >> 32) combined_[b / 32 + 1] |= static_cast<uint32_t>(bits >> 32);
    }
    P::sync();
  }

  const Call& c_;
  Source* sources_;
  uint32_t* combined_;  // bit b: combine(b) has been made ready
  TileFormer<P> former_;
  uint32_t heard_ = 0;     // sources whose call signal has arrived
  uint32_t finished_ = 0;  // sources all of whose packets are consumed
  uint32_t packets_ = 0;
  uint32_t combines_ = 0;
  uint32_t scan_ = 0;
  bool complete_ = false;
};

}  // namespace flashmoe
