// A GPU and its resources: memory, mapped host memory, streams, events and modules. Each resource is an object, whose
// destructor releases it.
//
// Destructors report no errors, because when the process exits the driver may be gone before the objects.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "cuda/device/driver.h"

namespace flashmoe::cuda {

// The driver's name for a device, such as "NVIDIA H200". -1: the device of the caller's current context, or device 0 if
// there is none.
std::string device_name(int ordinal);

// A device and its primary context, which PyTorch uses too.
class Device {
 public:
  // -1: the device of the caller's current context, or 0 if there is none.
  explicit Device(int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int ordinal() const { return ordinal_; }
  uint32_t processors() const { return processors_; }  // multiprocessors
  uint32_t capability() const { return capability_; }  // compute capability; 90 is 9.0
  // The device's UUID, which no other device has.
  void identify(char (&uuid)[16]) const;
  // Waits for everything that was launched on the device.
  void synchronize() const;
  bool is_captured(DriverStream stream) const;
  // Throws Error while the stream is being captured: "capture: <what> cannot be done ...".
  void refuse_capture(DriverStream stream, const char* what) const;

  // Makes the device's context current while the object lives. Reports no error: if no context is current, the driver
  // refuses the next call, and all callers but destructors check that call's result.
  class Use {
   public:
    explicit Use(const Device& device) : pushed_(driver().cuCtxPushCurrent_v2(device.context_) == kCudaSuccess) {}
    ~Use() {
      DriverContext popped;
      if (pushed_) driver().cuCtxPopCurrent_v2(&popped);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    bool pushed_;
  };

 private:
  int ordinal_ = 0;
  int device_ = 0;
  uint32_t processors_ = 0, capability_ = 0;
  DriverContext context_ = nullptr;
};

// Zeroed memory of the device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const Device& device, uint64_t bytes, const char* what);
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(address_);
  }
  uint64_t bytes() const { return bytes_; }
  // Returns when the data is there for every stream; waits for the device.
  void upload(const void* from, uint64_t bytes) const;
  // Blocks, but does not wait for streams that do not synchronise with the default one.
  void download(void* to, uint64_t bytes, uint64_t offset = 0) const;

 private:
  const Device* device_ = nullptr;
  DevicePtr address_ = 0;
  uint64_t bytes_ = 0;
};

// A zeroed page of host memory that the device can write.
class MappedPage {
 public:
  static constexpr uint64_t kBytes = 4096;
  explicit MappedPage(const Device& device);
  ~MappedPage();
  MappedPage(const MappedPage&) = delete;
  MappedPage& operator=(const MappedPage&) = delete;

  template <class T>
  T* host() const {
    return static_cast<T*>(host_);
  }
  template <class T>
  T* mapped() const {
    return reinterpret_cast<T*>(mapped_);
  }

 private:
  MappedPage(const Device& device, std::nullptr_t) : device_(device) {}

  const Device& device_;
  void* host_ = nullptr;
  DevicePtr mapped_ = 0;
};

// A point in a stream. The host can wait for the point without waiting for what comes behind it. The device's context
// must be current.
class Event {
 public:
  explicit Event(const Device& device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(DriverStream stream) const;
  void wait() const;  // for the point recorded last

 private:
  const Device& device_;
  DriverEvent event_ = nullptr;
};

// A stream that does not wait for the default stream. The default stream does not wait for it either.
class Stream {
 public:
  explicit Stream(const Device& device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Start copies to and from the device. The host's memory must belong to a MappedPage. The device's context must be
  // current.
  void upload(void* to, const void* from, uint64_t bytes) const;
  void download(void* to, const void* from, uint64_t bytes) const;
  // Waits until all copies are done.
  void wait() const;

 private:
  const Device& device_;
  DriverStream stream_ = nullptr;
};

// The kernels of one cubin.
class Module {
 public:
  Module(const Device& device, const std::string& cubin);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  DriverModule handle() const { return module_; }
  // A kernel that may use shared_bytes of dynamic shared memory.
  DriverFunction kernel(const char* name, uint32_t shared_bytes) const;
  // Copies a constant of the module, which must have this number of bytes.
  void read(const char* name, void* to, size_t bytes) const;

 private:
  const Device& device_;
  const std::string doing_;  // what is being done, for error messages
  DriverModule module_ = nullptr;
};

}  // namespace flashmoe::cuda
