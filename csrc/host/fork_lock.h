// Locks of what a process keeps from call to call, and a forked one with it.
#pragma once

#include <pthread.h>

#include <mutex>

namespace flashmoe::host {

// The one lock of what `Of` names. A fork copies a lock as it is, and one that another thread holds then is held for ever in the
// child, which has no such thread. So a fork takes this one first, and gives it back on both sides.
template <class Of>
class ForkLock {
 public:
  static std::mutex& mutex() {
    (void)kHooked;  // made when the library is loaded, as it is used
    return mutex_;
  }

 private:
  static inline std::mutex mutex_;
  static inline const bool kHooked =
      pthread_atfork([] { mutex_.lock(); }, [] { mutex_.unlock(); }, [] { mutex_.unlock(); }) == 0;
};

}  // namespace flashmoe::host
