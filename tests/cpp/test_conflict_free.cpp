// Checks that no byte of any heap has two writers: for small configurations by the layout, and in real calls by
// observation.
#include <condition_variable>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "abstract_group.h"
#include "host/text.h"

namespace flashmoe::test {
namespace {

using host::concat;
constexpr uint32_t kNobody = ~0u;

// ---- Who may write where ----------------------------------------------------------------------------------

struct Table {
  FieldSpec<HeapField> fields[HeapLayout::kFields];
  FieldSpec<HeapField>& operator[](HeapField f) { return fields[static_cast<uint32_t>(f)]; }
  const FieldSpec<HeapField>& operator[](HeapField f) const { return fields[static_cast<uint32_t>(f)]; }
};

Table heap_table() {
  Table t;
  std::copy(std::begin(kHeapTable), std::end(kHeapTable), t.fields);
  return t;
}

// Notes who has written each byte of the heaps. A conflict is only reported, and does not end the test, because the
// test must also find conflicts in layouts that are wrong on purpose.
class Claims {
 public:
  Claims(const Call& call, const Limits& limits, const Table& table = heap_table())
      : call_(call),
        limits_(limits),
        table_(table),
        writer_(limits.ranks, std::vector<uint32_t>(call.memory.heap_layout.bytes, kNobody)) {}

  void claim(uint32_t at, HeapField f, const void* first, uint64_t bytes, uint32_t writer) {
    const uint64_t begin = static_cast<uint64_t>(static_cast<const uint8_t*>(first) - call_.memory.heaps[at]);
    const uint64_t field = call_.memory.heap_layout.offset[static_cast<uint32_t>(f)];
    const FieldShape shape = table_[f].shape(limits_);
    const uint64_t size = shape.dim[0] * shape.dim[1] * shape.dim[2] * shape.dim[3] * shape.elem_bytes;
    if (begin < field || begin + bytes > field + size) {
      report(concat(table_[f].name, ": rank ", writer, " writes outside the field"));
      return;
    }
    for (uint64_t i = begin; i < begin + bytes; ++i) claim_byte(at, i, writer);
  }

  void claim_byte(uint32_t at, uint64_t i, uint32_t writer) {
    uint32_t& known = writer_[at][i];
    if (known != kNobody && known != writer) {
      report(concat("byte ", i, " of rank ", at, "'s heap is written by ranks ", known, " and ", writer));
    }
    known = writer;
  }

  // Reports a byte that was written by a rank that may not write it by `rule`.
  void follow(const Claims& rule) {
    for (uint32_t at = 0; at < limits_.ranks; ++at) {
      for (uint64_t i = 0; i < call_.memory.heap_layout.bytes; ++i) {
        if (writer_[at][i] != kNobody && writer_[at][i] != rule.writer_[at][i]) {
          report(concat("byte ", i, " of rank ", at, "'s heap is written by rank ", writer_[at][i], ", but belongs to ",
                        rule.writer_[at][i]));
        }
      }
    }
  }

  const std::string& conflict() const { return conflict_; }

 private:
  void report(const std::string& what) {
    if (conflict_.empty()) conflict_ = what;
  }
  const Call& call_;
  const Limits limits_;
  const Table table_;
  std::vector<std::vector<uint32_t>> writer_;  // [heap][byte]
  std::string conflict_;
};

// The writer of coordinate (i, j) of a field in the heap of rank `at`, by the table's rule. For return rows,
// `owner_of` says who it is.
template <class OwnerOf>
uint32_t writer(const FieldSpec<HeapField>& s, const Limits& l, uint32_t at, uint64_t i, uint64_t j,
                OwnerOf&& owner_of) {
  switch (s.writer) {
    case Writer::kSelf: return at;
    case Writer::kRank0: return static_cast<uint32_t>(i);
    case Writer::kRank1: return static_cast<uint32_t>(j);
    case Writer::kPeer0:
      for (uint32_t p = 0; p < l.ranks; ++p) {
        if (p != at && peer_slot(p, at, l.ranks) == i) return p;
      }
      return kNobody;
    case Writer::kReturn: return owner_of(at, static_cast<uint32_t>(i), static_cast<uint32_t>(j));
  }
  return kNobody;
}

// Claims every coordinate of every field for the writer that the table names.
template <class OwnerOf>
void claim_table(Claims& claims, const Table& table, const Call& c, const Limits& l, OwnerOf&& owner_of) {
  for (const FieldSpec<HeapField>& s : table.fields) {
    const FieldShape shape = s.shape(l);
    for (uint32_t at = 0; at < l.ranks; ++at) {
      for (uint64_t i = 0; i < shape.dim[0]; ++i) {
        for (uint64_t j = 0; j < shape.dim[1]; ++j) {
          const uint32_t by = writer(s, l, at, i, j, owner_of);
          if (by == kNobody) continue;
          for (uint64_t k = 0; k < shape.dim[2]; ++k) {
            for (uint64_t m = 0; m < shape.dim[3]; ++m) {
              claims.claim(at, s.field, c.heap<uint8_t>(at, s.field, i, j, k, m), shape.elem_bytes, by);
            }
          }
        }
      }
    }
  }
}

// Claims everything that the protocol lets rank `c.rank` write in the call's epoch, by the accessors that the
// protocol uses.
template <class OwnerOf>
void claim_accessors(Claims& claims, const Call& c, const Limits& l, OwnerOf&& owner_of) {
  const uint32_t p = c.rank;
  const uint64_t row = row_pitch(l.hidden, l.x_bytes);
  claims.claim(p, HeapField::kStatus, c.status(p), sizeof(Status), p);
  for (uint32_t q = 0; q < l.ranks; ++q) {
    claims.claim(q, HeapField::kFault, c.fault(q, p), sizeof(FaultRecord), p);
    claims.claim(q, HeapField::kCallConfig, c.call_config(q, p), sizeof(CallConfig), p);
    claims.claim(q, HeapField::kCallSignal, c.call_signal(q, p), 8, p);
    for (uint32_t b = 0; b < l.max_blocks(); ++b) {
      claims.claim(q, HeapField::kPacketSignal, c.packet_signal(q, p, b), 8, p);
      claims.claim(q, HeapField::kPacketOffsets, c.packet_offsets(q, p, b), 2 * (l.max_local_experts + 1), p);
    }
    for (uint32_t g = 0; g < kMaxGroups; ++g) {
      claims.claim(q, HeapField::kReturnSignal, c.return_signal(q, p, g), 8, p);
    }
    for (uint32_t t = 0; t < l.max_tokens; ++t) {
      claims.claim(q, HeapField::kPacketCounts, c.packet_counts(q, p, t), 2, p);
      claims.claim(q, HeapField::kPacketEntries, c.packet_entries(q, p, t), sizeof(Entry) * l.entries_per_token(), p);
      if (q != p) claims.claim(q, HeapField::kRows, c.dispatched_row(q, p, t), row, p);
      for (uint32_t slot = 0; slot < l.return_slots; ++slot) {
        if (owner_of(q, t, slot) == p) claims.claim(q, HeapField::kReturnRows, c.return_row(q, t, slot), row, p);
      }
    }
  }
}

// Returns the first conflict of a layout, or an empty text. Claims two calls in a row, because a rank may be one call
// ahead of another. Both calls must have the same writer of a byte, also in fields that have a copy for each parity.
template <class OwnerOf>
std::string find_conflict(const Limits& l, const Table& table, const HeapLayout& layout, OwnerOf&& owner_of) {
  std::vector<std::vector<uint8_t>> memory(l.ranks, std::vector<uint8_t>(layout.bytes + 256));
  std::vector<uint8_t*> heaps;
  for (auto& m : memory) heaps.push_back(m.data());
  Call c;
  c.shape.ranks = l.ranks;
  c.memory.heaps = heaps.data();
  c.memory.heap_layout = layout;
  c.memory.max_blocks = l.max_blocks();

  Claims rule(c, l, table), accessors(c, l, table);
  claim_table(rule, table, c, l, owner_of);
  for (c.epoch = 4; c.epoch <= 5; ++c.epoch) {
    for (c.rank = 0; c.rank < l.ranks; ++c.rank) claim_accessors(accessors, c, l, owner_of);
  }
  if (!rule.conflict().empty()) return "table: " + rule.conflict();
  if (accessors.conflict().empty()) accessors.follow(rule);
  return accessors.conflict();
}

Limits small(uint32_t ranks, uint32_t tokens, uint32_t local_experts, uint32_t top_k, ReturnMode mode) {
  Limits l;
  l.ranks = ranks;
  l.max_tokens = tokens;
  l.hidden = 3;
  l.experts = ranks * local_experts;
  l.max_local_experts = local_experts;
  l.top_k = min_of(top_k, l.experts);
  l.x_bytes = l.intermediate_bytes = l.return_bytes = 8;
  l.return_slots = mode == ReturnMode::kReduced ? ranks : l.top_k;
  l.staging = mode == ReturnMode::kReduced;
  l.intermediate = 2;
  l.tile_rows = 3;
  l.columns_per_task = each_product(2);
  return l;
}

// The writer of a return row with `reduced`: the number of the slot is that of the rank.
uint32_t slot_is_rank(uint32_t, uint32_t, uint32_t slot) {
  return slot;
}
// The writer of a return row with `direct`: the owner of some expert. It must not matter which rank this is.
auto scattered(uint32_t ranks) {
  return [ranks](uint32_t home, uint32_t token, uint32_t k) { return (home + 2 * token + k) % ranks; };
}

void check_layouts() {
  uint32_t layouts = 0;
  for (uint32_t ranks = 1; ranks <= 4; ++ranks) {
    for (const uint32_t tokens : {0u, 1u, 8u, 9u, 24u}) {  // up to three blocks
      for (uint32_t local_experts = 1; local_experts <= 3; ++local_experts) {
        for (uint32_t top_k = 1; top_k <= 3; ++top_k) {
          const Limits reduced = small(ranks, tokens, local_experts, top_k, ReturnMode::kReduced);
          CHECK_EQ(find_conflict(reduced, heap_table(), make_heap_layout(reduced), slot_is_rank), "");
          const Limits direct = small(ranks, tokens, local_experts, top_k, ReturnMode::kDirect);
          CHECK_EQ(find_conflict(direct, heap_table(), make_heap_layout(direct), scattered(ranks)), "");
          layouts += 2;
        }
      }
    }
  }
  std::printf("%u layouts without a conflict\n", layouts);
}

// ---- The checker must find what is wrong ------------------------------------------------------------------

// The table's entry of field F, after the field has lost its coordinate D.
template <HeapField F, int D>
FieldSpec<HeapField> without_coordinate() {
  FieldSpec<HeapField> spec = heap_table()[F];
  spec.shape = [](const Limits& l) {
    FieldShape shape = heap_table()[F].shape(l);
    shape.dim[D] = 1;
    return shape;
  };
  return spec;
}

// Coordinate D of field F tells writers apart. Checks that the test finds what is wrong if the table lacks this
// coordinate, or if the layout's distance of neighbours in this coordinate is zero or one byte too small.
template <HeapField F, int D>
void check_broken() {
  const auto x = static_cast<uint32_t>(F);
  for (const bool reduced : {false, true}) {
    const Limits l = small(3, 24, 2, 3, reduced ? ReturnMode::kReduced : ReturnMode::kDirect);
    const auto conflict = [&](const Table& table, const HeapLayout& layout) {
      return reduced ? find_conflict(l, table, layout, slot_is_rank) : find_conflict(l, table, layout, scattered(3));
    };
    const HeapLayout whole = make_heap_layout(l);
    CHECK_EQ(conflict(heap_table(), whole), "");

    Table table = heap_table();
    table[F] = without_coordinate<F, D>();
    CHECK(conflict(table, make_layout(table.fields, l)) != "");

    HeapLayout overlaid = whole;
    overlaid.stride[x][D] = 0;
    CHECK(conflict(heap_table(), overlaid) != "");

    HeapLayout tight = whole;
    tight.stride[x][D] -= 1;
    CHECK(conflict(heap_table(), tight) != "");
  }
}

void check_broken_layouts() {
  check_broken<HeapField::kFault, 0>();
  check_broken<HeapField::kCallConfig, 1>();
  check_broken<HeapField::kCallSignal, 1>();
  check_broken<HeapField::kPacketSignal, 1>();
  check_broken<HeapField::kPacketOffsets, 1>();
  check_broken<HeapField::kPacketCounts, 1>();
  check_broken<HeapField::kPacketEntries, 1>();
  check_broken<HeapField::kReturnSignal, 0>();
  check_broken<HeapField::kRows, 0>();
  check_broken<HeapField::kReturnRows, 1>();
}

// ---- `direct`: all routings of a tiny configuration -------------------------------------------------------

// All routings of T tokens to K distinct experts of E, one after the other.
class Routings {
 public:
  Routings(uint32_t tokens, uint32_t top_k, uint32_t experts) : k_(top_k), e_(experts), ids_(tokens * top_k) {}
  const std::vector<int32_t>& ids() const { return ids_; }
  bool next() {
    do {
      size_t i = 0;
      while (i < ids_.size() && ++ids_[i] == static_cast<int32_t>(e_)) ids_[i++] = 0;
      if (i == ids_.size()) return false;
    } while (!distinct());
    return true;
  }
  bool distinct() const {
    for (size_t i = 0; i < ids_.size(); ++i) {
      for (size_t j = i - i % k_; j < i; ++j) {
        if (ids_[i] == ids_[j]) return false;
      }
    }
    return true;
  }

 private:
  const uint32_t k_, e_;
  std::vector<int32_t> ids_;
};

// How check_all_routings() places experts. kOnce: each expert on one rank. kInCopies: every expert but the first on
// two ranks, so that ranks send their tokens to different copies. kInSlices: each expert in two slices, on two ranks.
enum class Held { kOnce, kInCopies, kInSlices };

// For each routing, rank `home_rank` builds its packets as in a call. Then each rank claims what it would have to
// write by the entries of its packet.
uint32_t check_all_routings(uint32_t ranks, uint32_t home_rank, uint32_t tokens, ReturnMode mode, Held held) {
  const uint32_t slices = held == Held::kInSlices ? 2 : 1;
  const Limits l = small(ranks, tokens, 2 * slices, 2 * slices, mode);
  AbstractGroup<cpu::CpuPlatform> group(l);
  Problem x;
  x.epoch = 1;
  x.hidden = l.hidden;
  x.intermediate = l.intermediate;
  x.experts = l.experts;
  x.top_k = l.top_k;
  x.slices = slices;
  x.return_mode = mode;
  host::Holders holders;
  for (uint32_t e = 0; e < l.experts; ++e) {
    holders.expert(e % ranks);
    if (held == Held::kInCopies && e != 0) holders.copy((e + 1) % ranks);
  }
  x.place(holders, ranks);
  x.of.resize(ranks);
  for (Problem::OfRank& r : x.of) r.tokens = tokens;
  for (uint32_t q = 0; q < ranks; ++q) group.rank(q).prepare(x);

  PacketMemory scratch(l, 1);
  const Call& home = group.rank(home_rank).call;
  const PacketScratch s = scratch.of(home);
  for (uint32_t q = 0; q < ranks; ++q) {
    announce_own<cpu::CpuPlatform>(group.rank(q).call);
    announce_to_peers<cpu::CpuPlatform>(group.rank(q).call);
  }
  uint32_t routings = 0;
  const uint32_t top_k = l.top_k / slices;
  Routings all(tokens, top_k, l.experts / slices);
  for (bool more = all.distinct() || all.next(); more; more = all.next(), ++routings) {
    for (uint32_t t = 0; t < tokens; ++t) {
      std::copy_n(all.ids().begin() + t * top_k, top_k, s.ids + t * l.top_k);
      if (slices != 1) choose_slices<cpu::CpuPlatform>(home, t, s.ids + t * l.top_k, s.weights + t * l.top_k);
    }
    CHECK(build_packets<cpu::CpuPlatform>(home, 0, s));
    Claims claims(home, l);
    uint32_t returned = 0;
    for (uint32_t q = 0; q < ranks; ++q) {
      const Call& c = group.rank(q).call;
      const Entry* entries = home.out_entries(q, 0);
      for (uint32_t i = 0; i < s.entries[q]; ++i) {
        const uint32_t slot = mode == ReturnMode::kReduced ? q : entries[i].k;
        claims.claim(home_rank, HeapField::kReturnRows, c.return_row(home_rank, entries[i].token, slot),
                     row_pitch(l.hidden, l.return_bytes), q);
        ++returned;
      }
    }
    CHECK_EQ(claims.conflict(), "");
    CHECK_EQ(returned, tokens * l.top_k);
  }
  return routings;
}

// ---- Real calls, observed ---------------------------------------------------------------------------------

// Actors run one at a time. An actor's turn ends where the actor would wait. So what changed during a turn was
// written by the rank whose actor had the turn.
class Turns {
 public:
  static void begin() {
    std::unique_lock lock(mutex_);
    const uint64_t mine = next_++;
    serve_.wait(lock, [&] { return serving_ == mine; });
  }
  static void end() {
    if (at_end) at_end();
    const std::lock_guard lock(mutex_);
    ++serving_;
    serve_.notify_all();
  }
  static inline std::function<void()> at_end;

 private:
  static inline std::mutex mutex_;
  static inline std::condition_variable serve_;
  static inline uint64_t next_ = 0, serving_ = 0;
};

struct TurnPlatform : cpu::CpuPlatform {
  static void backoff(uint32_t) {
    blocking([] {});
  }
  template <class Wait>
  static void blocking(Wait&& wait) {
    Turns::end();
    wait();
    Turns::begin();
  }
  template <class Body>
  static void run_warp(Body&& body) {
    Turns::begin();
    body();
    Turns::end();
  }
};

// The first byte from `from` on that differs; `bytes` if there is none. ThreadSanitizer does not check this function,
// because that took three minutes. There is no race: the thread that compares has the turn, and all others wait.
__attribute__((no_sanitize("thread"))) uint64_t difference(const uint8_t* seen, const uint8_t* now, uint64_t from,
                                                           uint64_t bytes) {
  while (from < bytes && seen[from] == now[from]) ++from;
  return from;
}

// Notes which rank changed which byte in which call. A byte that is overwritten with its own value is not noticed.
// But rows are hashes, and signals have the epoch, so over some calls every field except `fault` is seen to change.
class Observer {
 public:
  Observer(AbstractGroup<TurnPlatform>& group, const Limits& limits, const std::vector<Problem>& problems)
      : group_(group), limits_(limits), problems_(problems), seen_(limits.ranks) {
    for (uint32_t at = 0; at < limits.ranks; ++at) seen_[at].resize(group.heap_bytes);
    for (size_t i = 0; i < problems.size(); ++i) observed_.emplace_back(group.rank(0).call, limits);
    Turns::at_end = [this] { note_changes(); };
  }
  ~Observer() { Turns::at_end = nullptr; }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  void check() {
    const Call& c = group_.rank(0).call;
    for (size_t i = 0; i < problems_.size(); ++i) {
      const Problem& x = problems_[i];
      Claims rule(c, limits_);
      claim_table(rule, heap_table(), c, limits_, [&](uint32_t home, uint32_t token, uint32_t slot) {
        if (token >= x.of[home].tokens) return kNobody;
        if (x.return_mode == ReturnMode::kReduced) return slot < limits_.ranks ? slot : kNobody;
        return slot < x.top_k ? x.owner_of(home, token, slot) : kNobody;
      });
      if (observed_[i].conflict().empty()) observed_[i].follow(rule);
      CHECK_EQ(observed_[i].conflict(), "");
    }
    // Every field must have been seen to change, because a field that never changes is not checked.
    for (uint32_t at = 0; at < limits_.ranks; ++at) {
      for (uint32_t by = 0; by < limits_.ranks; ++by) {
        for (const FieldSpec<HeapField>& s : kHeapTable) {
          const bool never = s.field == HeapField::kFault || (at != by && s.field == HeapField::kStatus) ||
                             (at == by && s.field == HeapField::kRows);
          CHECK_EQ(bytes_.contains({at, by, s.field}), !never);
        }
      }
    }
  }

  uint64_t changes() const { return changes_; }

 private:
  void note_changes() {
    const Epoch epoch = group_.rank(this_rank).call.epoch;
    for (uint32_t at = 0; at < limits_.ranks; ++at) {
      const uint8_t* now = group_.heap(at);
      const auto next = [&](uint64_t from) { return difference(seen_[at].data(), now, from, group_.heap_bytes); };
      for (uint64_t i = next(0); i < group_.heap_bytes; i = next(i + 1)) {
        seen_[at][i] = now[i];
        observed_[epoch - 1].claim_byte(at, i, this_rank);
        bytes_.insert({at, this_rank, field_of(i)});
        ++changes_;
      }
    }
  }

  HeapField field_of(uint64_t byte) const {
    uint32_t x = HeapLayout::kFields - 1;
    while (group_.rank(0).call.memory.heap_layout.offset[x] > byte) --x;
    return static_cast<HeapField>(x);
  }

  AbstractGroup<TurnPlatform>& group_;
  const Limits limits_;
  const std::vector<Problem>& problems_;
  std::vector<std::vector<uint8_t>> seen_;                     // [heap] its bytes after the last turn
  std::vector<Claims> observed_;                               // [epoch - 1]
  std::set<std::tuple<uint32_t, uint32_t, HeapField>> bytes_;  // (heap, writer, field) with a change
  uint64_t changes_ = 0;
};

void check_real_calls(uint32_t ranks, uint64_t seed) {
  Limits l = small(ranks, 24, 3, 3, ReturnMode::kReduced);
  l.processors = 2;
  l.max_local_experts = l.experts;  // placement is drawn, too
  l.return_slots = max_of(ranks, l.top_k);
  const std::vector<Problem> problems = Problems(l, seed).draw(40);
  AbstractGroup<TurnPlatform> group(l);
  Observer observer(group, l, problems);
  group.run(problems);
  observer.check();
  std::printf("%u ranks, %zu calls: %llu bytes seen to change, each by its only writer\n", ranks, problems.size(),
              static_cast<unsigned long long>(observer.changes()));
}

// Ranks on several machines, whose relays write in the names of other ranks. Within a call no byte may have two
// writers. Over all calls together, only return rows may have several writers, because their writers depend on the
// routing.
void check_spread_calls(const std::vector<uint32_t>& machines, uint64_t seed) {
  const auto ranks = static_cast<uint32_t>(machines.size());
  Limits l = small(ranks, 24, 3, 3, ReturnMode::kReduced);
  l.max_local_experts = l.experts;
  l.return_slots = max_of(ranks, l.top_k);
  host::MachineTables(machines, ranks, 0).set(l);
  host::batch_bytes = 1;
  const std::vector<Problem> problems = Problems(l, seed).draw(30);
  AbstractGroup<SpreadPlatform<TurnPlatform>> group(l, {.machines = machines});
  struct Byte {
    uint32_t writer = kNobody;
    Epoch epoch = 0;
  };
  std::vector<std::vector<Byte>> bytes(ranks, std::vector<Byte>(group.heap_bytes));
  std::vector<std::vector<uint8_t>> seen(ranks, std::vector<uint8_t>(group.heap_bytes));
  const HeapLayout layout = make_heap_layout(l);
  const uint64_t return_rows = layout.offset[static_cast<uint32_t>(HeapField::kReturnRows)];
  uint64_t changes = 0, in_relays = 0;
  Turns::at_end = [&] {
    const Epoch epoch = group.rank(this_rank).call.epoch;
    for (uint32_t at = 0; at < ranks; ++at) {
      const uint8_t* const now = group.heap(at);
      const auto next = [&](uint64_t from) { return difference(seen[at].data(), now, from, group.heap_bytes); };
      for (uint64_t i = next(0); i < group.heap_bytes; i = next(i + 1)) {
        seen[at][i] = now[i];
        Byte& byte = bytes[at][i];
        const bool any_call = i < return_rows || i >= layout.bytes;
        const bool known = byte.writer != kNobody && (any_call || byte.epoch == epoch);
        CHECK(!known || byte.writer == this_rank);
        byte = {this_rank, epoch};
        ++changes;
        in_relays += i >= training_heap_bytes(l) ? 1 : 0;
      }
    }
  };
  group.run(problems);
  Turns::at_end = nullptr;
  CHECK(in_relays != 0);
  std::printf(
      "%u ranks on several machines: %llu bytes seen to change, %llu of them relays', each by its only writer\n", ranks,
      static_cast<unsigned long long>(changes), static_cast<unsigned long long>(in_relays));
}

}  // namespace
}  // namespace flashmoe::test

int main() {
  using namespace flashmoe::test;
  using flashmoe::ReturnMode;
  check_layouts();
  check_broken_layouts();
  uint32_t routings = 0;
  for (const ReturnMode mode : {ReturnMode::kDirect, ReturnMode::kReduced}) {
    for (const auto& [ranks, tokens] : {std::pair{2u, 1u}, {2u, 2u}, {3u, 2u}}) {
      routings += check_all_routings(ranks, 0, tokens, mode, Held::kOnce);
      for (uint32_t p = 0; p < ranks; ++p) routings += check_all_routings(ranks, p, tokens, mode, Held::kInCopies);
    }
  }
  routings += check_all_routings(2, 0, 2, ReturnMode::kReduced, Held::kInSlices);
  routings += check_all_routings(3, 1, 2, ReturnMode::kReduced, Held::kInSlices);
  std::printf("%u routings without a conflict\n", routings);
  check_real_calls(2, 1);
  check_real_calls(4, 2);
  check_spread_calls({0, 1, 1}, 3);
  check_spread_calls({0, 0, 1, 1, 2}, 4);
}
