#include "sim/heaps.h"

#include <algorithm>
#include <bit>

namespace flashmoe::sim {
namespace {

constexpr uint64_t kPage = 4096, kAlign = 64;

// Which coordinate of a field names the source, or -1.
int source_coordinate(HeapField field) {
  switch (field) {
    case HeapField::kFault:
    case HeapField::kReturnSignal: return 0;
    case HeapField::kCallConfig:
    case HeapField::kCallSignal:
    case HeapField::kPacketSignal:
    case HeapField::kPacketOffsets:
    case HeapField::kPacketCounts:
    case HeapField::kPacketEntries: return 1;
    default: return -1;
  }
}

}  // namespace

SourceLayout::SourceLayout(const Limits& limits, uint32_t gpus) : heap(make_heap_layout(limits)) {
  first_source = kPage;
  place_sources(limits);
  const uint64_t slot = place_slots(limits);
  source_bytes = align_up(std::max(source_bytes, ceil_div(slot, uint64_t{gpus})), kAlign);
  slot_bytes = source_bytes * gpus;
  first_slot = align_up(first_source + source_bytes * limits.ranks, kPage);
  bytes = std::bit_ceil(first_slot + slot_bytes * limits.relayed);
  for (const auto& field : kHeapTable) {
    const int of_source = source_coordinate(field.field);
    if (of_source >= 0) heap.stride[static_cast<uint32_t>(field.field)][of_source] = source_bytes;
  }
  for (uint32_t f = 0; f < RelayLayout::kFields; ++f) {
    relay.offset[f] += first_slot - slot_bytes;  // Group::behind_own(), which is added, is one slot
    relay.stride[f][0] = slot_bytes;
  }
  constexpr auto kRows = static_cast<uint32_t>(HeapField::kRows);
  heap.stride[kRows][0] = limits.max_tokens;
  heap.stride[kRows][1] = 1;
  heap.offset[static_cast<uint32_t>(HeapField::kStatus)] = 0;
  signals.heap_bytes = bytes;
  signals.first_source = first_source;
  signals.source_bytes = source_bytes;
  signals.end_sources = first_source + source_bytes * limits.ranks;
}

// Places the signals first, because they are read most often.
void SourceLayout::place_sources(const Limits& limits) {
  constexpr HeapField kSignals[SignalMap::kKinds] = {HeapField::kCallSignal, HeapField::kPacketSignal,
                                                     HeapField::kReturnSignal, HeapField::kFault};
  const auto place = [&](HeapField field) {
    const auto f = static_cast<uint32_t>(field);
    const int of_source = source_coordinate(field);
    if (of_source < 0) return;
    const uint64_t inner = align_up(heap.stride[f][of_source], kAlign);
    const uint64_t copies = of_source == 0 ? 1 : kHeapTable[f].shape(limits).dim[0];
    heap.offset[f] = first_source + source_bytes;
    if (of_source == 1) heap.stride[f][0] = inner;
    source_bytes += inner * copies;
  };
  for (uint32_t kind = 0; kind < SignalMap::kKinds; ++kind) {
    place(kSignals[kind]);
    signals.end[kind] = source_bytes;
  }
  for (const auto& field : kHeapTable) {
    if (source_coordinate(field.field) < 0) continue;
    if (std::find(std::begin(kSignals), std::end(kSignals), field.field) == std::end(kSignals)) place(field.field);
  }
}

// Places the fields of a slot, and returns the bytes of a slot. The sums in a slot are rows, so they take no bytes.
uint64_t SourceLayout::place_slots(const Limits& limits) {
  relay = make_relay_layout(limits);
  signal_bytes = relay.stride[static_cast<uint32_t>(RelayField::kSignal)][0];
  uint64_t slot = 0;
  for (uint32_t f = 0; f < RelayLayout::kFields; ++f) {
    relay.offset[f] = slot;
    if (f != static_cast<uint32_t>(RelayField::kSums)) slot += align_up(relay.stride[f][0], kAlign);
  }
  return slot;
}

}  // namespace flashmoe::sim
