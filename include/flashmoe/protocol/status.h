// What ranks tell one another about themselves: how they have configured the call, that they still run, what went
// wrong.
#pragma once

#include <cstring>

#include "flashmoe/protocol/base.h"
#include "flashmoe/spec/layer.h"

namespace flashmoe {

// Four words, which the rank's OS actor writes in the rank's own heap. (The rank's host writes them, too, while it
// compiles a kernel or refuses a call.)
struct alignas(64) Status {
  uint64_t entered;    // epoch of the last call that this rank has begun
  uint64_t left;       // epoch of the last call whose tasks are all published here and whose returns are all here
  uint64_t heartbeat;  // grows with every step of the OS actor
  uint64_t progress;   // grows with every step that achieved something
};

enum class FaultKind : uint32_t {
  kNone = 0,
  kCallSignal = 1,  // a rank did not begin the call in time
  kPacket = 2,      // a packet did not arrive in time
  kReturn = 3,      // a return signal did not arrive in time
  kLocal = 4,       // an actor of this rank did not progress in time
  kDisagree = 5,    // a rank's call configuration differs from this rank's
  kLeft = 6,        // a rank did not leave a refused call in time
};

enum class Actor : uint32_t { kOs = 0, kProcessor = 1 };

struct Fault {
  FaultKind kind = FaultKind::kNone;
  Actor actor = Actor::kOs;
  uint32_t rank = 0;      // the rank that found the fault
  uint32_t awaited = 0;   // the rank for which the finder waited; kDisagree: the rank that disagrees
  uint32_t culprit = 0;   // the rank that, as far as the finder could see, holds the call up
  uint32_t index = 0;     // kPacket: token block; kReturn: return group
  uint64_t expected = 0;  // epoch of the awaited signal
  uint64_t seen = 0;      // epoch that this signal had
  uint64_t epoch = 0;     // of the call
};

// Why a row of this rank is bad. The call goes on, but no expert gets the row, and the token's result is NaN.
enum class RowFault : uint32_t {
  kNone = 0,
  kLogits = 1,           // no choice can be made by its router logits: NaN or +inf, or all are -inf
  kExpertRange = 2,      // given routing names an expert that does not exist
  kDuplicateExpert = 3,  // given routing names one expert twice
};

// A bad row, packed into one word. Of two words, that of the lower token number is larger. No packed note is 0.
struct RowNote {
  RowFault fault = RowFault::kNone;
  uint32_t token = 0;
  int32_t id = 0;  // the wrong id that the caller gave; 0 for kLogits

  FLASHMOE_HD constexpr uint64_t pack() const {
    return ~(uint64_t{token} << 36 | uint64_t{static_cast<uint32_t>(fault)} << 32 | static_cast<uint32_t>(id));
  }
  FLASHMOE_HD static constexpr RowNote unpack(uint64_t word) {
    if (word == 0) return {};
    return {static_cast<RowFault>(~word >> 32 & 0xfu), static_cast<uint32_t>(~word >> 36), static_cast<int32_t>(~word)};
  }
};

inline constexpr uint32_t kReasonBytes = 512;  // of a refusal's text, with the zero behind it (refusal.h)

// What a rank says, in every rank's heap, about calls that are not completed.
struct alignas(64) FaultRecord {
  static constexpr uint64_t kFailed = ~uint64_t{0};
  uint64_t
      posted;  // polled: kFailed once `fault` is written; else epoch of the last call that the rank refused (refusal.h)
  Fault fault;
  uint64_t left;  // epoch of the last refused call that the rank has left, whichever rank has refused it

  FLASHMOE_HD static constexpr bool is_news(uint64_t posted, uint64_t epoch) {
    return posted == kFailed || posted == epoch;
  }
};
static_assert(sizeof(FaultRecord) == 64);

// What all ranks must agree on in a call. A rank compares the hashes when another rank's call signal is here. If they
// differ, the error message says in which values.
struct alignas(64) CallConfig {
  uint64_t hash;
  uint64_t layer_words[sizeof(AgreedLayer) / 8];  // an AgreedLayer as words, so that kernels copy it word by word
  uint32_t placement;                             // hash of which ranks hold which experts
  // 30 bits of a hash, and two flags above them. The hash is of the columns at which return groups end, because a
  // return signal must stand for the same columns on all ranks, and in a backward pass also of the forward call's
  // number. kBackward: the call is a backward pass. kRedispatch: it sends x again.
  uint32_t groups;
  static constexpr uint32_t kBackward = 1u << 31, kRedispatch = 1u << 30;

  AgreedLayer layer() const {
    AgreedLayer l;
    std::memcpy(&l, layer_words, sizeof(l));
    return l;
  }
  void set_layer(const AgreedLayer& l) { std::memcpy(layer_words, &l, sizeof(l)); }
};
static_assert(sizeof(CallConfig) == 64 && sizeof(AgreedLayer) % 8 == 0);

// A fault as an engine hands it to the host: the record, and what else of the heaps the message needs.
struct HostFault {
  uint64_t posted;  // non-zero once the next four fields are written
  Fault fault;
  uint64_t entered;         // epoch of the last call that the culprit has begun
  CallConfig mine, theirs;  // the configurations of fault.rank and of fault.awaited
  // The rest is not about the fault. noted: the first RowNote that is an error and that the host has not raised yet; 0:
  // there is none. noted_experts: E of the note's layer, for the message.
  uint64_t noted = 0;
  uint32_t noted_experts = 0;
  // refused: the first call that some rank has refused and that the host has not raised yet; 0: there is
  // none. `refuser` and `reason` belong to this call. last_refused: the last call that some rank has refused, raised
  // or not; it is written after these.
  uint64_t refused = 0, last_refused = 0;
  uint32_t refuser = 0;
  alignas(8) char reason[kReasonBytes] = {};
};

// Control::calls after a call has failed. The next call's epoch would be 0, which no call has.
inline constexpr uint64_t kNoMoreCalls = ~uint64_t{0};

// Words that several actors of a rank change, each in a cache line of its own.
struct alignas(128) Control {
  struct alignas(128) Line {
    uint64_t value;
  };
  Line queue_head;   // tickets taken
  Line list_tail;    // items pushed to the ready list
  Line abort;        // non-zero: all actors of the rank leave the call
  Line fault_claim;  // faults found; the actor that adds first writes the fault record
  Line tiles;        // tiles made in this call; zero between calls
  Line left;         // thread blocks that have left the kernel (GPU); zero between calls
  Line calls;        // calls completed (GPU); kNoMoreCalls once a call has failed
  Line reduces[2];   // [parity] pieces of Reduce taken; zero before the call
  Line sends[2];     // [parity] parts of packets that senders have taken; zero before the call
  Line published;    // between calls: words ever published to the ready queue
  Line list_head;    // between calls: items ever drained from the ready list
  // Counters of the kernel for a few tokens (GPU); zero between calls.
  Line few_met;      // in a rank alone: thread blocks that have stored their weighted rows
  Line few_stored;   // in a group: thread blocks that have stored their weighted rows
  Line few_tickets;  // tasks taken, without the first one of each thread block
  // Counters of passes that train (GPU); zero between calls.
  Line keepers_done;    // among several ranks: keepers that have copied all rows
  Line weight_tickets;  // tasks that clusters have taken after their stop words
  // With a router. Low 32 bits: thread blocks that have stored the gradients of their tokens' logits. High 32 bits:
  // warps that have no piece of Combine left.
  Line routed;
  Line noted;    // the RowNote of the call's first bad row; 0: there is none, as before the call
  Line refused;  // the last call that ended because some rank has refused it (GPU)
};

}  // namespace flashmoe
