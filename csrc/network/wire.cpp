#include "network/wire.h"

#include <poll.h>

#include <algorithm>
#include <utility>

namespace flashmoe::network {
namespace {

constexpr int kMeetingMs = 5;  // milliseconds between looks at the door

}  // namespace

Wire::Wire(const std::string& library, const GroupKey& key, uint32_t rank, uint32_t ranks, const std::string& at)
    : rank_(rank),
      tls_(library, key, rank),
      door_(std::make_unique<Door>(tls_, at)),
      address_(door_->addresses()),
      peers_(ranks),
      ready_(ranks) {}

void Wire::connect(uint32_t peer, const std::string& address) {
  peers_[peer].expected = true;
  if (peer < rank_) peers_[peer].dialling = std::make_unique<Dialling>(tls_, peer, address);
}

void Wire::send(uint32_t peer, std::unique_ptr<Message> message) {
  peers_[peer].connection.send(std::move(message));
}

void Wire::pack() {
  for (Peer& p : peers_) p.connection.pack();
}

bool Wire::is_packed() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.connection.is_packed(); });
}

std::string Wire::trouble(uint32_t peer) const {
  const Peer& p = peers_[peer];
  return p.dialling != nullptr ? p.dialling->why() : std::string();
}

// Goes on making connections: with peers that connect to this rank, and with peers that this rank connects to.
void Wire::meet() {
  if (door_ != nullptr) {
    for (std::unique_ptr<Tls>& tls : door_->progress()) {
      const uint32_t q = tls->peer();
      const bool wanted = q > rank_ && q < peers_.size() && peers_[q].expected && !peers_[q].connection.is_open() &&
                          peers_[q].connection.lost().empty();
      if (wanted) peers_[q].connection.begin(std::move(tls), true);  // else closes it: the rank is not expected, or is
                                                                     // connected already
    }
  }
  bool all = true, all_came = true;
  for (uint32_t q = 0; q < peers_.size(); ++q) {
    Peer& p = peers_[q];
    if (!p.expected) continue;
    if (p.dialling != nullptr && !p.connection.is_open()) {
      if (auto tls = p.dialling->progress()) p.connection.begin(std::move(tls), false);
    }
    if (p.connection.is_sure()) p.dialling.reset();
    all = all && p.connection.is_sure();
    all_came = all_came && (q < rank_ || p.connection.is_sure());
  }
  if (all_came) door_.reset();
  meeting_ = !all;
}

bool Wire::progress() {
  if (meeting_) meet();
  if (!std::exchange(polled_, false)) poll_all(-1, 0);
  bool any = false;
  for (uint32_t q = 0; q < peers_.size(); ++q) {
    Connection& c = peers_[q].connection;
    if (!c.is_open()) continue;
    if (c.has_more() || (ready_[q] & ~POLLOUT) != 0) {
      any |= c.receive(q, *receiver_);
    }
    if (c.waits_to_write() && (ready_[q] & POLLOUT) != 0) any |= c.flush();
  }
  return any;
}

void Wire::wait(int fd, int milliseconds) {
  const auto has_more = [](const Peer& p) { return p.connection.has_more(); };
  if (std::any_of(peers_.begin(), peers_.end(), has_more)) return;
  poll_all(fd, meeting_ ? std::min(milliseconds, kMeetingMs) : milliseconds);
  polled_ = true;
}

void Wire::poll_all(int extra, int milliseconds) {
  std::vector<pollfd> on{{extra, POLLIN, 0}};
  for (const Peer& p : peers_) {
    const Connection& c = p.connection;
    const auto events = static_cast<short>(POLLIN | (c.waits_to_write() ? POLLOUT : 0));
    on.push_back({c.is_open() ? c.socket() : -1, events, 0});
  }
  poll(on.data(), on.size(), milliseconds);
  for (size_t q = 0; q < peers_.size(); ++q) ready_[q] = on[q + 1].revents;
}

}  // namespace flashmoe::network
