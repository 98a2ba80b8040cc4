// The limits that the system sets for this process (getrlimit). Error messages use them to say which limit was reached.
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
