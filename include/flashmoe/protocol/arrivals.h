// Arrivals: which ranks have begun the call, and which of their packets are here.
//
// Each OS actor, former and keeper, which is one warp, has an Arrivals of its own; all its lanes keep the same
// private members. One load of a warp looks at 32 packet signals. The loads of a step do not wait for one another.
#pragma once

#include "flashmoe/protocol/fault.h"

namespace flashmoe {

// What is known of a source rank.
struct Source {
  static constexpr uint32_t kUnheard = 0xffffffffu;
  uint32_t blocks;  // packets that it will send; kUnheard until its call signal is here
  uint32_t next;    // first packet not yet seen
};

// The number of packets of one source that a lane looks at in a step. The 32 lanes of a warp look at 128 packets.
// These are all packets of a source that has at most about one token block for each SM.
inline constexpr uint32_t kPacketsOfLane = 4;

// If the order of an expert's rows must be the same in every call (kInTurn), sources are taken in turn: all packets
// of rank 0, then all packets of rank 1, and so on. This delays tasks that could have begun with the packets that
// came first. It costs little else, because meanwhile the packets of all sources travel, and all are needed in the
// end.
//
// kDepth: the number of packets of one source that a lane looks at in a step; the loads of their signals are under
// way together. kLooks: about how many rounds of such loads a step has. If there are at most kLooks ranks, each rank
// has a round with all lanes. If there are more, ranks share rounds: of 32 ranks in 8 rounds of 32 lanes, 4 ranks
// share a round, and each has 8 lanes.
template <class P, uint32_t kDepth, uint32_t kLooks>
class Arrivals {
 public:
  // sources: [R] in shared memory, uninitialised.
  FLASHMOE_FN Arrivals(const Call& call, Source* sources) : c_(call), sources_(sources) {
    for (uint32_t p = P::lane(); p < c_.shape.ranks; p += P::kLanes) sources_[p] = {Source::kUnheard, 0};
    P::sync();
  }

  // Looks at all awaited signals once. Calls consume(p, first token block, n) for n <= kLanes * kDepth packets of
  // rank p that have newly arrived; they are of consecutive token blocks. The own rank comes first (not if kInTurn).
  // Calls close(p) after a rank's last packet. Returns whether anything was new. All lanes.
  template <class Consume, class Close>
  FLASHMOE_FN bool step(Consume&& consume, Close&& close) {
    bool moved = heard_ < c_.shape.ranks && hear_calls(close);
    [[maybe_unused]] uint32_t turn = 0;  // if kInTurn: the first source whose packets are not all here
    if constexpr (kInTurn) {
      while (turn < c_.shape.ranks && sources_[turn].next == sources_[turn].blocks) ++turn;
    }
    const uint32_t width = max_of(1u, min_of(P::kLanes, P::kLanes * kLooks / c_.shape.ranks));  // lanes per source
    const uint32_t per_load = P::kLanes / width;                                                // sources per load
    for (uint32_t base = 0; base < c_.shape.ranks; base += per_load) {
      const uint32_t i = base + P::lane() / width;
      const uint32_t p = (c_.rank + i) % c_.shape.ranks;
      bool listening = i < c_.shape.ranks && P::lane() / width < per_load && sources_[p].blocks != Source::kUnheard;
      if constexpr (kInTurn) listening &= p == turn;
      const uint32_t b = listening ? sources_[p].next + P::lane() % width : 0;
      const uint32_t end = listening ? sources_[p].blocks : 0;
      uint64_t word[kDepth];
      FLASHMOE_UNROLL
      for (uint32_t d = 0; d < kDepth; ++d) {
        word[d] = b + d * width < end ? P::poll(c_.packet_signal(c_.rank, p, b + d * width), kSystem) : 0;
      }
      uint32_t present[kDepth];
      FLASHMOE_UNROLL
      for (uint32_t d = 0; d < kDepth; ++d) present[d] = P::ballot(Signal::epoch(word[d]) == c_.epoch);
      if (present[0] == 0) continue;
      FLASHMOE_UNROLL
      for (uint32_t d = 0; d < kDepth; ++d) {
        if (Signal::epoch(word[d]) == c_.epoch) acquire_packet(p, b + d * width);
      }
      P::sync();
      FLASHMOE_NO_UNROLL
      for (uint32_t g = 0; g < per_load && base + g < c_.shape.ranks; ++g) {
        // n: the packets that are here, from the source's next one on, up to the first that is missing. So the
        // signals of index d count only if all `width` signals of each lower index are here.
        uint32_t n = 0;
        FLASHMOE_UNROLL
        for (uint32_t d = 0; d < kDepth; ++d) {
          if (n == d * width) n += min_of(lowest_bit<P>(~(present[d] >> g * width)), width);
        }
        if (n == 0) continue;
        take((c_.rank + base + g) % c_.shape.ranks, n, consume, close);
        moved = true;
      }
    }
    return moved;
  }

  // Every packet of every rank is here.
  FLASHMOE_FN bool complete() const { return finished_ == c_.shape.ranks; }
  FLASHMOE_FN const Source& source(uint32_t p) const { return sources_[p]; }
  // A rank whose call configuration differs from this rank's; if there is none, a number that is no rank's.
  FLASHMOE_FN uint32_t stranger() const { return stranger_; }

 private:
  // Called after a poll that saw the packet's signal. A rank signals its own packets at device scope.
  FLASHMOE_FN void acquire_packet(uint32_t p, uint32_t b) const {
    const uint64_t* signal = c_.packet_signal(c_.rank, p, b);
    if (p == c_.rank) {
      P::acquire(signal, kDevice);
    } else {
      P::acquire(signal, kSystem);
    }
  }

  template <class Close>
  FLASHMOE_FN bool hear_calls(Close&& close) {
    bool moved = false;
    P::sync();  // other lanes may still read sources_ for the step before, and ballots do not order memory accesses
    for (uint32_t base = 0; base < c_.shape.ranks; base += P::kLanes) {
      const uint32_t p = base + P::lane();
      bool fresh = false, empty = false, strange = false;
      if (p < c_.shape.ranks && sources_[p].blocks == Source::kUnheard) {
        const uint64_t word = P::poll(c_.call_signal(c_.rank, p), kSystem);
        fresh = Signal::epoch(word) == c_.epoch;
        if (fresh) P::acquire(c_.call_signal(c_.rank, p), kSystem);
        // Packets of a rank that computes something else must not be taken: they mean something else.
        strange = fresh && c_.call_config(c_.rank, p)->hash != c_.config.hash;
        fresh = fresh && !strange;
        if (fresh) {
          const uint32_t payload = Signal::payload(word);
          sources_[p].blocks = ceil_div(CallPayload::tokens(payload), 1u << CallPayload::log2_block(payload));
          empty = sources_[p].blocks == 0;
        }
      }
      heard_ += count_lanes<P>(fresh);
      moved |= P::ballot(fresh) != 0;
      const uint32_t strangers = P::ballot(strange);
      if (strangers != 0) stranger_ = base + lowest_bit<P>(strangers);
      uint32_t closing = P::ballot(empty);
      P::sync();
      for (; closing != 0; closing &= closing - 1) {
        ++finished_;
        close(base + lowest_bit<P>(closing));
      }
    }
    P::sync();
    return moved;
  }

  // Hands on the next n packets of source p.
  template <class Consume, class Close>
  FLASHMOE_FN void take(uint32_t p, uint32_t n, Consume&& consume, Close&& close) {
    const uint32_t next = sources_[p].next;
    consume(p, next, n);
    const bool last = next + n == sources_[p].blocks;
    P::sync();
    if (P::lane() == 0) sources_[p].next = next + n;
    P::sync();
    if (last) {
      ++finished_;
      close(p);
    }
  }

  const Call& c_;
  Source* sources_;
  uint32_t heard_ = 0;     // sources whose call signal has arrived
  uint32_t finished_ = 0;  // sources all of whose packets are here
  uint32_t stranger_ = 0xffffffffu;
};

}  // namespace flashmoe
