#include "host/mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "host/error.h"
#include "host/resource_limit.h"
#include "host/text.h"

namespace flashmoe::host {

namespace {

// The system only says that there is no memory, even if there is some but this process may not have it.
std::string why(int failed) {
  std::string text = std::strerror(failed);
  if (failed != ENOMEM) return text;
  if (const uint64_t most = limit_of(RLIMIT_AS); most != UINT64_MAX) {
    text += concat("; this process's address space is limited to ", most, " bytes (RLIMIT_AS; see ulimit -v)");
  }
  if (const uint64_t most = limit_of(RLIMIT_DATA); most != UINT64_MAX) {
    text += concat("; its own memory is limited to ", most, " bytes (RLIMIT_DATA; see ulimit -d)");
  }
  return text;
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

Mapping::Mapping(int fd, uint64_t bytes) : bytes_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) {
    throw Error(Error::Kind::kHeap, concat("heap: cannot map ", bytes, " bytes: ", why(errno)));
  }
  base_ = static_cast<uint8_t*>(p);
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

}  // namespace flashmoe::host
