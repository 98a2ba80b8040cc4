// The memory that the kernel for a few tokens (sm90/decode/) has besides the protocol's. It lies behind the workspace,
// where no other rank reads or writes. The host and the kernel use one table of it. Names with `few` belong to calls of
// few tokens.
#pragma once

#include "flashmoe/protocol/call.h"

namespace flashmoe::gpu {

// At most so many tokens of a rank go through the kernel.
inline constexpr uint32_t kFewTokens = 256;
// The most choices that they have there, those of the shared expert's slices too.
inline constexpr uint32_t kFewChoices = 2048;
// In a group, so many rows may come to a rank (of kFewChoices), and so many offsets of packets, El + 1 each.
inline constexpr uint32_t kFewOffsets = 16384;
// fp32's products there are made without the tensor cores: beyond so many tokens, more slowly than weights arrive.
inline constexpr uint32_t kFewExactTokens = 8;
// So many tokens' rows may be sums of parts, kMostFewParts at most: of a token, all rows' parts have so many columns.
inline constexpr uint32_t kMostFewParts = 8, kFewPartColumns = 32768;

// Whether a rank of a group has room, in a thread block, for all that ever comes to it in a call: then calls may go through
// the kernel, whatever the others' numbers of tokens (sm90/decode/group.cuh). The same on all ranks.
constexpr bool has_few_in_group(const Limits& l) {
  const uint64_t packets = uint64_t{l.ranks} * l.max_blocks();
  return l.ranks > 1 && l.rdma == 0 && l.max_tokens <= kFewTokens &&
         l.ranks * uint64_t{l.max_tokens} * min_of(l.top_k, l.max_local_experts) <= kFewChoices &&
         packets * (l.max_local_experts + 1) <= kFewOffsets;
}
// The most rows of a call, and units of them, each some rows of an expert or of a slice of the shared one.
constexpr uint32_t few_rows(const Limits& l) {
  if (l.ranks > 1) return has_few_in_group(l) ? l.ranks * l.max_tokens * min_of(l.top_k, l.max_local_experts) : 0;
  return min_of(min_of(l.max_tokens, kFewTokens) * (l.top_k + l.shared), kFewChoices);
}
constexpr uint32_t few_units(const Limits& l) {
  return min_of(few_rows(l), l.experts + l.shared + few_rows(l) / 16);
}

// A choice of an expert, which other thread blocks load as one word: it is its own signal.
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

// Offsets are from the workspace's beginning, `bytes` are those of both.
using FewLayout = Layout<FewField>;
inline FewLayout make_few_layout(const Limits& limits) {
  return make_layout(kFewTable, limits, work_bytes(limits));
}

// A call's. The only place where this memory is addressed.
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
  // A row of H is `part` times `rows` and more behind the first.
  FLASHMOE_HD float* part(uint32_t part, uint32_t rows, uint32_t row) const {
    return at<float>(FewField::kParts) + (uint64_t{part} * rows + row) * c.shape.hidden;
  }
  FLASHMOE_HD uint64_t done_bytes() const {  // of all units
    return layout.offset[static_cast<uint32_t>(FewField::kRows)] -
           layout.offset[static_cast<uint32_t>(FewField::kDone)];
  }
};

}  // namespace flashmoe::gpu
