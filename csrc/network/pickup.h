// Each function makes the messages for one signal to a rank on another machine. The messages have the signal, and the
// data that it announces. This rank's actors wrote that data before they signalled, to the mirror of the other rank's
// heap.
//
// The caller of each function has acquired the signal, so the data may be read. The functions are called before the
// next call of the layer begins. The data is copied when a message is about to be sent, or when the call ends
// (Message::pack()).
#pragma once

#include <memory>
#include <vector>

#include "flashmoe/protocol/machines.h"
#include "network/message.h"

namespace flashmoe::network {

using Messages = std::vector<std::unique_ptr<Message>>;

// The call's configuration for rank q. The signal is the call signal, `word`.
Messages pick_up_call(const Call& c, uint32_t q, uint64_t word);
// The n-th batch, of `each` token blocks, for a relay: the rows that the relay's machine needs (each token's once, in
// a backward pass that dispatches x again also its row of x), and the data that says which ranks need them.
Messages pick_up_batch(const SpreadCall& c, uint32_t relay, uint32_t n, uint32_t each, uint64_t word);
// All rows that go home to rank q, in a backward pass also the gradients of combine weights. (On the CPU engine, such
// a group has one return group, whose signal `word` is.)
Messages pick_up_returns(const SpreadCall& c, const GradientLayout& gradients, uint32_t q, uint64_t word);
// This rank's fault record. If ranks disagree on the call, the two configurations are sent before it, because rank q
// needs them for its error message.
Messages pick_up_fault(const Call& c, uint32_t q);

}  // namespace flashmoe::network
