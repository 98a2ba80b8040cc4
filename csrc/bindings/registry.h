// What the bindings share besides the codec: handles, who owns the objects behind the handles, and the translation of
// this project's errors to Python's exceptions.
#pragma once

#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "host/error.h"
#include "host/fork_lock.h"

namespace flashmoe {

inline const char* python_name(host::Error::Kind kind) {
  using Kind = host::Error::Kind;
  switch (kind) {
    case Kind::kInvalidArgument: return "flashmoe.InvalidArgument";
    case Kind::kBadRow: return "flashmoe.BadRow";
    case Kind::kHeap: return "flashmoe.HeapError";
    case Kind::kGroup: return "flashmoe.GroupError";
    case Kind::kPeerTimeout: return "flashmoe.PeerTimeout";
    case Kind::kOther: break;
  }
  return "flashmoe.FlashMoEError";
}

// Runs fn. This project's errors become the Python exceptions of their kinds.
template <class Fn>
auto guarded(Fn&& fn) {
  try {
    return fn();
  } catch (const host::Error& e) {
    throw tvm::ffi::Error(python_name(e.kind), e.what(), "");
  }
}

// The error message for a handle whose object is gone.
template <class Context>
inline constexpr const char* kGone = "context: it is closed";

// Python has handles instead of pointers, so that the use of a closed context raises an error and does not crash.
template <class Context>
class Registry {
 public:
  int64_t add(std::shared_ptr<Context> context) {
    const std::lock_guard lock(mutex());
    contexts_[++last_] = std::move(context);
    return last_;
  }
  std::shared_ptr<Context> get(int64_t handle) {
    const std::lock_guard lock(mutex());
    const auto it = contexts_.find(handle);
    if (it == contexts_.end()) throw host::Error(host::Error::Kind::kOther, kGone<Context>);
    return it->second;
  }
  int64_t count() {
    const std::lock_guard lock(mutex());
    return static_cast<int64_t>(contexts_.size());
  }
  void remove(int64_t handle) {
    std::shared_ptr<Context> last;  // destroyed after the lock is released
    const std::lock_guard lock(mutex());
    if (const auto it = contexts_.find(handle); it != contexts_.end()) {
      last = std::move(it->second);
      contexts_.erase(it);
    }
  }

 private:
  static std::mutex& mutex() { return host::ForkLock<Registry>::mutex(); }

  std::unordered_map<int64_t, std::shared_ptr<Context>> contexts_;
  int64_t last_ = 0;
};

// The one registry for each kind of object. It is never destroyed: at exit, the CUDA driver may be gone already, which
// contexts need to free their memory.
template <class Context>
Registry<Context>& registry() {
  static auto* const r = new Registry<Context>;
  return *r;
}

// Registers the context, and returns what Python holds: a function that returns the context's handle. When Python
// drops the function, the context is closed. A bare number could be lost: a signal handler may raise as soon as the
// interpreter runs again, before Python has stored the number. Then the context and all its threads would stay. A
// forked process has none of these threads, and closes nothing.
template <class Context>
tvm::ffi::Function owned(std::shared_ptr<Context> context) {
  struct Ownership {
    const pid_t process = getpid();
    int64_t handle = 0;
    ~Ownership() {
      if (handle != 0 && getpid() == process) registry<Context>().remove(handle);
    }
  };
  const auto ownership = std::make_shared<Ownership>();
  ownership->handle = registry<Context>().add(std::move(context));
  return tvm::ffi::Function::FromTyped([ownership] { return ownership->handle; });
}

}  // namespace flashmoe
