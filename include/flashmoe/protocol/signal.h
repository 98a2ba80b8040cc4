// A signal: one 64-bit word = epoch (40 bits) | payload (24 bits). It is written with a release after the data that
// it announces. The release is at device scope if the reader is on the same rank, otherwise at system scope. A reader
// takes only the signal that has its own call's epoch, so signals need not be cleared.
#pragma once

#include "flashmoe/protocol/base.h"

namespace flashmoe {

using Epoch = uint64_t;

struct Signal {
  static constexpr uint32_t kPayloadBits = 24;
  static constexpr uint64_t kPayloadMask = (uint64_t{1} << kPayloadBits) - 1;

  FLASHMOE_HD static constexpr uint64_t make(Epoch epoch, uint64_t payload) {
    return (epoch << kPayloadBits) | (payload & kPayloadMask);
  }
  FLASHMOE_HD static constexpr Epoch epoch(uint64_t word) { return word >> kPayloadBits; }
  FLASHMOE_HD static constexpr uint32_t payload(uint64_t word) { return static_cast<uint32_t>(word & kPayloadMask); }
};

// The payload of call_signal: how many tokens the source has and how it cuts them into token blocks.
struct CallPayload {
  static constexpr uint32_t kTokenBits = 20;  // fewer than 2^20 tokens per rank and call
  FLASHMOE_HD static constexpr uint32_t make(uint32_t tokens, uint32_t log2_block) {
    return (log2_block << kTokenBits) | tokens;
  }
  FLASHMOE_HD static constexpr uint32_t tokens(uint32_t payload) { return payload & ((1u << kTokenBits) - 1); }
  FLASHMOE_HD static constexpr uint32_t log2_block(uint32_t payload) { return payload >> kTokenBits; }
};

}  // namespace flashmoe
