#include "host/mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::host {

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

Mapping::Mapping(int fd, uint64_t bytes) : bytes_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) {
    throw Error(Error::Kind::kHeap, concat("heap: cannot map ", bytes, " bytes: ", std::strerror(errno)));
  }
  base_ = static_cast<uint8_t*>(p);
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

}  // namespace flashmoe::host
