// How a rank connects to another's door: at one of its addresses after the other, again and again, until one answers and
// has proved to be that rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "network/socket.h"
#include "network/tls.h"

namespace flashmoe::network {

class Dialling {
 public:
  // addresses: the door's. Throws Error for what is none.
  Dialling(const TlsOfRank& tls, uint32_t peer, const std::string& addresses);

  // The connection, once; null as long as there is none. Waits for nobody.
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
  host::FileDescriptor socket_;  // that is not connected yet
  std::unique_ptr<Tls> tls_;     // that is
  uint64_t since_ns_ = 0, not_before_ns_ = 0;
  std::string why_ = "no answer";
};

}  // namespace flashmoe::network
