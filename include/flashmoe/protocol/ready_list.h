// Ready list: what formers, and processors that retire tasks, have made ready, on its way to the OS warp. Many push,
// one takes.
//
// Lives in device memory (L2). One fetch-add per pushing warp, one store per item. The OS warp zeroes what it reads,
// and a call drains everything that was pushed, so nothing is cleared between calls.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

// All lanes; pushes the words of the lanes with `has`.
template <class P>
FLASHMOE_FN void push_ready(const Call& c, bool has, Ready ready) {
  uint32_t total;
  const uint32_t position = count_before<P>(has, total);
  if (total == 0) return;
  uint64_t base = 0;
  if (P::lane() == 0) base = P::fetch_add(&c.control()->list_tail.value, uint64_t{total});
  base = P::broadcast(base, 0);
  if (has) P::store_release(c.list_slot(base + position), ready.pack(), kDevice);
}

// All lanes of the OS warp; lane i looks at the i-th item behind `head`, without acquiring it.
template <class P>
FLASHMOE_FN uint64_t look_ready(const Call& c, uint64_t head) {
  return P::poll(c.list_slot(head + P::lane()), kDevice);
}

// Takes the items that the lanes have seen (`word`: what look_ready(head) returned) up to the first empty slot, and
// returns how many they are. A fence must follow before what the items refer to is read or published.
template <class P>
FLASHMOE_FN uint32_t take_ready(const Call& c, uint64_t head, uint64_t word) {
  const uint32_t count = min_of(lowest_bit<P>(~P::ballot(word != 0)), P::kLanes);
  if (P::lane() < count) P::store_relaxed(c.list_slot(head + P::lane()), uint64_t{0});
  return count;
}

}  // namespace flashmoe
