// Sends messages to one rank on another machine and receives messages from it, in order, over a TLS connection, once
// there is one.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "network/message.h"
#include "network/tls.h"

namespace flashmoe::network {

// Is told of messages that come. The data of a message is read straight to where it belongs.
class Receiver {
 public:
  struct Place {
    uint8_t* to;
    uint64_t bytes;
  };
  // Where the bytes behind the message's ranges go, in order. Throws Error for an impossible message.
  virtual std::vector<Place> places(uint32_t peer, const Header&, const std::vector<Range>&) = 0;
  // Called when these bytes are there.
  virtual void arrived(uint32_t peer, const Header&) = 0;

 protected:
  ~Receiver() = default;
};

class Connection {
 public:
  // Sends the message later, unless the connection is lost.
  void send(std::unique_ptr<Message> message);
  // Called when the handshake is over. The side that accepts speaks first; the side that connects sends nothing before
  // it has heard something. Until then the accepting rank may still close the connection, because it did not see the
  // handshake's end. In that case end() makes room for another connection.
  void begin(std::unique_ptr<Tls> tls, bool accepted);
  void end() { tls_.reset(); }

  // Receives what has come. Returns whether there was anything. `peer` is the number of the peer.
  bool receive(uint32_t peer, Receiver& receiver);
  // Sends what can go. Returns whether there was anything.
  bool flush();
  // Copies the data of waiting messages into them, so that they no longer need the heap.
  void pack();
  bool is_packed() const;

  bool is_open() const { return tls_ != nullptr; }
  // Whether the peer is known to have the connection.
  bool is_sure() const { return sure_; }
  // Whether receive() can read more without waiting for the socket. It stops now and then, so that other connections
  // have their turn.
  bool has_more() const { return has_more_; }
  bool waits_to_write() const { return is_open() && sure_ && (!outgoing_.empty() || tls_->keeps()); }
  int socket() const { return tls_->socket(); }
  // Why nothing more comes or goes; empty while the connection may work.
  const std::string& lost() const { return lost_; }
  void lose(const std::string& why);

 private:
  bool check(Tls::Result result);

  std::unique_ptr<Tls> tls_;
  bool sure_ = false, has_more_ = false;
  std::string lost_;
  std::deque<std::unique_ptr<Message>> outgoing_;
  size_t sent_ = 0;  // bytes of the first message that are sent
  Receiver::Place next();
  void complete(uint32_t peer, Receiver& receiver);

  // Of the message that is coming: its header, its ranges, and where their bytes go. have_ counts the bytes of the
  // first incomplete one of these parts.
  Header header_{};
  std::vector<Range> ranges_;
  std::vector<Receiver::Place> places_;
  size_t place_ = 0;
  uint64_t have_ = 0;
  enum class Part { kHeader, kRanges, kPlaces } part_ = Part::kHeader;
};

}  // namespace flashmoe::network
