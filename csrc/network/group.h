// A group whose ranks are on several machines: those of this one are mapped, the others have mirrors (courier.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "flashmoe/protocol/refusal.h"
#include "host/group.h"
#include "network/courier.h"

namespace flashmoe::network {

// How the ranks are spread, as they have found it.
struct Spread {
  std::vector<uint32_t> here;          // ranks of this machine, this one among them, ascending
  std::vector<std::string> addresses;  // by rank, of their couriers
  std::vector<std::string> hosts;      // by rank: names for messages
};

// Begins to listen to the ranks of other machines; `here`: those of this one, which have joined. Every rank must listen
// before one calls. Throws Error.
std::unique_ptr<host::Group> join_network_group(std::unique_ptr<host::Group> here, uint32_t rank, const Limits& limits,
                                                std::shared_ptr<Courier> courier, const Spread& spread);

}  // namespace flashmoe::network
