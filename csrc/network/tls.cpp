#include "network/tls.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::network {
namespace {

using host::concat;
using host::Error;

constexpr char kProtocol[16] = "flashmoe ranks1";

// The connection for which this thread has called OpenSSL: OpenSSL's callbacks use it. A thread calls OpenSSL for one
// connection at a time.
thread_local Tls* calling = nullptr;

template <class T>
T* checked(T* made) {
  if (made == nullptr) throw Error(Error::Kind::kOther, "openssl: expected memory for a connection, got none");
  return made;
}

// Records are kept until there are at least this many bytes of them. Sending 256 KiB at once instead of one record
// saves the sender 0.4 ns a byte, and more at once saves nothing further. So few bytes stay within a core's
// second-level cache.
constexpr size_t kKeptBytes = 240 << 10;
constexpr size_t kMostRecordBytes = 17 << 10;

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

// OpenSSL asks its BIO for a flush after some of its writes. This function only agrees: Tls::flush() sends, after
// OpenSSL's function has returned.
long control(Bio*, int command, long, void*) {
  return command == kBioCtrlFlush ? 1 : 0;
}

}  // namespace

TlsOfRank::TlsOfRank(const std::string& library, const GroupKey& group_key, uint32_t own_rank)
    : api(openssl(library)),
      key(group_key),
      rank(own_rank),
      sockets(checked(api.BIO_meth_new(kBioOfApplication, "flashmoe"))),
      context(checked(api.SSL_CTX_new(api.TLS_method()))) {
  const bool set = api.SSL_CTX_ctrl(context, kCtrlLeastProtocol, kTls13, nullptr) == 1 &&
                   api.SSL_CTX_ctrl(context, kCtrlMostProtocol, kTls13, nullptr) == 1 &&
                   api.SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") == 1 &&
                   api.SSL_CTX_set_num_tickets(context, 0) == 1 && api.BIO_meth_set_write(sockets, Tls::keep) == 1 &&
                   api.BIO_meth_set_read(sockets, Tls::receive_from) == 1 &&
                   api.BIO_meth_set_ctrl(sockets, control) == 1;
  if (!set) {
    api.SSL_CTX_free(context);
    api.BIO_meth_free(sockets);
    throw Error(Error::Kind::kOther,
                "openssl: expected TLS 1.3 with TLS_AES_128_GCM_SHA256, got a library that is not allowed to use it");
  }
  api.SSL_CTX_ctrl(context, kCtrlMode, kPartialWrites, nullptr);
  api.SSL_CTX_ctrl(context, kCtrlReadAhead, 1, nullptr);   // one read of the socket for each record, not two
  api.SSL_CTX_set_options(context, kIgnoreUnexpectedEof);  // ranks say goodbye by a message, so it means
                                                           // nothing how the connection ends
  api.SSL_CTX_set_psk_find_session_callback(context, Tls::find_key);
  api.SSL_CTX_set_psk_use_session_callback(context, Tls::use_key);
}

TlsOfRank::~TlsOfRank() {
  api.SSL_CTX_free(context);
  api.BIO_meth_free(sockets);
}

Tls::Tls(const TlsOfRank& of, host::FileDescriptor socket, uint32_t peer)
    : of_(of),
      socket_(std::move(socket)),
      connects_(peer != kAnyone),
      peer_(peer),
      identity_{{}, of.rank, peer},
      ssl_(checked(of.api.SSL_new(of.context))) {
  std::memcpy(identity_.protocol, kProtocol, sizeof(kProtocol));
  Bio* const bio = of.api.BIO_new(of.sockets);
  if (bio == nullptr) of.api.SSL_free(ssl_);
  of.api.BIO_set_init(checked(bio), 1);
  of.api.SSL_set_bio(ssl_, bio, bio);  // ssl_ frees the BIO
  if (connects_) {
    // The side that connects trusts no certificate, so a stranger cannot present one in place of the key.
    of.api.SSL_set_verify(ssl_, kVerifyPeer, nullptr);
    of.api.SSL_set_connect_state(ssl_);
  } else {
    of.api.SSL_set_accept_state(ssl_);
  }
}

Tls::~Tls() {
  of_.api.SSL_free(ssl_);
}

// The group's key in OpenSSL's form, or null.
SslSession* Tls::session() const {
  const OpenSsl& api = of_.api;
  SslSession* const made = api.SSL_SESSION_new();
  if (made == nullptr) return nullptr;
  const SslCipher* const cipher = api.SSL_CIPHER_find(ssl_, kAes128GcmSha256);
  if (cipher != nullptr && api.SSL_SESSION_set1_master_key(made, of_.key.data(), of_.key.size()) == 1 &&
      api.SSL_SESSION_set_cipher(made, cipher) == 1 && api.SSL_SESSION_set_protocol_version(made, kTls13) == 1) {
    return made;
  }
  api.SSL_SESSION_free(made);
  return nullptr;
}

// OpenSSL calls this on the accepting side, with the identity that the other side has sent, and gets the group's key.
// The handshake then proves that the other side, too, knows the key, so that its identity can be believed.
int Tls::find_key(Ssl*, const unsigned char* identity, size_t bytes, SslSession** session) {
  *session = nullptr;  // without a session the handshake fails, because this side has no certificate
  Tls* const self = calling;
  Identity said;
  if (bytes != sizeof(said)) return 1;
  std::memcpy(&said, identity, sizeof(said));
  const bool fits = std::memcmp(said.protocol, kProtocol, sizeof(kProtocol)) == 0 && said.to == self->of_.rank &&
                    said.from != self->of_.rank;
  if (!fits) return 1;
  *session = self->session();
  self->peer_ = said.from;
  return *session != nullptr ? 1 : 0;
}

int Tls::use_key(Ssl*, const EvpMd*, const unsigned char** identity, size_t* bytes, SslSession** session) {
  Tls* const self = calling;
  *session = self->session();
  *identity = reinterpret_cast<const unsigned char*>(&self->identity_);
  *bytes = sizeof(self->identity_);
  return *session != nullptr ? 1 : 0;
}

int Tls::keep(Bio*, const char* from, int bytes) {
  calling->kept_.insert(calling->kept_.end(), from, from + bytes);
  return bytes;
}

int Tls::receive_from(Bio* bio, char* to, int most) {
  const ssize_t bytes = recv(calling->socket(), to, static_cast<size_t>(most), 0);
  const OpenSsl& api = calling->of_.api;
  api.BIO_clear_flags(bio, kBioFlags);
  if (bytes < 0 && would_block()) {
    api.BIO_set_flags(bio, kBioRead | kBioShouldRetry);
  } else if (bytes < 0) {
    calling->error_ = errno;
  }
  return static_cast<int>(bytes);
}

void Tls::begin_call() {
  of_.api.ERR_clear_error();  // of earlier calls: SSL_get_error() looks at all that are left
  calling = this;
}

Tls::Result Tls::handshake() {
  begin_call();
  const Result r = result(of_.api.SSL_do_handshake(ssl_));
  const Result sent = flush();  // also if OpenSSL has written an alert instead
  if (r != Result::kDone) return r;
  if (of_.api.SSL_session_reused(ssl_) == 1) return sent;
  return fail("it does not know the group's key");  // a handshake without the key: no correct OpenSSL allows it
}

Tls::Result Tls::fail(const std::string& why) {
  why_ = why;
  return Result::kFailed;
}

Tls::Result Tls::read(uint8_t* to, size_t most, size_t& got) {
  got = 0;
  begin_call();
  return result(of_.api.SSL_read_ex(ssl_, to, most, &got));
}

Tls::Result Tls::write(const uint8_t* from, size_t bytes, size_t& put) {
  put = 0;
  if (kept_.size() >= kKeptBytes) {
    if (const Result r = flush(); r != Result::kDone) return r;
  }
  kept_.reserve(kKeptBytes + kMostRecordBytes);
  begin_call();
  if (records_ >= records_per_key && !renew_key()) return result(0);
  const Result r = result(of_.api.SSL_write_ex(ssl_, from, bytes, &put));
  if (r == Result::kDone) ++records_;
  return r;
}

// Sends by send(), not by OpenSSL's own BIO for sockets, which would raise SIGPIPE if the peer has closed the
// connection.
Tls::Result Tls::flush() {
  while (gone_ < kept_.size()) {
    const ssize_t bytes = send(socket(), kept_.data() + gone_, kept_.size() - gone_, MSG_NOSIGNAL);
    if (bytes < 0) return would_block() ? Result::kWaits : fail(std::strerror(errno));
    gone_ += static_cast<size_t>(bytes);
  }
  kept_.clear();
  gone_ = 0;
  return Result::kDone;
}

bool Tls::renew_key() {
  records_ = 0;
  return of_.api.SSL_key_update(ssl_, kKeyUpdateOfOwn) == 1;
}

Tls::Result Tls::result(int returned) {
  if (returned == 1) return Result::kDone;
  const int error = of_.api.SSL_get_error(ssl_, returned);
  if (error == kErrorWantRead || error == kErrorWantWrite) return Result::kWaits;
  if (error_ != 0) return fail(std::strerror(error_));
  if (error == kErrorZeroReturn || error == kErrorSyscall) return fail("it closed the connection");
  const char* const reason = of_.api.ERR_reason_error_string(of_.api.ERR_get_error());
  return fail(concat("TLS: ", reason == nullptr ? "an error without a reason" : reason));
}

}  // namespace flashmoe::network
