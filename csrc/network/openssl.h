// OpenSSL 3, whose TLS carries messages between machines. The library is loaded at run time, so that neither a build
// nor a wheel needs it.
//
// This file declares the part of OpenSSL's interface that is used. In all releases of libssl.so.3, these functions
// and numbers are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace flashmoe::network {

// OpenSSL's own types. This project has only pointers to them.
struct SslCtx;
struct Ssl;
struct SslSession;
struct SslMethod;
struct SslCipher;
struct EvpMd;
struct Bio;
struct BioMethod;

inline constexpr int kTls13 = 0x0304;
inline constexpr unsigned char kAes128GcmSha256[2] = {0x13, 0x01};  // as a handshake names this cipher
// Commands for SSL_CTX_ctrl().
inline constexpr int kCtrlMode = 33, kCtrlReadAhead = 41, kCtrlLeastProtocol = 123, kCtrlMostProtocol = 124;
// SSL_write_ex() returns as soon as one record is written. The caller writes the rest by further calls.
inline constexpr long kPartialWrites = 1 << 0;
inline constexpr uint64_t kIgnoreUnexpectedEof = 1 << 7;
inline constexpr int kVerifyPeer = 1;
// Results of SSL_get_error().
inline constexpr int kErrorSsl = 1, kErrorWantRead = 2, kErrorWantWrite = 3, kErrorSyscall = 5, kErrorZeroReturn = 6;
inline constexpr int kKeyUpdateOfOwn = 0;  // for SSL_key_update(): the peer need not change its key

// For a BIO, the object through which OpenSSL reads and writes: a type for the application's own BIOs, the flags that
// say that a call must be repeated, and the command that asks for written data to be sent.
inline constexpr int kBioOfApplication = 0x400 | 128;
inline constexpr int kBioRead = 0x01, kBioShouldRetry = 0x08, kBioFlags = 0x0f;
inline constexpr int kBioCtrlFlush = 11;
using BioWrite = int (*)(Bio*, const char* from, int bytes);
using BioRead = int (*)(Bio*, char* to, int most);
using BioCtrl = long (*)(Bio*, int command, long number, void* pointer);

using PskOfServer = int (*)(Ssl*, const unsigned char* identity, size_t bytes, SslSession**);
using PskOfClient = int (*)(Ssl*, const EvpMd*, const unsigned char** identity, size_t* bytes, SslSession**);

// The functions that this project calls, by name.
#define FLASHMOE_OPENSSL_API(X)                                                    \
  X(TLS_method, const SslMethod*, ())                                              \
  X(SSL_CTX_new, SslCtx*, (const SslMethod*))                                      \
  X(SSL_CTX_free, void, (SslCtx*))                                                 \
  X(SSL_CTX_ctrl, long, (SslCtx*, int command, long number, void* pointer))        \
  X(SSL_CTX_set_options, uint64_t, (SslCtx*, uint64_t options))                    \
  X(SSL_CTX_set_ciphersuites, int, (SslCtx*, const char* names))                   \
  X(SSL_CTX_set_num_tickets, int, (SslCtx*, size_t tickets))                       \
  X(SSL_CTX_set_psk_find_session_callback, void, (SslCtx*, PskOfServer))           \
  X(SSL_CTX_set_psk_use_session_callback, void, (SslCtx*, PskOfClient))            \
  X(SSL_new, Ssl*, (SslCtx*))                                                      \
  X(SSL_free, void, (Ssl*))                                                        \
  X(SSL_set_bio, void, (Ssl*, Bio * reads, Bio * writes))                          \
  X(SSL_set_verify, void, (Ssl*, int mode, int (*callback)(int, void*)))           \
  X(SSL_set_connect_state, void, (Ssl*))                                           \
  X(SSL_set_accept_state, void, (Ssl*))                                            \
  X(SSL_do_handshake, int, (Ssl*))                                                 \
  X(SSL_session_reused, int, (const Ssl*))                                         \
  X(SSL_read_ex, int, (Ssl*, void* to, size_t most, size_t* got))                  \
  X(SSL_write_ex, int, (Ssl*, const void* from, size_t bytes, size_t* put))        \
  X(SSL_key_update, int, (Ssl*, int type))                                         \
  X(SSL_get_error, int, (const Ssl*, int result))                                  \
  X(BIO_meth_new, BioMethod*, (int type, const char* name))                        \
  X(BIO_meth_free, void, (BioMethod*))                                             \
  X(BIO_meth_set_write, int, (BioMethod*, BioWrite))                               \
  X(BIO_meth_set_read, int, (BioMethod*, BioRead))                                 \
  X(BIO_meth_set_ctrl, int, (BioMethod*, BioCtrl))                                 \
  X(BIO_new, Bio*, (const BioMethod*))                                             \
  X(BIO_set_init, void, (Bio*, int))                                               \
  X(BIO_set_flags, void, (Bio*, int))                                              \
  X(BIO_clear_flags, void, (Bio*, int))                                            \
  X(SSL_CIPHER_find, const SslCipher*, (Ssl*, const unsigned char* name))          \
  X(SSL_SESSION_new, SslSession*, ())                                              \
  X(SSL_SESSION_free, void, (SslSession*))                                         \
  X(SSL_SESSION_set1_master_key, int, (SslSession*, const unsigned char*, size_t)) \
  X(SSL_SESSION_set_cipher, int, (SslSession*, const SslCipher*))                  \
  X(SSL_SESSION_set_protocol_version, int, (SslSession*, int version))             \
  X(ERR_clear_error, void, ())                                                     \
  X(ERR_get_error, unsigned long, ())                                              \
  X(ERR_reason_error_string, const char*, (unsigned long error))                   \
  X(OpenSSL_version_num, unsigned long, ())

struct OpenSsl {
#define FLASHMOE_OPENSSL_MEMBER(name, result, parameters) result(*name) parameters;
  FLASHMOE_OPENSSL_API(FLASHMOE_OPENSSL_MEMBER)
#undef FLASHMOE_OPENSSL_MEMBER
};

// The library libssl at `path`. A process loads it once: later calls return the same library, whatever their path.
// Throws Error, which says what to install.
const OpenSsl& openssl(const std::string& path);

}  // namespace flashmoe::network
