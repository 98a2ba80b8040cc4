// How a thread that sleeps hears of what others have done: they ring, it is awake, and looks.
#pragma once

#include <atomic>

#include "host/mapping.h"

namespace flashmoe::host {

class Bell {
 public:
  Bell();

  // Any thread. What it wrote before, who takes the ring has before it.
  void ring();
  // Whether it was rung since the last time. One thread.
  bool take();
  // Can be read once it was rung.
  int descriptor() const { return event_.get(); }

 private:
  std::atomic<bool> rung_{false};
  FileDescriptor event_;
};

}  // namespace flashmoe::host
