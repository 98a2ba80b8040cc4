// The program of a call: a table with a row for every kind of task.
//
// A row says what a task multiplies or sums, over which axis, how its results are cut into tasks, where the results go,
// who takes the task and what it waits for. Code that forms tiles, orders tasks, loads, multiplies, retires, counts
// or traces reads the table, and does not name kGemm0 or kGemm1. The compiler knows the whole table. So it turns such
// code into comparisons with constants, as if the code named these kinds.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "flashmoe/spec/build.h"

namespace flashmoe {

// What a word of each kind names in the ready queue, and says in the ready list (Task and Ready of protocol/task.h):
//
//                in the ready queue                                  in the ready list
//   kGemm0       a block of columns, and a tile or (for the shared   the tile, or the slice of the tile, is formed
//                expert) a slice of a tile
//   kGemm1       a block of columns, and a tile                      all GEMM0 tasks of the tile are done
//   kStop        nothing: the cluster that takes it takes no more    (not there)
//   kFormed      (not there)                                         more experts have all their tiles: how many
//                                                                    experts, and how many tiles
//
// kReduce and kCombine are in neither, because nobody hands out their pieces (actors/returner.h). kBehindStop is in
// neither: clusters of a backward pass take these tasks by tickets after their stop word (kIsBackward). Such a task
// names a group of weights, and its own number among the tasks of the group (sm90/gradients/weights.cuh).
enum class TaskKind : uint32_t {
  kNone = 0,
  kGemm0 = 1,
  kGemm1 = 2,
  kStop = 3,
  kFormed = 4,
  kReduce = 5,
  kCombine = 6,
  kBehindStop = 7
};

enum class Axis : uint32_t {
  kHidden,        // H, the columns of tokens and of results
  kIntermediate,  // I, the columns of intermediate rows
  kChoices,       // the rows of one token: those of its experts on one rank, or all that came home
};

// Rows and matrices that a task reads.
enum class Operand : uint32_t {
  kNone,
  kTokens,        // dispatched token rows, gathered by their offsets
  kIntermediate,  // intermediate rows; those of a tile lie one behind the other
  kGateUp,        // the expert's weights [2I or I, H]
  kDown,          // the expert's weights [H, I]
  kStaged,        // staged rows, which GEMM1 has written for Reduce
  kReturned,      // return rows
};

// What becomes of a task's results.
enum class Epilogue : uint32_t {
  kActivate,       // bias and activation; to the tile's intermediate rows
  kDifferentiate,  // the activation's gradient; to the tile's intermediate rows (docs/training.md)
  kReturn,         // bias and combine weight; to each row's home, or to where they are reduced
  kSend,           // the sum; to the token's home
  kOutput,         // the sum; to the layer's output
};

enum class Taker : uint32_t {
  kProcessors,  // processors take the task from the ready queue, in the order that the scheduler chooses
  kIdle,        // workers that have no task take pieces of it
};

struct TaskRow {
  TaskKind kind;
  Operand left, right;
  Axis over;     // the axis that is summed over; both operands of a product have it
  Axis columns;  // the axis of the results' columns. These are cut into blocks; a tile has a task for each block
  Epilogue epilogue;
  Taker taker;
  // The kind of what must be done before. A product of a tile is ready when all the tile's tasks of this kind are
  // done, or, if this is kFormed, when the tile is formed. Reduce is ready when all rows of a source are computed
  // (protocol/pending.h), Combine when all ranks have signalled; both go by return group.
  TaskKind after;
  Phase phase;  // what reports and traces call it
};

// ---- Programs. Rows that processors take come first. ---------------------------------------------------------------

// The forward pass. (With ReturnMode::kDirect there is no Reduce, and Combine follows GEMM1.)
inline constexpr auto kForward = std::to_array<TaskRow>({
    {.kind = TaskKind::kGemm0,
     .left = Operand::kTokens,
     .right = Operand::kGateUp,
     .over = Axis::kHidden,
     .columns = Axis::kIntermediate,
     .epilogue = Epilogue::kActivate,
     .taker = Taker::kProcessors,
     .after = TaskKind::kFormed,
     .phase = Phase::kGemm0},
    {.kind = TaskKind::kGemm1,
     .left = Operand::kIntermediate,
     .right = Operand::kDown,
     .over = Axis::kIntermediate,
     .columns = Axis::kHidden,
     .epilogue = Epilogue::kReturn,
     .taker = Taker::kProcessors,
     .after = TaskKind::kGemm0,
     .phase = Phase::kGemm1},
    {.kind = TaskKind::kReduce,
     .left = Operand::kStaged,
     .right = Operand::kNone,
     .over = Axis::kChoices,
     .columns = Axis::kHidden,
     .epilogue = Epilogue::kSend,
     .taker = Taker::kIdle,
     .after = TaskKind::kGemm1,
     .phase = Phase::kReduce},
    {.kind = TaskKind::kCombine,
     .left = Operand::kReturned,
     .right = Operand::kNone,
     .over = Axis::kChoices,
     .columns = Axis::kHidden,
     .epilogue = Epilogue::kOutput,
     .taker = Taker::kIdle,
     .after = TaskKind::kReduce,
     .phase = Phase::kCombine},
});

// The backward pass. Its token rows are rows of dY: dA = dY down, dX = dZ gate_up. It has the kinds and axes of
// kForward, so sizes of memory, which follow from them, are the same. The gradients of weights are not in the table:
// clusters compute them after their stop word (kBehindStop).
inline constexpr auto kBackward = [] {
  auto program = kForward;
  program[0].right = Operand::kDown;
  program[0].epilogue = Epilogue::kDifferentiate;
  program[1].right = Operand::kGateUp;
  return program;
}();

// The program of this build. Sizes of memory follow from it.
inline constexpr auto& kProgram = kBuild.backward ? kBackward : kForward;

// ---- What is asked of the program, all of it at compile time --------------------------------------------------------

inline constexpr uint32_t kTaskRows = kProgram.size();

// The kinds of the rows for which `what` holds, as a set: bit k is kind k.
template <class What>
consteval uint32_t kinds_where(What&& what) {
  uint32_t kinds = 0;
  for (const TaskRow& row : kProgram) kinds |= what(row) ? 1u << static_cast<uint32_t>(row.kind) : 0u;
  return kinds;
}

consteval uint32_t row_of(TaskKind kind) {
  uint32_t n = 0;
  while (kProgram[n].kind != kind) ++n;  // a kind that the table lacks does not compile
  return n;
}

// The number of products, which are the rows that processors take. A product is named by the number of its row.
inline constexpr uint32_t kProducts =
    std::popcount(kinds_where([](const TaskRow& r) { return r.taker == Taker::kProcessors; }));

// The product that is ready when a tile is formed, and the one whose results go home.
consteval uint32_t first_product() {
  uint32_t n = 0;
  while (kProgram[n].after != TaskKind::kFormed) ++n;
  return n;
}
consteval uint32_t returning_product() {
  uint32_t n = 0;
  while (kProgram[n].epilogue != Epilogue::kReturn) ++n;
  return n;
}
inline constexpr uint32_t kFirst = first_product(), kReturning = returning_product();
// The product that makes the returning one ready.
inline constexpr uint32_t kBeforeReturning = row_of(kProgram[kReturning].after);

// Whether product n makes another one ready.
consteval bool leads_on(uint32_t n) {
  bool any = false;
  for (uint32_t m = 0; m < kProducts; ++m) any |= kProgram[m].after == kProgram[n].kind;
  return any;
}

consteval bool reads_tokens(const TaskRow& row) {
  return row.left == Operand::kTokens;
}

// Row n of the table as constants, for device code, which cannot read the table itself.
template <uint32_t n>
struct Product {
  static constexpr TaskKind kKind = kProgram[n].kind;
  static constexpr Operand kLeft = kProgram[n].left, kRight = kProgram[n].right;
  static constexpr TaskKind kAfter = kProgram[n].after;
  static constexpr Phase kPhase = kProgram[n].phase;
  static constexpr bool kLeadsOn = leads_on(n);
};

// Sets of kinds. Code that runs tasks asks whether a task's kind is in one of them (is_one_of).
inline constexpr uint32_t kGathering = kinds_where(reads_tokens);
inline constexpr uint32_t kDifferentiating =
    kinds_where([](const TaskRow& r) { return r.epilogue == Epilogue::kDifferentiate; });
inline constexpr uint32_t kActivating = kinds_where([](const TaskRow& r) { return r.epilogue == Epilogue::kActivate; });
inline constexpr uint32_t kOverHidden = kinds_where([](const TaskRow& r) { return r.over == Axis::kHidden; });
inline constexpr uint32_t kHome = kinds_where([](const TaskRow& r) { return r.epilogue == Epilogue::kReturn; });

// The kind of a set that has only one; kNone for other sets.
template <uint32_t kKinds>
inline constexpr TaskKind kOnly =
    std::has_single_bit(kKinds) ? static_cast<TaskKind>(std::countr_zero(kKinds)) : TaskKind::kNone;

// Whether the program is a backward pass. If so, clusters go on after their stop word, with tasks of kind
// kBehindStop, which are in no queue: products over an expert's rows, which are the gradients of its weights. No
// other rank waits for them.
inline constexpr bool kIsBackward = kDifferentiating != 0;

// kTrainsInGroup: the build is for passes that train among several GPUs. Then keepers copy the rows of other ranks'
// tokens as the rows arrive (actors/keeper.h). kInTurn: it is, besides, for a backward pass. Then packets are taken
// source by source, so that tiles have their rows in canonical order (protocol/arrivals.h).
inline constexpr bool kTrainsInGroup = kBuild.trains() && kBuild.group;
inline constexpr bool kInTurn = kTrainsInGroup && kIsBackward;

consteval bool is_sound() {
  bool sound = true;
  for (uint32_t n = 0; n < kTaskRows; ++n) sound &= (kProgram[n].taker == Taker::kProcessors) == (n < kProducts);
  return sound && std::has_single_bit(kHome) && kProgram[row_of(TaskKind::kReduce)].after == kProgram[kReturning].kind;
}
static_assert(is_sound());

}  // namespace flashmoe
