#include "host/bell.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::host {

Bell::Bell() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_.get() < 0)
    throw Error(Error::Kind::kOther, concat("network: cannot make an event: ", std::strerror(errno)));
}

void Bell::ring() {
  if (rung_.exchange(true, std::memory_order_acq_rel))
    return;  // the sleeper has not taken the last ring yet; when it does, it also sees what this thread has written
  const uint64_t one = 1;
  (void)!write(event_.get(), &one, sizeof(one));
}

bool Bell::take() {
  uint64_t rings;
  (void)!read(event_.get(), &rings, sizeof(rings));
  return rung_.exchange(false, std::memory_order_acq_rel);
}

}  // namespace flashmoe::host
