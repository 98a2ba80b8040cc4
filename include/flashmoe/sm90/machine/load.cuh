// Loader warps fill the stages of a task: features by TMA, tokens gathered by cp.async or by TMA.
#pragma once

#include <type_traits>

#include "flashmoe/sm90/machine/pipeline.cuh"
#include "flashmoe/sm90/machine/tma.cuh"

namespace flashmoe::sm90 {

// The weight rows that a block loads: TMA boxes at these coordinates; the innermost, c0, goes along K.
struct FeatureBox {
  const TensorMap* map;
  uint32_t c1, c2, c3, expert;
  bool read_once;  // no other cluster is about to load these rows: see reads_weights_once()
  bool half;       // a stage's second box would lie behind the last rows, so it is not loaded

  template <class Stage>
  static constexpr bool kShared = Stage::kByCluster && Stage::kFeatures == kClusterBlocks * kBoxFeatures;
  template <class Stage>
  static constexpr uint32_t kBoxes = ceil_div(Stage::kFeatures, kBoxFeatures);

  // The bytes of features that both blocks together load into a stage.
  template <class Stage>
  __device__ __forceinline__ uint32_t bytes() const {
    return kBoxes<Stage> != 1 && half ? Stage::kFeatureBytes / 2 : Stage::kFeatureBytes;
  }
  template <class Dtype, class Stage>
  __device__ __forceinline__ void load(const typename Stage::Ring& ring, uint32_t k_byte) const {
    const uint32_t k = k_byte / Dtype::kBytes;
    const uint64_t hint = read_once ? kEvictFirst : kEvictNormally;
    if constexpr (kShared<Stage>) {
      if (half && cluster_rank() != 0) return;
      tma_load_to_cluster(ring.data() + cluster_rank() * kBoxBytes, map, ring.full(), k, c1, c2, c3, expert, hint);
    } else {
#pragma unroll
      for (uint32_t b = 0; b < Stage::kBlocks; ++b) {
        tma_load(ring.data() + Stage::features(b), map, ring.full(), k + b * kRowBytes / Dtype::kBytes, c1, c2, c3,
                 expert, hint);
      }
      if constexpr (kBoxes<Stage> != 1) {
        static_assert(Stage::kBlocks == 1);
        if (!half) {
          tma_load(ring.data() + Stage::features(0) + kBoxBytes, map, ring.full(), k, c1 + kBoxFeatures, c2, c3, expert,
                   hint);
        }
      }
    }
  }
};

// The same for transposed weights. For each k-block, a block loads two spans of 64 features, or in fp32 four spans of
// 32. Here c0 goes along features.
struct FeatureSpans {
  const TensorMap* map;
  uint32_t first;  // the first span's first feature
  bool ups;        // 16-bit types: the second span has the ups of the first span's gates; else the next 64 features
  uint32_t expert;
  bool read_once;
  uint32_t c2 = 0;  // of both spans; with `ups`, c2 is the span's number instead

  template <class Stage>
  static __device__ __forceinline__ uint32_t bytes() {
    return Stage::kFeatureBytes;
  }
  template <class Dtype, class Stage>
  __device__ __forceinline__ void load(const typename Stage::Ring& ring, uint32_t k_byte) const {
    constexpr uint32_t kSide = span_side(Dtype::kBytes), kEach = span_bytes(Dtype::kBytes);
    constexpr uint32_t kSpans = kBoxBytes / kEach;
    const uint32_t k = k_byte / Dtype::kBytes;
    const uint64_t hint = read_once ? kEvictFirst : kEvictNormally;
#pragma unroll
    for (uint32_t s = 0; s < Stage::kBlocks * kSpans; ++s) {
      const uint32_t block = s / kSpans, second = s % kSpans;
      const uint32_t c0 = first + (ups ? 0 : second * kSide), half = ups ? second : c2;
      if constexpr (Stage::kFeatures == kClusterBlocks * kBoxFeatures) {
        tma_load_to_cluster(ring.data() + cluster_rank() * kBoxBytes + s * kEach, map, ring.full(), c0, k, half, 0,
                            expert, hint);
      } else {
        tma_load(ring.data() + Stage::features(block) + second * kEach, map, ring.full(), c0, k + block * kSide, half,
                 0, expert, hint);
      }
    }
  }
};

// Where gathered rows lie. An offset counts units of 16 bytes from `own`, or from `remote` if bit 31 is set.
struct TokenRows {
  static constexpr uint32_t kRemote = 1u << 31;
  static_assert(uint64_t{kRemote} * 16 == kReachBytes);

  const uint8_t* own;
  const uint8_t* remote;
  const uint32_t* offsets;  // [rows] in shared memory; read until the task's first stage is loaded, or with
                            // GatheredScales until its last stage is loaded
  uint32_t rows;

  __device__ __forceinline__ const uint8_t* at(uint32_t row) const {
    const uint32_t offset = offsets[row];
    return (offset & kRemote ? remote : own) + uint64_t{offset & ~kRemote} * 16;
  }
};

// Rows that lie together: `rows` rows, from row `first` of the map's matrix on. An intermediate row of the shared
// expert is cut into slices of columns, and each further slice is stored as a row elsewhere. If in each slice's rows
// of dZ all gates lie before all ups, the loader goes through the slices twice: first for the gates, then for the
// ups.
struct BoxRows {
  const TensorMap* map;
  uint32_t first, rows;
  uint32_t slices = 1;
  uint32_t second = 0;  // the second slice's first row; each later slice begins a tile (kTileTokens rows) further on
  uint32_t round = 0;   // if the loader goes through slices twice: how many there are,
  uint32_t up = 0;      // and the column of a slice's row at which its ups begin

  __device__ __forceinline__ uint32_t row(uint32_t slice) const {
    return slice == 0 ? first : second + (slice - 1) * kTileTokens;
  }
};

// The thread's number among the loaders' threads. A backward pass loads tasks in three ways, and no register is left
// to keep the number from task to task, so there it is read anew each time.
__device__ __forceinline__ uint32_t loader_thread() {
  if constexpr (!kIsBackward) return threadIdx.x - kFirstLoader;
  return thread_anew() - kFirstLoader;
}

// The scales of rows and weights that are not quantised: none are loaded. (Others: machine/stage_scales.cuh.)
struct NoScales {
  static __device__ __forceinline__ void gather(uint32_t, uint32_t, uint32_t) {}
};

namespace detail {

// Gathers rows. Thread t loads the 16-byte chunk t % 8 of rows t / 8 + 8 i, so that 8 threads together fetch 128
// bytes of a row. The number of instructions for each copy (6 cycles each) limits how fast a loader warp is. It is
// hardly more than one, because the rows' addresses are in registers and advance only every other stage, and not
// every row is checked against the number of rows. Rows that the tile does not have are copies of row 0.
template <class Dtype, class Stage, class Features, class Scales, class Count>
__device__ __forceinline__ void load_stages(typename Stage::Ring& ring, const Features& features,
                                            const TokenRows& tokens, const Scales& scales, uint32_t k_bytes,
                                            Count&& count) {
  constexpr uint32_t kRowsApart = kLoaders / 8;
  constexpr uint32_t kMost = Stage::kTokens / kRowsApart, kBlocks = Stage::kBlocks;
  constexpr uint32_t kAtOnce = 4;  // rows of a thread between two bounds checks
  const uint32_t thread = loader_thread();
  const uint32_t chunk = thread % 8, first = thread / 8;
  const uint32_t slot = first * kRowBytes + (chunk ^ first % 8) * 16;
  const uint8_t* row[kMost];
#pragma unroll
  for (uint32_t i = 0; i < kMost; ++i) {
    const uint32_t r = first + i * kRowsApart;
    const uint32_t offset = tokens.offsets[r < tokens.rows ? r : 0];
    const uint8_t* base = offset & TokenRows::kRemote ? tokens.remote : tokens.own;
    row[i] = base + uint64_t{offset & ~TokenRows::kRemote} * 16 + chunk * 16;
  }
  const uint32_t stages = Stage::stages(k_bytes);
  auto load = [&](uint32_t s, uint32_t ahead) {
    const uint32_t k = s * kBlocks * kRowBytes;
    wait(ring.empty(), ring.parity);
    if (thread == 0) {
      arrive_expect_tx(ring.full(), features.template bytes<Stage>());
      features.template load<Dtype, Stage>(ring, k);
      count();
    }
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const uint32_t to = ring.data() + Stage::tokens(b) + slot;
      const uint32_t at = (ahead * kBlocks + b) * kRowBytes;
      const bool whole = k + (b + 1) * kRowBytes <= k_bytes;
      const uint32_t valid = k + b * kRowBytes + chunk * 16 < k_bytes ? 16 : 0;  // no access beyond the row's end
      if (whole) {
#pragma unroll
        for (uint32_t i = 0; i < kMost; ++i) {
          if (i % kAtOnce == 0 && i * kRowsApart >= tokens.rows) break;
          cp_async16(to + i * kRowsApart * kRowBytes, row[i] + at);
        }
      } else {
#pragma unroll
        for (uint32_t i = 0; i < kMost; ++i) {
          if (i % kAtOnce == 0 && i * kRowsApart >= tokens.rows) break;
          cp_async16_or_zero(to + i * kRowsApart * kRowBytes, row[i] + at, valid);
        }
      }
    }
    scales.gather(ring.stage, s, thread);
    cp_async_arrive_noinc(ring.full());
    ring.advance();
  };
#pragma unroll 1
  for (uint32_t s = 0; s < stages; s += 2) {
    load(s, 0);
    if (s + 1 < stages) load(s + 1, 1);
#pragma unroll
    for (uint32_t i = 0; i < kMost; ++i) row[i] += 2 * kBlocks * kRowBytes;
  }
}

// Loads rows by the copy engine: `k_bytes` of each row, in each slice. The first loader thread does everything, and
// also makes the other loader threads' arrivals, so that the second loader warp may do something else.
template <class Dtype, class Stage, class Features, class Scales, class Count>
__device__ __forceinline__ void load_stages(typename Stage::Ring& ring, Features features, const BoxRows& from,
                                            const Scales& scales, uint32_t k_bytes, Count&& count) {
  constexpr bool kScaled = !std::is_same_v<Scales, NoScales>;
  const uint32_t stages = Stage::stages(k_bytes);
  if (threadIdx.x == kFirstLoader) {
    typename Stage::Ring at = ring;
    // Other blocks stored the intermediate rows through the generic proxy; the clerk acquired them with the task.
    fence_proxy_async_global();
    const uint32_t boxes = ceil_div(from.rows, kRowBox);
    uint32_t s = 0, slice = 0, row = from.row(0);
    [[maybe_unused]] uint32_t column = 0;
#pragma unroll 1
    for (uint32_t left = from.slices * stages; left != 0; --left, ++s, at.advance()) {
      if (s == stages) {
        s = 0;
        ++slice;
        ++features.expert;
        if constexpr (kBuild.sliced && kIsBackward) {
          if (slice == from.round) slice = 0, column = from.up, features.expert -= from.round, features.c2 = 1;
        }
        row = from.row(slice);
      }
      wait(at.empty(), at.parity);
      if constexpr (kScaled) {
        arrive(at.full(), kLoaders - 1);
        arrive_expect_tx(at.full(),
                         features.template bytes<Stage>() + boxes * kRowBox * kRowBytes + Scales::bytes(from.rows));
        scales.load(at, row, from.rows, s, slice * stages + s);  // makes the one arrival that is left
      } else {
        arrive(at.full(), kLoaders);
        arrive_expect_tx(at.full(), features.template bytes<Stage>() + Stage::kBlocks * boxes * kRowBox * kRowBytes);
      }
      const uint32_t k_byte = s * Stage::kBlocks * kRowBytes;
      features.template load<Dtype, Stage>(at, k_byte);
      count();
#pragma unroll
      for (uint32_t b = 0; b < Stage::kBlocks; ++b) {
        const uint32_t to = at.data() + Stage::tokens(b);
#pragma unroll 1
        for (uint32_t i = 0; i < boxes; ++i) {
          const uint32_t k = (k_byte + b * kRowBytes) / Dtype::kBytes, first = row + i * kRowBox;
          if constexpr (kScaled) {
            tma_load(to + i * kRowBox * kRowBytes, from.map, at.full(), k, first % kTileTokens, first / kTileTokens);
          } else {
            tma_load(to + i * kRowBox * kRowBytes, from.map, at.full(), kBuild.sliced && kIsBackward ? k + column : k,
                     first);
          }
        }
      }
    }
  }
  __syncwarp();
  ring.advance(from.slices * stages);
}

}  // namespace detail

// Loads all stages of a task. Its token rows are gathered (TokenRows, `k_bytes` of each row), or they lie together
// (BoxRows, `k_bytes` of each row in each slice). Run by all loader threads; the first calls count() for each stage.
// Tasks whose rows have scales are always wide.
template <class Dtype, class Features, class Rows, class Scales, class Count>
__device__ __forceinline__ void load_stages(Pipeline& ring, bool wide, const Features& features, const Rows& rows,
                                            const Scales& scales, uint32_t k_bytes, Count&& count) {
  if (wide) {
    detail::load_stages<Dtype, Wide>(ring, features, rows, scales, k_bytes, count);
  } else if constexpr (std::is_same_v<Scales, NoScales>) {
    detail::load_stages<Dtype, Narrow>(ring, features, rows, scales, k_bytes, count);
  }
}

}  // namespace flashmoe::sm90
