// Locks of data that a process keeps from call to call. A forked process inherits the data with its lock.
#pragma once

#include <pthread.h>

#include <mutex>

namespace flashmoe::host {

// The one lock of the data that `Of` names. A fork copies a lock in its present state. If another thread held it then,
// it would stay held for ever in the child, which has no such thread. So a fork takes this lock first, and releases it
// in both processes.
template <class Of>
class ForkLock {
 public:
  static std::mutex& mutex() {
    (void)kHooked;  // using kHooked here makes it exist; it is set when the library is loaded
    return mutex_;
  }

 private:
  static inline std::mutex mutex_;
  static inline const bool kHooked =
      pthread_atfork([] { mutex_.lock(); }, [] { mutex_.unlock(); }, [] { mutex_.unlock(); }) == 0;
};

}  // namespace flashmoe::host
