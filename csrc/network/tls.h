// TLS 1.3 between the ranks of one group, who know one key (RFC 8446, an external PSK with Diffie-Hellman): both sides
// prove that they know the key, and say which ranks they are; what they then say is encrypted, authenticated and in
// order. There are no certificates, tickets or early data, and no other version or cipher.
//
// One thread at a time.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "host/mapping.h"
#include "network/openssl.h"

namespace flashmoe::network {

// Drawn for each group: what was recorded of another group's handshakes proves nothing.
using GroupKey = std::array<uint8_t, 32>;

// What a rank's connections have in common.
class TlsOfRank {
 public:
  // library: OpenSSL's. Throws Error.
  TlsOfRank(const std::string& library, const GroupKey& key, uint32_t rank);
  ~TlsOfRank();
  TlsOfRank(const TlsOfRank&) = delete;
  TlsOfRank& operator=(const TlsOfRank&) = delete;

  const OpenSsl& api;
  const GroupKey key;
  const uint32_t rank;
  BioMethod* const sockets;  // how OpenSSL reads and writes
  SslCtx* const context;
};

// One connection, over a socket that does not block.
class Tls {
 public:
  static constexpr uint32_t kAnyone = ~uint32_t{0};
  // The side that connects, to `peer`; or with kAnyone the side that accepts whoever proves to be a rank. `of` must
  // outlive it.
  Tls(const TlsOfRank& of, host::FileDescriptor socket, uint32_t peer);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  enum class Result {
    kDone,
    kWaits,   // for the socket
    kFailed,  // for good; why() says why
  };
  Result handshake();
  Result read(uint8_t* to, size_t most, size_t& got);
  // A record at most, which is kept until flush() or until there are many: a packet of the network for each record costs
  // its sender as much as the cipher does. kWaits: what is kept has to leave first.
  Result write(const uint8_t* from, size_t bytes, size_t& put);
  // Sends what is kept.
  Result flush();
  bool keeps() const { return !kept_.empty(); }

  int socket() const { return socket_.get(); }
  // After the handshake: which rank it is at the other end.
  uint32_t peer() const { return peer_; }
  const std::string& why() const { return why_; }

 private:
  static int find_key(Ssl*, const unsigned char* identity, size_t bytes, SslSession**);
  static int use_key(Ssl*, const EvpMd*, const unsigned char** identity, size_t* bytes, SslSession**);
  static int keep(Bio*, const char* from, int bytes);
  static int receive_from(Bio*, char* to, int most);
  friend class TlsOfRank;
  SslSession* session() const;
  void begin_call();
  Result result(int returned);
  Result fail(const std::string& why);
  bool renew_key();

  // Who connects to whom, as the handshake says it.
  struct Identity {
    char protocol[16];
    uint32_t from, to;
  };

  const TlsOfRank& of_;
  const host::FileDescriptor socket_;
  const bool connects_;
  uint32_t peer_;
  Identity identity_;
  Ssl* const ssl_;
  uint64_t records_ = 0;       // sent with the present key
  std::vector<uint8_t> kept_;  // records, of which `gone_` bytes have been sent
  size_t gone_ = 0;
  int error_ = 0;  // of the system, by the socket
  std::string why_;
};

// A key of AES-GCM may protect 2^24.5 records (RFC 8446, 5.5), which a fast network has sent within minutes: after so
// many a sender takes the next one. Tests make it smaller, before there is a connection.
inline uint64_t records_per_key = uint64_t{1} << 22;

}  // namespace flashmoe::network
