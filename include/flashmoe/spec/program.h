// The program of a call: a table with a row for every kind of task.
//
// A row says what a task multiplies or sums, over which axis, how its results are cut into tasks, where the results go,
// who takes the task and what it waits for. Code that forms tiles, orders tasks, loads, multiplies, retires, counts or
// traces reads the table, and names no kind. The compiler knows the whole table. So it turns such code into comparisons
// with constants, as if the code named the kinds.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "flashmoe/spec/build.h"

namespace flashmoe {

// Where a kind occurs, and what it is of there (`Task` and `Ready` of protocol/task.h):
//
//                in the ready queue                                  in the ready list
//   kGemm0       a tile, or one slice of the shared expert's;        the tile, or slice, is formed
//                a block of columns
//   kGemm1       a tile; a block of columns                          all its columns of GEMM0 are done
//   kStop        ends a cluster: of nothing
//   kFormed                                                          so many more experts have all their tiles, so many
//
// In neither are Reduce and Combine, since nobody hands out their pieces (actors/returner.h), and kBehindStop, which clusters
// of a backward pass take by number (kIsBackward): of a group of weights, and which of its group's tasks it is
// (sm90/gradients/weights.cuh).
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
  kChoices,       // a token's rows, of its experts on one rank or of all
};

// Rows and matrices that a task reads.
enum class Operand : uint32_t {
  kNone,
  kTokens,        // dispatched token rows, gathered by their offsets
  kIntermediate,  // intermediate rows, a tile's one behind the other
  kGateUp,        // the expert's weights [2I or I, H]
  kDown,          // the expert's weights [H, I]
  kStaged,        // rows that GEMM1 left to be reduced
  kReturned,      // rows that came home
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
  kProcessors,  // from the ready queue, in the order that the scheduler chooses
  kIdle,        // whoever has nothing else to do
};

struct TaskRow {
  TaskKind kind;
  Operand left, right;
  Axis over;     // contracted: both operands have it
  Axis columns;  // of the results. They are cut into blocks of columns: a task for each unit and block
  Epilogue epilogue;
  Taker taker;
  // What makes it ready. A tile's product: all the tile's columns of this kind are done, or, for kFormed, the tile is
  // formed. Reduce and Combine: all rows of a source are done (protocol/pending.h), or all ranks have signalled.
  TaskKind after;
  Phase phase;  // what reports and traces call it
};

// ---- Programs. Rows that processors take come first. ---------------------------------------------------------------

// The layer. (Where results are returned directly there is no Reduce, and Combine follows GEMM1.)
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

// Its backward pass, with dY for tokens: dA = dY down, dX = dZ gate_up. It differs from the layer in nothing that sizes of
// memory follow from. Products over an expert's rows come behind the stop, and are not in the table (kBehindStop).
inline constexpr auto kBackward = [] {
  auto program = kForward;
  program[0].right = Operand::kDown;
  program[0].epilogue = Epilogue::kDifferentiate;
  program[1].right = Operand::kGateUp;
  return program;
}();

// A build has one program: sizes of memory follow from it.
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

// Products: the rows that processors take. A product is known by its row's number.
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

// Sets of kinds by which whoever runs tasks tells them apart.
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

// Whether the program is a backward pass. Then clusters go on behind the stop, with tasks of kind kBehindStop, which nobody
// awaits and no queue has: products over an expert's rows, for the gradients of its weights.
inline constexpr bool kIsBackward = kDifferentiating != 0;

// Whether the build is of passes that train among several ranks (on a GPU): rows of other ranks' tokens are then copied as
// they come (actors/keeper.h), and a backward pass forms tiles in canonical order (protocol/arrivals.h).
inline constexpr bool kTrainsInGroup = kBuild.trains() && kBuild.group;
inline constexpr bool kInTurn = kTrainsInGroup && kIsBackward;

consteval bool is_sound() {
  bool sound = true;
  for (uint32_t n = 0; n < kTaskRows; ++n) sound &= (kProgram[n].taker == Taker::kProcessors) == (n < kProducts);
  return sound && std::has_single_bit(kHome) && kProgram[row_of(TaskKind::kReduce)].after == kProgram[kReturning].kind;
}
static_assert(is_sound());

}  // namespace flashmoe
