#include "cuda/device/device.h"

#include <cstring>
#include <fstream>
#include <iterator>

#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;

uint32_t attribute(int device, DeviceAttribute which) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, which, device), "cannot query the device");
  return static_cast<uint32_t>(value);
}

// The driver's handle of a device. Replaces the ordinal -1 by the ordinal of the device of the caller's current
// context, or by 0 if there is none.
int open_device(int& ordinal) {
  const Driver& d = driver();
  int count = 0, device = 0;
  check(d.cuDeviceGetCount(&count), "cannot count the devices");
  if (ordinal == -1 && d.cuCtxGetDevice(&ordinal) != kCudaSuccess) ordinal = 0;
  if (ordinal < 0 || ordinal >= count) {
    throw Error(Error::Kind::kInvalidArgument,
                concat("device: expected one of the ", count, " that the driver shows, got ", ordinal));
  }
  check(d.cuDeviceGet(&device, ordinal), "cannot open the device");
  return device;
}

std::string name_of(int device) {
  char name[128] = "";
  driver().cuDeviceGetName(name, sizeof(name), device);
  return name;
}

}  // namespace

std::string device_name(int ordinal) {
  return name_of(open_device(ordinal));
}

Device::Device(int ordinal) : ordinal_(ordinal) {
  device_ = open_device(ordinal_);
  processors_ = attribute(device_, kMultiprocessorCount);
  capability_ = attribute(device_, kComputeCapabilityMajor) * 10 + attribute(device_, kComputeCapabilityMinor);
  check(driver().cuDevicePrimaryCtxRetain(&context_, device_), "cannot open the device's context");
}

Device::~Device() {
  driver().cuDevicePrimaryCtxRelease_v2(device_);
}

void Device::identify(char (&uuid)[16]) const {
  check(driver().cuDeviceGetUuid_v2(uuid, device_), "cannot query the device");
}

void Device::synchronize() const {
  const Use use(*this);
  check(driver().cuCtxSynchronize(), "work on the device failed");
}

bool Device::is_captured(DriverStream stream) const {
  const Use use(*this);
  int status = kCaptureNone;
  check(driver().cuStreamIsCapturing(stream, &status), "cannot query the stream");
  return status != kCaptureNone;
}

void Device::refuse_capture(DriverStream stream, const char* what) const {
  if (!is_captured(stream)) return;
  throw Error(Error::Kind::kOther, concat("capture: ", what, " cannot be done while the stream is being captured"));
}

// Delegates to another constructor, so that the destructor runs and frees the memory if the rest throws.
DeviceMemory::DeviceMemory(const Device& device, uint64_t bytes, const char* what) : DeviceMemory() {
  const Driver& d = driver();
  const Device::Use use(device);
  if (const CudaResult result = d.cuMemAlloc_v2(&address_, bytes); result == kCudaOutOfMemory) {
    size_t free = 0, total = 0;
    d.cuMemGetInfo_v2(&free, &total);
    throw Error(Error::Kind::kHeap, concat(what, ": expected ", bytes, " bytes of device memory, got ", free,
                                           " free of ", total, "; lower max_tokens"));
  } else {
    check(result, what);
  }
  device_ = &device;
  bytes_ = bytes;
  check(d.cuMemsetD8_v2(address_, 0, bytes), what);
  check(d.cuCtxSynchronize(), what);  // streams that do not wait for the default one must find zeros
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (address_ == 0) return;
  const Device::Use use(*device_);
  driver().cuMemFree_v2(address_);
}

void DeviceMemory::upload(const void* from, uint64_t bytes) const {
  const Device::Use use(*device_);
  check(driver().cuMemcpyHtoD_v2(address_, from, bytes), "cannot copy to the device");
  check(driver().cuCtxSynchronize(), "cannot copy to the device");  // the copy may return before its last transfer
}

void DeviceMemory::download(void* to, uint64_t bytes, uint64_t offset) const {
  if (bytes == 0) return;
  const Device::Use use(*device_);
  check(driver().cuMemcpyDtoH_v2(to, address_ + offset, bytes), "cannot copy from the device");
}

// Delegates to another constructor for the same reason as DeviceMemory.
MappedPage::MappedPage(const Device& device) : MappedPage(device, nullptr) {
  const Device::Use use(device);
  check(driver().cuMemHostAlloc(&host_, kBytes, kHostAllocMapped | kHostAllocPortable), "cannot map host memory");
  std::memset(host_, 0, kBytes);
  check(driver().cuMemHostGetDevicePointer_v2(&mapped_, host_, 0), "cannot map host memory");
}

MappedPage::~MappedPage() {
  if (host_ == nullptr) return;
  const Device::Use use(device_);
  driver().cuMemFreeHost(host_);
}

Event::Event(const Device& device) : device_(device) {
  const Device::Use use(device);
  check(driver().cuEventCreate(&event_, kEventDisableTiming), "cannot create an event");
}

Event::~Event() {
  const Device::Use use(device_);
  driver().cuEventDestroy_v2(event_);
}

void Event::record(DriverStream stream) const {
  check(driver().cuEventRecord(event_, stream), "cannot record an event");
}

void Event::wait() const {
  check(driver().cuEventSynchronize(event_), "work on the device failed");
}

Stream::Stream(const Device& device) : device_(device) {
  const Device::Use use(device);
  check(driver().cuStreamCreate(&stream_, kStreamNonBlocking), "cannot create a stream");
}

Stream::~Stream() {
  const Device::Use use(device_);
  driver().cuStreamDestroy_v2(stream_);
}

void Stream::upload(void* to, const void* from, uint64_t bytes) const {
  check(driver().cuMemcpyHtoDAsync_v2(reinterpret_cast<DevicePtr>(to), from, bytes, stream_),
        "cannot copy to the device");
}

void Stream::download(void* to, const void* from, uint64_t bytes) const {
  check(driver().cuMemcpyDtoHAsync_v2(to, reinterpret_cast<DevicePtr>(from), bytes, stream_),
        "cannot copy from the device");
}

void Stream::wait() const {
  check(driver().cuStreamSynchronize(stream_), "cannot wait for a stream of copies");
}

Module::Module(const Device& device, const std::string& cubin)
    : device_(device), doing_(concat("cannot load the kernel ", cubin)) {
  std::ifstream file(cubin, std::ios::binary);
  const std::string image{std::istreambuf_iterator<char>(file), {}};
  if (!file || image.empty()) throw Error(Error::Kind::kOther, concat("cuda: cannot read the kernel ", cubin));
  const Device::Use use(device);
  check(driver().cuModuleLoadData(&module_, image.data()), doing_.c_str());
}

DriverFunction Module::kernel(const char* name, uint32_t shared_bytes) const {
  const Device::Use use(device_);
  DriverFunction function = nullptr;
  check(driver().cuModuleGetFunction(&function, module_, name), doing_.c_str());
  check(driver().cuFuncSetAttribute(function, kMaxDynamicSharedBytes, static_cast<int>(shared_bytes)), doing_.c_str());
  return function;
}

void Module::read(const char* name, void* to, size_t bytes) const {
  const Device::Use use(device_);
  DevicePtr from = 0;
  size_t found = 0;
  check(driver().cuModuleGetGlobal_v2(&from, &found, module_, name), doing_.c_str());
  if (found != bytes) {
    throw Error(Error::Kind::kOther, concat(doing_, ": ", name, ": expected ", bytes, " bytes, got ", found));
  }
  check(driver().cuMemcpyDtoH_v2(to, from, bytes), doing_.c_str());
}

Module::~Module() {
  const Device::Use use(device_);
  driver().cuModuleUnload(module_);
}

}  // namespace flashmoe::cuda
