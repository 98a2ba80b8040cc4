// TCP sockets that do not block, and the addresses of this host.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "host/mapping.h"

namespace flashmoe::network {

struct Address {
  sockaddr_storage bytes{};
  socklen_t length = 0;
};

// "10.0.0.1:4711", "[fd00::1]:4711".
std::string text_of(const Address& address);
// The host alone; guests are counted by it.
std::string host_of(const Address& address);
// The address whose text_of() is `text`. Throws Error.
Address address_of(const std::string& text);

// The addresses, with port 0, at which others may reach this host. `at` names interfaces or addresses, separated by
// commas. If it is empty, these are all addresses but those that no other host reaches. Throws Error if nothing usable
// has such a name.
std::vector<Address> own_addresses(const std::string& at);

// A socket that listens at the address. Sets the address's port. Throws Error.
host::FileDescriptor listening(Address& address);
// The next connection to a listener, and where it comes from; -1 if there is none.
host::FileDescriptor accepted(int listener, Address& from);
// Begins a connection; -1 if it cannot be begun, with errno.
host::FileDescriptor connecting(const Address& to);
// What became of connecting(): 0 if it is connected, EINPROGRESS while that is not decided, else the error.
int connected(int socket);

}  // namespace flashmoe::network
