// Ready queue: the scheduler publishes task words, processors take them by ticket.
//
// Lives in device memory (L2). A slot is zero unless it holds a task that was published and not yet taken; clusters
// take every word that a call publishes, and each cluster takes one kStop. So nothing is cleared between calls.
// There are at least as many slots as tasks and stop words in a call, so a slot is never published twice in one call.
#pragma once

#include "flashmoe/protocol/fault.h"
#include "flashmoe/protocol/wait.h"

namespace flashmoe {

// Publishes the words of the lanes with `has`, in lane order, behind the `published` ones; returns how many. All lanes
// of the OS warp, after a release_fence: so whoever takes a task sees all that the OS warp had seen by then.
template <class P>
FLASHMOE_FN uint32_t publish(const Call& c, uint64_t published, bool has, Task task) {
  uint32_t total;
  const uint32_t position = count_before<P>(has, total);
  if (has) P::post(c.queue_slot(published + position), task.pack());
  return total;
}

// Takes a ticket for one task. (On a GPU, a cluster takes it during its current task, so that it need not wait for
// the round trip to memory afterwards.)
template <class P>
FLASHMOE_FN uint64_t take_ticket(const Call& c) {
  return P::fetch_add(&c.control()->queue_head.value, uint64_t{1});
}

// Waits for the ticket's task and returns it; returns kStop if the call is aborted. `meanwhile` is called between two
// looks at the queue, and returns whether it did something. All lanes of the warp that takes tasks.
template <class P, class Meanwhile>
FLASHMOE_FN Task wait_task(const Call& c, uint64_t ticket, Meanwhile&& meanwhile) {
  uint64_t* slot = c.queue_slot(ticket);
  uint64_t word = 0;
  const WaitEnd end = wait_until<P>(
      c,
      [&] {
        // One lane looks: lanes that looked for themselves could see different values.
        if (P::lane() == 0) word = P::load_acquire(slot, kDevice);
        word = P::broadcast(word, 0);
        if (word != 0) return Step::kDone;
        return meanwhile() ? Step::kProgress : Step::kIdle;
      },
      OsLiveness<P>{c});
  if (end != WaitEnd::kDone) {
    // The OS actor has not stepped for a whole timeout, and nobody else will report that.
    if (end == WaitEnd::kExpired && P::lane() == 0) {
      post_fault<P>(c, {.kind = FaultKind::kLocal, .actor = Actor::kProcessor, .awaited = c.rank, .culprit = c.rank});
    }
    return {TaskKind::kStop};
  }
  P::sync();  // what lane 0 acquired, every lane may read
  if (P::lane() == 0) P::store_relaxed(slot, uint64_t{0});
  return Task::unpack(word);
}

template <class P>
FLASHMOE_FN Task wait_task(const Call& c, uint64_t ticket) {
  return wait_task<P>(c, ticket, [] { return false; });
}

}  // namespace flashmoe
