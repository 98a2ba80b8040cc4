// A CUDA driver for tests of the host side where there is no GPU: device memory is host memory, of which only what is
// written takes any, and a launch describes itself in JSON, fills in the routing that a kernel would, and posts the fault
// it was told to.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/transport/nvshmem.h"
#include "flashmoe/protocol/machines.h"
#include "flashmoe/sm90/geometry.h"
#include "host/clock.h"

using namespace flashmoe;
using cuda::CudaResult;
using cuda::DeviceAttribute;
using cuda::DevicePtr;

namespace {

constexpr CudaResult kOutOfMemory = 2, kCaptureUnsupported = 900;

int major = 9;
size_t memory_left = size_t{1} << 40;
unsigned allocation_ms = 0;
bool capture = false;
Fault next_fault;
RowNote next_note;
uint64_t next_refused = 0, next_last_refused = 0;
std::string last_launch = "{}";
std::string last_move;
std::string events;  // what was launched, recorded and waited for since it was asked for
std::map<DevicePtr, size_t> blocks;

// What a stream that is being captured forbids.
CudaResult unless_capturing() {
  return capture ? kCaptureUnsupported : cuda::kCudaSuccess;
}

struct MapWords {  // what cuTensorMapEncodeTiled puts into the 128 bytes
  uint64_t base;
  uint64_t dims[5];
  uint64_t strides[4];
  uint32_t box[5];
  uint32_t type_rank;
};
static_assert(sizeof(MapWords) <= sizeof(gpu::TensorMap));

template <class T>
std::string list(const T* values, size_t n) {
  std::ostringstream out;
  for (size_t i = 0; i < n; ++i) out << (i ? ", " : "") << uint64_t{values[i]};
  return "[" + out.str() + "]";
}

std::string described(const gpu::TensorMap& map) {
  MapWords w;
  std::memcpy(&w, &map, sizeof(w));
  const uint32_t rank = w.type_rank % 16;
  if (rank == 0) return "null";
  std::ostringstream out;
  out << "{\"base\": " << w.base << ", \"type\": " << w.type_rank / 16 << ", \"dims\": " << list(w.dims, rank)
      << ", \"strides\": " << list(w.strides, rank - 1) << ", \"box\": " << list(w.box, rank) << "}";
  return out.str();
}

std::string described(const gpu::WeightRows& rows) {
  const uint64_t words[] = {reinterpret_cast<uint64_t>(rows.data), rows.expert_bytes, rows.row_bytes};
  return list(words, 3);
}

std::string described(const gpu::ScaleTable& t) {
  const uint64_t words[] = {reinterpret_cast<uint64_t>(t.data), t.expert, t.row, t.step, t.blocks, t.up};
  return list(words, 6);
}

std::string described(const gpu::BackwardArgs& b) {
  std::ostringstream out;
  auto put = [&](const char* name, const void* at) {
    out << "\"" << name << "\": " << reinterpret_cast<uint64_t>(at) << ", ";
  };
  out << "{";
  put("kept", b.kept.pre_activations), put("kept_ids", b.kept.ids), put("kept_weights", b.kept.weights), put("x", b.x);
  put("dz", b.dz), put("weighted", b.weighted), put("weight_parts", b.weight_parts);
  put("combine_gradients", b.combine_gradients), put("gate_up_gradient", b.gate_up_gradient);
  put("down_gradient", b.down_gradient), put("gate_up_bias_gradient", b.gate_up_bias_gradient);
  put("down_bias_gradient", b.down_bias_gradient);
  out << "\"x_row_bytes\": " << b.x_row_bytes << ", \"z_columns\": " << b.z_columns
      << ", \"dz_columns\": " << described(b.dz_columns) << ", \"weighted_columns\": " << described(b.weighted_columns)
      << "}";
  return out.str();
}

std::string described(const gpu::GroupArgs& g) {
  const uint64_t words[] = {reinterpret_cast<uint64_t>(g.received),
                            reinterpret_cast<uint64_t>(g.numbers),
                            g.pitch,
                            g.rows,
                            g.received_rows,
                            reinterpret_cast<uint64_t>(g.x),
                            reinterpret_cast<uint64_t>(g.first_row),
                            reinterpret_cast<uint64_t>(g.gather),
                            g.weights_at,
                            g.x_behind,
                            g.weights_pitch};
  return list(words, 11);
}

std::string described(const sm90::BackwardOptions& o) {
  const uint64_t words[] = {o.plain_behind, reinterpret_cast<uint64_t>(o.shared_gate_up_gradient),
                            reinterpret_cast<uint64_t>(o.shared_down_gradient),
                            reinterpret_cast<uint64_t>(o.shared_logit_gradients)};
  return list(words, 4);
}

// Functions, as cuModuleGetFunction numbers them.
constexpr uintptr_t kMoe = 1, kFew = 2, kCount = 3, kMove = 4, kClock = 5;

// Of each rank its machine and its place; who is whose relay; sums; and what the relay's counters are before a call.
std::string described(const Machines& m, uint32_t ranks) {
  std::ostringstream out;
  out << "{\"of\": " << list(m.of, ranks) << ", \"place\": " << list(m.place, ranks)
      << ", \"ranks\": " << list(m.ranks, ranks) << ", \"first\": " << list(m.first, m.count + 1)
      << ", \"sources\": " << list(m.sources, m.source_count) << ", \"passed\": " << list(m.passed, 2 * m.source_count)
      << ", \"counted\": " << m.counts[0].rows_passed + m.counts[1].sums_sent << ", \"sums\": " << int{m.sums}
      << ", \"behind\": " << m.behind << "}";
  return out.str();
}

void describe(const gpu::KernelArgs& a, const cuda::LaunchConfig& config, bool few) {
  const Call& c = a.call;
  std::ostringstream out;
  auto put = [&](const char* name, auto v) { out << "\"" << name << "\": " << uint64_t(v) << ", "; };
  out << "{";
  put("grid", config.grid_x);
  put("few", few);
  put("threads", config.block_x);
  auto has = [&](uint32_t warps) { return config.block_x == warps * 32; };
  put("geometry", (few ? has(sm90::few_warps(false)) || has(sm90::few_warps(true)) : has(sm90::kWarps)) &&
                      config.shared_bytes == (few ? sm90::kFewSharedBytes : gpu::kSharedBytes));
  put("stream", reinterpret_cast<uint64_t>(config.stream));
  put("cooperative", config.attribute_count == 1 && config.attributes->id == 2 && config.attributes->value.cooperative);
  put("tokens", c.shape.tokens), put("hidden", c.shape.hidden), put("intermediate", c.shape.intermediate),
      put("experts", c.shape.experts);
  put("top_k", c.shape.top_k), put("local_experts", c.shape.local_experts), put("block", c.block_tokens());
  put("capacity", c.shape.capacity), put("tile_rows", c.policy.tile_rows),
      put("gemm0_columns", c.policy.columns[kFirst]);
  put("gemm1_columns", c.policy.columns[kReturning]), put("window", c.policy.order.window),
      put("raster", c.policy.order.raster);
  put("gemm1_lag", c.policy.order.gemm1_lag), put("senders", c.policy.order.senders),
      put("gemm1_lists", c.policy.order.gemm1_lists);
  put("own_first", c.policy.order.own_first), put("link_clusters", c.policy.order.link_clusters);
  put("epoch", c.epoch), put("token_row_bytes", c.memory.token_row_bytes);
  put("intermediate_row_bytes", c.memory.intermediate_row_bytes), put("return_row_bytes", c.memory.return_row_bytes);
  put("own_heap", c.memory.heaps[0] != nullptr && blocks.count(reinterpret_cast<DevicePtr>(c.memory.heaps[0])) == 1);
  uint32_t mapped = 0;
  for (uint32_t q = 0; q < c.shape.ranks; ++q) mapped += c.memory.heaps[q] != nullptr;
  put("mapped", mapped), put("return_mode", c.shape.return_mode);
  put("x_scale", reinterpret_cast<uint64_t>(a.x_scale)), put("scales_by_row", a.scales_by_row);
  put("x", reinterpret_cast<uint64_t>(a.x)), put("x_row_bytes", a.x_row_bytes);
  put("out", reinterpret_cast<uint64_t>(a.out)), put("topk_ids", reinterpret_cast<uint64_t>(a.topk_ids));
  put("topk_weights", reinterpret_cast<uint64_t>(a.topk_weights)), put("topk_ids_64", a.topk_ids_64);
  put("load", reinterpret_cast<uint64_t>(a.load)), put("router_logits", reinterpret_cast<uint64_t>(a.router_logits));
  put("kept", reinterpret_cast<uint64_t>(a.kept.pre_activations));
  put("kept_ids", reinterpret_cast<uint64_t>(a.kept.ids));
  put("kept_weights", reinterpret_cast<uint64_t>(a.kept.weights));
  put("shared_ups_gradient", reinterpret_cast<uint64_t>(a.shared_ups_gradient));
  put("slice_tiles", c.memory.slice_tiles), put("shared_gate", reinterpret_cast<uint64_t>(a.shared_gate));
  put("keepers", c.policy.keepers), put("config", c.config.hash), put("config_groups", c.config.groups);
  put("renormalize", a.rule.renormalize), put("gate_up_bias", reinterpret_cast<uint64_t>(a.gate_up_bias));
  put("down_bias", reinterpret_cast<uint64_t>(a.down_bias));
  put("router_bias", reinterpret_cast<uint64_t>(a.router_bias)), put("traced", a.trace != nullptr);
  out << "\"groups\": " << list(c.policy.group_first, c.policy.groups + 1)
      << ", \"owner\": " << list(c.placement.owner, c.shape.experts)
      << ", \"by_owner\": " << list(c.placement.by_owner, c.shape.experts)
      << ", \"owner_base\": " << list(c.placement.owner_base, 2) << ", \"gate_up\": " << described(a.gate_up)
      << ", \"down\": " << described(a.down) << ", \"router\": " << described(a.router)
      << ", \"router_rows\": " << described(a.router_rows) << ", \"intermediate_rows\": " << described(a.intermediate)
      << ", \"token_rows\": " << described(a.tokens) << ", \"gate_up_scale\": " << described(a.gate_up_scale)
      << ", \"down_scale\": " << described(a.down_scale)
      << ", \"shared_gate_up_scale\": " << described(a.shared_gate_up_scale)
      << ", \"shared_down_scale\": " << described(a.shared_down_scale) << ", \"backward\": " << described(a.backward)
      << ", \"group\": " << described(a.group) << ", \"shared_gate_up\": " << described(a.shared_gate_up)
      << ", \"shared_down\": " << described(a.shared_down) << ", \"options\": " << described(a.options)
      << ", \"machines\": " << (c.machines == nullptr ? "null" : described(*c.machines, c.shape.ranks)) << "}";
  last_launch = out.str();
}

// Token t chooses experts t, t + 1, ... modulo E, with weights 1, 1/2, ...; a call that keeps keeps them, too.
void route(const Call& c, const gpu::KeptOutputs& kept) {
  for (uint32_t t = 0; t < c.shape.tokens; ++t) {
    for (uint32_t k = 0; k < c.shape.top_k; ++k) {
      const auto expert = static_cast<int32_t>((t + k) % c.shape.experts);
      const float weight = 1.0f / static_cast<float>(k + 1);
      c.routing(t)[k] = expert;
      c.weights(t)[k] = weight;
      if (kept.ids == nullptr) continue;
      kept.ids[t * c.shape.top_k + k] = expert;
      kept.weights[t * c.shape.top_k + k] = weight;
    }
  }
}

// The packets of that routing, to every rank whose memory is mapped, without their entries.
void send(const Call& c) {
  for (uint32_t q = 0; q < c.shape.ranks; ++q) {
    if (c.memory.heaps[q] == nullptr) continue;
    *c.call_signal(q, c.rank) = call_word(c);
    for (uint32_t b = 0; b < c.blocks(); ++b) {
      const uint32_t first = b << c.policy.log2_block, end = first + c.tokens_in_block(b);
      uint16_t* const offsets = c.packet_offsets(q, c.rank, b);
      std::memset(offsets, 0, (c.owned(q) + 1) * sizeof(*offsets));
      for (uint32_t t = first; t < end; ++t) {
        uint16_t here = 0;
        for (uint32_t k = 0; k < c.shape.top_k; ++k) {
          const uint32_t e = static_cast<uint32_t>(c.routing(t)[k]);
          if (c.placement.owner[e] != q) continue;
          ++here;
          const uint32_t* const experts = c.placement.by_owner + c.placement.owner_base[q];
          for (uint32_t l = 0; l < c.owned(q); ++l) offsets[l + 1] += experts[l] == e;
        }
        c.packet_counts(q, c.rank, first)[t - first] = here;
      }
      for (uint32_t l = 0; l < c.owned(q); ++l) offsets[l + 1] += offsets[l];
      *c.packet_signal(q, c.rank, b) = Signal::make(c.epoch, offsets[c.owned(q)]);
    }
  }
}

// What the kernel behind a forward pass that keeps counts of the packets of all ranks, once these are here.
CudaResult count(const Call& of_layer, const sm90::CountedRows& to) {
  Call c = of_layer;
  c.epoch = c.control()->calls.value;
  const uint32_t ranks = c.shape.ranks, el = c.shape.local_experts;
  for (uint32_t p = 0; p < ranks; ++p) {
    const auto is_here = [&](const uint64_t* signal) {
      return Signal::epoch(std::atomic_ref(*const_cast<uint64_t*>(signal)).load()) == c.epoch;
    };
    for (uint32_t tries = 0; !is_here(c.call_signal(c.rank, p)) && tries < 10'000; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    sm90::RankRows& counted = to.told[p] = {c.tokens_of(p), 0, 0};
    for (uint32_t l = 0; l < el; ++l) to.rows[p * el + l] = 0;
    for (uint32_t b = 0; b < c.blocks_of(p); ++b) {
      for (uint32_t tries = 0; !is_here(c.packet_signal(c.rank, p, b)) && tries < 10'000; ++tries)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const uint16_t* const offsets = c.packet_offsets(c.rank, p, b);
      const uint32_t theirs = p == c.rank ? el : c.shape.routed_local_experts();  // shared experts are each rank's own
      for (uint32_t l = 0; l < theirs; ++l) to.rows[p * el + l] += offsets[l + 1] - offsets[l];
    }
    for (uint32_t l = 0; l < el; ++l) {
      counted.rows += to.rows[p * el + l] * (c.shape.is_shared(l) ? c.shape.shared : 1);
    }
    for (uint32_t t = 0; p != c.rank && t < counted.tokens; ++t) {
      counted.received += *c.packet_counts(c.rank, p, t) != 0;
    }
    to.ranks[p] = counted;
  }
  return 0;
}

// And where the one that moves them is told to bring them.
CudaResult moved(const sm90::MovedRows& to, uint32_t grid) {
  const uint64_t words[] = {reinterpret_cast<uint64_t>(to.pre_activations),
                            reinterpret_cast<uint64_t>(to.received),
                            reinterpret_cast<uint64_t>(to.numbers),
                            reinterpret_cast<uint64_t>(to.first_row),
                            to.room.rows,
                            to.room.received,
                            to.room.pitch,
                            grid};
  last_move = list(words, 8);
  return 0;
}

// Block b begins at 1000 b + 900 and ends at 1000 b + 3000. Its first warp has one span of each phase, 100 ns long, from
// 1000 * (b + 1) on, of expert 2.
void record(uint8_t* trace, uint32_t processors) {
  for (uint32_t b = 0; trace != nullptr && b < processors; ++b, trace += gpu::kTraceBytesPerBlock) {
    auto* header = reinterpret_cast<gpu::TraceHeader*>(trace);
    auto* events = reinterpret_cast<sm90::TraceEvent*>(header + 1);
    *header = {0, 1000 * b + 900, 1000 * b + 3000, b};
    for (uint16_t p = 0; p < flashmoe::kValues<flashmoe::Phase>; ++p) {
      const uint64_t start = 1000 * (b + 1) + 100 * p;
      events[header->count++] = {start, start + 100, p, 0, b, p, 2};
    }
  }
}

// Has answered before it is asked; its clock is a second ahead.
CudaResult tell_the_time(gpu::ClockPage* page, void** parameters) {
  page->answered = *static_cast<const uint32_t*>(parameters[1]);
  page->device_ns = host::monotonic_ns() + 1'000'000'000;
  return 0;
}

}  // namespace

extern "C" {

const char* fake_last_launch() {
  return last_launch.c_str();
}
const char* fake_last_move() {
  return last_move.c_str();
}
const char* fake_log() {
  static std::string told;
  told = std::exchange(events, {});
  return told.c_str();
}
void fake_capture(int on) {
  capture = on != 0;
}
void fake_memory(size_t bytes) {
  memory_left = bytes;
}
void fake_allocation_ms(unsigned ms) {
  allocation_ms = ms;
}
void fake_compute_capability(int value) {
  major = value;
}
void fake_fault(unsigned kind, unsigned token, uint64_t expected, uint64_t seen) {
  next_fault = {.kind = static_cast<FaultKind>(kind), .index = token, .expected = expected, .seen = seen, .epoch = 3};
}
// The next call's kernel finds that rank 1 has refused a call; and others, up to `last`. Of 0: only these, whose reason it did not
// hand over.
void fake_refusal(uint64_t call, uint64_t last) {
  next_refused = call, next_last_refused = last;
}
void fake_note(unsigned fault, unsigned token, int id) {
  next_note = {static_cast<RowFault>(fault), token, id};
}
size_t fake_allocations() {
  return blocks.size();
}
size_t fake_allocated_bytes() {
  size_t sum = 0;
  for (const auto& [address, bytes] : blocks) sum += bytes;
  return sum;
}

CudaResult cuInit(unsigned) {
  return 0;
}
CudaResult cuGetErrorName(CudaResult result, const char** name) {
  *name = result == kCaptureUnsupported ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR_OUT_OF_MEMORY";
  return 0;
}
CudaResult cuGetErrorString(CudaResult, const char** text) {
  *text = "so it was told";
  return 0;
}
CudaResult cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
CudaResult cuDeviceGetCount(int* count) {
  *count = 4;
  return 0;
}
CudaResult cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, static_cast<size_t>(length), "Fake");
  return 0;
}
CudaResult cuDeviceGetUuid_v2(void* uuid, int device) {
  std::memset(uuid, device + 1, 16);
  return 0;
}
CudaResult cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == cuda::kMultiprocessorCount ? 132 : attribute == cuda::kComputeCapabilityMajor ? major : 0;
  return 0;
}
CudaResult cuDevicePrimaryCtxRetain(cuda::DriverContext* context, int) {
  *context = nullptr;
  return 0;
}
CudaResult cuDevicePrimaryCtxRelease_v2(int) {
  return 0;
}
CudaResult cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}
CudaResult cuCtxPushCurrent_v2(cuda::DriverContext) {
  return 0;
}
CudaResult cuCtxPopCurrent_v2(cuda::DriverContext*) {
  return 0;
}
CudaResult cuCtxSynchronize() {
  return unless_capturing();
}
CudaResult cuStreamCreate(cuda::DriverStream* stream, unsigned) {
  *stream = reinterpret_cast<cuda::DriverStream>(2);
  return 0;
}
CudaResult cuStreamDestroy_v2(cuda::DriverStream) {
  return 0;
}
CudaResult cuStreamSynchronize(cuda::DriverStream) {
  return unless_capturing();
}
CudaResult cuEventCreate(cuda::DriverEvent* event, unsigned) {
  *event = reinterpret_cast<cuda::DriverEvent>(1);
  return unless_capturing();
}
CudaResult cuEventRecord(cuda::DriverEvent, cuda::DriverStream) {
  events += "record ";
  return 0;
}
CudaResult cuEventSynchronize(cuda::DriverEvent) {
  events += "wait ";
  return unless_capturing();
}
CudaResult cuEventDestroy_v2(cuda::DriverEvent) {
  return 0;
}
CudaResult cuMemAlloc_v2(DevicePtr* address, size_t bytes) {
  if (capture) return kCaptureUnsupported;
  if (bytes > memory_left) return kOutOfMemory;
  std::this_thread::sleep_for(std::chrono::milliseconds(allocation_ms));
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<DevicePtr>(block);
  blocks[*address] = bytes;
  return 0;
}
CudaResult cuMemFree_v2(DevicePtr address) {
  munmap(reinterpret_cast<void*>(address), blocks[address]);
  blocks.erase(address);
  return 0;
}
CudaResult cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = *total = memory_left;
  return 0;
}
CudaResult cuMemHostAlloc(void** host, size_t bytes, unsigned) {
  *host = std::malloc(bytes);
  return unless_capturing();
}
CudaResult cuMemHostGetDevicePointer_v2(DevicePtr* address, void* host, unsigned) {
  *address = reinterpret_cast<DevicePtr>(host);
  return 0;
}
CudaResult cuMemFreeHost(void* host) {
  std::free(host);
  return 0;
}
CudaResult cuMemsetD8_v2(DevicePtr address, unsigned char value, size_t bytes) {
  void* const p = reinterpret_cast<void*>(address);
  // Whole blocks are zeroed by giving their pages back: own ones, or shared ones of the fake NVSHMEM.
  const int advice = blocks.count(address) != 0 ? MADV_DONTNEED : MADV_REMOVE;
  if (value != 0 || madvise(p, bytes, advice) != 0) std::memset(p, value, bytes);
  return unless_capturing();
}
CudaResult cuMemcpyHtoD_v2(DevicePtr to, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return unless_capturing();
}
CudaResult cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, size_t bytes, cuda::DriverStream) {
  events += "write ";
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
CudaResult cuMemcpyDtoH_v2(void* to, DevicePtr from, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return unless_capturing();
}
CudaResult cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, size_t bytes, cuda::DriverStream) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
// A module is the names of its kernels, each behind a space, and ends with a zero.
CudaResult cuModuleLoadData(cuda::DriverModule* module, const void* image) {
  *module = reinterpret_cast<cuda::DriverModule>(new std::string(static_cast<const char*>(image)));
  return unless_capturing();
}
CudaResult cuModuleUnload(cuda::DriverModule module) {
  delete reinterpret_cast<std::string*>(module);
  return 0;
}
CudaResult cuModuleGetFunction(cuda::DriverFunction* function, cuda::DriverModule module, const char* name) {
  constexpr CudaResult kNotFound = 500;
  const std::string wanted = name, has = *reinterpret_cast<const std::string*>(module) + " ";
  if (has.find(" " + wanted + " ") == std::string::npos) return kNotFound;
  *function = reinterpret_cast<cuda::DriverFunction>(wanted == "flashmoe_few"     ? kFew
                                                     : wanted == "flashmoe_count" ? kCount
                                                     : wanted == "flashmoe_move"  ? kMove
                                                     : wanted == "flashmoe_clock" ? kClock
                                                                                  : kMoe);
  return 0;
}
// Of a kernel that puts: which NVSHMEM's headers it was compiled with. The fake NVSHMEM is 3.8.0.
CudaResult cuModuleGetGlobal_v2(DevicePtr* address, size_t* bytes, cuda::DriverModule, const char*) {
  static cuda::NvshmemVersion compiled_with{3, 8, 0};
  if (std::getenv("FAKE_DRIVER_OLD_HEADERS") != nullptr) compiled_with = {3, 4, 5};
  *address = reinterpret_cast<DevicePtr>(&compiled_with);
  *bytes = sizeof(compiled_with);
  return 0;
}
CudaResult cuFuncSetAttribute(cuda::DriverFunction, int, int) {
  return 0;
}
CudaResult cuStreamIsCapturing(cuda::DriverStream, int* status) {
  *status = capture;
  return 0;
}
CudaResult cuLaunchKernelEx(const cuda::LaunchConfig* config, cuda::DriverFunction function, void** parameters,
                            void**) {
  const auto kernel = reinterpret_cast<uintptr_t>(function);
  if (kernel == kClock) return tell_the_time(*static_cast<gpu::ClockPage**>(parameters[0]), parameters);
  const auto& args = *static_cast<const gpu::KernelArgs*>(parameters[0]);
  events += kernel == kCount ? "count " : kernel == kMove ? "move " : "call ";
  if (kernel == kCount) return count(args.call, *static_cast<const sm90::CountedRows*>(parameters[1]));
  if (kernel == kMove) return moved(*static_cast<const sm90::MovedRows*>(parameters[1]), config->grid_x);
  if (std::getenv("FAKE_DRIVER_QUICK") != nullptr) return 0;
  describe(args, *config, kernel == kFew);
  if (capture) return 0;
  Call call = args.call;
  call.epoch = ++call.control()->calls.value;
  route(call, args.kept);
  if (call.shape.ranks > 1) send(call);
  record(args.trace, config->grid_x);
  if (next_fault.kind != FaultKind::kNone) {
    args.host_fault->fault = next_fault;
    args.host_fault->posted = 1;
    next_fault = {};
  }
  const bool is_error = next_note.fault != RowFault::kLogits || args.strict != 0;
  if (next_note.fault != RowFault::kNone && is_error) {
    args.host_fault->noted_experts = args.call.shape.gate_experts;
    args.host_fault->noted = next_note.pack();
  }
  next_note = {};
  if (next_last_refused != 0) {
    HostFault& to = *args.host_fault;
    to.refused = next_refused, to.last_refused = next_last_refused, to.refuser = 1;
    std::strcpy(to.reason, "x: too wide");
    next_last_refused = 0;
  }
  return 0;
}
CudaResult cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* base, const uint64_t* dims,
                                  const uint64_t* strides, const uint32_t* box, const uint32_t*, int, int swizzle, int,
                                  int) {
  if (swizzle != cuda::kMapSwizzle128B) return 1;
  MapWords w{};
  w.base = reinterpret_cast<uint64_t>(base);
  for (unsigned i = 0; i < rank; ++i) {
    // As the driver's documentation has it.
    if (dims[i] == 0 || box[i] == 0 || box[i] > 256 || (i > 0 && strides[i - 1] % 16 != 0)) return 1;
    w.dims[i] = dims[i];
    w.box[i] = box[i];
    if (i > 0) w.strides[i - 1] = strides[i - 1];
  }
  w.type_rank = static_cast<uint32_t>(type) * 16 + rank;
  std::memset(map, 0, sizeof(gpu::TensorMap));
  std::memcpy(map, &w, sizeof(w));
  return 0;
}

}  // extern "C"
