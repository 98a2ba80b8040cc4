// Messages to and from ranks on other machines, with a connection to each. Used by one thread at a time.
//
// Of two ranks the higher one connects to the lower one's door (door.h). The door is closed when all higher ranks have
// come, so nothing listens while a group runs.
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

  // The addresses where other ranks reach this rank.
  std::string address() const { return address_; }
  // Says that the peer is on another machine, and at which addresses.
  void connect(uint32_t peer, const std::string& address);
  // Sets who is told of messages that come. The receiver must outlive this object.
  void deliver_to(Receiver& receiver) { receiver_ = &receiver; }
  // Sends the message sooner or later, unless the peer is lost.
  void send(uint32_t peer, std::unique_ptr<Message> message);
  // pack: copies the data of waiting messages into them. is_packed: whether all waiting messages have their data.
  void pack();
  bool is_packed() const;
  // Receives and sends as much as is possible at once. Returns whether there was anything.
  bool progress();
  // Waits until there may be something to do, until `fd` can be read, or for so many milliseconds.
  void wait(int fd, int milliseconds);
  // Why nothing more gets to or from the peer; empty while the peer can be reached.
  const std::string& lost(uint32_t peer) const { return peers_[peer].connection.lost(); }
  // Why there is no connection to the peer yet, as far as this rank knows.
  std::string trouble(uint32_t peer) const;

 private:
  struct Peer {
    bool expected = false;  // the peer is on another machine
    Connection connection;
    std::unique_ptr<Dialling> dialling;  // until the connection is sure; null if the peer connects
  };
  void meet();
  void poll_all(int extra, int milliseconds);

  const uint32_t rank_;
  const TlsOfRank tls_;
  std::unique_ptr<Door> door_;  // while a peer is missing
  const std::string address_;
  bool meeting_ = true;
  std::vector<Peer> peers_;
  std::vector<int> ready_;  // by peer: what its socket is ready for
  bool polled_ = false;     // whether ready_ is newer than the last look of progress()
  Receiver* receiver_ = nullptr;
};

}  // namespace flashmoe::network
