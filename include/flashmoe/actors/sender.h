// Sender: brings a rank's packets to the other ranks: offsets, entries and rows, then the signal.
//
// A packet for another rank is built in the workspace, in the outbox, because many small stores to a peer would hold up
// the signal of the own packet. Its rows are sent in parts of 32 tokens, by several senders. The sender that is the
// last to finish a part signals the packet. Rank 2 of 4 sends all packets for rank 3, then those for rank 0, then
// those for rank 1. So each rank receives from about one rank at a time, and receives its first packets early.
// Senders share the parts of one packet. If each sender sent whole packets, all packets would be complete at about
// the same time, late, and until then no tile could be made of them.
//
// Other senders: machine_sender.h sends the packets for all ranks of another machine to its relay. put_sender.h sends
// where peers are not mapped.
#pragma once

#include "flashmoe/actors/engine.h"
#include "flashmoe/actors/machine_sender.h"
#include "flashmoe/protocol/announce.h"
#include "flashmoe/protocol/packet.h"
#include "flashmoe/spec/enums.h"

namespace flashmoe {

// Waits until a signal in the own heap or workspace has this call's epoch; false if the call was aborted. All lanes of
// a sender. It acquires at device scope. So if this rank's own actors wrote the word, the caller may read all that
// they wrote before it. If a peer wrote the word, the caller may read only the word itself.
template <class P>
FLASHMOE_FN bool await_word(const Call& c, const uint64_t* word) {
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        if (Signal::epoch(P::broadcast(P::poll(word, kDevice), 0)) == c.epoch) return Step::kDone;
        P::rest();
        return Step::kIdle;
      },
      OsLiveness<P>{c});
  P::acquire(word, kDevice);
  P::sync();
  return end == WaitEnd::kDone;
}

// The same for the own packet's signal, which says that the token block's routing and outbox are written.
template <class P>
FLASHMOE_FN bool await_routing(const Call& c, uint32_t b) {
  return await_word<P>(c, c.packet_signal(c.rank, c.rank, b));
}

// One of a rank's senders. The parts of all packets are numbered by destination, then by token block. A sender takes
// the next part that no other sender has taken. So senders that are free before the last tokens are routed send the
// packets that are there. All lanes call its functions.
template <class P, SendsRows Engine>
class Sender {
 public:
  FLASHMOE_FN Sender(const Call& call, Engine& engine) : c_(call), engine_(engine) {}

  // first: this is the rank's first sender, which announces the call. own_block: the first token block that this
  // sender's processor dispatches. False if the call was aborted.
  FLASHMOE_FN bool run(bool first, uint32_t own_block) {
    if (first && !announce(own_block)) return false;
    const uint32_t parts = ceil_div(c_.block_tokens(), kPartTokens), of_rank = c_.blocks() * parts;
    const uint32_t all = of_rank * (c_.shape.ranks - 1);
    FLASHMOE_NO_UNROLL
    for (uint32_t i = take_part(all); i < all; i = take_part(all)) {
      const uint32_t q = (c_.rank + 1 + i / of_rank) % c_.shape.ranks, b = i % of_rank / parts, part = i % parts;
      if (!await_routing<P>(c_, b)) return false;
      if constexpr (SpansMachines<P>) {
        if (!c_.machines->together(c_.rank, q)) {
          send_to_machine<P>(c_, engine_, q, b, part, parts);
          continue;
        }
      }
      engine_.begin();
      const uint32_t entries = c_.out_offsets(q, b)[c_.owned(q)];
      if (part == 0) copy_packet(b, q, entries);
      send_part(b, q, part * kPartTokens);
      P::sync();  // all lanes' writes before the count
      if (P::lane() == 0) count_part(b, q, parts, entries);
      engine_.end(Phase::kDispatch, b, q);
    }
    return true;
  }

 private:
  FLASHMOE_FN uint32_t take_part(uint32_t all) const {
    if (all == 0) return 0;
    uint64_t part = 0;
    if (P::lane() == 0) part = P::fetch_add(&c_.control()->sends[c_.parity()].value, uint64_t{1});
    return static_cast<uint32_t>(P::broadcast(part, 0));
  }

  // Announces the call to the peers, after this processor has signalled its first packet to the rank itself. On a
  // GPU, the release of that signal would otherwise wait 0.1 ms for the words that announce the call, which are the
  // call's first stores to peers. (If the OS actor announced the call, its releases would wait likewise when it
  // publishes tasks.) Peers have no use for the words sooner.
  FLASHMOE_FN bool announce(uint32_t own_block) const {
    if (own_block < c_.blocks() && !await_routing<P>(c_, own_block)) return false;
    announce_to_peers<P>(c_);
    return true;
  }

  // Sends rank q the rows that it needs of one part, which is tokens base .. base + kPartTokens - 1 of the token block.
  FLASHMOE_FN void send_part(uint32_t b, uint32_t q, uint32_t base) const {
    const uint32_t first = b << c_.policy.log2_block;
    FLASHMOE_UNROLL
    for (uint32_t at = base; at < base + kPartTokens; at += P::kLanes) {
      const uint32_t t = at + P::lane();
      const bool exists = t < c_.tokens_in_block(b);
      const uint32_t n = exists ? c_.out_counts(q, first)[t] : 0;
      if ((kTrainsInGroup || c_.reduced()) && exists) c_.packet_counts(q, c_.rank, first)[t] = static_cast<uint16_t>(n);
      const uint32_t needed = P::ballot(n != 0);
      engine_.send_rows(q, first + at + P::nth_bit(needed, P::lane()), P::popcount(needed));
    }
  }

  // Counts a part that is sent. The sender that counts the last part of a packet signals the packet. One lane.
  FLASHMOE_FN void count_part(uint32_t b, uint32_t q, uint32_t parts, uint32_t entries) const {
    if (parts != 1 && !is_last_part<P>(c_.out_sent(q, b), parts)) return;
    signal_packet<P>(c_, q, b, entries);
  }

  FLASHMOE_FN void copy_packet(uint32_t b, uint32_t q, uint32_t entries) const {
    const uint32_t first = b << c_.policy.log2_block;
    copy_words<P>(c_.packet_offsets(q, c_.rank, b), c_.out_offsets(q, b), c_.owned(q) + 1);
    copy_entries<P>(c_.packet_entries(q, c_.rank, first), c_.out_entries(q, first), entries);
  }

  const Call& c_;
  Engine& engine_;
};

}  // namespace flashmoe
