#include "cpu/group.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "cpu/error.h"
#include "cpu/platform.h"
#include "cpu/text.h"

namespace flashmoe::cpu {
namespace {

using Kind = Error::Kind;

// The first page of a segment: who the rank is and how far it has come. The heap follows.
struct ControlPage {
  enum State : uint32_t { kCreated = 0, kReady = 1, kSawAll = 2, kFailed = 3 };
  uint32_t state;
  uint32_t seen_by;  // ranks that have opened this segment
  uint32_t rank;
  int32_t pid;
  Limits limits;
};
constexpr uint64_t kPageBytes = 4096;
static_assert(sizeof(ControlPage) <= kPageBytes);

std::string segment_name(const std::string& group, uint32_t rank) {
  return concat("/flashmoe-", group, "-", rank);
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

bool process_is_gone(pid_t pid) {
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
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Joining, as seen by one rank: create the own segment; open every peer's, whose control page says what it is; once
// every rank has opened all, nobody needs a name any more. Only then are limits compared and heaps mapped, so that ranks
// which disagree all see with whom.
class ProcessGroup final : public Group {
 public:
  ProcessGroup(const std::string& name, uint32_t rank, const Limits& limits, uint64_t heap_bytes, uint64_t timeout_ns)
      : name_(name),
        rank_(rank),
        limits_(limits),
        bytes_(kPageBytes + heap_bytes),
        timeout_ns_(timeout_ns),
        deadline_(timeout_ns == 0 ? UINT64_MAX : monotonic_ns() + timeout_ns),
        pages_(limits.ranks) {
    create_own();
    try {
      std::vector<FileDescriptor> files;
      for (uint32_t p = 0; p < limits.ranks; ++p) files.push_back(p == rank ? FileDescriptor(-1) : open_peer(p));
      set_state(ControlPage::kSawAll);
      for (uint32_t p = 0; p < limits.ranks; ++p) await_state(p, ControlPage::kSawAll);
      for (uint32_t p = 0; p < limits.ranks; ++p) check_agreement(p);
      for (uint32_t p = 0; p < limits.ranks; ++p) {
        if (p != rank) pages_[p] = Mapping(files[p].get(), bytes_);
      }
    } catch (const Error& e) {
      leave(e);
      throw;
    }
    shm_unlink(segment_name(name, rank).c_str());
    for (const Mapping& m : pages_) heaps_.push_back(m.base() + kPageBytes);
  }

  std::string obituary(uint32_t p) const override {
    const pid_t pid = page(p)->pid;
    return process_is_gone(pid) ? concat("its process ", pid, " is gone") : std::string();
  }

 private:
  ControlPage* page(uint32_t p) const { return reinterpret_cast<ControlPage*>(pages_[p].base()); }
  void set_state(ControlPage::State s) { std::atomic_ref(page(rank_)->state).store(s, std::memory_order_release); }

  void create_own() {
    const std::string path = segment_name(name_, rank_);
    const FileDescriptor fd(shm_open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600));
    if (fd.get() < 0) {
      if (errno == EEXIST) {
        throw Error(Kind::kGroup, concat("rank: group '", name_, "' already has a rank ", rank_, " (shared memory ",
                                         path, " exists)"));
      }
      throw Error(Kind::kHeap, concat("heap: cannot create shared memory ", path, ": ", std::strerror(errno)));
    }
    try {
      reserve(fd.get());
      pages_[rank_] = Mapping(fd.get(), bytes_);
    } catch (...) {
      shm_unlink(path.c_str());
      throw;
    }
    ControlPage* own = page(rank_);
    own->rank = rank_;
    own->pid = getpid();
    own->limits = limits_;
    set_state(ControlPage::kReady);
  }

  // Takes the memory now: a file system that fills up later would kill the process at a store.
  void reserve(int fd) const {
    auto refuse = [&](const char* why) {
      struct statvfs fs;
      const uint64_t free = fstatvfs(fd, &fs) == 0 ? uint64_t{fs.f_bavail} * fs.f_frsize : 0;
      throw Error(Kind::kHeap, concat("heap: expected ", bytes_, " bytes free in /dev/shm, got ", free, " (", why,
                                      "); use smaller limits or enlarge it: mount -o remount,size=... /dev/shm"));
    };
    struct statvfs fs;
    if (fstatvfs(fd, &fs) == 0 && uint64_t{fs.f_bavail} * fs.f_frsize < bytes_) refuse("too small");
    if (const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes_)); error != 0) refuse(std::strerror(error));
  }

  // Opens a peer's segment and maps its control page: the rest may not be there yet, or be of another size.
  FileDescriptor open_peer(uint32_t p) {
    const std::string path = segment_name(name_, p);
    while (true) {
      FileDescriptor file(shm_open(path.c_str(), O_RDWR, 0600));
      struct stat info;
      if (file.get() >= 0 && fstat(file.get(), &info) == 0 && static_cast<uint64_t>(info.st_size) >= kPageBytes) {
        pages_[p] = Mapping(file.get(), kPageBytes);
        await_state(p, ControlPage::kReady);
        std::atomic_ref(page(p)->seen_by).fetch_add(1, std::memory_order_relaxed);
        // Whom to wait for depends on this; everything else can be compared when all are there.
        if (page(p)->limits.ranks != limits_.ranks) check_agreement(p);
        return file;
      }
      pause(p, "did not join");
    }
  }

  void check_agreement(uint32_t p) const {
    const std::string differs = difference(limits_, rank_, page(p)->limits, p);
    if (!differs.empty()) throw Error(Kind::kGroup, concat("group '", name_, "' disagrees on ", differs));
  }

  void await_state(uint32_t p, ControlPage::State wanted) const {
    while (true) {
      const uint32_t state = std::atomic_ref(page(p)->state).load(std::memory_order_acquire);
      if (state == ControlPage::kFailed) {
        check_agreement(p);
        throw Error(Kind::kGroup, concat("group '", name_, "': rank ", p, " failed to join (rank ", rank_, " saw it)"));
      }
      if (state >= wanted) return;
      pause(p, "did not finish joining");
    }
  }

  void pause(uint32_t p, const char* what) const {
    if (monotonic_ns() > deadline_) {
      throw Error(Kind::kPeerTimeout, concat("group '", name_, "': rank ", p, " ", what, " within ",
                                             static_cast<double>(timeout_ns_) * 1e-9, " s (rank ", rank_, " waited)"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  // Tells the peers that this rank gives up, and cleans up.
  void leave(const Error& e) {
    set_state(ControlPage::kFailed);
    if (e.kind == Kind::kPeerTimeout) {
      // Somebody is missing for good: nobody can use any name of the group, and owners may be dead.
      for (uint32_t p = 0; p < limits_.ranks; ++p) shm_unlink(segment_name(name_, p).c_str());
      return;
    }
    // The peers must still be able to see why.
    auto seen_by = [&] { return std::atomic_ref(page(rank_)->seen_by).load(std::memory_order_relaxed); };
    while (seen_by() + 1 < limits_.ranks && monotonic_ns() < deadline_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    shm_unlink(segment_name(name_, rank_).c_str());
  }

  const std::string name_;
  const uint32_t rank_;
  const Limits limits_;
  const uint64_t bytes_, timeout_ns_, deadline_;
  std::vector<Mapping> pages_;
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

}  // namespace flashmoe::cpu
