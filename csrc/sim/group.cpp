#include "sim/group.h"

#include "sim/messages.h"

namespace flashmoe::sim {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kWordBytes = 32;  // what the smallest store takes on NVLink

// Bytes of the workspace without the rows at its end.
uint64_t touched_work(const Limits& limits) {
  return make_work_layout(limits).offset[static_cast<uint32_t>(WorkField::kIntermediate)];
}

}  // namespace

Group* Group::group_ = nullptr;

Group::Group(const Machine& machine, const Limits& limits, uint32_t machines, bool folded)
    : machine_(machine),
      ranks_(limits.ranks),
      gpus_(limits.ranks / machines),
      simulated_(folded ? gpus_ : ranks_),
      folded_(folded),
      layout_(limits, gpus_),
      work_stride_(align_up(touched_work(limits), kPage)),
      work_at_(layout_.bytes * simulated_),
      rows_at_(work_at_ + work_stride_ * simulated_),
      memory_(-1, rows_at_),
      links_(machine, simulated_),
      calls_(simulated_) {
  layout_.heap.offset[static_cast<uint32_t>(HeapField::kRows)] = rows_at_;
  layout_.heap.offset[static_cast<uint32_t>(HeapField::kReturnRows)] = rows_at_;
  layout_.signals.base = memory_.base();
  layout_.signals.ranks = simulated_;
  world_.set_signals(layout_.signals);
  group_ = this;
}

Group::~Group() {
  group_ = nullptr;
}

Group::Peer Group::peer(uint32_t from, uint32_t to) const {
  if (!folded_) return {to, from / gpus_ != to / gpus_};
  return {to % gpus_, to >= gpus_};
}

// `rank` addresses the heap of a rank that is d machines further on (ranks - d * gpus) sources too far. So what
// `rank` writes lands in the place of a source that is d machines back.
std::vector<uint8_t*> Group::heaps_of(uint32_t rank) const {
  std::vector<uint8_t*> heaps(ranks_);
  for (uint32_t q = 0; q < ranks_; ++q) {
    const Peer p = peer(rank, q);
    const uint64_t behind = folded_ && p.remote ? ranks_ - q / gpus_ * gpus_ : 0;
    heaps[q] = memory_.base() + p.rank * layout_.bytes + behind * layout_.source_bytes;
  }
  return heaps;
}

void Group::signal(uint32_t from, uint64_t* word, uint64_t value, Time at) {
  const uint64_t in_heaps = static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(word) - memory_.base());
  if (in_heaps >= work_at_) return world_.write_at(at + machine_.costs.store, word, value);
  const auto to = static_cast<uint32_t>(in_heaps / layout_.bytes);
  const uint64_t in_heap = in_heaps % layout_.bytes;
  const uint64_t message = in_heap < layout_.first_slot ? message_of_source(from, to, in_heap, word)
                                                        : message_of_slot(from, to, in_heap - layout_.first_slot);
  if (message != 0) return send_message({from, to, message, word, value}, at);
  if (to == from) return world_.write_at(at + machine_.costs.store, word, value);
  // Within a machine, senders store a packet's entries before its signal. Here the bytes of the entries go over the
  // link together with the signal.
  const bool packet = in_heap < layout_.first_slot && layout_.signals.place(word).kind == SignalMap::kPackets;
  const uint64_t entries = packet ? Signal::payload(value) : 0;
  world_.write_at(links_.send(from, to, kWordBytes + entries * sizeof(Entry), at).there, word, value);
}

// Bytes of the message that has the word of a source, if the word goes to another machine; else 0. Packet signals
// never go to another machine: there the relay stores them, in the source's name.
uint64_t Group::message_of_source(uint32_t from, uint32_t to, uint64_t in_heap, const uint64_t* word) const {
  const uint32_t kind = layout_.signals.place(word).kind;
  if (kind == SignalMap::kPackets || kind == SignalMap::kNone) return 0;
  const uint64_t machines_back = folded_ ? (in_heap - layout_.first_source) / layout_.slot_bytes : 0;
  if (folded_ ? machines_back == 0 : !peer(from, to).remote) return 0;
  uint64_t bytes = sizeof(*word);
  if (kind == SignalMap::kCalls) bytes += sizeof(CallConfig);
  if (kind == SignalMap::kReturns) {
    const uint64_t in_source = (in_heap - layout_.first_source) % layout_.source_bytes;
    const auto g = static_cast<uint32_t>((in_source - layout_.signals.end[SignalMap::kReturns - 1]) / sizeof(*word));
    bytes += bytes_of_returns(*calls_[from].own, rank_of(to, machines_back), g);
  }
  return bytes;
}

// The same for a word in a relay's slot. The signal of a batch comes from another machine. The signal of a sum comes
// from the relay's own machine, so it takes no message.
uint64_t Group::message_of_slot(uint32_t from, uint32_t to, uint64_t in_slots) const {
  const uint64_t in_slot = in_slots % layout_.slot_bytes, slot = in_slots / layout_.slot_bytes;
  if (in_slot >= layout_.signal_bytes) return 0;
  const auto batch = static_cast<uint32_t>(in_slot / sizeof(uint64_t));
  return sizeof(uint64_t) + bytes_of_batch(*calls_[from].sending, rank_of(to, slot + 1), batch);
}

// When a message's first byte leaves the interface of the sending rank, the message joins the queue of the interface
// of the receiving rank, behind all messages that are in this queue by then.
void Group::send_message(const Message& m, Time at) {
  const Time leaves = links_.leave(m.from, m.bytes, at);
  world_.start(m.to, 1, Watch::kWords, [this, m, leaves] {
    world_.sleep_until(leaves);
    world_.write_at(links_.arrive(m.to, m.bytes), m.word, m.value);
  });
}

}  // namespace flashmoe::sim
