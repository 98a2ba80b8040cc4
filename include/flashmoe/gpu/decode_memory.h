// The memory that the kernel for a few tokens (sm90/decode/) has besides the protocol's. It lies behind the workspace,
// where no other rank reads or writes. The host and the kernel use one table of it. Names with `few` belong to calls of
// few tokens.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe::gpu {

// The most tokens of a rank alone that go through the kernel for a few tokens.
inline constexpr uint32_t kFewTokens = 512;
// The most choices that these tokens have. Each slice of the shared expert counts as a choice. Beside weights in e4m3
// there are fewer, because the stages leave less shared memory.
inline constexpr uint32_t kFewChoices = 4096, kFewChoicesInE4m3 = 2048;
// In a group: the most tokens of a rank, the most rows that may come to a rank, and the most offsets of packets that
// may come to it, El + 1 for each packet.
inline constexpr uint32_t kFewGroupTokens = 256, kFewGroupRows = 2048, kFewOffsets = 16384;
// The most tokens in fp32, whose products are made without the tensor cores: with more tokens, products would take
// longer than the weights take to arrive.
inline constexpr uint32_t kFewExactTokens = 8;
// In calls of at most kFewExactTokens tokens, with weights that do not have 16 bits, a row may be the sum of up to
// kMostFewParts parts. All parts of all rows of a token have at most kFewPartColumns columns.
inline constexpr uint32_t kMostFewParts = 8, kFewPartColumns = 32768;

// Whether a thread block of each rank of a group has room for everything that can come to the rank in a call. Then
// calls may go through the kernel, however many tokens each rank has (sm90/decode/group.cuh). The answer is the same
// on all ranks.
constexpr bool has_few_in_group(const Limits& l) {
  const uint64_t packets = uint64_t{l.ranks} * l.max_blocks();
  return l.ranks > 1 && l.rdma == 0 && l.max_tokens <= kFewGroupTokens &&
         l.ranks * uint64_t{l.max_tokens} * min_of(l.top_k, l.max_local_experts) <= kFewGroupRows &&
         packets * (l.max_local_experts + 1) <= kFewOffsets;
}
// The most rows of a call that goes through the kernel, and the most units. A unit has some rows of one expert, or of
// one slice of the shared expert. (In a group, such a call may be one for which all ranks promise fewer tokens than the
// group has room for: AgreedLayer::most_tokens.)
constexpr uint32_t few_rows(const Limits& l) {
  if (l.ranks == 1) return min_of(min_of(l.max_tokens, kFewTokens) * (l.top_k + l.shared), kFewChoices);
  const uint64_t most = l.ranks * uint64_t{l.max_tokens} * min_of(l.top_k, l.max_local_experts);
  return l.rdma == 0 ? static_cast<uint32_t>(min_of(most, uint64_t{kFewGroupRows})) : 0;
}
constexpr uint32_t few_units(const Limits& l) {
  return min_of(few_rows(l), l.experts + l.shared + few_rows(l) / 16);
}

// A choice of an expert. Other thread blocks load it as one word, so its epoch says whether the rest is there, too.
struct alignas(16) FewChoice {
  uint64_t epoch;
  uint32_t weight;  // a float's bits
  uint32_t expert;
};

enum class FewField : uint32_t { kLogits, kDone, kRows, kParts, kCount };

inline constexpr FieldSpec<FewField> kFewTable[] = {
    {FewField::kLogits, "few_logits", Writer::kSelf,
     [](const Limits& l) {
       const uint32_t chosen = l.ranks == 1 ? l.choices_per_token() * uint32_t{sizeof(FewChoice)} / 8 : 0;
       return FieldShape{{min_of(l.max_tokens, kFewTokens), align_up(l.experts, 2u) + chosen, 1, 1}, 8};
     },
     "[token][expert] router logits of few tokens, each with the epoch it is of, and behind them the token's choices"},
    {FewField::kDone, "few_done", Writer::kSelf, [](const Limits& l) { return FieldShape{{few_units(l), 1, 1, 1}, 4}; },
     "[unit] of few tokens: the unit's tasks of GEMM0 that are done; zero between calls"},
    {FewField::kRows, "few_rows", Writer::kSelf,
     [](const Limits& l) {
       return FieldShape{{l.ranks == 1 ? few_rows(l) : 0, row_pitch(l.hidden, l.return_bytes), 1, 1}, 1};
     },
     "[row][H] weighted expert rows of few tokens"},
    {FewField::kParts, "few_parts", Writer::kSelf,
     [](const Limits& l) {
       const uint32_t tokens = l.ranks == 1 ? min_of(l.max_tokens, kFewExactTokens) : 0;
       return FieldShape{{tokens, kFewPartColumns, 1, 1}, 4};
     },
     "[part][row][H] sums of parts of the intermediate columns, where few tokens' rows are made of such"},
};
static_assert(sizeof(kFewTable) / sizeof(kFewTable[0]) == static_cast<size_t>(FewField::kCount));

// Offsets count from the workspace's beginning, and `bytes` is the size of the workspace and this memory together.
using FewLayout = Layout<FewField>;
inline FewLayout make_few_layout(const Limits& limits) {
  return make_layout(kFewTable, limits, work_bytes(limits));
}

// The memory of a call for a few tokens. Only this struct computes addresses in it.
struct FewMemory {
  const FewLayout& layout;
  const Call& c;

  template <class T>
  FLASHMOE_HD T* at(FewField f, uint64_t i = 0, uint64_t j = 0) const {
    return layout.at<T>(c.memory.work, f, i, j);
  }
  FLASHMOE_HD uint64_t* logit(uint32_t token, uint32_t expert) const {
    return at<uint64_t>(FewField::kLogits, token, expert);
  }
  FLASHMOE_HD FewChoice* chosen(uint32_t token, uint32_t k) const {
    return reinterpret_cast<FewChoice*>(logit(token, align_up(c.shape.routed_experts(), 2u))) + k;
  }
  FLASHMOE_HD uint32_t* done(uint32_t unit) const { return at<uint32_t>(FewField::kDone, unit); }
  FLASHMOE_HD uint8_t* row(uint32_t row) const { return at<uint8_t>(FewField::kRows, row); }
  // Part `part` of row `row`, of `rows` rows of H numbers: first lies part 0 of all rows, then part 1 of all rows, ...
  FLASHMOE_HD float* part(uint32_t part, uint32_t rows, uint32_t row) const {
    return at<float>(FewField::kParts) + (uint64_t{part} * rows + row) * c.shape.hidden;
  }
  FLASHMOE_HD uint64_t done_bytes() const {  // of all units
    return layout.offset[static_cast<uint32_t>(FewField::kRows)] -
           layout.offset[static_cast<uint32_t>(FewField::kDone)];
  }
};

}  // namespace flashmoe::gpu
