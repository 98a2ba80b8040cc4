#include "network/door.h"

#include <poll.h>

#include <algorithm>
#include <map>
#include <utility>

#include "host/clock.h"
#include "host/error.h"

namespace flashmoe::network {
namespace {

// A listener lets in at most this many guests at a time. Then the guests that are already in have their turn.
constexpr int kGuestsInARow = 64;

}  // namespace

Door::Door(const TlsOfRank& tls, const std::string& at) : tls_(tls) {
  std::vector<Address> all = own_addresses(at);
  for (Address& a : all) {
    try {
      listeners_.push_back(listening(a));
      at_.push_back(a);
    } catch (const host::Error&) {  // an address is not usable yet, for example because the host still tests it
      if (&a == &all.back() && at_.empty()) throw;
    }
  }
}

std::string Door::addresses() const {
  std::string all;
  for (const Address& a : at_) {
    if (!all.empty()) all += ',';
    all += text_of(a);
  }
  return all;
}

std::vector<std::unique_ptr<Tls>> Door::progress() {
  std::vector<pollfd> on;
  for (const host::FileDescriptor& l : listeners_) on.push_back({l.get(), POLLIN, 0});
  for (const Guest& g : guests_) on.push_back({g.tls->socket(), POLLIN, 0});
  poll(on.data(), on.size(), 0);

  std::vector<std::unique_ptr<Tls>> proved;
  const uint64_t now = host::monotonic_ns();
  auto ready = on.begin() + static_cast<std::ptrdiff_t>(listeners_.size());
  for (auto g = guests_.begin(); g != guests_.end(); ++ready) {
    const Tls::Result result = ready->revents != 0 ? g->tls->handshake() : Tls::Result::kWaits;
    if (result == Tls::Result::kDone) proved.push_back(std::move(g->tls));
    const bool over = result == Tls::Result::kDone || result == Tls::Result::kFailed || now - g->since_ns > kMostNs;
    g = over ? guests_.erase(g) : std::next(g);
  }
  for (size_t i = 0; i < listeners_.size(); ++i) {
    if (on[i].revents != 0) let_in(listeners_[i].get());
  }
  return proved;
}

void Door::let_in(int listener) {
  for (int i = 0; i < kGuestsInARow; ++i) {
    Address from;
    host::FileDescriptor socket = accepted(listener, from);
    if (socket.get() < 0) return;
    make_room();
    auto tls = std::make_unique<Tls>(tls_, std::move(socket), Tls::kAnyone);
    guests_.push_back({std::move(tls), host_of(from), host::monotonic_ns()});
  }
}

// If there are too many guests, closes the connection of one: the oldest guest of the host that has the most guests.
// So a host that floods the door takes places only from its own guests.
void Door::make_room() {
  if (guests_.size() < kMostGuests) return;
  std::map<std::string, size_t> of_host;
  for (const Guest& g : guests_) ++of_host[g.host];
  const auto most = std::max_element(of_host.begin(), of_host.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  guests_.erase(std::find_if(guests_.begin(), guests_.end(), [&](const Guest& g) { return g.host == most->first; }));
}

}  // namespace flashmoe::network
