// What the system allows this process (getrlimit). Error messages use it to say which limit was met.
#pragma once

#include <sys/resource.h>

#include <cstdint>

namespace flashmoe::host {

// The limit in force; UINT64_MAX where there is none.
inline uint64_t limit_of(decltype(RLIMIT_AS) resource) {
  rlimit limit;
  return getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
}

}  // namespace flashmoe::host
