// Messages to ranks on other machines: a connection to each. One thread at a time.
//
// Of two ranks the higher connects to the lower's door (door.h), which is closed when all higher ones have come: nothing
// listens while a group runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "network/connection.h"
#include "network/dialling.h"
#include "network/door.h"
#include "network/message.h"

namespace flashmoe::network {

class Wire {
 public:
  // library: OpenSSL's. at: see own_addresses(). Throws Error.
  Wire(const std::string& library, const GroupKey& key, uint32_t rank, uint32_t ranks, const std::string& at);

  // Where others reach this rank.
  std::string address() const { return address_; }
  // That the peer is on another machine, and where.
  void connect(uint32_t peer, const std::string& address);
  // Who is told of what comes, which must outlive it.
  void deliver_to(Receiver& receiver) { receiver_ = &receiver; }
  // Sends, sooner or later, unless the peer is lost.
  void send(uint32_t peer, std::unique_ptr<Message> message);
  // Copies what messages that wait are of; whether all of them have been copied.
  void pack();
  bool is_packed() const;
  // Receives and sends what can be; whether there was anything.
  bool progress();
  // Waits until there may be something, until `fd` can be read, or for so long.
  void wait(int fd, int milliseconds);
  // Why nothing more gets to or from the peer; empty as long as it does.
  const std::string& lost(uint32_t peer) const { return peers_[peer].connection.lost(); }
  // Why there is no connection to the peer yet, as far as is known here.
  std::string trouble(uint32_t peer) const;

 private:
  struct Peer {
    bool expected = false;  // it is on another machine
    Connection connection;
    std::unique_ptr<Dialling> dialling;  // until the connection is sure; null where the peer connects
  };
  void meet();
  void poll_all(int extra, int milliseconds);

  const uint32_t rank_;
  const TlsOfRank tls_;
  std::unique_ptr<Door> door_;  // while somebody is missing
  const std::string address_;
  bool meeting_ = true;
  std::vector<Peer> peers_;
  std::vector<int> ready_;  // by peer: what its socket is ready for
  bool polled_ = false;     // since progress() has looked last
  Receiver* receiver_ = nullptr;
};

}  // namespace flashmoe::network
