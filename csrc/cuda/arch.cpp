#include "cuda/arch.h"

#include "cuda/device/device.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;

constexpr const Arch* kArchs[] = {&kHopper};

std::string written(uint32_t capability) {
  return concat(capability / 10, ".", capability % 10);
}

}  // namespace

const Arch& arch_of(const Device& device) {
  std::string known;
  for (const Arch* const arch : kArchs) {
    if (arch->capability == device.capability()) return *arch;
    known += concat(known.empty() ? "" : " or ", written(arch->capability), " (", arch->devices, ")");
  }
  throw Error(Error::Kind::kInvalidArgument,
              concat("device: expected a GPU of compute capability ", known, ", got ", written(device.capability()),
                     " (", device_name(device.ordinal()), ") for device ", device.ordinal()));
}

}  // namespace flashmoe::cuda
