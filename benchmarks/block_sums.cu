// How fast thread blocks that do nothing else sum rows, on one GPU. A cluster that stops early in a call with the
// reduced return does this work (OrderPolicy::link_clusters).
//
// Rows lie as in the staging area of a call: memory for [T, K] rows of one source's tokens. A token has one row for
// each of its choices that fall on this rank. Blocks have as many warps as those of the fused kernel. Warps take pieces
// by tickets of one counter, return group by return group (each of whole tasks' columns), and sum them with the
// kernel's own code
// (sm90/roles/ring_sums.cuh). Sums are stored on the same GPU, so the time that a link between GPUs adds is not
// measured. "registers_gb_s": the same with ItemSums, which holds the rows in registers and uses no shared memory.
// Before each run the L2 is filled with other data.
//
// Prints one JSON object. Rates count the bytes of the rows that are read.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "flashmoe/sm90/geometry.h"
#include "flashmoe/sm90/roles/ring_sums.cuh"

namespace flashmoe {
namespace {

using gpu::SumSpan;
using RingSums = sm90::RingSums<gpu::Bf16>;
using P = gpu::Platform;

constexpr uint32_t kThreads = 384, kItems = 32, kGroups = 5;
constexpr uint32_t kRepeats = 9;
constexpr size_t kFlushBytes = size_t{256} << 20;

struct Rows {
  const uint8_t* staged;  // [T, K, row_bytes]
  uint8_t* sums;          // [T, row_bytes]
  const uint32_t* used;   // [T] bit k: the token has a row k
  uint32_t tokens, top_k, row_bytes;
  uint32_t* tickets;  // the counter; zero before a run
  // In a row, group g has the bytes from first[g] to first[g + 1].
  uint32_t first[kGroups + 1];
};

// The return groups of a call with the reduced return (cuda::return_groups): they end after 2, 4, 6, 7 and 8 eighths of
// GEMM1's columns of tasks.
void set_groups(Rows& r) {
  constexpr uint32_t kTaskBytes = sm90::kTaskFeatures * gpu::Bf16::kBytes, kEighths[] = {0, 2, 4, 6, 7, 8};
  const uint32_t columns = ceil_div(r.row_bytes, kTaskBytes);
  for (uint32_t g = 0; g <= kGroups; ++g) {
    r.first[g] = std::min(ceil_div(columns * kEighths[g], 8u) * kTaskBytes, r.row_bytes);
  }
}

__device__ SumSpan span_of(const Rows& r, uint32_t group) {
  const uint32_t first = r.first[group], end = r.first[group + 1];
  return {.rows = r.staged + first + P::lane() * 16,
          .token_bytes = r.top_k * r.row_bytes,
          .slot_bytes = r.row_bytes,
          .out = r.sums + first + P::lane() * 16,
          .out_bytes = r.row_bytes,
          .bytes = end - first,
          .writes_all = false};
}

template <bool kRing>
__global__ void __launch_bounds__(kThreads, 1) sum_rows(const __grid_constant__ Rows r) {
  extern __shared__ __align__(16) uint8_t memory[];
  const uint32_t ring = gpu::shared_address(memory) + threadIdx.x / 32 * RingSums::kBytes;
  uint32_t group = 0, before = 0;
  while (true) {
    uint32_t ticket = 0;
    if (P::lane() == 0) ticket = atomicAdd(r.tickets, 1u);
    ticket = P::broadcast(ticket, 0);
    uint32_t items;
    while (true) {
      items = r.tokens * span_of(r, group).per_token();
      const uint32_t pieces = ceil_div(items, kItems);
      if (ticket - before < pieces) break;
      before += pieces;
      if (++group == kGroups) return;
    }
    gpu::SumPiece piece(span_of(r, group), ticket - before, kItems, items);
    if (piece.exists) piece.used = r.used[piece.token];
    if constexpr (kRing) {
      RingSums(piece, ring).run();
    } else {
      gpu::ItemSums<gpu::Bf16, false>(piece).run();
    }
  }
}

// Writes bfloat16 numbers with magnitudes in [1, 2). Digits and signs come from a hash of the index.
__global__ void fill(uint16_t* to, size_t count) {
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t bits = static_cast<uint32_t>(i * 2654435761u);
    to[i] = static_cast<uint16_t>(0x3f80u | (bits >> 9 & 0x7fu) | (bits >> 16 & 0x8000u));
  }
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T* memory(size_t count) {
  T* p;
  check(cudaMalloc(&p, count * sizeof(T)));
  return p;
}

std::vector<uint8_t> copied(const uint8_t* from, size_t bytes) {
  std::vector<uint8_t> to(bytes);
  check(cudaMemcpy(to.data(), from, bytes, cudaMemcpyDeviceToHost));
  return to;
}

struct Layer {
  const char* name;
  uint32_t hidden, top_k, ranks;
};

// Draws how many of each token's choices fall on this rank, one of l.ranks. Returns Rows::used, with as many low bits
// set for each token; `rows` becomes the number of all these choices.
std::vector<uint32_t> used_rows(const Layer& l, uint32_t tokens, uint64_t& rows) {
  std::mt19937_64 random(7);
  std::vector<uint32_t> used(tokens);
  rows = 0;
  for (uint32_t& each : used) {
    uint32_t n = 0;
    for (uint32_t k = 0; k < l.top_k; ++k) n += random() % l.ranks == 0 ? 1 : 0;
    each = (1u << n) - 1;
    rows += n;
  }
  return used;
}

// The GB/s at which `blocks` blocks sum, as the median of kRepeats runs. `bytes` are read in a run.
template <bool kRing>
double rate(Rows r, uint32_t blocks, uint64_t bytes, uint8_t* flush) {
  constexpr uint32_t kBytes = kThreads / 32 * RingSums::kBytes;
  check(cudaFuncSetAttribute(sum_rows<kRing>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  std::vector<float> times;
  cudaEvent_t from, to;
  check(cudaEventCreate(&from));
  check(cudaEventCreate(&to));
  for (uint32_t i = 0; i < kRepeats; ++i) {
    check(cudaMemset(flush, static_cast<int>(i), kFlushBytes));
    check(cudaMemset(r.tickets, 0, sizeof(uint32_t)));
    check(cudaEventRecord(from));
    sum_rows<kRing><<<blocks, kThreads, kBytes>>>(r);
    check(cudaGetLastError());
    check(cudaEventRecord(to));
    check(cudaEventSynchronize(to));
    times.emplace_back();
    check(cudaEventElapsedTime(&times.back(), from, to));
  }
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return static_cast<double>(bytes) / times[kRepeats / 2] / 1e6;
}

}  // namespace
}  // namespace flashmoe

int main() {
  using namespace flashmoe;
  constexpr uint32_t kTokens = 8192;
  const Layer layers[] = {{"qwen3", 2048, 8, 2},
                          {"qwen3", 2048, 8, 4},
                          {"qwen3-next", 2048, 10, 2},
                          {"qwen3-next", 2048, 10, 4},
                          {"minimax-m2", 3072, 8, 4}};
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0));
  auto* flush = memory<uint8_t>(kFlushBytes);
  const auto rates = [&](const char* name, auto&& rate_of) {
    std::printf(", \"%s\": {", name);
    for (const uint32_t blocks : {1u, 8u, 16u, 32u, 132u})
      std::printf("%s\"%u\": %.1f", blocks == 1 ? "" : ", ", blocks, rate_of(blocks));
    std::printf("}");
  };
  std::printf("{\"device\": \"%s\", \"tokens\": %u, \"layers\": [", device.name, kTokens);
  for (const Layer& l : layers) {
    const uint32_t row_bytes = l.hidden * 2;
    uint64_t rows;
    const std::vector<uint32_t> used = used_rows(l, kTokens, rows);
    auto* staged = memory<uint8_t>(size_t{kTokens} * l.top_k * row_bytes);
    auto* sums = memory<uint8_t>(size_t{kTokens} * row_bytes);
    auto* bits = memory<uint32_t>(kTokens);
    auto* tickets = memory<uint32_t>(1);
    fill<<<1024, 256>>>(reinterpret_cast<uint16_t*>(staged), size_t{kTokens} * l.top_k * l.hidden);
    check(cudaMemset(sums, 0, size_t{kTokens} * row_bytes));
    check(cudaMemcpy(bits, used.data(), kTokens * sizeof(uint32_t), cudaMemcpyHostToDevice));
    Rows r{staged, sums, bits, kTokens, l.top_k, row_bytes, tickets, {}};
    set_groups(r);
    std::printf("%s\n {\"layer\": \"%s\", \"ranks\": %u, \"rows_of_a_token\": %.3f", &l == layers ? "" : ",", l.name,
                l.ranks, static_cast<double>(rows) / kTokens);
    std::vector<uint8_t> ours[2];
    rates("gb_s", [&](uint32_t blocks) { return rate<true>(r, blocks, rows * row_bytes, flush); });
    ours[0] = copied(sums, size_t{kTokens} * row_bytes);
    check(cudaMemset(sums, 0, size_t{kTokens} * row_bytes));
    rates("registers_gb_s", [&](uint32_t blocks) { return rate<false>(r, blocks, rows * row_bytes, flush); });
    ours[1] = copied(sums, size_t{kTokens} * row_bytes);
    std::printf("}");
    if (ours[0] != ours[1]) {
      std::fprintf(stderr, "%s x%u: the ways have other bits\n", l.name, l.ranks);
      return 1;
    }
    for (void* p :
         {static_cast<void*>(staged), static_cast<void*>(sums), static_cast<void*>(bits), static_cast<void*>(tickets)})
      check(cudaFree(p));
  }
  std::printf("]}\n");
  return 0;
}
