// Ready list: what retiring processors made ready, on its way to the OS warp. Many producers, one consumer.
//
// Lives in device memory (L2). One fetch-add per pushing warp, one store per item. The consumer zeroes what it reads,
// and a call drains everything that was pushed, so nothing is cleared between calls.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe {

// All lanes; pushes the words of the lanes with `has`.
template <class P>
FLASHMOE_FN void push_ready(const Call& c, bool has, Task task) {
  uint32_t total;
  const uint32_t place = count_before<P>(has, total);
  if (total == 0) return;
  uint64_t base = 0;
  if (P::lane() == 0) base = P::fetch_add(&c.control()->list_tail.value, uint64_t{total});
  base = P::broadcast(base, 0);
  if (has) P::store_release(c.list_slot(base + place), task.pack(), kDevice);
}

// All lanes of the OS warp; lane i gets the i-th item behind `head`, if it and all before it are there. Returns how
// many there were.
template <class P>
FLASHMOE_FN uint32_t drain_ready(const Call& c, uint64_t head, Task& task) {
  uint64_t* slot = c.list_slot(head + P::lane());
  const uint64_t word = P::load_acquire(slot, kDevice);
  const uint32_t present = P::ballot(word != 0);
  uint32_t count = 0;
  while (count < P::kLanes && (present >> count & 1u)) ++count;
  task = Task::unpack(word);
  if (P::lane() < count) P::store_relaxed(slot, uint64_t{0});
  return count;
}

}  // namespace flashmoe
