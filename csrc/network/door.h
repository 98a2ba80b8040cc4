// A rank's door: where it listens while its group joins, so that other ranks can connect to it. Anybody may connect.
// Whoever has connected, and has not proved yet to be a rank of the group, is a guest. The door closes the connection
// of a guest that does not prove this within kMostNs. When all ranks have come, the door itself is closed (wire.h).
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
  static constexpr size_t kMostGuests = 64;  // guests at a time
  static constexpr uint64_t kMostNs = 10'000'000'000;

  // at: see own_addresses(). Throws Error.
  Door(const TlsOfRank& tls, const std::string& at);

  // The door's addresses, separated by commas, each as a text that address_of() reads.
  std::string addresses() const;
  // Accepts new guests, and continues the handshakes of guests that have sent something. Returns the connections of
  // those that have proved to be ranks. Does not block.
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
