// This project's errors. The kind of an error selects the Python exception (python/flashmoe/_ffi.py).
#pragma once

#include <stdexcept>
#include <string>

namespace flashmoe::host {

class Error : public std::runtime_error {
 public:
  enum class Kind { kInvalidArgument, kBadRow, kHeap, kGroup, kPeerTimeout, kOther };
  Error(Kind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  const Kind kind;
};

}  // namespace flashmoe::host
