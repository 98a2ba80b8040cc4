// How other threads wake a thread that sleeps: they ring the bell, and the thread looks at what they have done.
#pragma once

#include <atomic>

#include "host/mapping.h"

namespace flashmoe::host {

class Bell {
 public:
  Bell();

  // Any thread may call this. What the thread wrote before it rang is visible to the thread that takes the ring.
  void ring();
  // Whether the bell was rung since the last call. Only one thread may call this.
  bool take();
  // A descriptor that becomes readable when the bell is rung.
  int descriptor() const { return event_.get(); }

 private:
  std::atomic<bool> rung_{false};
  FileDescriptor event_;
};

}  // namespace flashmoe::host
