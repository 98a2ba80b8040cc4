// Connects a rank to another's door. It tries the door's addresses one after the other, again and again, until one
// answers and has proved to be that rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "network/socket.h"
#include "network/tls.h"

namespace flashmoe::network {

class Dialling {
 public:
  // addresses: the door's. Throws Error for a text that is not an address.
  Dialling(const TlsOfRank& tls, uint32_t peer, const std::string& addresses);

  // Returns the connection, once; null while there is none. Does not block.
  std::unique_ptr<Tls> progress();
  // Why the last address did not answer.
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
