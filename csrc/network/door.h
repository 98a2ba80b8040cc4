// The door of a rank while its group joins: other ranks connect to it. Anybody may come as a guest. A guest that does
// not prove within some seconds to be a rank of the group is closed. The door is closed when all ranks have come.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "network/socket.h"
#include "network/tls.h"

namespace flashmoe::network {

class Door {
 public:
  static constexpr size_t kMostGuests = 64;  // guests that have proved nothing yet
  static constexpr uint64_t kMostNs = 10'000'000'000;

  // at: see own_addresses(). Throws Error.
  Door(const TlsOfRank& tls, const std::string& at);

  // The door's addresses, as text for others' address_of(), separated by commas.
  std::string addresses() const;
  // Lets guests in, and continues the handshakes of guests that can continue. Returns those that have proved to be
  // ranks. Does not block.
  std::vector<std::unique_ptr<Tls>> progress();

 private:
  struct Guest {
    std::unique_ptr<Tls> tls;
    std::string host;
    uint64_t since_ns;
  };
  void let_in(int listener);
  void make_room();

  const TlsOfRank& tls_;
  std::vector<host::FileDescriptor> listeners_;
  std::vector<Address> at_;
  std::list<Guest> guests_;  // in the order in which they came
};

}  // namespace flashmoe::network
