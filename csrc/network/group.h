// A group whose ranks are on several machines. The heaps of this machine's ranks are mapped; the other ranks have
// mirrors (courier.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "flashmoe/protocol/refusal.h"
#include "host/group.h"
#include "network/courier.h"

namespace flashmoe::network {

// How the ranks are spread over machines, as they have found out when they met.
struct Spread {
  std::vector<uint32_t> here;          // ranks of this machine, this one among them, ascending
  std::vector<std::string> addresses;  // by rank: addresses of their couriers
  std::vector<std::string> hosts;      // by rank: hosts' names, for error messages
};

// Begins to listen to the ranks of other machines. `here`: the group of this machine's ranks, which have joined. Every
// rank must have returned from this function before any rank begins a call of the layer. Throws Error.
std::unique_ptr<host::Group> join_network_group(std::unique_ptr<host::Group> here, uint32_t rank, const Limits& limits,
                                                std::shared_ptr<Courier> courier, const Spread& spread);

}  // namespace flashmoe::network
