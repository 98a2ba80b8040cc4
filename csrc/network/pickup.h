// Makes messages of what a signal to a rank on another machine announces. These are the parts of that rank's heap which
// this rank's actors wrote before they signalled. The actors wrote them to the rank's mirror here.
//
// The caller of each function has acquired the signal, so all data that the signal announces may be read. It calls
// before the call's actors start another call. The data is copied when a message goes, or when the call ends
// (Message::pack()).
#pragma once

#include <memory>
#include <vector>

#include "flashmoe/protocol/machines.h"
#include "network/message.h"

namespace flashmoe::network {

using Messages = std::vector<std::unique_ptr<Message>>;

// The call's configuration, and its call signal, which is `word`.
Messages pick_up_call(const Call& c, uint32_t q, uint64_t word);
// For a relay: the n-th batch of `each` token blocks. It has the rows that the relay's machine needs, one for each
// token, and the data that says which ranks need them.
Messages pick_up_batch(const SpreadCall& c, uint32_t relay, uint32_t n, uint32_t each, uint64_t word);
// All rows that go home to rank q, in one return group; in a backward pass also the gradients of combine weights.
Messages pick_up_returns(const SpreadCall& c, const GradientLayout& gradients, uint32_t q, uint64_t word);
// This rank's fault record. For a disagreement the two configurations are sent before it, because others need them for
// the message.
Messages pick_up_fault(const Call& c, uint32_t q);

}  // namespace flashmoe::network
