#include "host/segment.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "host/leftovers.h"
#include "host/own_file.h"
#include "host/resource_limit.h"
#include "host/text.h"

namespace flashmoe::host {
namespace {

using Kind = Error::Kind;

std::string segment_path(const std::string& group, uint32_t rank) {
  return concat(kSharedMemory, kNamePrefix, group, "-", rank);
}

// A file's first name. It is removed at the end, unless the file has been renamed.
struct TemporaryName {
  std::string path;
  ~TemporaryName() {
    if (!path.empty()) unlink(path.c_str());
  }
  // Fails with EEXIST if the name exists already. Renaming leaves the file with one name at any moment, as own_file.h
  // demands.
  int rename_to(const std::string& name) {
    if (renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, name.c_str(), RENAME_NOREPLACE) != 0) return errno;
    path.clear();
    return 0;
  }
};

// Not 0, and almost never the same number twice.
uint64_t new_attempt() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

uint64_t size_of(const FileDescriptor& file) {
  struct stat info;
  return fstat(file.get(), &info) == 0 ? static_cast<uint64_t>(info.st_size) : 0;
}

// Allocates the first `bytes` bytes of the segment now. Otherwise the file system might fill up later, and a store
// would kill the process. The error message names the size of the whole segment.
void reserve(int fd, uint64_t bytes, uint64_t segment_bytes) {
  // Checked before allocating: beyond this limit the system sends a signal, which ends a process that does not expect
  // it.
  if (const uint64_t most = limit_of(RLIMIT_FSIZE); segment_bytes > most) {
    throw Error(Kind::kHeap, concat("heap: expected files of ", segment_bytes, " bytes to be allowed, got a limit of ",
                                    most, " (RLIMIT_FSIZE; see ulimit -f)"));
  }
  struct stat file;
  struct statvfs fs;
  const bool known = fstat(fd, &file) == 0 && fstatvfs(fd, &fs) == 0;
  const uint64_t free = known ? uint64_t{fs.f_bavail} * fs.f_frsize + static_cast<uint64_t>(file.st_blocks) * 512 : 0;
  auto refuse = [&](const char* why) {
    throw Error(Kind::kHeap, concat("heap: expected ", segment_bytes, " bytes free in /dev/shm, got ", free, " (", why,
                                    "); use smaller limits or enlarge it: mount -o remount,size=... /dev/shm"));
  };
  if (known && free < bytes) refuse("too small");
  int failed = EINTR;
  while (failed == EINTR) failed = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (failed != 0) refuse(std::strerror(failed));
}

}  // namespace

OwnSegment::OwnSegment(const std::string& group, uint32_t rank, const Limits& limits, uint64_t bytes,
                       uint64_t deadline_ns)
    : path_(segment_path(group, rank)), bytes_(bytes) {
  TemporaryName temporary{concat(kSharedMemory, kTemporaryPrefix, group, "-", rank, ".XXXXXX")};
  file_ = FileDescriptor(mkostemp(temporary.path.data(), O_CLOEXEC));  // mode 0600
  if (file_.get() < 0) {
    const int failed = errno;
    temporary.path.clear();
    throw Error(Kind::kHeap, concat("heap: cannot create shared memory ", path_, ": ", std::strerror(failed)));
  }
  reserve(file_.get(), kPageBytes, bytes_);
  page_ = Mapping(file_.get(), kPageBytes);
  ControlPage* own = page_of(page_);
  own->process = this_process();
  own->bytes = bytes_;
  own->limits = limits;
  own->attempt = new_attempt();
  std::atomic_ref(own->magic).store(ControlPage::kMagic, std::memory_order_release);  // last: the other fields are
                                                                                      // written
  int failed = temporary.rename_to(path_);
  if (failed == EEXIST && remove_name_of_the_dead(path_, deadline_ns)) failed = temporary.rename_to(path_);
  if (failed == EEXIST) {
    throw Error(Kind::kGroup,
                concat("rank: group '", group, "' already has a rank ", rank, " (shared memory ", path_, " exists)"));
  }
  if (failed != 0) {
    throw Error(Kind::kHeap, concat("heap: cannot name shared memory ", path_, ": ", std::strerror(failed)));
  }
  named_ = true;
}

Mapping OwnSegment::map_whole() const {
  reserve(file_.get(), bytes_, bytes_);
  return Mapping(file_.get(), bytes_);
}

void OwnSegment::remove_name() {
  if (named_) unlink(path_.c_str());
  named_ = false;
}

PeerSegment open_peer(const std::string& group, uint32_t peer) {
  const std::string path = segment_path(group, peer);
  PeerSegment found{open_own_file(path), {}};
  if (found.file.get() < 0) return found;
  auto refuse = [&](const auto&... got) {
    throw Error(Kind::kGroup,
                concat("shared memory ", path, ": expected that of a rank of this version, got ", got...));
  };
  if (const uint64_t bytes = size_of(found.file); bytes < kPageBytes)
    refuse(bytes, " of at least ", kPageBytes, " bytes");
  found.page = Mapping(found.file.get(), kPageBytes);
  const ControlPage* page = page_of(found.page);
  if (page->magic != ControlPage::kMagic) refuse("a file that begins otherwise");
  if (page->limits.ranks > ControlPage::kMostRanks) refuse("a group of ", page->limits.ranks, " ranks");
  return found;
}

Mapping map_peer(const std::string& group, uint32_t peer, const FileDescriptor& file, uint64_t bytes) {
  if (const uint64_t got = size_of(file); got < bytes) {
    throw Error(Kind::kGroup,
                concat("shared memory ", segment_path(group, peer), ": expected ", bytes, " bytes, got ", got));
  }
  return {file.get(), bytes};
}

void remove_names_of_the_dead(const std::string& group, uint32_t ranks) {
  for (uint32_t p = 0; p < ranks; ++p) {
    try {
      remove_name_of_the_dead(segment_path(group, p), 0);
    } catch (const Error&) {
      // The segment is another user's, or locked. A rank that leaves need not care.
    }
  }
}

}  // namespace flashmoe::host
