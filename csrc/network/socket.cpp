#include "network/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <sstream>

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::network {
namespace {

using host::concat;
using host::Error;
using host::FileDescriptor;

constexpr int kBacklog = 128;
constexpr size_t kMostAddresses = 16;  // most addresses of one host

const sockaddr* generic(const Address& a) {
  return reinterpret_cast<const sockaddr*>(&a.bytes);
}

Address copy_of(const sockaddr* from) {
  Address a;
  a.length = from->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::memcpy(&a.bytes, from, a.length);
  return a;
}

// Whether the address is link-local. Other hosts could not use it, because it is valid only together with the name of
// an interface.
bool is_of_a_link(const sockaddr* a) {
  return a->sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr);
}

std::vector<std::string> names_of(const std::string& at) {
  std::vector<std::string> names;
  std::istringstream in(at);
  for (std::string name; std::getline(in, name, ',');) {
    if (!name.empty()) names.push_back(name);
  }
  return names;
}

[[noreturn]] void fail(const char* what, const Address& a) {
  throw Error(Error::Kind::kGroup, concat("network: ", what, " ", text_of(a), " failed: ", std::strerror(errno)));
}

FileDescriptor opened(const Address& a) {
  return FileDescriptor(socket(a.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Turns off TCP's delay: it would hold back the end of what is sent, to wait for more data, but a message is complete
// when it is sent.
void send_at_once(int socket) {
  const int yes = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

}  // namespace

std::string host_of(const Address& address) {
  char host[NI_MAXHOST];
  const int failed = getnameinfo(generic(address), address.length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return failed != 0 ? "an unknown address" : host;
}

std::string text_of(const Address& address) {
  const bool six = address.bytes.ss_family == AF_INET6;
  const in_port_t port = six ? reinterpret_cast<const sockaddr_in6*>(&address.bytes)->sin6_port
                             : reinterpret_cast<const sockaddr_in*>(&address.bytes)->sin_port;
  return concat(six ? "[" : "", host_of(address), six ? "]:" : ":", ntohs(port));
}

Address address_of(const std::string& text) {
  const size_t colon = text.rfind(':');
  std::string name = text.substr(0, colon);
  if (name.size() > 2 && name.front() == '[' && name.back() == ']') name = name.substr(1, name.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (colon == std::string::npos || getaddrinfo(name.c_str(), text.c_str() + colon + 1, &hints, &found) != 0) {
    throw Error(Error::Kind::kGroup,
                concat("network: expected a rank's address and port, got '",
                       host::text_of_another(text.data(), std::min<size_t>(text.size(), 80)), "'"));
  }
  const Address a = copy_of(found->ai_addr);
  freeaddrinfo(found);
  return a;
}

std::vector<Address> own_addresses(const std::string& at) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) {
    throw Error(Error::Kind::kGroup,
                concat("network: asking for this host's addresses failed: ", std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, freeifaddrs);
  std::vector<std::string> names = names_of(at);
  const bool any = names.empty();
  std::vector<Address> found;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0 || is_of_a_link(i->ifa_addr)) continue;
    if (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6) continue;
    const Address a = copy_of(i->ifa_addr);
    const bool named =
        std::count(names.begin(), names.end(), i->ifa_name) + std::count(names.begin(), names.end(), host_of(a)) != 0;
    if (!named && !(any && (i->ifa_flags & IFF_LOOPBACK) == 0)) continue;
    if (found.size() < kMostAddresses) found.push_back(a);
  }
  if (found.empty()) {
    throw Error(
        Error::Kind::kInvalidArgument,
        concat("FLASHMOE_INTERFACE: expected network interfaces of this host that are up and have an address (such "
               "as eth0), got ",
               any ? "none but its own loopback" : concat("'", at, "'")));
  }
  return found;
}

FileDescriptor listening(Address& address) {
  FileDescriptor made = opened(address);
  const bool listens = made.get() >= 0 && bind(made.get(), generic(address), address.length) == 0 &&
                       listen(made.get(), kBacklog) == 0 &&
                       getsockname(made.get(), reinterpret_cast<sockaddr*>(&address.bytes), &address.length) == 0;
  if (!listens) fail("listening at", address);
  return made;
}

FileDescriptor accepted(int listener, Address& from) {
  from.length = sizeof(from.bytes);
  FileDescriptor made(
      accept4(listener, reinterpret_cast<sockaddr*>(&from.bytes), &from.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (made.get() >= 0) send_at_once(made.get());
  return made;
}

FileDescriptor connecting(const Address& to) {
  FileDescriptor made = opened(to);
  if (made.get() < 0) return made;
  send_at_once(made.get());
  if (connect(made.get(), generic(to), to.length) != 0 && errno != EINPROGRESS) return FileDescriptor();
  return made;
}

int connected(int socket) {
  pollfd on{socket, POLLOUT, 0};
  if (poll(&on, 1, 0) == 0) return EINPROGRESS;
  int error = 0;
  socklen_t bytes = sizeof(error);
  return getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0 ? errno : error;
}

}  // namespace flashmoe::network
