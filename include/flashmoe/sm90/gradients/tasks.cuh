// What consumer warpgroups compute in the tasks of a backward pass.
#pragma once

#include "flashmoe/sm90/gradients/epilogue.cuh"
#include "flashmoe/sm90/gradients/look_up.cuh"
#include "flashmoe/sm90/gradients/mainloop_rows.cuh"
#include "flashmoe/sm90/gradients/router.cuh"
#include "flashmoe/sm90/gradients/weights.cuh"
#include "flashmoe/sm90/machine/mainloop.cuh"
#include "flashmoe/sm90/roles/consumer.cuh"

namespace flashmoe::sm90 {

// The rows, columns and addresses of a task that differentiates, as store_gradients() asks for them.
template <class Dtype, bool kGated>
struct GradientPlace {
  const KernelArgs& args;
  const Call& c;
  const TaskSlot& slot;

  __device__ __forceinline__ uint32_t first_column() const {
    return slot.column * kTaskFeatures + by_block(kTaskFeatures / kClusterBlocks);
  }
  __device__ __forceinline__ uint32_t rows() const { return slot.share.rows; }
  __device__ __forceinline__ uint32_t columns() const {
    const uint32_t first = first_column();
    return first < c.shape.intermediate ? c.shape.intermediate - first : 0;
  }
  // Rows rows() to padded() - 1 of the share lie behind the tile's last row, and become zeros, up to the end of a
  // stage. 0 in the first block of a wide task, because the tile's last row is in the second block.
  __device__ __forceinline__ uint32_t padded() const {
    const uint32_t end = slot.share.first + slot.share.rows;
    [[maybe_unused]] const uint32_t anew = kByFragments<Dtype> ? cluster_rank_anew() : 0;  // see by_block()
    const uint32_t last_block = kClusterBlocks - 1;
    const bool last = !slot.share.wide || (kByFragments<Dtype> ? anew : cluster_rank()) == last_block;
    return last ? align_up(end, kRowsOfStage<Dtype>) - slot.share.first : 0;
  }
  __device__ __forceinline__ float weight(uint32_t r) const { return slot.weights[r]; }
  // The kept pre-activations z: the address of row 0 at the block's first column; the bytes from row to row; the
  // number of the kept row for row r of the share (any valid number if there is no row r).
  __device__ __forceinline__ const uint8_t* z() const {
    return args.backward.kept.pre_activations + first_column() * ((kGated ? 2 : 1) * Dtype::kBytes);
  }
  __device__ __forceinline__ uint32_t z_bytes() const { return kept_row_bytes<Dtype>(args); }
  __device__ __forceinline__ uint32_t kept_row(uint32_t r) const { return r < rows() ? slot.tokens[r] : 0; }
  // in_turn(): in dZ, each up lies beside its gate; otherwise all gates lie before all ups.
  __device__ __forceinline__ bool in_turn() const { return args.gated.step != 1; }
  __device__ __forceinline__ uint32_t to_up() const { return args.gated.up; }
  __device__ __forceinline__ uint32_t gradient_bytes() const { return args.backward.z_columns * Dtype::kBytes; }
  __device__ __forceinline__ uint8_t* gradients(uint32_t r, uint32_t element) const {
    return args.backward.dz + row(r) * gradient_bytes() + (first_column() * args.gated.step + element) * Dtype::kBytes;
  }
  // Computed from a kernel argument, although c.shape has the number, too: c lies in shared memory, so each row would
  // load it again and wait for it.
  __device__ __forceinline__ uint32_t weighted_bytes() const {
    return args.backward.z_columns * (kGated ? Dtype::kBytes / 2 : Dtype::kBytes);
  }
  __device__ __forceinline__ uint8_t* weighted(uint32_t r, uint32_t column) const {
    return args.backward.weighted + row(r) * weighted_bytes() + (first_column() + column) * Dtype::kBytes;
  }
  // If weights scale the products with gate_up: biases() are the expert's biases from a column on, null if there are
  // none or no such column; bias() is the bias of the i-th of these columns' gate or up; plain_behind() says how many
  // bytes behind dZ its rows without the weight lie, 0 if nobody needs these.
  __device__ __forceinline__ const uint8_t* biases(uint32_t column) const {
    const uint32_t n = first_column() + column;
    if (args.gate_up_bias == nullptr || n >= c.shape.intermediate) return nullptr;
    const uint64_t first = uint64_t{slot.expert} * args.backward.z_columns + n * args.gated.step;
    return static_cast<const uint8_t*>(args.gate_up_bias) + first * Dtype::kBytes;
  }
  __device__ __forceinline__ float bias(const uint8_t* biases, uint32_t i, bool up) const {
    return bias_at<Dtype>(biases, i * args.gated.step + (up ? args.gated.up : 0), true);
  }
  __device__ __forceinline__ uint64_t plain_behind() const { return args.options.plain_behind; }
  // Stores the block's part of dS for row r. A row has two parts in each block of columns, one for each thread block
  // of the cluster. In a wide task, one block has all columns of the row, so it stores zero as the second part.
  __device__ __forceinline__ void store_part(uint32_t r, float sum) const {
    const uint64_t all =
        kTrainsInGroup ? args.group.rows : uint64_t{c.shape.tokens} * (c.shape.routed_top_k() + c.shape.shared);
    float* const parts = args.backward.weight_parts + all * slot.column * kClusterBlocks + slot.tokens[r];
    parts[by_block(all)] = sum;
    if (slot.share.wide) parts[all] = 0.0f;
  }

 private:
  // If the cluster's blocks share the task's columns: `each` times the number of blocks before this one; else 0. With
  // fragments, no register is left to keep the block's number, so it is read here, also for a wide task: otherwise
  // the compiler would keep the number from an earlier task.
  template <class T>
  __device__ __forceinline__ T by_block(T each) const {
    if constexpr (!kByFragments<Dtype>) return slot.share.wide ? 0 : cluster_rank() * each;
    const T before = cluster_rank_anew() * each;
    return slot.share.wide ? 0 : before;
  }
  __device__ __forceinline__ uint64_t row(uint32_t r) const {
    return uint64_t{slot.inner} * kTileTokens + slot.share.first + r;
  }
};

// Stores the gradients of combine weights, each the sum of its parts. Run by all warps that have seen the stop, which
// are all but the last warp of a block.
__device__ __forceinline__ void sum_weight_parts(const KernelArgs& args, const Call& c) {
  constexpr uint32_t kSummers = (kWarps - 1) * 32;
  const uint32_t thread = thread_anew();
  if (thread >= kSummers || args.backward.combine_gradients == nullptr) return;
  const uint32_t parts = weight_parts_of(c);
  const uint32_t top_k = gate_top_k_of(c.shape), all = c.shape.tokens * top_k;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kSummers + thread; i < all; i += gridDim.x * kSummers) {
    args.backward.combine_gradients[i] = choice_gradient(args, i / top_k, i % top_k, parts);
  }
}

struct BackwardTasks {
  // A consumer warpgroup's part of one task of a backward pass, in one of its shapes.
  template <class Dtype, Activation kActivation, class Shape, class Trace>
  static __device__ __forceinline__ void compute(const KernelArgs& args, const Call& c, const TaskSlot& slot,
                                                 Pipeline& ring, const Consumer& consumer, const Trace& trace) {
    using Stage = typename Shape::Stage;
    TaskKind kind = slot.kind;  // kept in a register; with fragments, which leave none, read again after the mainloop
    const uint32_t group = consumer.anew<Dtype>(ring).group;
    if (slot.share.cover <= group * Shape::kNextA) return keep_pace<Dtype, Stage>(ring, stages_of(slot));
    Accumulators<Shape> acc;
    const uint32_t stages = (kBuild.sliced ? slot.slices : 1) * Stage::stages(slot.k_bytes);
    multiply_and_hold<Dtype, Shape>(ring, group, stages, is_one_of<kGathering>(kind), acc);
    trace.begin(1);
    const auto [group_after, staging] = consumer.anew<Dtype>(ring);
    const Lane at = Lane::of_thread(group_after);
    const GradientPlace<Dtype, is_gated(kActivation)> where{args, c, slot};
    const uint32_t last = ring.last();
    if constexpr (kByFragments<Dtype>) kind = *static_cast<const volatile TaskKind*>(&slot.kind);
    if (is_one_of<kDifferentiating>(kind)) {
      // Pre-activations land in the last stage, so it is released after the epilogue. Until then, loaders fill the
      // other three stages.
      const uint32_t landing = ring.data(last) + Shape::a(0) + group_after * Shape::kNextA * kRowBytes;
      store_gradients<Dtype, kActivation>(staging, landing, acc, where, args.clamped);
      release_stage<Dtype, Stage>(ring.empty(ring.last()));
    } else {
      release_stage<Dtype, Stage>(ring.empty(last));
      if constexpr (kBuild.sliced) {  // adds the part of dX that comes through the shared expert's gate
        if (args.shared_gate != nullptr && c.shape.is_shared(slot.expert)) {
          add_outer<Dtype>(staging, at, acc, reinterpret_cast<const float*>(slot.tokens), args.shared_gate,
                           where.first_column(), c.shape.hidden);
        }
      }
      store_returned_rows<Dtype>(staging, at, acc, nullptr, where.rows(), where.first_column(), c.shape.hidden,
                                 slot.weights, slot.to);
    }
    trace.end(Phase::kEpilogue, slot.tile, slot.column, 1);
  }

  // A consumer warpgroup's part of one task after the queue's stop.
  template <class Dtype, bool kTransposedLayer>
  static __device__ __forceinline__ void compute_behind_stop(const KernelArgs& args, const TaskSlot& slot,
                                                             Pipeline& ring, const Consumer& consumer) {
    const uint32_t stages = Wide::stages(slot.k_bytes);
    const bool accumulates = args.backward.accumulates != 0;
    if (stages == 0) {
      if (accumulates) return;
      const WeightOutput to = WeightOutput::of<Dtype, kTransposedLayer>(args, slot.expert, slot.column);
      return store_no_gradients<Dtype>(to, Lane::of_thread(consumer.anew<Dtype>(ring).group));
    }
    float acc[1][128];
    if constexpr (kByFragments<Dtype>) {
      using Shape = TokensByFeatures<Wide, Major::kMn>;  // the operands have this shape's places in a stage
      const uint32_t in_warpgroup = consumer.anew<Dtype>(ring).group;
      release_stage<Dtype, Wide>(
          multiply_fragments_and_hold<Dtype, Shape, Major::kMn>(ring, in_warpgroup, stages, acc));
    } else {
      multiply_rows<Dtype>(ring, consumer.anew<Dtype>(ring).group, stages, acc[0]);
    }
    const auto [group, staging] = consumer.anew<Dtype>(ring);
    const WeightOutput to = WeightOutput::of<Dtype, kTransposedLayer>(args, slot.expert, slot.column);
    if (accumulates) return add_weight_gradients(Lane::of_thread(group), acc, to);
    store_weight_gradients<Dtype>(staging, Lane::of_thread(group), acc, to);
  }
};

}  // namespace flashmoe::sm90
