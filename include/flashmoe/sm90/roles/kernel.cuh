// The fused Mixture-of-Experts layer of one rank: one cooperative launch, one block per SM, 12 warps a block. Two
// blocks are a cluster, and compute each task together (geometry.h says how it is halved). Every thread runs
// run_roles().
//
// Roles, in the order in which warps take them; a role's file says all that it touches.
//   warps   what they do                                                           mainly write, in global memory
//   0 to 10 dispatch the block's token blocks: gate, choice of experts, packets    own heap, workspace   dispatch.cuh
//   0 to 11 of the last blocks: send rows and packets to ranks that are mapped     others' heaps         send.cuh
//   0 to 7  consumers: wgmma on the stages; epilogues: intermediate rows, results  workspace, all heaps  consumers.cuh
//   8, 9    loaders: weights, token rows and intermediate rows to the stages       for returns: heaps, y loaders.cuh
//   10      clerk: the first block's takes tasks for both, the second's retires    counters, signals     clerk.cuh
//           them
//   11      block 0: OS actor (subscriber, scheduler), actors/os.h                 own heap, task queue
//           elsewhere: former, actors/former.h                                     tiles, list, signals
//             or if peers are not mapped sender, actors/put_sender.h               others' heaps         puts.cuh
//             or if several ranks train keeper, actors/keeper.h                    kept rows, signals
//             or if ranks are on several machines relay, actors/relay.h            others' heaps         passing_on.cuh
//   0 to 11 after their roles: reduce what goes to other ranks, combine what came  all heaps, y          sums.cuh
//           back, or join rows                                                     y                     join.cuh
// This file's own code reads the arguments and the count of calls. It writes Shared (the call, its barriers), and at
// the end the count of calls (workspace) and, to the host, what went wrong (gpu/leave.cuh). It waits at barriers of
// the block and of the cluster.
//
// A role that finds the call failed may also write a fault to all ranks' heaps (protocol/fault.h).
// In a backward pass, x is dY and y is dX, and roles also do what their Pass says (pass.cuh). With a router, only the
// last warp of each block reduces and combines; the consumers help to combine after the experts' tasks
// (gradients/router.cuh).
//
// Consumers have 200 registers a thread (forward of TF32: 184), warps 8 to 11 have 104 (forward of TF32: 128).
// TMA needs only one thread, so during GEMM1 the second loader warp joins rows (actors/joiner.h) or works on the
// returns. There is no fourth warpgroup for this work: a block of 512 threads begins with 128 registers a thread.
// Then ptxas refuses any instruction that needs more (C7602), even after setmaxnreg, and the products of 256 features
// by 128 tokens need more.
//
// Pipelines, with the arrivals that a phase of their barriers takes
//   stages  4 x 48 KiB: full 1 + 64 and both copy engines' bytes, empty 2 x 2  (machine/pipeline.cuh)
//   gate    the same memory, before the roles, in 3 to 8 stages: full 1 + 64 and the copy engine's bytes, empty 2
//           (without tensor cores each thread arrives at an empty barrier: x 128, here and above; with fragments each
//           warp: x 4)
//           For more than 256 experts, each block of a cluster has half of the experts. `logits_stored` (1) says that
//           the other block has stored its share of the logits here. `dispatched` (1) says that the other block's
//           memory is free for the next logits (roles/shared_gate.cuh).
//   rows    the same memory, between gate and roles, in blocks that send: 16 KiB a warp, two buffers in turn, each full
//           4 and the copy engine's bytes; a lane that has stored from a buffer waits for the store before it loads
//           into the buffer again (roles/send.cuh)
//   scales  beside the stages, if rows are quantised (machine/stage_scales.cuh); each warp arrives at an empty barrier:
//           x 4
//   tasks   5 slots, 4 if rows are quantised: handed 1 (leading clerk), full 32 (clerk), done 320 (consumers,
//           loaders), in the follower one more (leading clerk), stored 256 (consumers), free 1 (following clerk)
//           (roles/ring.cuh)
//   named barriers: 0 block, 1 and 2 one consumer warpgroup each, 3 the 11 dispatching warps, 4 loaders,
//     5 both consumer warpgroups, if each has half of the columns of quantised rows
//
// In a call that fails, every role still runs until its stop, since the cluster's other block waits for its arrivals.
// Only the abort word says that the call has failed (a flag in each thread would be spilled).
//
// A captured graph replays the same arguments, so the epoch is counted in device memory (Control::calls).
#pragma once

#include "flashmoe/gpu/leave.cuh"
#include "flashmoe/sm90/roles/clerk.cuh"
#include "flashmoe/sm90/roles/consumers.cuh"
#include "flashmoe/sm90/roles/dispatch.cuh"
#include "flashmoe/sm90/roles/loaders.cuh"
#include "flashmoe/sm90/roles/passing_on.cuh"
#include "flashmoe/sm90/roles/puts.cuh"
#include "flashmoe/sm90/roles/send.cuh"

namespace flashmoe::sm90 {

template <uint32_t kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <uint32_t kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
inline constexpr uint32_t kClerkWarp = kWarps - 2;
// Whether the last warps of the blocks behind those with formers have a role (run_behind_formers). The number of
// formers depends on this.
inline constexpr bool kWorkBehindFormers = kTrainsInGroup || SpansMachines<Platform> || !Platform::kPeersMapped;
__device__ __forceinline__ uint32_t formers_of(const Call& c) {
  return formers_of(c.shape.ranks, c.shape.local_experts, gridDim.x, kWorkBehindFormers);
}
// Warpgroups can only redistribute the registers with which the block began. An increase beyond their number would
// wait for ever.
inline constexpr uint32_t kEntryRegisters = 65536 / kThreads / 8 * 8;
// Registers of a thread of warps 8 to 11. In TF32, loaders need more to sum rows of fp32, except in a backward pass,
// where they make no sums.
template <class Dtype>
inline constexpr uint32_t kServiceRegisters = Dtype::kBytes == 2 || !Dtype::kTensorCores || kIsBackward ? 104 : 128;
template <class Dtype>
inline constexpr uint32_t kConsumerRegisters =
    (kThreads / kWarpgroup * kEntryRegisters - kServiceRegisters<Dtype>) / kConsumers / 8 * 8;

// Run first, by all threads: makes this block's copy of the call, and its barriers. Returns false in every block if
// an earlier call has failed.
template <class Dtype>
__device__ __forceinline__ bool prepare(const KernelArgs& args, Shared& s) {
  const auto* from = reinterpret_cast<const uint32_t*>(&args.call);
  auto* to = reinterpret_cast<uint32_t*>(&s.call);
  for (uint32_t i = threadIdx.x; i < sizeof(Call) / 4; i += kThreads) to[i] = from[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    s.call.epoch = Platform::load_relaxed(&args.call.control()->calls.value) + 1;
    s.returns.combines = 0;
    s.returns.reduce.init();
    s.returns.combine.init();
    s.late.init();
    s.idle_consumers = 0;
    s.trace_events = 0;
    s.ring.init();
    Ring<kMostGateStages, 0>::init(shared_address(s.gate_barriers),
                                   kConsumers * kReleases<typename Scores<Dtype>::Type>);
    barrier_init(shared_address(&s.logits_stored), 1);
    barrier_init(shared_address(&s.dispatched), 1);
    Pipeline::init(shared_address(s.stage_barriers),
                   kClusterBlocks * kConsumers * kReleases<typename Factors<Dtype>::Type>);
    fence_barrier_init();
  }
  cluster_sync();
  return s.call.epoch != 0;  // kNoMoreCalls + 1 is 0, see leave()
}

// Run by all threads: in the last `senders` blocks, all warps send rows to other ranks. memory: the stages.
template <class Dtype, class Pass, class Trace>
__device__ __forceinline__ void send_rows(const KernelArgs& args, const Call& c, Shared& s, uint32_t memory,
                                          const Trace& trace) {
  // Both are read anew, so that roles read them again. Otherwise the compiler keeps them from here on, and spills them.
  const uint32_t thread = thread_anew();
  uint32_t blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  const uint32_t senders = c.policy.order.senders, warp = thread / 32;
  if (blockIdx.x + senders < blocks) return;
  __syncthreads();  // dispatch no longer uses the stages
  trace.begin(1);
  const RowCopies copies(memory + warp * RowCopies::kBytes, shared_address(s.send_barriers[warp]));
  RowEngine<Dtype, Pass, Trace> engine(args, c, copies, trace);
  // No block of the call, so that the Sender does not wait for the own packet of one: that packet is signalled by
  // now, and the wait would cost a spill.
  constexpr uint32_t own_block = ~0u;
  Sender<Platform, RowEngine<Dtype, Pass, Trace>>(c, engine).run(warp == 0 && blockIdx.x + senders == blocks,
                                                                 own_block);
  __syncthreads();  // the senders no longer use the stages
  trace.end(Phase::kSend, blockIdx.x, 0, 1);
  trace.begin();  // the wait for the first task begins here; in other blocks it begins when dispatch ends
}

// Run by the last warp of a block behind those with formers. The block is the n-th of `of` such blocks.
template <class Dtype, class Pass, class Trace>
__device__ __forceinline__ void run_behind_formers(const KernelArgs& args, const Call& c, Shared& s, uint32_t n,
                                                   uint32_t of, const Trace& trace) {
  if constexpr (kTrainsInGroup) {
    if (n < c.policy.keepers) Pass::keep_received(args, c, s.former_sources, n);
  } else if constexpr (SpansMachines<Platform>) {
    RelayEngine<Trace> engine(c, trace);
    RelayWorker<Platform, RelayEngine<Trace>>(c, engine).run(n, of);
  } else if constexpr (!Platform::kPeersMapped) {
    PutEngine<Dtype, Trace> engine(args, c, trace);
    PutSender<Platform, PutEngine<Dtype, Trace>>(c, engine).run(n, of, blockIdx.x);
  }
}

// Run by each warp of the last warpgroup (warps 8 to 11): takes the warp's role.
template <class Dtype, class Pass, bool kGated, bool kTransposed, class Trace>
__device__ __forceinline__ void run_service_role(const KernelArgs& args, const Call& c, Shared& s, Pipeline& ring,
                                                 uint32_t warp, const Trace& trace) {
  if (warp < kClerkWarp) {
    load_tasks<Dtype, Pass, kGated, kTransposed>(args, c, s, ring, trace);
  } else if (warp == kClerkWarp) {
    if (cluster_rank() == TaskRing::kLeader) {
      lead_tasks<Dtype, Pass>(args, c, s.ring);
    } else {
      follow_tasks<Dtype, Pass>(args, c, s.ring);
    }
  } else if (blockIdx.x == 0) {
    trace.begin(1);
    run_os<Platform>(c, {.subscriber = {s.os_sources, {s.experts, 0, 0}}, .scheduler = &s.scheduler, .seen = s.seen});
    trace.end(Phase::kSchedule, 0, 0, 1);
  } else if (const uint32_t formers = formers_of(c); blockIdx.x <= formers) {
    trace.begin(1);
    run_former<Platform>(c, s.former_sources, {s.experts, blockIdx.x - 1, formers});
    trace.end(Phase::kForm, blockIdx.x - 1, 0, 1);
    if constexpr (kTrainsInGroup) {
      if (formers + 1 == gridDim.x && c.policy.keepers != 0)
        Pass::keep_received(args, c, s.former_sources, blockIdx.x - 1);
    }
  } else {
    run_behind_formers<Dtype, Pass>(args, c, s, blockIdx.x - 1 - formers, gridDim.x - 1 - formers, trace);
  }
}

template <class Dtype, class Pass, Activation kActivation, bool kTransposed, bool kTrace>
__device__ __forceinline__ void run_roles(const KernelArgs& args, Shared& s, uint8_t* memory) {
  const Call& c = s.call;
  const Tracer<kTrace, kThreads> trace{args, s.trace_events, s.trace_starts};
  trace.begin();
  uint32_t thread = threadIdx.x, warp = thread / 32;
  const uint32_t warpgroup = thread / kWarpgroup;
  const uint32_t ring_memory = shared_address(memory);
  if (warp < kTeamWarps) {
    // The loop's end is computed anew each time: there is no register in which to keep it.
    for (uint32_t b = blockIdx.x; b < dispatch_end<Dtype>(args, c); b += gridDim.x) {
      if (!dispatch_block<Dtype, Pass>(args, c, s, memory, b, trace)) break;
    }
  }
  const Tracer<kTrace, 32> each_warp{args, s.trace_events, s.trace_starts};
  if constexpr (!kBuild.rdma && (!kIsBackward || kTrainsInGroup))
    send_rows<Dtype, Pass>(args, c, s, ring_memory, each_warp);
  Pipeline ring{ring_memory, shared_address(s.stage_barriers)};
  if (warpgroup < kConsumers) {
    take_registers<kConsumerRegisters<Dtype>>();
    uint32_t n;
    const bool routes = compute_tasks<Dtype, Pass, kActivation, kTransposed>(args, c, s, ring, warpgroup, trace, n);
    if constexpr (kIsBackward) {
      if (routes) Pass::template combine_and_add<Dtype>(args, c, s, ring, n, trace, each_warp);
    } else if (Platform::lane() == 0) {
      Platform::fence_nearby();
      Platform::fetch_add_nearby(&s.idle_consumers, 1);
    }
  } else {
    give_registers<kServiceRegisters<Dtype>>();
    run_service_role<Dtype, Pass, is_gated(kActivation), kTransposed>(args, c, s, ring, warp, each_warp);
  }
  each_warp.begin(1);
  if constexpr (kIsBackward) {
    Pass::template sum_behind_stop<Dtype>(args, c);
  }
  if (c.policy.joined == 0) {
    // (In a backward pass, tasks after the stop still use the stages.)
    const auto stages = stages_of_ended<kTrace>(s);
    using Sums =
        SumEngine<Dtype, Tracer<kTrace, 32>, SpansMachines<Platform>, Platform, std::remove_const_t<decltype(stages)>>;
    Sums sums(c, args.out, each_warp, stages);
    Returner<Platform, Sums, CursorOfWarp> returner(c, sums, s.returns);
    if constexpr (kIsBackward) {
      Pass::template combine_and_route<Dtype>(args, c, returner);
    } else {
      returner.run(c);
    }
  } else if (!kIsBackward && joins_late_rows(c)) {
    JoinEngine<Dtype, Tracer<kTrace, 32>> adder(args, c, each_warp);
    Joiner<Platform, JoinEngine<Dtype, Tracer<kTrace, 32>>>(c, adder, s.late).run();
  }
  if constexpr (kTrainsInGroup && kIsBackward) Pass::collect_weights(args, c);
  each_warp.end(Phase::kReturn, blockIdx.x, 0, 1);
  __syncwarp();            // lanes may have left a wait one by one
  thread = thread_anew();  // otherwise the compiler keeps it meanwhile, in a register or on the stack
  warp = thread / 32;
  if constexpr (!Platform::kPeersMapped) {
    // Called by the first sender's warp: every rank has one, and by now it has done everything that may fail.
    if (warp == kTeamWarps && blockIdx.x == 1 + formers_of(c)) tell_fault<Platform>(c);
  }
  cluster_sync();  // neither block may leave while the other may still arrive at its barriers
  if (thread == 0) {
    trace.finish();
    leave(args, c, c.epoch);
  }
}

}  // namespace flashmoe::sm90
