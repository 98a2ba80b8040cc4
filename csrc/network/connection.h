// The connection to one rank on another machine. It sends messages to that rank and receives messages from it, in
// order, over TLS. Messages to be sent wait until there is a TLS connection.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "network/message.h"
#include "network/tls.h"

namespace flashmoe::network {

// A Receiver is told of the messages that come. It names the places in memory to which a message's data is read
// straight from the connection.
class Receiver {
 public:
  struct Place {
    uint8_t* to;
    uint64_t bytes;
  };
  // Returns where the bytes that follow the message's ranges are to be written, in the order in which they come.
  // Throws Error for an impossible message.
  virtual std::vector<Place> places(uint32_t peer, const Header&, const std::vector<Range>&) = 0;
  // Called when all these bytes are in their places.
  virtual void arrived(uint32_t peer, const Header&) = 0;

 protected:
  ~Receiver() = default;
};

class Connection {
 public:
  // Sends the message later, unless the connection is lost.
  void send(std::unique_ptr<Message> message);
  // Called when the handshake is over. The accepting side sends first. The connecting side sends nothing before it
  // has received something: until then, the accepting side may close the connection again, because it has not seen
  // the end of the handshake. If it closes the connection, end() makes room for another one.
  void begin(std::unique_ptr<Tls> tls, bool accepted);
  void end() { tls_.reset(); }

  // Receives what has come. Returns whether there was anything. `peer` is the number of the peer.
  bool receive(uint32_t peer, Receiver& receiver);
  // Sends what can be sent without waiting. Returns whether anything was sent.
  bool flush();
  // Copies the data of all waiting messages from the heap into the messages, so that the heap may then be
  // overwritten.
  void pack();
  bool is_packed() const;

  bool is_open() const { return tls_ != nullptr; }
  // Whether this rank knows that the peer, too, has the connection (see begin()).
  bool is_sure() const { return sure_; }
  // Whether receive() can read more without waiting for the socket. receive() stops now and then, so that other
  // connections have their turn.
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
  size_t sent_ = 0;  // how many bytes of the first outgoing message have been sent
  Receiver::Place next();
  void complete(uint32_t peer, Receiver& receiver);

  // The parts of the message that is coming: its header, its ranges, and the places where the bytes that follow go.
  // have_ counts the bytes that have come of the first incomplete part.
  Header header_{};
  std::vector<Range> ranges_;
  std::vector<Receiver::Place> places_;
  size_t place_ = 0;
  uint64_t have_ = 0;
  enum class Part { kHeader, kRanges, kPlaces } part_ = Part::kHeader;
};

}  // namespace flashmoe::network
