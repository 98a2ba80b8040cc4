// Sockets of TCP that do not block, and the addresses of this host.
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
// The host alone, by which guests are counted.
std::string host_of(const Address& address);
// What text_of() has made. Throws Error.
Address address_of(const std::string& text);

// The addresses, with port 0, at which others may reach this host: those of the interfaces or addresses that `at` names,
// separated by commas; without a name, all but those that no other host reaches. Throws Error for a name that is none.
std::vector<Address> own_addresses(const std::string& at);

// A socket that listens at the address, which gets its port. Throws Error.
host::FileDescriptor listening(Address& address);
// The next connection to a listener, and where it is from; -1 where there is none.
host::FileDescriptor accepted(int listener, Address& from);
// A connection that is begun; -1 where it cannot be, with errno.
host::FileDescriptor connecting(const Address& to);
// What became of connecting(): 0 where it is a connection, EINPROGRESS as long as nothing has, else why it is none.
int connected(int socket);

}  // namespace flashmoe::network
