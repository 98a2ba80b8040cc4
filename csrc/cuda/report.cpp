#include "cuda/report.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "host/received.h"

namespace flashmoe::cuda {

void read_routing(const Call& c, const DeviceMemory& workspace, const Limits& limits, uint32_t tokens, uint32_t top_k,
                  int32_t* ids, float* weights) {
  if (tokens > limits.max_tokens || top_k > limits.top_k) {
    throw Error(Error::Kind::kOther, "routing: expected no more than the context's limits");
  }
  // A row of the workspace has room for the largest K. The shared expert's slices follow a token's own K choices.
  const uint64_t pitch = limits.choices_per_token(), words = tokens * pitch;
  std::vector<uint32_t> rows(words);
  auto read = [&](WorkField field, auto* to) {
    workspace.download(rows.data(), words * sizeof(uint32_t),
                       c.memory.work_layout.offset[static_cast<uint32_t>(field)]);
    for (uint32_t t = 0; t < tokens; ++t) {
      std::memcpy(to + uint64_t{t} * top_k, rows.data() + t * pitch, top_k * sizeof(*to));
    }
  };
  read(WorkField::kRouting, ids);
  read(WorkField::kWeights, weights);
}

RowsSent read_received(const Call& layer, const Device& device, const DeviceMemory& workspace, const uint8_t* own_heap,
                       const DeviceMachines* machines, int32_t* rows) {
  Call c = layer;
  Control control;
  workspace.download(&control, sizeof(control),
                     c.memory.work_layout.offset[static_cast<uint32_t>(WorkField::kControl)]);
  c.epoch = control.calls.value;
  // Copies the heap up to the packets' entries. Other ranks may be a call ahead and write there, but they write the
  // fields of the other parity.
  static_assert(std::max({HeapField::kCallSignal, HeapField::kPacketSignal, HeapField::kPacketOffsets,
                          HeapField::kPacketCounts}) < HeapField::kPacketEntries);
  std::vector<uint8_t> heap(c.memory.heap_layout.offset[static_cast<uint32_t>(HeapField::kPacketEntries)]);
  const Device::Use use(device);
  check(driver().cuMemcpyDtoH_v2(heap.data(), reinterpret_cast<DevicePtr>(own_heap), heap.size()),
        "cannot copy from the heap");
  const std::vector<uint8_t*> heaps(c.shape.ranks, heap.data());
  c.memory.heaps = heaps.data();
  host::count_rows(c, rows);
  if (machines == nullptr) return {host::rows_returned(c), 0};
  const Machines::Counts relayed = machines->counts(c.parity());
  return {host::rows_returned(c, machines->here()) + relayed.sums_sent, relayed.rows_passed};
}

}  // namespace flashmoe::cuda
