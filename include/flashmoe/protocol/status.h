// What ranks tell one another about themselves: the call they believe in, that they are alive, what went wrong.
#pragma once

#include <cstring>

#include "flashmoe/protocol/base.h"
#include "flashmoe/spec/layer.h"

namespace flashmoe {

// One word per concern, written by the OS actor of the rank that owns it.
struct alignas(64) Status {
  uint64_t entered;    // epoch of the call this rank has begun
  uint64_t left;       // epoch of the last call whose tasks are all published here and whose returns are all here
  uint64_t heartbeat;  // grows with every step of its OS actor
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
  uint32_t rank = 0;      // who found it
  uint32_t awaited = 0;   // from whom it was awaited; kDisagree: who disagrees
  uint32_t culprit = 0;   // who, as far as the finder could see, does not move
  uint32_t index = 0;     // packet: token block; return: group
  uint64_t expected = 0;  // epoch of the awaited signal
  uint64_t seen = 0;      // epoch it had
  uint64_t epoch = 0;
};

// Why no expert gets an own token's row. The call goes on without it, and its result is NaN.
enum class RowFault : uint32_t {
  kNone = 0,
  kLogits = 1,           // no choice can be made by its router logits: NaN or +inf, or all are -inf
  kExpertRange = 2,      // given routing names an expert that does not exist
  kDuplicateExpert = 3,  // given routing names one expert twice
};

// Such a row as one word, of which the largest is the first token's. No note is 0.
struct RowNote {
  RowFault fault = RowFault::kNone;
  uint32_t token = 0;
  int32_t id = 0;  // of given routing

  FLASHMOE_HD constexpr uint64_t pack() const {
    return ~(uint64_t{token} << 36 | uint64_t{static_cast<uint32_t>(fault)} << 32 | static_cast<uint32_t>(id));
  }
  FLASHMOE_HD static constexpr RowNote unpack(uint64_t word) {
    if (word == 0) return {};
    return {static_cast<RowFault>(~word >> 32 & 0xfu), static_cast<uint32_t>(~word >> 36), static_cast<int32_t>(~word)};
  }
};

inline constexpr uint32_t kReasonBytes = 512;  // of a refusal's text, with the zero behind it (refusal.h)

// What a rank says, in another one's heap, of calls that come to nothing.
struct alignas(64) FaultRecord {
  static constexpr uint64_t kFailed = ~uint64_t{0};
  uint64_t
      posted;  // polled: kFailed once `fault` is written; else epoch of the last call that it has refused (refusal.h)
  Fault fault;
  uint64_t left;  // epoch of the last call that some rank has refused and it has left

  FLASHMOE_HD static constexpr bool is_news(uint64_t posted, uint64_t epoch) {
    return posted == kFailed || posted == epoch;
  }
};
static_assert(sizeof(FaultRecord) == 64);

// What every rank must agree on in a call. The hash is compared on arrival; the values name the difference.
struct alignas(64) CallConfig {
  uint64_t hash;
  uint64_t layer_words[sizeof(AgreedLayer) / 8];  // as words, since kernels copy those at once
  uint32_t placement;                             // hash of the expert -> rank map
  // Hash of where return groups' columns end: a signal stands for the same columns on all ranks. Of a backward pass also
  // of the call whose gradients it computes; kBackward says that it is one, kRedispatch that it dispatches x again.
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
  uint64_t posted;  // non-zero once the rest is written
  Fault fault;
  uint64_t entered;         // epoch of the call that the culprit has begun
  CallConfig mine, theirs;  // of fault.rank and fault.awaited
  // Beside a fault: the first RowNote that is an error and that the host has not raised yet, 0 without one; of a layer with so
  // many experts.
  uint64_t noted = 0;
  uint32_t noted_experts = 0;
  // Likewise the first call that some rank has refused, `refuser`, and its reason; 0 without one. And the last one, whether or not
  // the host has raised it, written behind these.
  uint64_t refused = 0, last_refused = 0;
  uint32_t refuser = 0;
  alignas(8) char reason[kReasonBytes] = {};
};

inline constexpr uint64_t kNoMoreCalls = ~uint64_t{0};  // the next call's epoch would be 0, which no call has

// Words for which the actors of a rank contend, one cache line each.
struct alignas(128) Control {
  struct alignas(128) Line {
    uint64_t value;
  };
  Line queue_head;   // tickets taken
  Line list_tail;    // items pushed to the ready list
  Line abort;        // non-zero: leave
  Line fault_claim;  // the first to add writes the fault record
  Line tiles;        // tiles made in this call; zero between calls
  Line left;         // thread blocks that have left the kernel (GPU); zero between calls
  Line calls;        // calls completed (GPU); kNoMoreCalls once one has failed
  Line reduces[2];   // [parity] pieces of Reduce taken; zero before the call
  Line sends[2];     // [parity] parts of packets that senders have taken; zero before the call
  Line published;    // between calls: words ever published to the ready queue
  Line list_head;    // between calls: items ever drained from the ready list
  // Of the kernel for a few tokens (GPU); zero between calls.
  Line few_met;      // alone: thread blocks that have come to its meeting
  Line few_stored;   // in a group: thread blocks whose results are stored
  Line few_tickets;  // tasks that were taken behind each block's first
  // Of passes that train (GPU); zero between calls.
  Line keepers_done;    // among several ranks: keepers that have copied all rows
  Line weight_tickets;  // tasks that were taken behind the stop
  // With a router: thread blocks whose tokens' logits are differentiated, and in the upper half warps that have combined.
  Line routed;
  Line noted;    // the first RowNote of the call, 0 without one; zero before the call
  Line refused;  // the last call that ended since some rank has refused it (GPU)
};

}  // namespace flashmoe
