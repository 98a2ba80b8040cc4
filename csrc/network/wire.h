// Sends messages to ranks on other machines and receives messages from them, over a connection to each. Used by one
// thread at a time.
//
// Of two ranks, the one with the higher number connects to the door of the other (door.h). A rank closes its door
// when all ranks with higher numbers have come, so nothing listens while a group runs.
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
  // Says that the peer is on another machine, and at which addresses its door is.
  void connect(uint32_t peer, const std::string& address);
  // Sets the receiver that is told of messages that come. It must outlive this object.
  void deliver_to(Receiver& receiver) { receiver_ = &receiver; }
  // Takes the message, which is sent when it can be, unless the peer is lost.
  void send(uint32_t peer, std::unique_ptr<Message> message);
  // pack: copies the data of waiting messages into them. is_packed: whether all waiting messages have their data.
  void pack();
  bool is_packed() const;
  // Receives and sends what is possible without waiting. Returns whether there was anything.
  bool progress();
  // Waits until progress() may have something to do, or `fd` can be read, or so many milliseconds have passed.
  void wait(int fd, int milliseconds);
  // Why nothing more gets to or from the peer; empty while the peer can be reached.
  const std::string& lost(uint32_t peer) const { return peers_[peer].connection.lost(); }
  // Why there is no connection to the peer yet, as far as this rank knows.
  std::string trouble(uint32_t peer) const;

 private:
  struct Peer {
    bool expected = false;  // the peer is on another machine
    Connection connection;
    std::unique_ptr<Dialling> dialling;  // null once the connection is sure, and if the peer is the one that connects
  };
  void meet();
  void poll_all(int extra, int milliseconds);

  const uint32_t rank_;
  const TlsOfRank tls_;
  std::unique_ptr<Door> door_;  // null once all peers that connect to this rank have come
  const std::string address_;
  bool meeting_ = true;
  std::vector<Peer> peers_;
  std::vector<int> ready_;  // by peer: what poll() says of its socket
  bool polled_ = false;     // whether wait() has filled ready_, and progress() has not used it yet
  Receiver* receiver_ = nullptr;
};

}  // namespace flashmoe::network
