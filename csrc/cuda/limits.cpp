#include "cuda/limits.h"

#include "flashmoe/protocol/machines.h"
#include "host/error.h"
#include "host/text.h"

namespace flashmoe::cuda {
namespace {

using host::concat;
using host::Error;

// The number of thread blocks. limits.processors 0: one on every multiprocessor.
uint32_t processors_of(const Arch& arch, const Limits& limits, uint32_t multiprocessors) {
  const uint32_t all = multiprocessors / arch.cluster_blocks * arch.cluster_blocks;
  const uint32_t wanted = limits.processors == 0 ? all : limits.processors;
  const uint32_t least = arch.least_blocks(limits.ranks, limits.all_local_experts());
  if (wanted < least || wanted > all || wanted % arch.cluster_blocks != 0) {
    const std::string most =
        least > all ? concat(", of which the device has ", all) : concat(" to ", all, ", the device's multiprocessors");
    throw Error(Error::Kind::kInvalidArgument,
                concat("processors: expected an even number from ", least, " (for R=", limits.ranks,
                       " and El=", limits.all_local_experts(), ")", most, ", got ", wanted));
  }
  return wanted;
}

// Refuses limits with which the kernel's offsets would not reach all rows. The offsets have 31 or 32 bits and count
// units of 16 bytes. They address rows of other ranks' tokens (TokenRows) and rows to sum (SumPiece).
void check_reach(const Arch& arch, const Limits& limits) {
  const uint64_t tokens = limits.max_tokens;
  const uint64_t sent = row_pitch(limits.hidden, limits.x_bytes);
  const uint64_t returned = row_pitch(limits.hidden, limits.return_bytes);
  const uint64_t summed = limits.relayed == 0 ? 0 : row_pitch(limits.hidden, 4);
  const struct {
    const char* what;
    uint64_t bytes, most;
  } fields[] = {
      {"other ranks' tokens", (limits.ranks - 1) * tokens * sent, arch.reach_bytes},
      {"results to sum", tokens * limits.return_slots * returned, 2 * arch.reach_bytes},
      {"results to reduce", limits.staging * tokens * limits.entries_per_token() * returned, 2 * arch.reach_bytes},
      {"sums of a machine's ranks", limits.staging * tokens * summed, 2 * arch.reach_bytes}};
  for (const auto& f : fields) {
    if (f.bytes <= f.most) continue;
    throw Error(Error::Kind::kInvalidArgument,
                concat("max_tokens: expected rows of ", f.what, " within ", f.most >> 30, " GiB, got ", f.bytes,
                       " bytes for R=", limits.ranks, ", T=", tokens, ", K=", limits.top_k, " and H=", limits.hidden));
  }
}

}  // namespace

Limits cuda_limits(const Arch& arch, Limits limits, uint32_t multiprocessors) {
  check_reach(arch, limits);
  limits.processors = processors_of(arch, limits, multiprocessors);
  limits.tile_rows = arch.tile_rows;
  // A context serves every activation. Activations with a gate have the most blocks of columns, because their tasks
  // have fewer columns of I, so the limits are those of a gated activation.
  limits.columns_per_task = arch.columns_per_task(true);
  return limits;
}

Reasons cuda_reasons(const Limits& limits) {
  const uint64_t behind = may_train_in_group(limits) ? spread_heap_bytes(limits) : make_heap_layout(limits).bytes;
  return {may_refuse(limits) ? make_refusal_layout(limits) : RefusalLayout{}, behind};
}

uint64_t cuda_heap_bytes(const Limits& limits) {
  const Reasons reasons = cuda_reasons(limits);
  return reasons.behind + reasons.layout.bytes;
}

}  // namespace flashmoe::cuda
