#include "network/ucx.h"

#include "host/error.h"
#include "host/library.h"
#include "host/text.h"

namespace flashmoe::network {
namespace {

using host::concat;
using host::Error;

// As python/flashmoe/ucx.py says it.
constexpr const char* kInstall = "pip install libucx-cu13, or a system's package libucx0";
constexpr unsigned kOldestMajor = 1, kOldestMinor = 13;

// Unless the user has said otherwise: no handlers of this process's signals, no hooks under its allocator, both of which
// have uses for memory of GPUs and for RDMA, and reports of errors here, in this project's words.
void set_environment() {
  host::set_defaults({{"UCX_HANDLE_ERRORS", "none"}, {"UCX_MEM_EVENTS", "n"}, {"UCX_LOG_LEVEL", "fatal"}});
}

Ucx load(const std::string& path) {
  set_environment();
  const host::Library library(
      path, concat("ucx: expected the library ", path, ", which a group on several machines needs (", kInstall, ")"),
      concat("ucx: expected UCX ", kOldestMajor, ".", kOldestMinor, " or newer (", kInstall, ")"));
  Ucx u{};
#define FLASHMOE_UCX_RESOLVE(name, result, parameters) library.resolve(u.name, #name);
  FLASHMOE_UCX_API(FLASHMOE_UCX_RESOLVE)
#undef FLASHMOE_UCX_RESOLVE
  unsigned major = 0, minor = 0, release = 0;
  u.ucp_get_version(&major, &minor, &release);
  if (major != kOldestMajor || minor < kOldestMinor) {
    throw Error(Error::Kind::kOther, concat("ucx: expected UCX 1, from ", kOldestMajor, ".", kOldestMinor, " on (",
                                            kInstall, "), got ", path, " of release ", major, ".", minor));
  }
  return u;
}

}  // namespace

const Ucx& ucx(const std::string& path) {
  static const Ucx loaded = load(path);  // a load that threw is tried again at the next call
  return loaded;
}

void check_ucx(const Ucx& api, UcsStatus status, const char* what) {
  if (status >= kUcsOk) return;
  throw Error(Error::Kind::kGroup,
              concat("ucx: ", what, " failed: ", api.ucs_status_string(status), "; UCX_LOG_LEVEL=info says more"));
}

}  // namespace flashmoe::network
