#include "network/openssl.h"

#include "host/error.h"
#include "host/library.h"
#include "host/text.h"

namespace flashmoe::network {
namespace {

using host::concat;
using host::Error;

// The same text as INSTALL in python/flashmoe/system/openssl.py.
constexpr const char* kInstall = "a system's package of OpenSSL 3, such as Debian's libssl3";
constexpr unsigned long kOldest = 0x30000000;

OpenSsl load(const std::string& path) {
  const std::string expected = concat("openssl: expected OpenSSL 3 (", kInstall, ")");
  const host::Library library(
      path,
      concat("openssl: expected the library ", path, ", which a group on several machines needs (", kInstall, ")"),
      expected);
  OpenSsl s{};
#define FLASHMOE_OPENSSL_RESOLVE(name, result, parameters) library.resolve(s.name, #name);
  FLASHMOE_OPENSSL_API(FLASHMOE_OPENSSL_RESOLVE)
#undef FLASHMOE_OPENSSL_RESOLVE
  if (const unsigned long release = s.OpenSSL_version_num(); release < kOldest) {
    throw Error(Error::Kind::kOther, concat(expected, ", got ", path, " of release ", release >> 28));
  }
  return s;
}

}  // namespace

const OpenSsl& openssl(const std::string& path) {
  static const OpenSsl loaded = load(path);  // a load that threw is tried again at the next call
  return loaded;
}

}  // namespace flashmoe::network
