#include "host/segment.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>

#include "host/text.h"

namespace flashmoe::host {
namespace {

using Kind = Error::Kind;

constexpr const char* kFolder = "/dev/shm/";

std::string segment_path(const std::string& group, uint32_t rank) {
  return concat(kFolder, "flashmoe-", group, "-", rank);
}

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

FileDescriptor open_segment(const std::string& path) {
  return FileDescriptor(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
}

bool has_page(const FileDescriptor& file) {
  struct stat info;
  return file.get() >= 0 && fstat(file.get(), &info) == 0 && static_cast<uint64_t>(info.st_size) >= kPageBytes;
}

// Takes the memory of the first `bytes` of the segment now: a file system that fills up later would kill the process at a
// store. The message names all that is needed.
void reserve(int fd, uint64_t bytes, uint64_t segment_bytes) {
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

// Removes the name that a process which was killed while it joined has left behind; whether the name is free. Two may try at
// once: the second waits for the first's lock, and must then not remove what a living process has been named meanwhile.
bool remove_name_of_the_dead(const std::string& path) {
  const FileDescriptor file = open_segment(path);
  if (file.get() < 0) return errno == ENOENT;
  if (!has_page(file) || flock(file.get(), LOCK_EX) != 0) return false;
  struct stat opened, named;
  if (fstat(file.get(), &opened) != 0) return false;
  if (stat(path.c_str(), &named) != 0) return errno == ENOENT;
  if (opened.st_ino != named.st_ino) return false;
  const Mapping found(file.get(), kPageBytes);
  return is_gone(page_of(found)->process) && unlink(path.c_str()) == 0;
}

}  // namespace

OwnSegment::OwnSegment(const std::string& group, uint32_t rank, const Limits& limits, uint64_t bytes)
    : path_(segment_path(group, rank)), bytes_(bytes) {
  std::string unnamed = concat(kFolder, ".flashmoe-", group, "-", rank, ".XXXXXX");
  file_ = FileDescriptor(mkostemp(unnamed.data(), O_CLOEXEC));
  if (file_.get() < 0) {
    throw Error(Kind::kHeap, concat("heap: cannot create shared memory ", path_, ": ", std::strerror(errno)));
  }
  const Unlink unlink_it{unnamed};
  reserve(file_.get(), kPageBytes, bytes_);
  page_ = Mapping(file_.get(), kPageBytes);
  ControlPage* own = page_of(page_);
  own->process = this_process();
  own->bytes = bytes_;
  own->limits = limits;
  own->attempt = new_attempt();
  auto give_name = [&] { return link(unnamed.c_str(), path_.c_str()) == 0 ? 0 : errno; };
  int failed = give_name();
  if (failed == EEXIST && remove_name_of_the_dead(path_)) failed = give_name();
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

FileDescriptor open_peer(const std::string& group, uint32_t rank, uint32_t peer) {
  const std::string path = segment_path(group, peer);
  FileDescriptor file = open_segment(path);
  if (file.get() < 0 && errno != ENOENT) {
    throw Error(Kind::kGroup, concat("group '", group, "': rank ", rank, " cannot open rank ", peer,
                                     "'s shared memory ", path, ": ", std::strerror(errno)));
  }
  return has_page(file) ? std::move(file) : FileDescriptor();
}

void remove_names_of_the_dead(const std::string& group, uint32_t ranks) {
  for (uint32_t p = 0; p < ranks; ++p) remove_name_of_the_dead(segment_path(group, p));
}

}  // namespace flashmoe::host
