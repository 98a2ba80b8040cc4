#include "network/connection.h"

#include <algorithm>
#include <utility>

#include "host/error.h"

namespace flashmoe::network {
namespace {

// After this many bytes, receive() and flush() stop, so that other connections have their turn. It is a few messages
// of the usual size.
constexpr uint64_t kBytesInARow = 2 << 20;
constexpr const char* kNoMessage = "what it sends is no message of this version's";

}  // namespace

void Connection::send(std::unique_ptr<Message> message) {
  if (!lost_.empty()) return;
  outgoing_.push_back(std::move(message));
}

void Connection::begin(std::unique_ptr<Tls> tls, bool accepted) {
  tls_ = std::move(tls);
  sure_ = accepted;
  has_more_ = true;  // OpenSSL may have read data with the handshake's last bytes
}

void Connection::lose(const std::string& why) {
  lost_ = why;
  tls_.reset();
  has_more_ = false;
  outgoing_.clear();
}

bool Connection::check(Tls::Result result) {
  if (result == Tls::Result::kFailed) {
    if (sure_) {
      lose(tls_->why());
    } else {
      end();
    }
  }
  return result == Tls::Result::kDone;
}

bool Connection::receive(uint32_t peer, Receiver& receiver) {
  has_more_ = false;
  uint64_t came = 0;
  while (is_open()) {
    if (came >= kBytesInARow) {
      has_more_ = true;
      break;
    }
    const Receiver::Place to = next();
    size_t got = 0;
    if (to.bytes > have_ && !check(tls_->read(to.to + have_, to.bytes - have_, got))) break;
    sure_ = true;
    came += got;
    have_ += got;
    if (have_ < to.bytes) continue;
    have_ = 0;
    try {
      complete(peer, receiver);
    } catch (const host::Error& error) {
      lose(error.what());
    }
  }
  return came != 0;
}

// Returns where the next bytes go: to the first incomplete part of the message that is coming.
Receiver::Place Connection::next() {
  if (part_ == Part::kHeader) return {reinterpret_cast<uint8_t*>(&header_), sizeof(header_)};
  if (part_ == Part::kRanges) return {reinterpret_cast<uint8_t*>(ranges_.data()), ranges_.size() * sizeof(Range)};
  return places_[place_];
}

// Called when the part that next() has returned is complete. Goes on to the next part, or to the next message.
void Connection::complete(uint32_t peer, Receiver& receiver) {
  if (part_ == Part::kHeader) {
    if (header_.ranges > header_.bytes / sizeof(Range)) throw host::Error(host::Error::Kind::kGroup, kNoMessage);
    ranges_.resize(header_.ranges);
    part_ = Part::kRanges;
  } else if (part_ == Part::kRanges) {
    places_ = receiver.places(peer, header_, ranges_);
    uint64_t left = header_.bytes - ranges_.size() * sizeof(Range);
    for (const Receiver::Place& p : places_) left -= p.bytes;
    if (left != 0) throw host::Error(host::Error::Kind::kGroup, kNoMessage);
    place_ = 0;
    part_ = Part::kPlaces;
  } else {
    ++place_;
  }
  if (part_ != Part::kPlaces || place_ < places_.size()) return;
  part_ = Part::kHeader;
  receiver.arrived(peer, header_);
}

void Connection::pack() {
  for (const auto& m : outgoing_) m->pack();
}

bool Connection::is_packed() const {
  return std::all_of(outgoing_.begin(), outgoing_.end(), [](const auto& m) { return m->is_packed(); });
}

bool Connection::flush() {
  uint64_t gone = 0;
  while (is_open() && !outgoing_.empty() && gone < kBytesInARow) {
    Message& m = *outgoing_.front();
    if (sent_ == 0) {
      m.pack();
      m.seal();
    }
    size_t put = 0;
    if (!check(tls_->write(m.bytes() + sent_, m.size - sent_, put))) break;
    gone += put;
    sent_ += put;
    if (sent_ < m.size) continue;
    outgoing_.pop_front();
    sent_ = 0;
  }
  if (is_open()) check(tls_->flush());
  return gone != 0;
}

}  // namespace flashmoe::network
