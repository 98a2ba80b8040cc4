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

// The address as text: "10.0.0.1:4711", "[fd00::1]:4711".
std::string text_of(const Address& address);
// The address without its port. Door counts the guests of each host by this text.
std::string host_of(const Address& address);
// The address whose text_of() is `text`. Throws Error.
Address address_of(const std::string& text);

// The addresses, with port 0, at which others may reach this host. `at` names interfaces or addresses, separated by
// commas. If `at` is empty, these are all addresses that another host can reach. Throws Error if nothing that can be
// used has one of the names.
std::vector<Address> own_addresses(const std::string& at);

// A socket that listens at the address. Sets the address's port. Throws Error.
host::FileDescriptor listening(Address& address);
// The next connection to a listener; `from` becomes the address from which it comes. -1 if there is none.
host::FileDescriptor accepted(int listener, Address& from);
// Begins to connect, and returns the socket. It is -1, with errno, if connecting has failed at once.
host::FileDescriptor connecting(const Address& to);
// What became of a socket of connecting(): 0 if it is connected, EINPROGRESS while this is not decided, else the
// error.
int connected(int socket);

}  // namespace flashmoe::network
