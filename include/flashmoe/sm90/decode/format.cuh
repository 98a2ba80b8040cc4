// What the kernel for a few tokens does differently for each way in which experts' matrices are stored: Format<Dtype>.
// The Format in this file is for matrices in the type of rows. Matrices in e4m3 and in mxfp4 have Formats of their own
// (decode/fp8.cuh, decode/mxfp4.cuh), which the entry of such a kernel includes.
//
// The consumer warps run prepare() and multiply(). The warps that load rows and scales run load(). All threads run
// send_rows(). These functions call decode/products.cuh, decode/tasks.cuh and decode/send.cuh, which say what memory
// they touch.
#pragma once

#include "flashmoe/sm90/decode/products.cuh"
#include "flashmoe/sm90/decode/send.cuh"
#include "flashmoe/sm90/decode/tasks.cuh"

namespace flashmoe::sm90::few {

// For weights that have no scale for each row: a lane's finished sums of a task are stored as they are.
struct NoRowScales {
  __device__ __forceinline__ NoRowScales(const Block&, const Task&, uint32_t) {}
  template <class Store>
  __device__ __forceinline__ void scale(const float (&sums)[kBlocks][2], Store&& store) const {
    store(sums);
  }
};

template <class Dtype>
struct Format {
  static_assert(!kQuantised<Dtype> && !kMxFp4<Dtype>);
  template <bool kGated>
  using RowScales = NoRowScales;

  // The consumers, before their first task.
  static __device__ __forceinline__ void prepare(const Block&) {}
  // Multiplies all stages of a task. all_stages(count, add) calls add for each stage, `count` stages at a time.
  template <class AllStages>
  static __device__ __forceinline__ void multiply(const Block& b, uint32_t rows, const AllStages& all_stages,
                                                  Sums<Dtype>& sums) {
    all_stages(Count<2>{}, [&](const auto& w, uint32_t from) { w.multiply(from, rows, sums); });
  }
  // The warps that load rows or scales. Here they load rows.
  template <bool kGated, bool kHalved>
  static __device__ __forceinline__ void load(const Block& b) {
    const uint32_t loader = b.warp() - (kFewConsumers + 1);
    if (loader < kFewRowLoaders) load_rows<Dtype, kGated, kHalved>(b, loader);
  }
  // All threads: sends the rows of token block n to the other ranks.
  static __device__ __forceinline__ void send_rows(const Block& b, uint32_t n) { copy_rows(b, n); }
};

}  // namespace flashmoe::sm90::few
