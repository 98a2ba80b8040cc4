// Consumer warpgroups store a task's accumulators to memory. This file is for accumulators that are TokensByFeatures;
// epilogue/features.cuh is for FeaturesByTokens.
//
// A warp has all columns of 16 rows, so it needs no results of other warps. It rearranges its results in its own
// quarter of the staging buffer, 128 bytes of each row at a time ("a piece"), so that its 16-byte stores write whole
// lines.
#pragma once

#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/sm90/epilogue/features.cuh"

namespace flashmoe::sm90 {

// How accumulator columns follow one another.
enum class Columns {
  kResults,  // each is a column of results
  kGroups,   // 8 gates, their 8 ups, the next 8 gates, ...
  kSpans,    // 64 gates, their 64 ups, ...: transposed weights, ups behind all gates
  kPairs,    // a gate, its up, the next gate, ...: transposed weights, in turn
};

namespace detail {

// How many accumulator columns make one column of results.
template <Columns kOrder>
inline constexpr uint32_t kJoined = kOrder == Columns::kResults ? 1 : 2;

inline constexpr uint32_t kWarpRows = 16;
inline constexpr uint32_t kLineBytes = 128;
inline constexpr uint32_t kPieceBytes = kWarpRows * kLineBytes;
inline constexpr uint32_t kPieceStores = kPieceBytes / (32 * 16);  // 16-byte stores of a lane
static_assert(kWarpgroup / 32 * kPieceBytes == kStagingBytes);

__device__ __forceinline__ void store_shared8(uint32_t to, uint32_t low, uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
}
__device__ __forceinline__ float2 load_shared8(uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}
// As store_matrices_transposed, but row by row: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}

// Has the L2 add to 16 bytes in global memory. Each element is rounded once, and no thread waits for the sums.
template <class Dtype>
__device__ __forceinline__ void add_global16(uint8_t* to, const uint4& v) {
  if constexpr (std::is_same_v<Dtype, Bf16>) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
  } else if constexpr (Dtype::kBytes == 4) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(__uint_as_float(v.x)),
                 "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)), "f"(__uint_as_float(v.w))
                 : "memory");
  } else {
    static_assert(std::is_same_v<Dtype, Fp16>);
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
  }
}

// The warp's own part of its warpgroup's staging buffer.
__device__ __forceinline__ uint32_t own_staging(uint32_t staging, const Lane& at) {
  return staging + at.warp * kPieceBytes;
}

// Loads the biases of accumulator columns 64 i + 2 lane and 64 i + 2 lane + 1, and stores them to the warp's staging
// buffer.
template <class Dtype, Columns kOrder>
__device__ __forceinline__ void stage_biases(uint32_t to, const void* bias, const Lane& at, uint32_t i, uint32_t first,
                                             uint32_t columns, GatedRows gated) {
  uint32_t c, low, next;  // a column of results, and the places of the biases
  if constexpr (kOrder == Columns::kSpans) {
    c = first + i / 2 * kSpanColumns + at.lane * 2;
    low = i % 2 * gated.up + c, next = low + 1;
  } else if constexpr (kOrder == Columns::kPairs) {
    c = first + i * 32 + at.lane;
    low = c * gated.step, next = low + gated.up;
  } else {
    constexpr bool kGated = kOrder == Columns::kGroups;
    c = first + (kGated ? at.lane / 8 * 8 + at.lane % 4 * 2 : at.lane * 2) + i * (kGated ? 32 : 64);
    const uint32_t up = kGated && at.lane / 4 % 2 == 1 ? gated.up : 0;
    low = up + c * gated.step, next = up + (c + 1) * gated.step;
  }
  store_shared8(to, __float_as_uint(bias_at<Dtype>(bias, low, c < columns)),
                __float_as_uint(bias_at<Dtype>(bias, next, c < columns)));
}

// Calls each(j, values) for each j-th four of a lane's kCount accumulators, with the values (biases, for instance) of
// the two columns that these four have. `row`: the expert's row of values; null: none. The task's results are columns
// first, first + 1, ... of `columns`; `gated` says where the values of gates and ups lie. A lane needs the values of a
// quarter of the accumulator columns, which are too many to load. So the warp loads each value once, and lanes read the
// values from the warp's staging buffer.
template <class Dtype, Columns kOrder, uint32_t kCount, class Each>
__device__ __forceinline__ void for_columns(uint32_t own, const void* row, const Lane& at, uint32_t first,
                                            uint32_t columns, GatedRows gated, Each&& each) {
  if (row == nullptr) return;
#pragma unroll
  for (uint32_t i = 0; i < kCount / 32; ++i) {
    stage_biases<Dtype, kOrder>(own + (i * 32 + at.lane) * 8, row, at, i, first, columns, gated);
  }
  __syncwarp();
#pragma unroll
  for (uint32_t j = 0; j < kCount / 4; ++j) {
    each(j, load_shared8(own + (j * 4 + at.lane % 4) * 8));
    if (j % 4 == 3) __syncwarp();  // else ptxas loads so far ahead that it spills; the last also frees the buffer
  }
}

// Adds biases to the accumulators.
template <class Dtype, Columns kOrder, uint32_t kCount>
__device__ __forceinline__ void add_bias(float (&acc)[kCount], uint32_t own, const void* bias, const Lane& at,
                                         uint32_t first, uint32_t columns, GatedRows gated = {1, 0}) {
  for_columns<Dtype, kOrder, kCount>(own, bias, at, first, columns, gated, [&](uint32_t j, float2 add) {
    acc[4 * j] += add.x, acc[4 * j + 1] += add.y, acc[4 * j + 2] += add.x, acc[4 * j + 3] += add.y;
  });
}

// Multiplies the accumulators by scales of the weights' rows.
template <Columns kOrder, uint32_t kCount>
__device__ __forceinline__ void scale_columns(float (&acc)[kCount], uint32_t own, const float* scales, const Lane& at,
                                              uint32_t first, uint32_t columns, GatedRows gated = {1, 0}) {
  for_columns<Tf32, kOrder, kCount>(own, scales, at, first, columns, gated, [&](uint32_t j, float2 by) {
    acc[4 * j] *= by.x, acc[4 * j + 1] *= by.y, acc[4 * j + 2] *= by.x, acc[4 * j + 3] *= by.y;
  });
}

// A lane's results of a piece: in each group of 8 columns, two neighbours in one row and two in the row 8 below.
template <class Dtype>
struct Piece {
  static constexpr uint32_t kGroups = kLineBytes / (8 * Dtype::kBytes);
  static constexpr uint32_t kWords = Dtype::kBytes / 2;  // that two neighbours take
  uint32_t word[kGroups][2][kWords];

  __device__ __forceinline__ void put(uint32_t group, uint32_t row, float low, float high) {
    if constexpr (Dtype::kBytes == 2) {
      word[group][row][0] = Dtype::pack(low, high);
    } else {
      word[group][row][0] = __float_as_uint(low), word[group][row][1] = __float_as_uint(high);
    }
  }
};

// Where 16-byte chunk `chunk` of a row of a piece is staged. Chunks are permuted so that different banks have what is
// written together: by stmatrix one chunk of 8 rows (a matrix), and in fp32, by half a warp, two chunks of 4 rows.
__device__ __forceinline__ uint32_t staged_in_piece(uint32_t row, uint32_t chunk) {
  const uint32_t turned = row * 2 % 8 + row / 4 % 2;
  return row * kLineBytes + (chunk ^ turned) * 16;
}

// Of 8 columns of results, the q-th of 4 lanes has q and q + 4, packed in `word`. Returns 2 q and 2 q + 1, packed.
__device__ __forceinline__ uint32_t neighbours(const Lane& at, uint32_t word) {
  const uint32_t q = at.lane % 4;
  const uint32_t even = __shfl_sync(kFullWarp, word, static_cast<int>(2 * q % 4), 4);
  const uint32_t odd = __shfl_sync(kFullWarp, word, static_cast<int>(2 * q % 4 + 1), 4);
  return __byte_perm(even, odd, q < 2 ? 0x5410 : 0x7632);
}

// Makes a piece's results. finish(h, a, b, up_a, up_b) turns accumulators of two columns of the lane's row h (of 2)
// into results, in place; ups have a meaning only with a gate. The two columns are neighbours, except in kPairs: there
// neighbours() makes neighbours of the results.
template <class Dtype, Columns kOrder, uint32_t kCount, class Finish>
__device__ __forceinline__ Piece<Dtype> finish_piece(const Lane& at, const float (&acc)[kCount], uint32_t piece,
                                                     Finish finish) {
  constexpr bool kPairs = kOrder == Columns::kPairs;
  constexpr uint32_t kNext = kPairs ? 4 : 1;                                               // to the second column
  constexpr uint32_t kUp = kPairs ? 1 : kOrder == Columns::kSpans ? kSpanColumns / 2 : 4;  // to its up
  Piece<Dtype> to;
#pragma unroll
  for (uint32_t g = 0; g < Piece<Dtype>::kGroups; ++g) {
    const uint32_t group = piece * Piece<Dtype>::kGroups + g;
    const uint32_t d =
        kOrder == Columns::kSpans ? group / 8 * kSpanColumns + group % 8 * 4 : group * kJoined<kOrder> * 4;
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      float v[2] = {acc[d + 2 * h], acc[d + 2 * h + kNext]};
      const uint32_t up = kOrder == Columns::kResults ? 0 : d + kUp + 2 * h;
      finish(h, v[0], v[1], acc[up], acc[up + kNext]);
      to.put(g, h, v[0], v[1]);
      if constexpr (kPairs) to.word[g][h][0] = neighbours(at, to.word[g][h][0]);
    }
  }
  return to;
}

template <class Dtype, uint32_t kGroups = Piece<Dtype>::kGroups>
__device__ __forceinline__ void stage_piece(uint32_t own, const Lane& at, const Piece<Dtype>& piece) {
  const auto& word = piece.word;
  if constexpr (Dtype::kBytes == 2) {
    // One stmatrix stores four matrices: those of both rows of one group, then those of both rows of the next group.
    const uint32_t to = own + at.lane / 8 % 2 * 8 * kLineBytes + staged_in_piece(at.lane % 8, at.lane / 16);
#pragma unroll
    for (uint32_t g = 0; g < kGroups; g += 2) {
      store_matrices(to ^ g * 16, {word[g][0][0], word[g][1][0], word[g + 1][0][0], word[g + 1][1][0]});
    }
  } else {
    const uint32_t to = own + staged_in_piece(at.row(), at.lane % 4 / 2) + at.lane % 2 * 8;
#pragma unroll
    for (uint32_t g = 0; g < Piece<Dtype>::kGroups; ++g) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        store_shared8((to ^ g * 32) + h * 8 * kLineBytes, word[g][h][0], word[g][h][1]);
      }
    }
  }
}

// Stores the warp's rows of the block's share, which has `rows` rows, and of each row no more than `columns` columns.
// row_of(r) points to the task's first column in row r of the share. kAdds: results are added to what is there.
template <class Dtype, Columns kOrder, bool kAdds = false, uint32_t kCount, class Finish, class RowOf>
__device__ __forceinline__ void store_rows(uint32_t own, const Lane& at, float (&acc)[kCount], uint32_t rows,
                                           uint32_t columns, Finish finish, RowOf row_of) {
  constexpr uint32_t kColumns = 2 * kCount / kJoined<kOrder>;
  constexpr uint32_t kPieces = kColumns * Dtype::kBytes / kLineBytes;
  // The same code handles half of the accumulators at a time, because it runs once a task, and takes as long to fetch
  // as to run.
  constexpr uint32_t kPasses = min_of(2u, kPieces), kPassAccumulators = kCount / kPasses;
  constexpr uint32_t kPassBytes = kPieces / kPasses * kLineBytes;
  // A lane stores chunk lane % 8 of every fourth row.
  constexpr uint32_t kRowsApart = kWarpRows / kPieceStores;
  const uint32_t chunk = at.lane % 8, row = at.lane / 8, first = at.tokens * 64 + at.warp * kWarpRows + row;
  uint8_t* to[kPieceStores];
#pragma unroll
  for (uint32_t i = 0; i < kPieceStores; ++i) to[i] = row_of(first + i * kRowsApart) + chunk * 16;
  uint32_t left = min_of(columns, kColumns) * Dtype::kBytes;
#pragma unroll 1
  while (true) {
    Piece<Dtype> next = finish_piece<Dtype, kOrder>(at, acc, 0, finish);
    // A piece is on its way out of shared memory while the next is computed.
#pragma unroll
    for (uint32_t p = 0; p < kPieces / kPasses; ++p) {
      if (p * kLineBytes >= left) break;  // a branch also keeps ptxas from mixing pieces, and spilling
      stage_piece(own, at, next);
      __syncwarp();
      uint4 piece[kPieceStores];
#pragma unroll
      for (uint32_t i = 0; i < kPieceStores; ++i) {
        piece[i] = load_shared16(own + staged_in_piece(row + i * kRowsApart, chunk));
      }
      if (p + 1 < kPieces / kPasses) next = finish_piece<Dtype, kOrder>(at, acc, p + 1, finish);
      const bool exists = p * kLineBytes + chunk * 16 < left;
#pragma unroll
      for (uint32_t i = 0; i < kPieceStores; ++i) {
        if (exists && first + i * kRowsApart < rows) {
          if constexpr (kAdds) {
            add_global16<Dtype>(to[i] + p * kLineBytes, piece[i]);
          } else {
            store_global16(to[i] + p * kLineBytes, piece[i]);
          }
        }
      }
      __syncwarp();
    }
    if (left <= kPassBytes) break;
    left -= kPassBytes;
#pragma unroll
    for (uint32_t i = 0; i < kPieceStores; ++i) to[i] += kPassBytes;
#pragma unroll
    for (uint32_t i = kPassAccumulators; i < kCount; ++i) acc[i - kPassAccumulators] = acc[i];
  }
  named_barrier_sync(
      group_barrier(at.group));  // the next task's epilogue may use the whole buffer (epilogue/features.cuh)
}

}  // namespace detail

// As scale_tokens(), for accumulators whose rows are tokens.
template <uint32_t kCount>
__device__ __forceinline__ void scale_rows(const Lane& at, float (&acc)[1][kCount], const float* weights) {
  const uint32_t row = at.tokens * 64 + at.warp * detail::kWarpRows + at.row();
  const float w[2] = {weights[row], weights[row + 8]};
#pragma unroll
  for (uint32_t j = 0; j < kCount / 4; ++j) {
    acc[0][4 * j] *= w[0], acc[0][4 * j + 1] *= w[0], acc[0][4 * j + 2] *= w[1], acc[0][4 * j + 3] *= w[1];
  }
}

// Adds to each row of accumulators its factor times `row`. factors[r] is that of row r of the share. `row` has
// `features` numbers; the task's first is number first_feature.
template <class Dtype, uint32_t kCount>
__device__ __forceinline__ void add_outer(uint32_t staging, const Lane& at, float (&acc)[1][kCount],
                                          const float* factors, const void* row, uint32_t first_feature,
                                          uint32_t features) {
  const uint32_t r = at.tokens * 64 + at.warp * detail::kWarpRows + at.row();
  const float by[2] = {factors[r], factors[r + 8]};
  detail::for_columns<Dtype, Columns::kResults, kCount>(
      detail::own_staging(staging, at), row, at, first_feature, features, {1, 0}, [&](uint32_t j, float2 v) {
        acc[0][4 * j] = fmaf(by[0], v.x, acc[0][4 * j]), acc[0][4 * j + 1] = fmaf(by[0], v.y, acc[0][4 * j + 1]);
        acc[0][4 * j + 2] = fmaf(by[1], v.x, acc[0][4 * j + 2]),
                       acc[0][4 * j + 3] = fmaf(by[1], v.y, acc[0][4 * j + 3]);
      });
}

// As store_activated() and store_returned(), but these two functions change the accumulators. `bias` is the expert's
// row; null: none.
template <class Dtype, Activation A, Columns kOrder, class Kept, uint32_t kCount>
__device__ __forceinline__ void store_activated_rows(uint32_t staging, const Lane& at, float (&acc)[1][kCount],
                                                     const void* bias, uint32_t rows, uint32_t first_column,
                                                     uint32_t intermediate, uint8_t* tile, uint64_t pitch,
                                                     GatedRows gated, const ClampedShape& shape, const Kept& kept) {
  const uint32_t columns = first_column < intermediate ? intermediate - first_column : 0;
  uint8_t* const to = tile + uint64_t{first_column} * Dtype::kBytes;
  const uint32_t own = detail::own_staging(staging, at);
  detail::add_bias<Dtype, kOrder>(acc[0], own, bias, at, first_column, intermediate, gated);
  kept.template rows<Dtype, kOrder>(at, acc[0], rows);
  detail::store_rows<Dtype, kOrder>(
      own, at, acc[0], rows, columns,
      [&](uint32_t, float& low, float& high, float up_low, float up_high) {
        activate_pair<Dtype, A>(low, high, shape);
        if constexpr (is_gated(A)) low *= shaped_up<A>(up_low, shape), high *= shaped_up<A>(up_high, shape);
      },
      [&](uint32_t row) { return to + row * pitch; });
}

// kAdds: results are added to what is there, which was stored before.
template <class Dtype, bool kAdds = false, uint32_t kCount>
__device__ __forceinline__ void store_returned_rows(uint32_t staging, const Lane& at, float (&acc)[1][kCount],
                                                    const void* bias, uint32_t rows, uint32_t first_feature,
                                                    uint32_t hidden, const float* weights, const uint64_t* rows_to) {
  const uint32_t columns = first_feature < hidden ? hidden - first_feature : 0;
  const uint64_t offset = uint64_t{first_feature} * Dtype::kBytes;
  const uint32_t own = detail::own_staging(staging, at);
  detail::add_bias<Dtype, Columns::kResults>(acc[0], own, bias, at, first_feature, hidden);
  const uint32_t row = at.tokens * 64 + at.warp * detail::kWarpRows + at.row();
  const float weight[2] = {weights[row], weights[row + 8]};
  detail::store_rows<Dtype, Columns::kResults, kAdds>(
      own, at, acc[0], rows, columns,
      [&](uint32_t h, float& low, float& high, float, float) { low *= weight[h], high *= weight[h]; },
      [&](uint32_t r) { return reinterpret_cast<uint8_t*>(rows_to[r] + offset); });
}

}  // namespace flashmoe::sm90
