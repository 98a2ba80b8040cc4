// What csrc/network calls of OpenSSL, without cryptography and instrumented as the tests are: bytes go as they are, in pieces of random sizes. In place of a handshake the side that connects sends its identity and the key,
// and the other answers with a byte.
#include <algorithm>
#include <random>
#include <string>

#include "network/openssl.h"

namespace flashmoe::network {

struct SslSession {
  std::string key;
};

struct SslCtx {
  PskOfServer find = nullptr;
  PskOfClient use = nullptr;
};

struct BioMethod {
  BioWrite write = nullptr;
  BioRead read = nullptr;
};

struct Bio {
  const BioMethod* how;
  int flags;
};

struct Ssl {
  SslCtx* context = nullptr;
  Bio* bio = nullptr;
  bool connects = false, sent = false;
  std::string said;  // what has come of the other side's identity and key
  int error = 0;
  std::mt19937 random{1};
};

}  // namespace flashmoe::network

using namespace flashmoe::network;

namespace {

constexpr size_t kIdentity = 24, kKey = 32, kRecord = 16 << 10;

// Of the application's functions.
int returned(Ssl* s, int bytes, int waits, size_t* done) {
  if (bytes > 0) {
    *done = static_cast<size_t>(bytes);
    return 1;
  }
  s->error = (s->bio->flags & kBioShouldRetry) != 0 ? waits : kErrorSyscall;
  return 0;
}

int read_some(Ssl* s, void* to, size_t most, size_t* got) {
  return returned(s, s->bio->how->read(s->bio, static_cast<char*>(to), static_cast<int>(most)), kErrorWantRead, got);
}

int write_some(Ssl* s, const void* from, size_t bytes, size_t* put) {
  const int all = s->bio->how->write(s->bio, static_cast<const char*>(from), static_cast<int>(bytes));
  return returned(s, all, kErrorWantWrite, put);
}

int fail(Ssl* s) {
  s->error = kErrorSsl;
  return 0;
}

int connect_side(Ssl* s) {
  if (!s->sent) {
    const unsigned char* identity = nullptr;
    size_t bytes = 0, put = 0;
    SslSession* session = nullptr;
    if (s->context->use(s, nullptr, &identity, &bytes, &session) != 1 || bytes != kIdentity) return fail(s);
    const std::string all = std::string(reinterpret_cast<const char*>(identity), bytes) + session->key;
    delete session;
    if (write_some(s, all.data(), all.size(), &put) != 1) return 0;
    s->sent = true;
  }
  char answer;
  size_t got = 0;
  return read_some(s, &answer, 1, &got);
}

int accept_side(Ssl* s) {
  while (s->said.size() < kIdentity + kKey) {
    char piece[kIdentity + kKey];
    size_t got = 0;
    if (read_some(s, piece, kIdentity + kKey - s->said.size(), &got) != 1) return 0;
    s->said.append(piece, got);
  }
  SslSession* session = nullptr;
  const auto* identity = reinterpret_cast<const unsigned char*>(s->said.data());
  if (s->context->find(s, identity, kIdentity, &session) != 1 || session == nullptr) return fail(s);
  const bool same = session->key == s->said.substr(kIdentity);
  delete session;
  size_t put = 0;
  return same ? write_some(s, "!", 1, &put) : fail(s);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT unsigned long OpenSSL_version_num() {
  return 0x30000000;
}
EXPORT const SslMethod* TLS_method() {
  return nullptr;
}
EXPORT SslCtx* SSL_CTX_new(const SslMethod*) {
  return new SslCtx;
}
EXPORT void SSL_CTX_free(SslCtx* c) {
  delete c;
}
EXPORT long SSL_CTX_ctrl(SslCtx*, int, long, void*) {
  return 1;
}
EXPORT uint64_t SSL_CTX_set_options(SslCtx*, uint64_t options) {
  return options;
}
EXPORT int SSL_CTX_set_ciphersuites(SslCtx*, const char*) {
  return 1;
}
EXPORT int SSL_CTX_set_num_tickets(SslCtx*, size_t) {
  return 1;
}
EXPORT void SSL_CTX_set_psk_find_session_callback(SslCtx* c, PskOfServer find) {
  c->find = find;
}
EXPORT void SSL_CTX_set_psk_use_session_callback(SslCtx* c, PskOfClient use) {
  c->use = use;
}
EXPORT Ssl* SSL_new(SslCtx* c) {
  Ssl* const made = new Ssl;
  made->context = c;
  return made;
}
EXPORT void SSL_free(Ssl* s) {
  delete s->bio;
  delete s;
}
EXPORT void SSL_set_bio(Ssl* s, Bio* bio, Bio*) {
  s->bio = bio;
}
EXPORT BioMethod* BIO_meth_new(int, const char*) {
  return new BioMethod;
}
EXPORT void BIO_meth_free(BioMethod* m) {
  delete m;
}
EXPORT int BIO_meth_set_write(BioMethod* m, BioWrite write) {
  m->write = write;
  return 1;
}
EXPORT int BIO_meth_set_read(BioMethod* m, BioRead read) {
  m->read = read;
  return 1;
}
EXPORT int BIO_meth_set_ctrl(BioMethod*, BioCtrl) {
  return 1;
}
EXPORT Bio* BIO_new(const BioMethod* how) {
  return new Bio{how, 0};
}
EXPORT void BIO_set_init(Bio*, int) {}
EXPORT void BIO_set_flags(Bio* b, int flags) {
  b->flags |= flags;
}
EXPORT void BIO_clear_flags(Bio* b, int flags) {
  b->flags &= ~flags;
}
EXPORT void SSL_set_verify(Ssl*, int, int (*)(int, void*)) {}
EXPORT void SSL_set_connect_state(Ssl* s) {
  s->connects = true;
}
EXPORT void SSL_set_accept_state(Ssl*) {}
EXPORT int SSL_do_handshake(Ssl* s) {
  return s->connects ? connect_side(s) : accept_side(s);
}
EXPORT int SSL_session_reused(const Ssl*) {
  return 1;
}
EXPORT int SSL_read_ex(Ssl* s, void* to, size_t most, size_t* got) {
  return read_some(s, to, std::min(most, 1 + s->random() % kRecord), got);
}
EXPORT int SSL_write_ex(Ssl* s, const void* from, size_t bytes, size_t* put) {
  return write_some(s, from, std::min(bytes, 1 + s->random() % kRecord), put);
}
EXPORT int SSL_key_update(Ssl*, int) {
  return 1;
}
EXPORT int SSL_get_error(const Ssl* s, int) {
  return s->error;
}
EXPORT const SslCipher* SSL_CIPHER_find(Ssl* s, const unsigned char*) {
  return reinterpret_cast<const SslCipher*>(s);
}
EXPORT SslSession* SSL_SESSION_new() {
  return new SslSession;
}
EXPORT void SSL_SESSION_free(SslSession* s) {
  delete s;
}
EXPORT int SSL_SESSION_set1_master_key(SslSession* s, const unsigned char* key, size_t bytes) {
  s->key.assign(reinterpret_cast<const char*>(key), bytes);
  return 1;
}
EXPORT int SSL_SESSION_set_cipher(SslSession*, const SslCipher*) {
  return 1;
}
EXPORT int SSL_SESSION_set_protocol_version(SslSession*, int) {
  return 1;
}
EXPORT void ERR_clear_error() {}
EXPORT unsigned long ERR_get_error() {
  return 0;
}
EXPORT const char* ERR_reason_error_string(unsigned long) {
  return "the stand-in refuses";
}
