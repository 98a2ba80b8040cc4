// What a signal to a rank on another machine announces, as messages: the parts of that rank's heap which this rank's
// actors have written, to what stands for it here (its mirror), before they signalled there.
//
// Each is called by who has acquired the signal, so that all it announces may be read, and before the call's actors
// start another call; what the messages bring is copied when they go, or when the call ends (Message::pack()).
#pragma once

#include <memory>
#include <vector>

#include "flashmoe/protocol/machines.h"
#include "network/message.h"

namespace flashmoe::network {

using Messages = std::vector<std::unique_ptr<Message>>;

// The call's configuration, and its call signal, which is `word`.
Messages pick_up_call(const Call& c, uint32_t q, uint64_t word);
// For a relay, the n-th batch, of `each` token blocks: the rows that its machine needs, each token's once, and what says
// whose they are.
Messages pick_up_batch(const SpreadCall& c, uint32_t relay, uint32_t n, uint32_t each, uint64_t word);
// All rows that go home to rank q, in one return group; in a backward pass the gradients of combine weights, too.
Messages pick_up_returns(const SpreadCall& c, const GradientLayout& gradients, uint32_t q, uint64_t word);
// This rank's fault record; of a disagreement before it the two configurations, by which others word it.
Messages pick_up_fault(const Call& c, uint32_t q);

}  // namespace flashmoe::network
