// Put sender: sends packets as Sender does, where peers are not mapped. It also puts the returns. Only senders put, so
// no other actor waits for the network, and the network's code is in one role.
//
// A sender leaves the call only when its puts have arrived. After that, the next call may overwrite the memory that the
// puts read, and a context that closes may free it.
#pragma once

#include "flashmoe/actors/engine.h"
#include "flashmoe/actors/sender.h"
#include "flashmoe/protocol/fault.h"
#include "flashmoe/protocol/packet.h"

namespace flashmoe {

// One of a rank's senders. All lanes call its functions. Those that return a bool return false if the call was aborted.
template <class P, StagesRows Engine>
class PutSender {
 public:
  FLASHMOE_FN PutSender(const Call& call, Engine& engine) : c_(call), engine_(engine) {}

  // own_block: the first token block that this sender's processor dispatches.
  FLASHMOE_FN void run(uint32_t first, uint32_t senders, uint32_t own_block) {
    const bool announced = first != 0 || announce(own_block);
    if (announced && send_packets(first, senders)) send_returns(first, senders);
    P::quiet();  // also if the call has failed
  }

 private:
  // Puts to the peers the configuration and the call signal that the OS actor has written to this rank's own heap,
  // from which puts may read. It waits as Sender::announce() does. A call that has begun is announced even if it was
  // aborted: if this rank has found that another rank disagrees, the peers need both configurations for their error
  // messages.
  FLASHMOE_FN bool announce(uint32_t own_block) const {
    const bool goes_on = (own_block >= c_.blocks() || await_routing<P>(c_, own_block)) &&
                         await_word<P>(c_, c_.call_signal(c_.rank, c_.rank));
    if (!goes_on && !has_begun()) return false;
    CallConfig* const config = c_.call_config(c_.rank, c_.rank);
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 1; i < c_.shape.ranks; ++i) {
      P::put_signal(config, config, sizeof(CallConfig), c_.call_signal(c_.rank, c_.rank), call_word(c_),
                    (c_.rank + i) % c_.shape.ranks);
    }
    return goes_on;
  }

  // Whether a call that was aborted has begun. A rank that finds a fault has written its call signal, in its own
  // heap, before it aborts. But the wait above looked at the signal first and at the abort word after that, and both
  // may have been written in between. So this function looks at the signal again, after the abort word.
  FLASHMOE_FN bool has_begun() const {
    P::load_acquire(&c_.control()->abort.value, kDevice);
    P::sync();
    const uint64_t word = P::broadcast(P::load_acquire(c_.call_signal(c_.rank, c_.rank), kDevice), 0);
    P::sync();
    return Signal::epoch(word) == c_.epoch;
  }

  // This sender sends token blocks first, first + senders, ... to all ranks, so each row is copied to out_row() once.
  FLASHMOE_FN bool send_packets(uint32_t first, uint32_t senders) const {
    const uint32_t blocks = c_.blocks();
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 1; i < c_.shape.ranks; ++i) {
      FLASHMOE_NO_UNROLL
      for (uint32_t b = first; b < blocks; b += senders) {
        if (i == 1) {
          if (!await_routing<P>(c_, b)) return false;
          stage_rows(b);
        }
        const uint32_t q = (c_.rank + i) % c_.shape.ranks;
        engine_.begin();
        send_packet(b, q);
        engine_.end(Phase::kDispatch, b, q);
      }
    }
    return true;
  }

  // Copies the token block's rows that any other rank needs to where puts may read.
  FLASHMOE_FN void stage_rows(uint32_t b) const {
    const uint32_t first = b << c_.policy.log2_block, tokens = c_.tokens_in_block(b);
    FLASHMOE_NO_UNROLL
    for (uint32_t base = 0; base < tokens; base += P::kLanes) {
      const uint32_t t = base + P::lane();
      uint32_t n = 0;
      FLASHMOE_NO_UNROLL
      for (uint32_t q = 0; q < c_.shape.ranks; ++q) {
        if (q != c_.rank && t < tokens) n |= c_.out_counts(q, first)[t];
      }
      FLASHMOE_NO_UNROLL
      for (uint32_t left = P::ballot(n != 0); left != 0; left &= left - 1) {
        engine_.stage_row(first + base + lowest_bit<P>(left));
      }
    }
    P::sync();
  }

  // Puts the packet of token block b to rank q. Rows of neighbouring tokens go in one put, because with many experts
  // per token most tokens go to every rank.
  FLASHMOE_FN void send_packet(uint32_t b, uint32_t q) const {
    const uint32_t first = b << c_.policy.log2_block, tokens = c_.tokens_in_block(b);
    const uint32_t slot = peer_slot(c_.rank, q, c_.shape.ranks);
    uint32_t mine = 0, entries;
    FLASHMOE_NO_UNROLL
    for (uint32_t base = 0; base < tokens; base += P::kLanes) {
      const uint32_t t = base + P::lane();
      const uint32_t n = t < tokens ? c_.out_counts(q, first)[t] : 0;
      mine += n;
      FLASHMOE_NO_UNROLL
      for (uint32_t left = P::ballot(n != 0); left != 0;) {
        const uint32_t begin = lowest_bit<P>(left), token = first + base + begin;
        const uint32_t end = begin + lowest_bit<P>(~(left >> begin));
        const uint8_t* const last = c_.out_row(token + end - begin - 1);
        P::put(c_.heap<uint8_t>(c_.rank, HeapField::kRows, slot, token), c_.out_row(token),
               static_cast<uint32_t>(last - c_.out_row(token)) + c_.memory.token_row_bytes, q);
        left = end >= P::kLanes ? 0 : left >> end << end;
      }
    }
    P::exclusive_scan(mine, entries);
    P::put(c_.packet_counts(c_.rank, c_.rank, first), c_.out_counts(q, first), tokens * sizeof(uint16_t), q);
    if (entries != 0) {
      P::put(c_.packet_entries(c_.rank, c_.rank, first), c_.out_entries(q, first), entries * sizeof(Entry), q);
    }
    P::fence();
    P::put_signal(c_.packet_offsets(c_.rank, c_.rank, b), c_.out_offsets(q, b), (c_.owned(q) + 1) * sizeof(uint16_t),
                  c_.packet_signal(c_.rank, c_.rank, b), Signal::make(c_.epoch, entries), q);
  }

  // Puts every rank's sums, rank after rank. A rank's tokens are dealt out to the senders, kLanes tokens at a time.
  // Each sender waits until the rows that it has put have arrived, and the last sender signals the rank.
  FLASHMOE_FN bool send_returns(uint32_t first, uint32_t senders) const {
    FLASHMOE_NO_UNROLL
    for (uint32_t i = 1; i < c_.shape.ranks; ++i) {
      const uint32_t p = (c_.rank + i) % c_.shape.ranks;
      if (!await_word<P>(c_, c_.call_signal(c_.rank, p))) return false;
      const uint32_t tokens = c_.tokens_of(p);
      if (tokens == 0) continue;  // p awaits nothing, and perhaps nobody sets returns_ready for it
      if (!await_word<P>(c_, c_.returns_ready(p))) return false;
      engine_.begin();
      send_rows(p, tokens, first * P::kLanes, senders * P::kLanes);
      P::quiet();
      if (P::lane() == 0 && P::fetch_add_acq_rel(c_.returns_sent(p), 1u) + 1 == senders) {
        P::store_relaxed(c_.returns_sent(p), 0u);
        P::signal(c_.return_signal(c_.rank, c_.rank, 0), Signal::make(c_.epoch, 0), p);
      }
      P::sync();
      engine_.end(Phase::kReduce, first, p << 8);
    }
    return true;
  }

  // Puts the sums of this sender's share of p's tokens, if they have rows here. The share is tokens first .. first +
  // kLanes - 1 of every `step` tokens.
  FLASHMOE_FN void send_rows(uint32_t p, uint32_t tokens, uint32_t first, uint32_t step) const {
    FLASHMOE_NO_UNROLL
    for (uint32_t base = first; base < tokens; base += step) {
      const uint32_t t = base + P::lane();
      const uint32_t n = t < tokens ? c_.packet_counts(c_.rank, p, 0)[t] : 0;
      FLASHMOE_NO_UNROLL
      for (uint32_t left = P::ballot(n != 0); left != 0; left &= left - 1) {
        const uint32_t token = base + lowest_bit<P>(left);
        P::put(c_.return_row(c_.rank, token, c_.rank), c_.staged_row(p, token, 0), c_.memory.return_row_bytes, p);
      }
    }
  }

  const Call& c_;
  Engine& engine_;
};

// Puts this rank's own fault record into the other ranks' heaps, if the rank posts a fault. All lanes of the first
// sender call it, after run(). It waits until the OS actor has left, because the OS actor is the last that may post a
// fault: it waits for the other ranks' returns.
template <class P>
FLASHMOE_FN void tell_fault(const Call& c) {
  wait_until<P>(
      c,
      [&] {
        if (P::broadcast(P::poll(&c.status(c.rank)->left, kDevice), 0) == c.epoch) return Step::kDone;
        P::rest();
        return Step::kIdle;
      },
      OsLiveness<P>{c});
  FaultRecord* const own = c.fault(c.rank, c.rank);
  P::load_acquire(&c.control()->abort.value, kDevice);  // was set after the record was written
  P::sync();                                            // all lanes have acquired it
  if (P::broadcast(P::load_acquire(&own->posted, kSystem), 0) != FaultRecord::kFailed) return;
  P::sync();
  FLASHMOE_NO_UNROLL
  for (uint32_t i = 1; i < c.shape.ranks; ++i) {
    P::put_signal(&own->fault, &own->fault, sizeof(Fault), &own->posted, FaultRecord::kFailed,
                  (c.rank + i) % c.shape.ranks);
  }
  P::quiet();
}

}  // namespace flashmoe
