// Hashes of the values that ranks must agree on. Ranks compare the hashes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashmoe::host {

// FNV-1a. `h` is the hash of the bytes before these; the default is the hash of no bytes.
inline uint64_t hash_bytes(const void* data, size_t n, uint64_t h = 0xcbf29ce484222325u) {
  for (size_t i = 0; i < n; ++i) h = (h ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  return h;
}

}  // namespace flashmoe::host
