#include "network/dialling.h"

#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

#include "host/clock.h"
#include "host/text.h"
#include "network/door.h"

namespace flashmoe::network {
namespace {

using host::concat;
using host::monotonic_ns;

// The longest wait for an address to answer. An address that this rank cannot reach may swallow what is sent to it,
// without an error.
constexpr uint64_t kMostConnectNs = 2'000'000'000;
constexpr uint64_t kPauseNs = 50'000'000;  // pause before the next address

}  // namespace

Dialling::Dialling(const TlsOfRank& tls, uint32_t peer, const std::string& addresses) : of_(tls), peer_(peer) {
  std::istringstream in(addresses);
  for (std::string each; std::getline(in, each, ',');) at_.push_back(address_of(each));
}

std::unique_ptr<Tls> Dialling::progress() {
  if (at_.empty()) return nullptr;
  const uint64_t now = monotonic_ns();
  if (tls_ == nullptr && socket_.get() < 0) {
    if (now >= not_before_ns_) begin();
    return nullptr;
  }
  if (tls_ == nullptr) {
    const int error = connected(socket_.get());
    if (error == EINPROGRESS) {
      if (now - since_ns_ > kMostConnectNs) give_up("no answer");
      return nullptr;
    }
    if (error != 0) {
      give_up(std::strerror(error));
      return nullptr;
    }
    tls_ = std::make_unique<Tls>(of_, std::move(socket_), peer_);
    socket_ = host::FileDescriptor();
  }
  const Tls::Result result = tls_->handshake();
  if (result == Tls::Result::kDone) {
    since_ns_ = 0;
    return std::move(tls_);
  }
  if (result == Tls::Result::kFailed) give_up(tls_->why());
  if (tls_ != nullptr && now - since_ns_ > Door::kMostNs) give_up("it does not answer as a rank of the group does");
  return nullptr;
}

void Dialling::begin() {
  since_ns_ = monotonic_ns();
  socket_ = connecting(at_[next_]);
  if (socket_.get() < 0) give_up(std::strerror(errno));
}

void Dialling::give_up(const std::string& why) {
  why_ = concat(text_of(at_[next_]), ": ", why);
  tls_.reset();
  socket_ = host::FileDescriptor();
  next_ = (next_ + 1) % at_.size();
  not_before_ns_ = monotonic_ns() + kPauseNs;
}

}  // namespace flashmoe::network
