#include "cuda/transport/nvshmem.h"

#include "host/error.h"
#include "host/library.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;
using host::Error;

// The same as in python/flashmoe/nvshmem.py.
constexpr const char* kInstall = "pip install 'nvidia-nvshmem-cu13>=3.4,<3.9'";

std::string text(const NvshmemVersion& v) {
  return concat(v.major, ".", v.minor, ".", v.patch);
}

// Defaults that the user's settings override. The ranks are on one machine and meet on its loopback. There is no
// network, because not every machine has a network's drivers. There is no memory that NVLink multicasts, because
// nothing here uses such memory and not every machine grants it.
void set_environment() {
  host::set_defaults({{"NVSHMEM_DISABLE_NVLS", "1"},
                      {"NVSHMEM_REMOTE_TRANSPORT", "none"},
                      {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo"}});
}

Nvshmem load(const std::string& path) {
  set_environment();
  const host::Library library(
      path, concat("nvshmem: expected the library ", path, ", which a group of several GPUs needs (", kInstall, ")"),
      concat("nvshmem: expected NVSHMEM 3 (", kInstall, ")"));
  Nvshmem n{};
#define FLASHMOE_NVSHMEM_RESOLVE(symbol, result, parameters) library.resolve(n.symbol, #symbol);
  FLASHMOE_NVSHMEM_API(FLASHMOE_NVSHMEM_RESOLVE)
#undef FLASHMOE_NVSHMEM_RESOLVE
  n.path = path;
  return n;
}

}  // namespace

void check_nvshmem(int status, const char* what) {
  if (status == 0) return;
  throw Error(Error::Kind::kOther,
              concat("nvshmem: ", what, " failed with status ", status, "; NVSHMEM_DEBUG=INFO makes it say more"));
}

NvshmemVersion Nvshmem::version() const {
  NvshmemVersion v{};
  nvshmemx_vendor_get_version_info(&v.major, &v.minor, &v.patch);
  return v;
}

// Stricter than NVSHMEM's own check, which accepts a kernel compiled with the headers of an older release.
void check_headers(const Nvshmem& api, const NvshmemVersion& compiled_with) {
  const NvshmemVersion library = api.version();
  if (compiled_with == library) return;
  throw Error(Error::Kind::kOther, concat("nvshmem: expected a kernel compiled with the headers of ", text(library),
                                          ", the release of ", api.path, ", got one compiled with those of ",
                                          text(compiled_with), "; to have both of one release: ", kInstall));
}

const Nvshmem& nvshmem(const std::string& path) {
  static const Nvshmem loaded = load(path);  // a load that threw is tried again at the next call
  return loaded;
}

}  // namespace flashmoe::cuda
