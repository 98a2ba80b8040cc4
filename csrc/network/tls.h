// TLS 1.3 between the ranks of one group, which share one key (RFC 8446, an external PSK with Diffie-Hellman). Each
// side proves that it knows the key, and says which rank it is. What the sides then send is encrypted, authenticated
// and in order. There are no certificates, tickets or early data, and no other version or cipher.
//
// Used by one thread at a time.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "host/mapping.h"
#include "network/openssl.h"

namespace flashmoe::network {

// The key of a group. It is drawn anew for each group, so a recording of another group's handshakes proves nothing.
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
  BioMethod* const sockets;  // the functions by which OpenSSL reads and writes
  SslCtx* const context;
};

// One connection, over a socket that does not block.
class Tls {
 public:
  static constexpr uint32_t kAnyone = ~uint32_t{0};
  // This is the side that connects, to rank `peer`. With kAnyone, it is the side that accepts any rank that proves
  // which rank it is. `of` must outlive this object.
  Tls(const TlsOfRank& of, host::FileDescriptor socket, uint32_t peer);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  enum class Result {
    kDone,
    kWaits,   // waits for the socket
    kFailed,  // the connection has failed for good; why() says why
  };
  Result handshake();
  Result read(uint8_t* to, size_t most, size_t& got);
  // Encrypts at most one record's worth of the bytes; `put` becomes their number. The record is kept until flush(),
  // or until many records are kept. If each record were sent in a packet of its own, this would cost the sender as
  // much as the cipher does. kWaits: records that are kept must be sent first.
  Result write(const uint8_t* from, size_t bytes, size_t& put);
  // Sends the kept records.
  Result flush();
  bool keeps() const { return !kept_.empty(); }

  int socket() const { return socket_.get(); }
  // After the handshake: the rank at the other end.
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

  // Which rank connects to which. The connecting side sends this in the handshake.
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
  uint64_t records_ = 0;       // records sent with the present key
  std::vector<uint8_t> kept_;  // records; the first gone_ bytes of them have been sent
  size_t gone_ = 0;
  int error_ = 0;  // the system's error for the socket
  std::string why_;
};

// A key of AES-GCM may protect 2^24.5 records (RFC 8446, 5.5), which a fast network sends within minutes. So a sender
// takes the next key after this many records. Tests make the number smaller, before there is a connection.
inline uint64_t records_per_key = uint64_t{1} << 22;

}  // namespace flashmoe::network
