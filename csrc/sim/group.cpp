#include "sim/group.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace flashmoe::sim {

Pages::Pages(uint64_t bytes) : bytes_(bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<uint8_t*>(at);
}

Pages::~Pages() {
  munmap(base_, bytes_);
}

namespace {

constexpr uint64_t kPage = 4096;

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

// The workspace, without the rows at its end, and behind it what puts need, likewise.
uint64_t work_offset(const Limits& limits) {
  return make_work_layout(limits).offset[static_cast<uint32_t>(WorkField::kIntermediate)];
}
uint64_t touched_work(const Limits& limits) {
  return work_offset(limits) + make_put_layout(limits).offset[static_cast<uint32_t>(PutField::kRows)];
}

}  // namespace

SourceLayout::SourceLayout(const Limits& limits) : layout(make_heap_layout(limits)) {
  constexpr uint64_t kAlign = 64;
  constexpr HeapField kSignals[SignalMap::kKinds] = {HeapField::kCallSignal, HeapField::kPacketSignal,
                                                     HeapField::kReturnSignal, HeapField::kFault};
  first_source = kPage;
  for (const auto& field : kHeapTable) {
    const auto f = static_cast<uint32_t>(field.field);
    const int of_source = source_coordinate(field.field);
    if (of_source < 0) continue;
    const FieldShape shape = field.shape(limits);
    const uint64_t inner = align_up(layout.stride[f][of_source], kAlign), copies = of_source == 0 ? 1 : shape.dim[0];
    layout.offset[f] = first_source + source_bytes;
    if (of_source == 1) layout.stride[f][0] = inner;
    for (uint32_t kind = 0; kind < SignalMap::kKinds; ++kind) {
      if (kSignals[kind] != field.field) continue;
      signals.begin[kind] = source_bytes;
      signals.end[kind] = source_bytes + inner * copies;
    }
    source_bytes += inner * copies;
  }
  source_bytes = align_up(source_bytes, kAlign);
  for (const auto& field : kHeapTable) {
    const int of_source = source_coordinate(field.field);
    if (of_source >= 0) layout.stride[static_cast<uint32_t>(field.field)][of_source] = source_bytes;
  }
  bytes = align_up(first_source + source_bytes * limits.ranks, kPage);
  layout.offset[static_cast<uint32_t>(HeapField::kStatus)] = 0;
  layout.offset[static_cast<uint32_t>(HeapField::kRows)] = bytes;
  layout.offset[static_cast<uint32_t>(HeapField::kReturnRows)] = bytes;
  signals.first_source = first_source;
  signals.source_bytes = source_bytes;
}

Group* Group::group_ = nullptr;

Group::Group(const Machine& machine, const Limits& limits, uint32_t machines, bool folded)
    : machine_(machine),
      ranks_(limits.ranks),
      gpus_(limits.ranks / machines),
      simulated_(folded ? gpus_ : ranks_),
      folded_(folded),
      source_(limits),
      heap_stride_(source_.bytes),
      work_stride_(align_up(touched_work(limits), kPage)),
      work_at_(heap_stride_ * simulated_),
      pages_(work_at_ + work_stride_ * simulated_),
      links_(machine, simulated_) {
  SignalMap signals = source_.signals;
  signals.base = pages_.base();
  signals.stride = heap_stride_;
  signals.ranks = simulated_;
  world_.set_signals(signals);
  group_ = this;
}

Group::~Group() {
  group_ = nullptr;
}

Group::Peer Group::peer(uint32_t from, uint32_t to) const {
  if (!folded_) return {to, from / gpus_ != to / gpus_, pages_.base() + to * heap_stride_};
  const uint32_t machine = to / gpus_, local = to % gpus_;
  // From d machines back: where `from` has its place in the heap, and (ranks - d gpus) sources behind it.
  const uint64_t behind = machine == 0 ? 0 : ranks_ - machine * gpus_;
  return {local, machine != 0, pages_.base() + local * heap_stride_ + behind * source_.source_bytes};
}

std::vector<uint8_t*> Group::heaps_of(uint32_t rank) const {
  std::vector<uint8_t*> heaps(ranks_);
  for (uint32_t q = 0; q < ranks_; ++q) heaps[q] = peer(rank, q).heap;
  return heaps;
}

Time Group::signalled(uint32_t from, const uint64_t* word, uint64_t value, Time at) {
  const uint64_t in_heaps = static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(word) - pages_.base());
  const auto to = static_cast<uint32_t>(in_heaps / heap_stride_);
  if (in_heaps >= work_at_ || to == from) return at + machine_.costs.store;
  constexpr uint64_t kWordBytes = 32;  // a store's least on the link
  uint64_t bytes = kWordBytes;
  const SignalMap::Place place = source_.signals.place_in(in_heaps % heap_stride_);
  if (place.kind == SignalMap::kPackets) bytes += Signal::payload(value) * sizeof(Entry);  // sent before it
  return links_.send(from, to, false, bytes, at).there;
}

uint64_t* Group::word_of(uint32_t from, uint32_t to, uint64_t* at_home) const {
  const uint64_t offset = reinterpret_cast<uint8_t*>(at_home) - (pages_.base() + from * heap_stride_);
  return reinterpret_cast<uint64_t*>(peer(from, to).heap + offset);
}

Links::Transfer Group::put(uint32_t from, uint32_t to, void* at_home, const void* data, uint64_t bytes, Time at) {
  const Peer p = peer(from, to);
  const uint64_t offset = static_cast<uint8_t*>(at_home) - (pages_.base() + from * heap_stride_);
  if (offset < heap_stride_) std::memcpy(p.heap + offset, data, bytes);
  return links_.send(from, p.rank, p.remote, bytes, at);
}

}  // namespace flashmoe::sim
