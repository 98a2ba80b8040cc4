// What the bindings of the two engines share: argument maps, handles, and this project's errors as Python's.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "flashmoe/protocol/heap_layout.h"
#include "host/error.h"

namespace flashmoe {

namespace ffi = tvm::ffi;
using Sizes = ffi::Map<ffi::String, int64_t>;

inline const char* python_name(host::Error::Kind kind) {
  using Kind = host::Error::Kind;
  switch (kind) {
    case Kind::kInvalidArgument: return "flashmoe.InvalidArgument";
    case Kind::kHeap: return "flashmoe.HeapError";
    case Kind::kGroup: return "flashmoe.GroupError";
    case Kind::kPeerTimeout: return "flashmoe.PeerTimeout";
    case Kind::kOther: break;
  }
  return "flashmoe.FlashMoEError";
}

// Runs fn; this project's errors become the Python exception of their kind.
template <class Fn>
auto guarded(Fn&& fn) {
  try {
    return fn();
  } catch (const host::Error& e) {
    throw ffi::Error(python_name(e.kind), e.what(), "");
  }
}

inline uint64_t size64(const Sizes& sizes, const char* name, uint64_t otherwise = 0) {
  const ffi::String key(name);
  return sizes.count(key) ? static_cast<uint64_t>(sizes.at(key)) : otherwise;
}

inline uint32_t size(const Sizes& sizes, const char* name, uint32_t otherwise = 0) {
  return static_cast<uint32_t>(size64(sizes, name, otherwise));
}

inline Limits limits_of(const Sizes& s) {
  Limits l;
  l.ranks = size(s, "ranks", 1);
  l.max_tokens = size(s, "max_tokens");
  l.hidden = size(s, "hidden");
  l.experts = size(s, "experts");
  l.max_local_experts = size(s, "max_local_experts");
  l.top_k = size(s, "top_k");
  l.elem_bytes = size(s, "elem_bytes");
  l.return_slots = size(s, "return_slots");
  l.capacity = size(s, "capacity");
  l.intermediate = size(s, "intermediate");
  l.staging = size(s, "staging");
  l.rdma = size(s, "rdma");
  l.tile_rows = size(s, "tile_rows", l.tile_rows);
  l.columns_per_task[kFirst] = size(s, "gemm0_columns_per_task", l.columns_per_task[kFirst]);
  l.columns_per_task[kReturning] = size(s, "gemm1_columns_per_task", l.columns_per_task[kReturning]);
  l.processors = size(s, "processors", l.processors);
  return l;
}

// The fields of heap and workspace for these limits, each with its size and purpose (bindings.cpp).
using FieldRows = ffi::Array<ffi::Map<ffi::String, ffi::Any>>;
FieldRows field_rows(const Limits& limits);

// Handles instead of pointers: a stale one is an error, not a crash.
template <class Context>
class Registry {
 public:
  int64_t add(std::shared_ptr<Context> context) {
    const std::lock_guard lock(mutex_);
    contexts_[++last_] = std::move(context);
    return last_;
  }
  std::shared_ptr<Context> get(int64_t handle) {
    const std::lock_guard lock(mutex_);
    const auto it = contexts_.find(handle);
    if (it == contexts_.end()) throw host::Error(host::Error::Kind::kOther, "context: it is closed");
    return it->second;
  }
  void remove(int64_t handle) {
    std::shared_ptr<Context> last;  // destroyed outside of the lock
    const std::lock_guard lock(mutex_);
    if (const auto it = contexts_.find(handle); it != contexts_.end()) {
      last = std::move(it->second);
      contexts_.erase(it);
    }
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Context>> contexts_;
  int64_t last_ = 0;
};

// One of each kind; not destroyed at exit, when the CUDA driver may be gone.
template <class Context>
Registry<Context>& registry() {
  static auto* const r = new Registry<Context>;
  return *r;
}

}  // namespace flashmoe
