// What goes to and comes from one rank on another machine: messages, in order, over a TLS connection, once there is one.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "network/message.h"
#include "network/tls.h"

namespace flashmoe::network {

// Who is told of messages. What a message brings is read to where it belongs, and nowhere else before.
class Receiver {
 public:
  struct Place {
    uint8_t* to;
    uint64_t bytes;
  };
  // Where the bytes behind the message's ranges go, in order. Throws Error for a message that cannot be.
  virtual std::vector<Place> places(uint32_t peer, const Header&, const std::vector<Range>&) = 0;
  // They are there.
  virtual void arrived(uint32_t peer, const Header&) = 0;

 protected:
  ~Receiver() = default;
};

class Connection {
 public:
  // Sends later, unless the connection is lost.
  void send(std::unique_ptr<Message> message);
  // The handshake is over. This side sends nothing before the other has: who accepts speaks first, and until it has the
  // connection may still be closed by a rank that did not see the handshake's end; then end() makes room for another.
  void begin(std::unique_ptr<Tls> tls, bool accepted);
  void end() { tls_.reset(); }

  // Whether anything has come from the peer, which has that number.
  bool receive(uint32_t peer, Receiver& receiver);
  // Whether anything has gone.
  bool flush();
  // Messages that wait no longer need what they are of.
  void pack();
  bool is_packed() const;

  bool is_open() const { return tls_ != nullptr; }
  // Whether the peer is known to have the connection.
  bool is_sure() const { return sure_; }
  // Whether receive() has more without waiting for the socket; it stops now and then, so that others have their turn.
  bool has_more() const { return has_more_; }
  bool waits_to_write() const { return is_open() && sure_ && (!outgoing_.empty() || tls_->keeps()); }
  int socket() const { return tls_->socket(); }
  // Why nothing more comes or goes; empty as long as something may.
  const std::string& lost() const { return lost_; }
  void lose(const std::string& why);

 private:
  bool check(Tls::Result result);

  std::unique_ptr<Tls> tls_;
  bool sure_ = false, has_more_ = false;
  std::string lost_;
  std::deque<std::unique_ptr<Message>> outgoing_;
  size_t sent_ = 0;  // bytes of the first
  Receiver::Place next();
  void complete(uint32_t peer, Receiver& receiver);

  // Of the message that comes: its header, its ranges, and where their bytes go; what has come of the first of these that
  // is not complete.
  Header header_{};
  std::vector<Range> ranges_;
  std::vector<Receiver::Place> places_;
  size_t place_ = 0;
  uint64_t have_ = 0;
  enum class Part { kHeader, kRanges, kPlaces } part_ = Part::kHeader;
};

}  // namespace flashmoe::network
