#include "cuda/driver.h"

#include <dlfcn.h>

#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;

constexpr const char* kLibrary = "libcuda.so.1";

std::string described(const Driver& d, CudaResult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  d.cuGetErrorName(result, &name);  // leaves null what it does not know
  d.cuGetErrorString(result, &text);
  return concat(name ? name : "error " + std::to_string(result), text ? concat(": ", text) : "");
}

Driver load() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(Error::Kind::kOther,
                concat("cuda: expected the NVIDIA driver's ", kLibrary, " on this machine, got: ", dlerror()));
  }
  Driver d{};
  auto find = [&](const char* symbol) {
    void* found = dlsym(library, symbol);
    if (found == nullptr) {
      throw Error(Error::Kind::kOther,
                  concat("cuda: expected an NVIDIA driver of CUDA 12 or newer, got a ", kLibrary, " without ", symbol));
    }
    return found;
  };
#define FLASHMOE_DRIVER_RESOLVE(symbol, parameters) d.symbol = reinterpret_cast<decltype(d.symbol)>(find(#symbol));
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
