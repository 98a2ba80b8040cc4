// Connects this rank to the door of another rank (door.h). It tries the door's addresses one after the other, again
// and again, until one of them answers and whoever answers has proved to be that rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "network/socket.h"
#include "network/tls.h"

namespace flashmoe::network {

class Dialling {
 public:
  // addresses: Door::addresses() of the peer. Throws Error for a text that is not an address.
  Dialling(const TlsOfRank& tls, uint32_t peer, const std::string& addresses);

  // Goes on dialling, without blocking. Returns the connection when its handshake is over, before that null. After
  // that, a further call dials anew.
  std::unique_ptr<Tls> progress();
  // Why the address that was tried last has given no connection.
  const std::string& why() const { return why_; }

 private:
  void begin();
  void give_up(const std::string& why);

  const TlsOfRank& of_;
  const uint32_t peer_;
  std::vector<Address> at_;
  size_t next_ = 0;
  host::FileDescriptor socket_;  // a socket that is not connected yet
  std::unique_ptr<Tls> tls_;     // over a socket that is connected
  uint64_t since_ns_ = 0, not_before_ns_ = 0;
  std::string why_ = "no answer";
};

}  // namespace flashmoe::network
