// The door of a rank while its group joins: where the others connect to. Anybody may come; who does not prove within some
// seconds to be a rank of the group is closed, and so is the door when all ranks have come.
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
  static constexpr size_t kMostGuests = 64;  // who have proved nothing
  static constexpr uint64_t kMostNs = 10'000'000'000;

  // at: see own_addresses(). Throws Error.
  Door(const TlsOfRank& tls, const std::string& at);

  // Where it is, in words for others' address_of(), separated by commas.
  std::string addresses() const;
  // Lets guests in, and those go on who can; returns who has proved to be a rank. Waits for nobody.
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
  std::list<Guest> guests_;  // who came first is first
};

}  // namespace flashmoe::network
