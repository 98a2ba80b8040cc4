// What a sender does for ranks of another machine. It brings the packets for all ranks of that machine to the machine's
// relay for this rank (protocol/machines.h), each token's row once. It sends a row if any of those ranks needs it.
// Entries, offsets and counts are those that each rank would get by itself.
#pragma once

#include <cstring>

#include "flashmoe/actors/engine.h"
#include "flashmoe/protocol/machines.h"
#include "flashmoe/spec/enums.h"

namespace flashmoe {

// The number of consecutive tokens whose rows are a part of a packet.
inline constexpr uint32_t kPartTokens = 32;

// Copies n words. A lane copies one word at a time, not 16 bytes, because packets may begin at any word. All lanes.
template <class P, class Word>
FLASHMOE_FN void copy_words(Word* to, const Word* from, uint32_t n) {
  constexpr uint32_t kAtOnce = 2;
  if constexpr (P::kLanes == 1) {
    std::memcpy(to, from, n * sizeof(Word));
    return;
  }
  FLASHMOE_NO_UNROLL
  for (uint32_t i = P::lane(); i < n; i += kAtOnce * P::kLanes) {
    Word word[kAtOnce];
    FLASHMOE_UNROLL
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      if (i + j * P::kLanes < n) word[j] = from[i + j * P::kLanes];
    }
    FLASHMOE_UNROLL
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      if (i + j * P::kLanes < n) to[i + j * P::kLanes] = word[j];
    }
  }
}

template <class P>
FLASHMOE_FN void copy_entries(Entry* to, const Entry* from, uint32_t n) {
  static_assert(sizeof(Entry) % 4 == 0);
  copy_words<P>(reinterpret_cast<uint32_t*>(to), reinterpret_cast<const uint32_t*>(from), n * (sizeof(Entry) / 4));
}

// Counts a part that is sent, and returns whether it is the last of `parts`. If so, sets the counter to zero. One lane.
template <class P>
FLASHMOE_FN bool is_last_part(uint32_t* sent, uint32_t parts) {
  if (P::fetch_add_acq_rel(sent, 1u) + 1 != parts) return false;
  P::store_relaxed(sent, 0u);
  return true;
}

template <class P, SendsRows Engine>
class MachineSender {
 public:
  FLASHMOE_FN MachineSender(const Call& call, Engine& engine, uint32_t relay, uint32_t b)
      : c_(call),
        m_(*call.machines),
        engine_(engine),
        machine_(m_.of[relay]),
        to_(call, m_, relay, call.rank),
        b_(b),
        first_(b << call.policy.log2_block) {}

  // Sends the offsets and the entries of the packets for all ranks of the machine. The entries of one packet lie
  // directly behind those of the packet before.
  FLASHMOE_FN void send_entries() const {
    Entry* entries = to_.entries(first_);
    for (uint32_t i = 0; i < m_.size(machine_); ++i) {
      const uint32_t q = m_.rank_at(machine_, i), owned = c_.owned(q);
      const uint16_t* const offsets = c_.out_offsets(q, b_);
      copy_words<P>(to_.offsets(b_, i), offsets, owned + 1);
      copy_entries<P>(entries, c_.out_entries(q, first_), offsets[owned]);
      entries += offsets[owned];
    }
  }

  FLASHMOE_FN void send_rows(uint32_t base) const {
    FLASHMOE_UNROLL
    for (uint32_t at = base; at < base + kPartTokens; at += P::kLanes) {
      const uint32_t t = at + P::lane();
      uint32_t any = 0;
      for (uint32_t i = 0; t < c_.tokens_in_block(b_) && i < m_.size(machine_); ++i) {
        const uint16_t n = c_.out_counts(m_.rank_at(machine_, i), first_)[t];
        *to_.counts(i, first_ + t) = n;
        any |= n;
      }
      const uint32_t needed = P::ballot(any != 0);
      engine_.send_rows(to_.at, first_ + at + P::nth_bit(needed, P::lane()), P::popcount(needed));
    }
  }

  // Counts a part that is sent. The sender that counts the last part of a batch of token blocks signals the batch.
  // One lane.
  FLASHMOE_FN void count_part(uint32_t parts) const {
    const uint32_t each = m_.batch_blocks(c_.block_tokens(), c_.memory.token_row_bytes), batch = b_ / each;
    parts *= min_of(each, c_.blocks() - batch * each);
    if (!is_last_part<P>(c_.out_sent(to_.at, batch * each), parts)) return;
    P::store_release(to_.signal(batch), Signal::make(c_.epoch, 0), kSystem);
  }

 private:
  const Call& c_;
  const Machines& m_;
  Engine& engine_;
  const uint32_t machine_;
  const RelayPlace to_;
  const uint32_t b_, first_;
};

// If rank q is its machine's relay for this rank, sends q a part of token block b's packets for all ranks of that
// machine. Otherwise does nothing. parts: the number of parts of a token block. All lanes call it, after the block's
// routing is here.
template <class P, SendsRows Engine>
FLASHMOE_FN void send_to_machine(const Call& c, Engine& engine, uint32_t q, uint32_t b, uint32_t part, uint32_t parts) {
  if (!c.machines->is_relay(c.rank, q)) return;
  const MachineSender<P, Engine> sender(c, engine, q, b);
  engine.begin();
  if (part == 0) sender.send_entries();
  sender.send_rows(part * kPartTokens);
  P::sync();  // all lanes' writes before the count
  if (P::lane() == 0) sender.count_part(parts);
  engine.end(Phase::kDispatch, b, q);
}

}  // namespace flashmoe
