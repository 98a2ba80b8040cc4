#include "cuda/transport/registration.h"

namespace flashmoe::cuda {

Registration::Registration(const Nvshmem& api, const Device& device, const DeviceMemory& memory)
    : api_(api), device_(device), address_(memory.as<void>()) {
  const Device::Use use(device_);
  check_nvshmem(api_.nvshmemx_buffer_register(address_, memory.bytes()), "nvshmemx_buffer_register");
}

Registration::~Registration() {
  const Device::Use use(device_);
  api_.nvshmemx_buffer_unregister(address_);
}

}  // namespace flashmoe::cuda
