// A rank on one GPU: its heap, its workspace, the layers it has been told of, and its calls.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/device.h"
#include "cuda/tensor_map.h"
#include "cuda/transport/group.h"
#include "cuda/transport/nvshmem.h"
#include "flashmoe/sm90/geometry.h"

namespace flashmoe::cuda {

// A layer as calls share it: all but the tokens. Addresses are the device's.
struct LayerSpec {
  DType dtype = DType::kBFloat16;
  Activation activation = Activation::kSwiGlu;
  uint32_t hidden = 0, intermediate = 0, experts = 0, top_k = 0;
  ReturnMode return_mode = ReturnMode::kDirect;
  double capacity_factor = 0.0;                               // 0: dropless
  std::vector<uint32_t> placement;                            // [E] owner rank of each expert
  Matrix gate_up, down, router;                               // router.data 0: routing is given
  uint64_t gate_up_bias = 0, down_bias = 0, router_bias = 0;  // 0: none
  bool renormalize = true;
  bool topk_ids_64 = false;
  bool traced = false;
  std::string cubin;  // file of the kernel compiled for dtype, activation and traced
};

// What changes from call to call.
struct TokenSpec {
  uint32_t tokens = 0;
  uint64_t x = 0, x_row_bytes = 0;
  uint64_t out = 0;
  uint64_t topk_ids = 0, topk_weights = 0;  // 0 with a router
};

// `limits` as a context allocates from them on a GPU of so many multiprocessors: what the kernel decides is set. Throws
// Error where there cannot be limits.processors thread blocks.
Limits cuda_limits(Limits limits, uint32_t multiprocessors);

// Whether the return mode `auto` is `reduced`: where a token's rows, dispatched and returned as with `direct`, would take half
// as long again on the link as its rows' GEMMs, since reducing them is not free, and a fifth fewer would come back. Of R
// ranks and K experts, on average, (R - 1) (1 - (1 - 1 / R)^K) rows go, and as many come back if reduced, else K (R - 1) / R.
bool reduces(uint32_t ranks, uint32_t top_k, uint32_t intermediate);

// Tokens of a block: as few as make no more token blocks than `processors` thread blocks, as far as the gate's shared
// memory allows.
uint32_t token_block(uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t processors);

// Return groups of GEMM1's columns: their number, and in first[0 .. number] where they begin.
uint32_t return_groups(uint32_t columns, ReturnMode mode, uint64_t return_bytes, uint16_t (&first)[kMaxGroups + 1]);

// Memory that a network may read, while this lives.
class Registration {
 public:
  Registration(const Nvshmem& api, const Device& device, const DeviceMemory& memory);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  const Nvshmem& api_;
  const Device& device_;
  void* const address_;
};

class Context {
 public:
  // limits.processors: thread blocks, 0 for one on every multiprocessor. ordinal: see Device. Of order, what is 0 is left
  // to the context. With several ranks, joins them.
  Context(int ordinal, const Membership& who, const Limits& limits, const OrderPolicy& order, uint64_t timeout_ns);
  // Waits for the device: a call may still be under way.
  ~Context();

  // Encodes the layer's tensor maps, loads its kernel and uploads its placement if they are new; returns its number.
  // `stream` is where its calls will go: while it is being captured, nothing can be loaded or uploaded.
  int64_t add_layer(const LayerSpec& spec, DriverStream stream);
  void remove_layer(int64_t layer);

  // Launches the kernel; does nothing else to the stream, and does not wait. Calls must follow one another on the
  // device: one stream, or streams that wait for each other. Throws what an earlier call of this context ran into.
  void call(int64_t layer, const TokenSpec& tokens, DriverStream stream);

  // Waits for the device, then throws what a call ran into, if one did. Refused while `stream` is being captured.
  void synchronize(DriverStream stream);

  // Of the last call, once it is over: [tokens, top_k] chosen experts (-1: dropped) and weights.
  void read_routing(uint32_t tokens, uint32_t top_k, int32_t* ids, float* weights) const;
  // Of the last call, once it is over, if it was this layer's: adds to rows[p * El + l] the rows that rank p's tokens have
  // with local expert l; returns how many rows went to other ranks as results.
  uint64_t read_received(int64_t layer, int32_t* rows);
  // Of the last call, if its layer is traced: trace_bytes() bytes, kTraceBytesPerBlock per thread block.
  void read_trace(uint8_t* to) const;
  uint64_t trace_bytes() const { return uint64_t{processors()} * sm90::kTraceBytesPerBlock; }

  int device() const { return device_.ordinal(); }
  uint32_t processors() const { return limits_.processors; }
  uint64_t heap_bytes() const { return call_.heap_layout.bytes; }
  uint64_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  struct Placement {
    DeviceMemory tables;
    const uint32_t* owner;
    const uint32_t* by_owner;
    const uint32_t* owner_base;
    uint32_t local_experts;
  };
  // Of one cubin: for any number of tokens, and for a few. api: null but for kernels that put, whose module NVSHMEM tells
  // where everything is.
  struct Kernels {
    Kernels(const Device& device, const std::string& cubin, const Nvshmem* api);
    ~Kernels();
    const Device& device;
    const Nvshmem* const api;
    Module module;
    DriverFunction general, few;
  };
  struct Plan {
    sm90::KernelArgs args;
    const Kernels* kernels;
    DType dtype;
    double capacity_factor;
  };

  bool capturing(DriverStream stream) const;
  void refuse_capture(DriverStream stream, const char* what) const;
  const Kernels& kernels(const std::string& cubin, DriverStream stream);
  const Placement& placement(const std::vector<uint32_t>& owners, DriverStream stream);
  OrderPolicy order_of(const Call& c, ReturnMode return_mode) const;
  Call call_of(const LayerSpec& spec, const Placement& where) const;
  Plan& plan_of(int64_t layer) const;
  void set_tokens(Plan& plan, const TokenSpec& tokens) const;
  void launch(Plan& plan, DriverStream stream) const;
  void check_health();
  Error worded(const HostFault& record) const;

  std::mutex mutex_;  // calls come from any thread
  const Device device_;
  Limits limits_;
  Call call_;                // what every call has in common
  const OrderPolicy asked_;  // 0: the context's choice
  DeviceMemory workspace_, heap_table_, trace_;
  std::unique_ptr<cpu::Group> group_;
  const Nvshmem* puts_ = nullptr;               // where peers are reached by puts alone
  std::unique_ptr<Registration> registration_;  // then, of the workspace
  MappedPage fault_page_;
  bool broken_ = false;
  std::unordered_map<std::string, std::unique_ptr<Kernels>> kernels_;
  // Never shrinks: graphs that were captured keep their pointers.
  std::map<std::vector<uint32_t>, Placement> placements_;
  std::unordered_map<int64_t, std::unique_ptr<Plan>> plans_;
  int64_t last_plan_ = 0;  // number
};

}  // namespace flashmoe::cuda
