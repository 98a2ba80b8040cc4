#include "host/group.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>
#include <utility>

#include "host/clock.h"
#include "host/error.h"
#include "host/interrupt.h"
#include "host/text.h"

namespace flashmoe::host {
namespace {

using Kind = Error::Kind;

// The first bytes of a segment: who the rank is and how far it has come. The heap follows.
struct ControlPage {
  static constexpr uint32_t kMostRanks = 1024;
  enum State : uint32_t { kCreated = 0, kReady = 1, kSawAll = 2, kJoined = 3, kFailed = 4 };
  uint32_t state;
  uint32_t seen_by;  // ranks that have opened this segment
  int32_t pid;
  uint64_t pid_space;  // in which the pid means something
  uint64_t bytes;      // of the segment
  Limits limits;
  Error::Kind failure_kind;  // of kFailed
  char failure[512];
  // A rank that gives up may come back at once, or be started again, and meet the others while they still join with what it
  // was before. So each attempt to join has a number, and says with which of each peer's it goes, once it has met it.
  uint64_t attempt, met[kMostRanks];
};
constexpr uint64_t kPageBytes = 3 * 4096;
static_assert(sizeof(ControlPage) <= kPageBytes);

// Shared memory lies in files, as shm_open() makes them; a segment's name is that of its file.
constexpr const char* kFolder = "/dev/shm/";
std::string segment_name(const std::string& group, uint32_t rank) {
  return concat(kFolder, "flashmoe-", group, "-", rank);
}

// The difference between two ranks' limits that no call could bridge, as a message; empty if there is none.
std::string difference(const Limits& mine, uint32_t rank, const Limits& theirs, uint32_t peer) {
  const struct {
    const char* name;
    uint32_t mine, theirs;
  } fields[] = {{"ranks", mine.ranks, theirs.ranks},
                {"max_tokens", mine.max_tokens, theirs.max_tokens},
                {"hidden", mine.hidden, theirs.hidden},
                {"experts", mine.experts, theirs.experts},
                {"most experts of a rank (placement)", mine.max_local_experts, theirs.max_local_experts},
                {"top_k", mine.top_k, theirs.top_k},
                {"bytes per element (dtype)", mine.elem_bytes, theirs.elem_bytes},
                {"return slots (return_mode)", mine.return_slots, theirs.return_slots},
                {"capacity (capacity_factor)", mine.capacity, theirs.capacity},
                {"rdma (transport)", mine.rdma, theirs.rdma}};
  for (const auto& f : fields) {
    if (f.mine != f.theirs) {
      return concat(f.name, ": rank ", rank, " has ", f.mine, ", rank ", peer, " has ", f.theirs);
    }
  }
  return {};
}

// Containers may share their memory and not their processes' numbers. 0: unknown.
uint64_t own_pid_space() {
  struct stat space;
  return stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0;
}

bool process_is_gone(const ControlPage& of) {
  const pid_t pid = of.pid;
  if (of.pid_space == 0 || of.pid_space != own_pid_space()) return false;  // as far as can be told
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  // A zombie answers kill; its state follows the parenthesised name in /proc.
  std::ifstream stat(concat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(stat, line);
  const size_t end = line.rfind(')');
  return end != std::string::npos && end + 2 < line.size() && line[end + 2] == 'Z';
}

class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, uint64_t bytes) : bytes_(bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) throw Error(Kind::kHeap, concat("heap: cannot map ", bytes, " bytes: ", std::strerror(errno)));
    base_ = static_cast<uint8_t*>(p);
  }
  Mapping(Mapping&& other) noexcept : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  uint8_t* base() const { return base_; }

 private:
  uint8_t* base_ = nullptr;
  uint64_t bytes_ = 0;
};

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Removes a file.
struct Unlink {
  const std::string& path;
  ~Unlink() { unlink(path.c_str()); }
};

// Not 0, and hardly ever the same twice.
uint64_t new_attempt() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

// Joining, as seen by one rank: create the own segment; open every peer's, whose control page says what it is; once
// every rank has opened all, compare limits, so that ranks which disagree all see with whom, and map the heaps. Then nobody
// needs a name any more; and once every rank has taken its own away, the next group of this name may form.
class ProcessGroup final : public Group {
 public:
  ProcessGroup(const std::string& name, uint32_t rank, const Limits& limits, uint64_t heap_bytes, uint64_t timeout_ns)
      : name_(name),
        rank_(rank),
        limits_(limits),
        bytes_(kPageBytes + heap_bytes),
        timeout_ns_(timeout_ns),
        deadline_(timeout_ns == 0 ? UINT64_MAX : monotonic_ns() + timeout_ns),
        files_(limits.ranks),
        pages_(limits.ranks) {
    if (limits.ranks > ControlPage::kMostRanks) {
      throw Error(Kind::kInvalidArgument,
                  concat("ranks: expected at most ", ControlPage::kMostRanks, ", got ", limits.ranks));
    }
    const FileDescriptor own = create_own();
    try {
      reserve(own.get(), bytes_);
      pages_[rank] = Mapping(own.get(), bytes_);
      set_state(ControlPage::kReady);
      open_peers();
      reach(ControlPage::kSawAll);
      for (uint32_t p = 0; p < limits.ranks; ++p) check_agreement(p);
      for (uint32_t p = 0; p < limits.ranks; ++p) {
        if (p != rank) pages_[p] = Mapping(files_[p].get(), bytes_);
      }
      files_.clear();
      remove_own_name();
      reach(ControlPage::kJoined);
    } catch (const Error& e) {
      leave(e.kind, e.what());
      throw;
    } catch (...) {
      leave(Kind::kOther, "it was interrupted");
      throw;
    }
    for (const Mapping& m : pages_) heaps_.push_back(m.base() + kPageBytes);
  }

  std::string obituary(uint32_t p) const override {
    return process_is_gone(*page(p)) ? concat("its process ", page(p)->pid, " is gone") : std::string();
  }

 private:
  // Peers that have a disagreement to see look every millisecond.
  static constexpr uint64_t kFarewellNs = 5'000'000'000;
  // Whether a process lives, and whether this one is interrupted, is asked at every so many looks.
  static constexpr uint32_t kRarely = 32;

  ControlPage* page(uint32_t p) const { return reinterpret_cast<ControlPage*>(pages_[p].base()); }
  uint32_t state(uint32_t p) const { return std::atomic_ref(page(p)->state).load(std::memory_order_acquire); }
  void set_state(ControlPage::State s) { std::atomic_ref(page(rank_)->state).store(s, std::memory_order_release); }
  Error error(Kind kind, const std::string& what) const { return {kind, concat("group '", name_, "'", what)}; }

  // The own segment, as yet without its heap. It has its name when its page says whose it is: a process that is killed from
  // then on can be seen to be gone.
  FileDescriptor create_own() {
    const std::string path = segment_name(name_, rank_);
    std::string unnamed = concat(kFolder, ".flashmoe-", name_, "-", rank_, ".XXXXXX");
    FileDescriptor file(mkostemp(unnamed.data(), O_CLOEXEC));
    if (file.get() < 0) {
      throw Error(Kind::kHeap, concat("heap: cannot create shared memory ", path, ": ", std::strerror(errno)));
    }
    const Unlink unlink_it{unnamed};
    reserve(file.get(), kPageBytes);
    pages_[rank_] = Mapping(file.get(), kPageBytes);
    ControlPage* own = page(rank_);
    own->pid = getpid();
    own->pid_space = own_pid_space();
    own->bytes = bytes_;
    own->limits = limits_;
    own->attempt = new_attempt();
    auto give_name = [&] { return link(unnamed.c_str(), path.c_str()) == 0 ? 0 : errno; };
    int failed = give_name();
    if (failed == EEXIST && remove_name_of_the_dead(path)) failed = give_name();
    if (failed == EEXIST) {
      throw Error(Kind::kGroup,
                  concat("rank: group '", name_, "' already has a rank ", rank_, " (shared memory ", path, " exists)"));
    }
    if (failed != 0)
      throw Error(Kind::kHeap, concat("heap: cannot name shared memory ", path, ": ", std::strerror(failed)));
    named_ = true;
    return file;
  }

  void remove_own_name() {
    if (named_) unlink(segment_name(name_, rank_).c_str());
    named_ = false;
  }

  // Removes the name that a process which was killed while it joined has left behind; whether the name is free. Who comes
  // second, locked out by the first, must not remove what has been named so since.
  static bool remove_name_of_the_dead(const std::string& path) {
    const FileDescriptor file = open_segment(path);
    if (file.get() < 0) return errno == ENOENT;
    if (!has_page(file) || flock(file.get(), LOCK_EX) != 0) return false;
    struct stat opened, named;
    if (fstat(file.get(), &opened) != 0) return false;
    if (stat(path.c_str(), &named) != 0) return errno == ENOENT;
    if (opened.st_ino != named.st_ino) return false;
    const Mapping found(file.get(), kPageBytes);
    return process_is_gone(*reinterpret_cast<const ControlPage*>(found.base())) && unlink(path.c_str()) == 0;
  }

  static FileDescriptor open_segment(const std::string& path) {
    return FileDescriptor(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  }

  static bool has_page(const FileDescriptor& file) {
    struct stat info;
    return file.get() >= 0 && fstat(file.get(), &info) == 0 && static_cast<uint64_t>(info.st_size) >= kPageBytes;
  }

  // Takes the memory of the first `bytes` now: a file system that fills up later would kill the process at a store.
  void reserve(int fd, uint64_t bytes) const {
    struct stat file;
    struct statvfs fs;
    const bool known = fstat(fd, &file) == 0 && fstatvfs(fd, &fs) == 0;
    const uint64_t free = known ? uint64_t{fs.f_bavail} * fs.f_frsize + static_cast<uint64_t>(file.st_blocks) * 512 : 0;
    auto refuse = [&](const char* why) {
      throw Error(Kind::kHeap, concat("heap: expected ", bytes_, " bytes free in /dev/shm, got ", free, " (", why,
                                      "); use smaller limits or enlarge it: mount -o remount,size=... /dev/shm"));
    };
    if (known && free < bytes) refuse("too small");
    int failed = EINTR;
    while (failed == EINTR) failed = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    if (failed != 0) refuse(std::strerror(failed));
  }

  void open_peers() {
    while (true) {
      uint32_t missing = limits_.ranks;  // the first
      for (uint32_t p = limits_.ranks; p-- > 0;) {
        if (p != rank_ && page(p) == nullptr && !try_open(p)) missing = p;
      }
      if (missing == limits_.ranks) return;
      pause(missing, "did not join");
    }
  }

  // Opens a peer's segment, if it is there, and maps its control page: the rest may not be there yet, or be of another size.
  bool try_open(uint32_t p) {
    const std::string path = segment_name(name_, p);
    FileDescriptor file = open_segment(path);
    if (file.get() < 0 && errno != ENOENT) {
      throw error(Kind::kGroup, concat(": rank ", rank_, " cannot open rank ", p, "'s shared memory ", path, ": ",
                                       std::strerror(errno)));
    }
    if (!has_page(file)) return false;
    pages_[p] = Mapping(file.get(), kPageBytes);
    if (process_is_gone(*page(p)) || goes_with_another(p)) {  // another may come in its place
      pages_[p] = Mapping();
      return false;
    }
    files_[p] = std::move(file);
    std::atomic_ref(page(rank_)->met[p]).store(page(p)->attempt, std::memory_order_relaxed);
    std::atomic_ref(page(p)->seen_by).fetch_add(1, std::memory_order_relaxed);
    // Whom to wait for depends on this; everything else can be compared when all are there.
    if (page(p)->limits.ranks != limits_.ranks) check_agreement(p);
    return true;
  }

  // Whether a peer joins with what was this rank before: what failed, or a process that this one replaces.
  bool goes_with_another(uint32_t p) const {
    const uint64_t met = std::atomic_ref(page(p)->met[rank_]).load(std::memory_order_relaxed);
    return met != 0 && met != page(rank_)->attempt;
  }
  void forget(uint32_t p) {
    std::atomic_ref(page(rank_)->met[p]).store(0, std::memory_order_relaxed);
    pages_[p] = Mapping();
  }

  void check_agreement(uint32_t p) {
    std::string differs = difference(limits_, rank_, page(p)->limits, p);
    if (differs.empty() && page(p)->bytes != bytes_) {
      differs = concat("engine or version, by the bytes that a rank shares: rank ", rank_, " has ", bytes_, ", rank ",
                       p, " has ", page(p)->bytes);
    }
    if (differs.empty()) return;
    disagrees_ = true;
    throw error(Kind::kGroup, concat(" disagrees on ", differs));
  }

  // Says that this rank has come so far, and waits until all have.
  void reach(ControlPage::State s) {
    set_state(s);
    for (uint32_t p = 0; p < limits_.ranks; ++p) await_state(p, s);
  }

  void await_state(uint32_t p, ControlPage::State wanted) {
    while (state(p) < wanted || state(p) == ControlPage::kFailed) pause(p, "did not finish joining");
    if (p != rank_) check_peer(p);
  }

  // A look at the peers that are there, then a millisecond.
  void pause(uint32_t p, const char* what) {
    if (++looks_ % kRarely == 0) check_interrupt();
    for (uint32_t q = 0; q < limits_.ranks; ++q) {
      if (q != rank_ && page(q) != nullptr) check_peer(q);
    }
    if (monotonic_ns() > deadline_) {
      throw error(Kind::kPeerTimeout, concat(": rank ", p, " ", what, " within ",
                                             static_cast<double>(timeout_ns_) * 1e-9, " s (rank ", rank_, " waited)"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  // A peer that has given up or died ends the joining of all, which may try again together.
  void check_peer(uint32_t q) {
    if (goes_with_another(q)) {
      if (state(rank_) < ControlPage::kSawAll) return forget(q);
      throw error(Kind::kGroup, concat(": rank ", q, " joins with an attempt of rank ", rank_, " before this one"));
    }
    const uint32_t reached = state(q);
    if (reached == ControlPage::kFailed) {
      check_agreement(q);
      const Kind kind = page(q)->failure_kind;
      if (kind == Kind::kPeerTimeout || kind == Kind::kGroup) throw Error(kind, page(q)->failure);
      throw error(Kind::kGroup, concat(": rank ", q, " failed to join: ", page(q)->failure));
    }
    if (reached < ControlPage::kJoined && looks_ % kRarely == 0 && process_is_gone(*page(q))) {
      throw error(Kind::kPeerTimeout,
                  concat(": rank ", q, " did not finish joining: ", obituary(q), " (rank ", rank_, " waited)"));
    }
  }

  // Tells the peers that this rank gives up, and why, and cleans up.
  void leave(Kind kind, const char* why) {
    page(rank_)->failure_kind = kind;
    std::snprintf(page(rank_)->failure, sizeof(ControlPage::failure), "%s", why);
    set_state(ControlPage::kFailed);
    if (disagrees_) await_witnesses();
    remove_own_name();
    for (uint32_t p = 0; p < limits_.ranks; ++p) remove_name_of_the_dead(segment_name(name_, p));
  }

  // Both sides are to see a disagreement. If it is about who there is, then those of whom both know.
  void await_witnesses() const {
    uint32_t ranks = limits_.ranks;
    for (const Mapping& m : pages_) {
      if (m.base() != nullptr) ranks = min_of(ranks, reinterpret_cast<const ControlPage*>(m.base())->limits.ranks);
    }
    const uint64_t end = min_of(deadline_, monotonic_ns() + kFarewellNs);
    auto seen_by = [&] { return std::atomic_ref(page(rank_)->seen_by).load(std::memory_order_relaxed); };
    while (seen_by() + 1 < ranks && monotonic_ns() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  const std::string name_;
  const uint32_t rank_;
  const Limits limits_;
  const uint64_t bytes_, timeout_ns_, deadline_;
  std::vector<FileDescriptor> files_;  // the peers', until their heaps are mapped
  std::vector<Mapping> pages_;
  bool named_ = false;      // the own segment has its name
  bool disagrees_ = false;  // with a peer, by its limits
  uint32_t looks_ = 0;
};

class LocalGroup final : public Group {
 public:
  explicit LocalGroup(std::vector<std::shared_ptr<Mapping>> maps) : maps_(std::move(maps)) {
    for (const auto& m : maps_) heaps_.push_back(m->base());
  }

 private:
  std::vector<std::shared_ptr<Mapping>> maps_;
};

}  // namespace

std::unique_ptr<Group> join_process_group(const std::string& name, uint32_t rank, const Limits& limits,
                                          uint64_t heap_bytes, uint64_t timeout_ns) {
  return std::make_unique<ProcessGroup>(name, rank, limits, heap_bytes, timeout_ns);
}

std::unique_ptr<Group> make_single_rank_group(uint64_t heap_bytes) {
  return std::move(make_thread_groups(1, heap_bytes).front());
}

std::vector<std::unique_ptr<Group>> make_thread_groups(uint32_t ranks, uint64_t heap_bytes) {
  std::vector<std::shared_ptr<Mapping>> maps;
  for (uint32_t p = 0; p < ranks; ++p) maps.push_back(std::make_shared<Mapping>(-1, heap_bytes));
  std::vector<std::unique_ptr<Group>> groups;
  for (uint32_t p = 0; p < ranks; ++p) groups.push_back(std::make_unique<LocalGroup>(maps));
  return groups;
}

}  // namespace flashmoe::host
