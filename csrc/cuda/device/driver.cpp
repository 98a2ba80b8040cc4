#include "cuda/device/driver.h"

#include "host/library.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;

constexpr const char* kLibrary = "libcuda.so.1";

std::string described(const Driver& d, CudaResult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  d.cuGetErrorName(result, &name);  // leaves null for an unknown result
  d.cuGetErrorString(result, &text);
  return concat(name ? name : "error " + std::to_string(result), text ? concat(": ", text) : "");
}

Driver load() {
  const host::Library library(kLibrary, concat("cuda: expected the NVIDIA driver's ", kLibrary, " on this machine"),
                              "cuda: expected an NVIDIA driver of CUDA 12 or newer");
  Driver d{};
#define FLASHMOE_DRIVER_RESOLVE(symbol, parameters) library.resolve(d.symbol, #symbol);
  FLASHMOE_DRIVER_API(FLASHMOE_DRIVER_RESOLVE)
#undef FLASHMOE_DRIVER_RESOLVE
  if (const CudaResult result = d.cuInit(0); result != kCudaSuccess) {
    throw Error(Error::Kind::kOther, concat("cuda: cannot initialise the driver: ", described(d, result)));
  }
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();  // a load that threw is tried again at the next call
  return loaded;
}

void check(CudaResult result, const char* doing) {
  if (result == kCudaSuccess) return;
  throw Error(result == kCudaOutOfMemory ? Error::Kind::kHeap : Error::Kind::kOther,
              concat("cuda: ", doing, ": ", described(driver(), result)));
}

}  // namespace flashmoe::cuda
