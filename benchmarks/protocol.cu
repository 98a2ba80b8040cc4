// The protocol alone on one GPU: whole calls of actors/ and protocol/ on every SM, with tasks that compute nothing.
//
// Answers two questions. How many tasks per microsecond do processors take? And if a processor's next task is there
// before its current task ends, how long does it stand still between the two tasks?
//
// Roles. In every block the first three warps are a processor, the fourth is a former of every gridDim.x-th expert. The
// fifth warp is the OS actor in block 0, and idle in other blocks:
//   warp 0  taker     takes a ticket and waits for its task while the executor still works on the previous task
//   warp 1  executor  dispatches its token blocks, then runs tasks
//   warp 2  retirer   retires the tasks that are done, while the executor is at the next task
//   warp 3  former    forms the tiles of its experts
//   warp 4  OS actor  only in block 0, which also has a processor: so no SM is used for the OS actor alone
// Pipelines. Task words go from the taker to the executor, and from there to the retirer, each time through a ring of
// two words in shared memory. The barriers full[i] and empty[i] of a ring expect one arrival each.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "flashmoe/actors/former.h"
#include "flashmoe/actors/os.h"
#include "flashmoe/actors/processor.h"
#include "flashmoe/gpu/platform.cuh"
#include "flashmoe/protocol/packet.h"

namespace flashmoe {
namespace {

using P = gpu::Platform;

constexpr uint32_t kTakerWarp = 0, kExecutorWarp = 1, kRetirerWarp = 2, kFormerWarp = 3, kOsWarp = 4;
constexpr uint32_t kThreads = 160;
constexpr uint32_t kMaxExperts = 512;
constexpr uint32_t kMaxServed = 16;  // experts per former
constexpr uint32_t kMaxChoices = 64 * 8;
constexpr uint32_t kStamps = 1024;  // the most gaps that a processor records in a call

// What one processor recorded. Times in cycles are of the SM's clock, times in nanoseconds of the global timer.
struct ProcessorLog {
  uint64_t first_taken_ns, last_taken_ns;
  uint32_t tasks;
  uint32_t gaps;                 // how many entries gap_cycles has
  uint32_t gap_cycles[kStamps];  // between the end of a task and the start of the next, if that was there already
};

// What tasks have counted, as a proof that each of them ran once: rows of tiles, and combined tokens.
struct Checks {
  uint64_t rows[kProducts], combined_tokens;
};

struct BenchArgs {
  const int32_t* topk_ids;  // [T, K]
  uint32_t busy_cycles;     // how long each task spins
  ProcessorLog* logs;       // [processors]
  Checks* checks;
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint64_t* b) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ bool barrier_test(uint64_t* b, uint32_t phase) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(shared_address(b)), "r"(phase)
               : "memory");
  return done != 0;
}
// This wait ends, because the taker's wait for a task is bounded: if no task comes, the taker puts a stop word into its
// ring, and the executor passes it on.
__device__ __forceinline__ void barrier_wait(uint64_t* b, uint32_t phase) {
  while (!barrier_test(b, phase)) {
  }
}

// Task words from one warp to another.
struct Ring {
  static constexpr uint32_t kSlots = 2;
  uint64_t full[kSlots], empty[kSlots], word[kSlots];

  __device__ void init() {
    for (uint32_t i = 0; i < kSlots; ++i) {
      barrier_init(&full[i]);
      barrier_init(&empty[i]);
    }
  }
  __device__ void wait_empty(uint32_t n) { barrier_wait(&empty[n % kSlots], (n / kSlots & 1u) ^ 1u); }
  // Called by one lane, after wait_empty(n).
  __device__ void put(uint32_t n, uint64_t w) {
    word[n % kSlots] = w;
    barrier_arrive(&full[n % kSlots]);
  }
  __device__ bool is_full(uint32_t n) { return barrier_test(&full[n % kSlots], n / kSlots & 1u); }
  // Called by all lanes. `there`: is_full(n) has returned true.
  __device__ uint64_t get(uint32_t n, bool there = false) {
    if (!there) barrier_wait(&full[n % kSlots], n / kSlots & 1u);
    const uint64_t w = word[n % kSlots];
    P::sync();
    if (P::lane() == 0) barrier_arrive(&empty[n % kSlots]);
    return w;
  }
};

struct Shared {
  Ring next, done;
  int32_t ids[kMaxChoices];
  float weights[kMaxChoices];
  uint16_t place[kMaxExperts], count[kMaxExperts], start[kMaxExperts];
  uint32_t owner[kMaxExperts], entries[1], aborted, missing;
  ReturnCursors<OneWorker<P>::Cursor> returns;
  // Former.
  FormedExpert experts[kMaxServed];
  Source formed[1];
  // OS warp of block 0.
  Source sources[1];
  Scheduler<P>::Memory scheduler;
  Status seen[1];
};

__device__ void take_tasks(const Call& c, Shared& s) {
  for (uint32_t n = 0;; ++n) {
    s.next.wait_empty(n);
    uint64_t ticket = 0;
    if (P::lane() == 0) ticket = take_ticket<P>(c);
    const Task task = wait_task<P>(c, P::broadcast(ticket, 0));
    if (P::lane() == 0) s.next.put(n, task.pack());
    if (task.kind == TaskKind::kStop) return;
  }
}

__device__ void retire_tasks(const Call& c, Shared& s) {
  for (uint32_t n = 0;; ++n) {
    const Task task = Task::unpack(s.done.get(n));
    if (task.kind == TaskKind::kStop) return;
    retire<P>(c, task);
  }
}

__device__ bool dispatch_block(const Call& c, const BenchArgs& args, Shared& s, uint32_t b) {
  const PacketScratch scratch{.ids = s.ids,
                              .weights = s.weights,
                              .place = s.place,
                              .count = s.count,
                              .start = s.start,
                              .entries = s.entries,
                              .aborted = &s.aborted,
                              .missing = &s.missing,
                              .owner = s.owner};
  const int32_t* ids = args.topk_ids + uint64_t{b << c.policy.log2_block} * c.shape.top_k;
  for (uint32_t i = P::lane(); i < c.tokens_in_block(b) * c.shape.top_k; i += P::kLanes) {
    s.ids[i] = ids[i];
    s.weights[i] = 1.0f;
  }
  P::team_sync();
  if (!build_packets<P>(c, b, scratch)) return false;
  signal_own_packet<P>(c, b, scratch);
  return true;
}

__device__ void execute(const Call& c, const BenchArgs& args, const Task& task) {
  const int64_t until = clock64() + args.busy_cycles;
  while (args.busy_cycles != 0 && clock64() < until) {
  }
  if (P::lane() != 0) return;
  // Relaxed adds without a result: the SM does not wait for them.
  if (task.kind == TaskKind::kStop) return;
  with_product(task.kind, [&]<uint32_t n>() {
    P::fetch_add(&args.checks->rows[n], uint64_t{c.tile(task.tile().number())->shape.rows});
  });
}

// The engine of the executor's Returner. An item is a token, and is counted instead of summed. (A rank that is alone
// has no Reduce.)
struct CountTokens {
  const BenchArgs& args;

  using Piece = uint32_t;  // tokens
  __device__ static uint32_t processor() { return blockIdx.x; }
  __device__ static uint32_t processors() { return gridDim.x; }
  __device__ static uint32_t items(uint32_t tokens, uint32_t) { return tokens; }
  __device__ static uint32_t items_of_reduce(uint32_t) { return 64; }
  __device__ static uint32_t items_of_combine(uint32_t) { return 64; }
  __device__ static Piece reduce_piece(uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) { return 0; }
  __device__ static Piece combine_piece(uint32_t, uint32_t n, uint32_t each, uint32_t all) {
    return min_of(each, all - n * each);
  }
  __device__ void sum(Piece tokens) const {
    if (P::lane() == 0) P::fetch_add(&args.checks->combined_tokens, uint64_t{tokens});
  }
  __device__ static void begin() {}
  __device__ static void end(Phase, uint32_t, uint32_t) {}
};

__device__ void run_tasks(const Call& c, const BenchArgs& args, Shared& s) {
  for (uint32_t b = blockIdx.x; b < c.blocks(); b += c.policy.clusters) {
    if (!dispatch_block(c, args, s, b)) break;  // the call has failed: the taker will deliver a stop word
  }
  ProcessorLog& log = args.logs[blockIdx.x];
  uint32_t tasks = 0, gaps = 0;
  uint64_t first = 0, last = 0;
  int64_t ended = 0;
  for (uint32_t n = 0;; ++n) {
    const bool waiting = s.next.is_full(n);
    const Task task = Task::unpack(s.next.get(n, waiting));
    const int64_t begun = clock64();
    s.done.wait_empty(n);  // here, and not after execute(), where a wait would count as a part of the gap
    if (task.kind != TaskKind::kStop) {
      last = P::now_ns();
      if (tasks++ == 0) first = last;
      if (waiting && ended != 0 && gaps < kStamps) {
        if (P::lane() == 0) log.gap_cycles[gaps] = static_cast<uint32_t>(begun - ended);
        ++gaps;
      }
      execute(c, args, task);
      ended = clock64();
    }
    if (P::lane() == 0) s.done.put(n, task.pack());
    if (task.kind == TaskKind::kStop) break;
  }
  if (P::lane() == 0) s.returns = {};
  P::sync();
  CountTokens engine{args};
  Returner<P, CountTokens, OneWorker<P>::Cursor>(c, engine, s.returns).run(c);
  if (P::lane() == 0) {
    log.first_taken_ns = first;
    log.last_taken_ns = last;
    log.tasks = tasks;
    log.gaps = gaps;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    protocol_kernel(const __grid_constant__ Call c, const __grid_constant__ BenchArgs args) {
  __shared__ Shared s;
  if (threadIdx.x == 0) {
    s.next.init();
    s.done.init();
  }
  for (uint32_t e = threadIdx.x; e < c.shape.experts; e += kThreads) s.owner[e] = c.placement.owner[e];
  __syncthreads();
  switch (threadIdx.x / P::kLanes) {
    case kTakerWarp: take_tasks(c, s); break;
    case kExecutorWarp: run_tasks(c, args, s); break;
    case kRetirerWarp: retire_tasks(c, s); break;
    case kFormerWarp: run_former<P>(c, s.formed, {s.experts, blockIdx.x, gridDim.x}); break;
    case kOsWarp:
      if (blockIdx.x == 0) {
        run_os<P>(c, {.subscriber = {s.sources, {}}, .scheduler = &s.scheduler, .seen = s.seen});
      }
      break;
    default: break;
  }
}

#define CUDA_CHECK(call)                                                                             \
  do {                                                                                               \
    const cudaError_t error = (call);                                                                \
    if (error != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(1);                                                                                  \
    }                                                                                                \
  } while (0)

template <class T>
T* device_copy(const std::vector<T>& host) {
  T* p;
  CUDA_CHECK(cudaMalloc(&p, host.size() * sizeof(T)));
  CUDA_CHECK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

uint8_t* device_zeros(uint64_t bytes) {
  uint8_t* p;
  CUDA_CHECK(cudaMalloc(&p, bytes));
  CUDA_CHECK(cudaMemset(p, 0, bytes));
  return p;
}

struct Shape {
  const char* name;
  uint32_t tokens, experts, top_k, log2_block, intermediate, hidden;  // the last two in blocks of columns
};

// Token blocks are so large that there is about one for each SM, but not so small that many packets hold little work.
// The blocks of columns are as many as tasks of 128 rows by 256 columns would have: ceil(2I / 256), or ceil(I / 256)
// without a gate, and ceil(H / 256).
constexpr Shape kShapes[] = {
    {"qwen3-30b-a3b", 8192, 128, 8, 6, 6, 8},
    {"paper-E64", 16384, 64, 2, 7, 8, 8},
    {"mixtral-8x7b", 8192, 8, 2, 6, 112, 16},
    {"qwen3-30b-a3b-1024", 1024, 128, 8, 6, 6, 8},
};

class Bench {
 public:
  Bench(const Shape& shape, uint32_t processors) : shape_(shape) {
    Limits limits;
    limits.max_tokens = shape.tokens;
    limits.experts = limits.max_local_experts = shape.experts;
    limits.top_k = shape.top_k;
    // No row is read or written. So a block of columns has one element, and rows have as many elements as blocks.
    limits.hidden = shape.hidden;
    limits.intermediate = shape.intermediate;
    limits.columns_per_task = each_product(1);
    limits.x_bytes = limits.intermediate_bytes = limits.return_bytes = 2;
    limits.return_slots = shape.top_k;
    limits.processors = processors;
    if (ceil_div(shape.experts, processors) > kMaxServed) {
      std::fprintf(stderr, "%s: more experts than formers serve\n", shape.name);
      std::exit(1);
    }

    std::vector<uint32_t> owner(shape.experts, 0), by_owner(shape.experts), owner_base{0, shape.experts};
    for (uint32_t e = 0; e < shape.experts; ++e) by_owner[e] = e;
    call_.shape.tokens = shape.tokens;
    call_.shape.hidden = limits.hidden;
    call_.shape.intermediate = limits.intermediate;
    call_.shape.experts = call_.shape.local_experts = shape.experts;
    call_.shape.top_k = shape.top_k;
    call_.policy.log2_block = shape.log2_block;
    call_.cut_columns(limits.columns_per_task);
    call_.policy.group_first[1] = static_cast<uint16_t>(call_.policy.columns[kReturning]);
    call_.policy.clusters = processors;
    call_.policy.order.raster = 8;
    call_.policy.order.window = processors;
    call_.policy.timeout_ns = 2'000'000'000;
    call_.placement.owner = device_copy(owner);
    call_.placement.by_owner = device_copy(by_owner);
    call_.placement.owner_base = device_copy(owner_base);
    call_.memory = make_call_memory(limits);
    call_.memory.heaps = device_copy(std::vector<uint8_t*>{device_zeros(call_.memory.heap_layout.bytes)});
    call_.memory.work = device_zeros(call_.memory.work_layout.bytes);
    call_.memory.token_row_bytes = limits.hidden * limits.x_bytes;
    call_.memory.intermediate_row_bytes = limits.intermediate * limits.intermediate_bytes;
    call_.memory.return_row_bytes = limits.hidden * limits.return_bytes;
    args_.topk_ids = device_copy(random_routing());
    args_.logs = reinterpret_cast<ProcessorLog*>(device_zeros(processors * sizeof(ProcessorLog)));
    args_.checks = reinterpret_cast<Checks*>(device_zeros(sizeof(Checks)));
  }

  // Makes a call whose tasks spin for busy_cycles. Returns its microseconds. Exits with a message if a task was lost or
  // run twice.
  float run(uint32_t busy_cycles) {
    ++call_.epoch;
    args_.busy_cycles = busy_cycles;
    CUDA_CHECK(cudaMemset(args_.checks, 0, sizeof(Checks)));
    void* parameters[] = {&call_, &args_};
    cudaEvent_t before, after;
    CUDA_CHECK(cudaEventCreate(&before));
    CUDA_CHECK(cudaEventCreate(&after));
    CUDA_CHECK(cudaEventRecord(before));
    CUDA_CHECK(cudaLaunchCooperativeKernel(protocol_kernel, call_.policy.clusters, kThreads, parameters, 0, nullptr));
    CUDA_CHECK(cudaEventRecord(after));
    CUDA_CHECK(cudaDeviceSynchronize());
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, before, after));
    CUDA_CHECK(cudaEventDestroy(before));
    CUDA_CHECK(cudaEventDestroy(after));
    logs_.resize(call_.policy.clusters);
    CUDA_CHECK(cudaMemcpy(logs_.data(), args_.logs, logs_.size() * sizeof(ProcessorLog), cudaMemcpyDeviceToHost));
    check();
    return ms * 1000.0f;
  }

  uint64_t tasks() const {
    uint64_t n = 0;
    for (const auto& log : logs_) n += log.tasks;
    return n;
  }
  // From the moment at which the first task is taken to that at which the last one is.
  double microseconds() const {
    uint64_t first = UINT64_MAX, last = 0;
    for (const auto& log : logs_) {
      if (log.tasks == 0) continue;
      first = std::min(first, log.first_taken_ns);
      last = std::max(last, log.last_taken_ns);
    }
    return static_cast<double>(last - first) * 1e-3;
  }
  std::vector<uint32_t> gaps() const {
    std::vector<uint32_t> all;
    for (const auto& log : logs_) all.insert(all.end(), log.gap_cycles, log.gap_cycles + log.gaps);
    std::sort(all.begin(), all.end());
    return all;
  }

 private:
  std::vector<int32_t> random_routing() const {
    std::mt19937 random(1);
    std::vector<int32_t> experts(shape_.experts), ids;
    for (uint32_t e = 0; e < shape_.experts; ++e) experts[e] = static_cast<int32_t>(e);
    for (uint32_t t = 0; t < shape_.tokens; ++t) {
      for (uint32_t k = 0; k < shape_.top_k; ++k) {
        std::swap(experts[k], experts[k + random() % (shape_.experts - k)]);
        ids.push_back(experts[k]);
      }
    }
    return ids;
  }

  void check() const {
    Checks checks;
    Control control;
    CUDA_CHECK(cudaMemcpy(&checks, args_.checks, sizeof(checks), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(&control, call_.control(), sizeof(control), cudaMemcpyDeviceToHost));
    const uint64_t rows = uint64_t{shape_.tokens} * shape_.top_k;
    bool whole = true;
    for (uint32_t n = 0; n < kProducts; ++n) whole &= checks.rows[n] == rows * call_.policy.columns[n];
    if (!whole || checks.combined_tokens != shape_.tokens || control.abort.value != 0 ||
        control.queue_head.value != control.published.value) {
      std::fprintf(stderr, "call %llu of %s: tasks were lost or repeated (abort %llu)\n",
                   static_cast<unsigned long long>(call_.epoch), shape_.name,
                   static_cast<unsigned long long>(control.abort.value));
      std::exit(1);
    }
  }

  const Shape& shape_;
  Call call_;
  BenchArgs args_{};
  std::vector<ProcessorLog> logs_;
};

template <class T>
T quantile(std::vector<T> v, double q) {
  if (v.empty()) return T{};
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(q * static_cast<double>(v.size() - 1))];
}

int run_all() {
  cudaDeviceProp device;
  CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
  int khz = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  const auto processors = static_cast<uint32_t>(device.multiProcessorCount);
  std::printf("{\"device\": \"%s\", \"sms\": %u, \"clock_ghz\": %.3f, \"shapes\": [", device.name, processors,
              khz * 1e-6);
  constexpr int kCalls = 50, kWarmUp = 5;
  constexpr uint32_t kBusyCycles = 8000;  // about 4 us, like a short task: the next task is ready long before its end
  for (size_t i = 0; i < std::size(kShapes); ++i) {
    Bench bench(kShapes[i], processors);
    std::vector<double> rate, span, kernel;
    for (int n = 0; n < kCalls; ++n) {
      const float us = bench.run(0);
      if (n < kWarmUp) continue;
      rate.push_back(static_cast<double>(bench.tasks()) / bench.microseconds());
      span.push_back(bench.microseconds());
      kernel.push_back(us);
    }
    bench.run(kBusyCycles);
    const std::vector<uint32_t> gaps = bench.gaps();
    const double ns = 1e6 / khz;
    std::printf(
        "%s\n {\"shape\": \"%s\", \"tasks\": %llu, \"tasks_per_us\": {\"median\": %.1f, \"min\": %.1f, \"max\": %.1f},"
        " \"taken_span_us\": %.1f, \"kernel_us\": %.1f,"
        " \"busy_gap_ns\": {\"n\": %zu, \"median\": %.0f, \"p99\": %.0f, \"max\": %.0f}}",
        i ? "," : "", kShapes[i].name, static_cast<unsigned long long>(bench.tasks()), quantile(rate, 0.5),
        quantile(rate, 0.0), quantile(rate, 1.0), quantile(span, 0.5), quantile(kernel, 0.5), gaps.size(),
        quantile(gaps, 0.5) * ns, quantile(gaps, 0.99) * ns, quantile(gaps, 1.0) * ns);
  }
  std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace flashmoe

int main() {
  return flashmoe::run_all();
}
