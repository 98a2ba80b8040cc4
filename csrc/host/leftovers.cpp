#include "host/leftovers.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>

#include "host/clock.h"
#include "host/interrupt.h"
#include "host/own_file.h"
#include "host/segment.h"
#include "host/text.h"

namespace flashmoe::host {
namespace {

// Looking at all names is a courtesy, and other users can make any number of names. So the time is limited.
constexpr uint64_t kLookNs = 20'000'000;
// Nobody can tell whether the maker of a segment without a page is dead. A living maker writes the page within
// microseconds. A maker that is stopped for longer than this in between gets an error later: its name is gone.
constexpr int64_t kUnwrittenSeconds = 60;

// The process that owns a segment; nothing if the segment has no page.
std::optional<Process> owner_of(const FileDescriptor& file) {
  ControlPage page;
  if (pread(file.get(), &page, sizeof(page), 0) != ssize_t{sizeof(page)} || page.magic != ControlPage::kMagic)
    return {};
  return page.process;
}

bool try_lock(const FileDescriptor& file) {
  return flock(file.get(), LOCK_EX | LOCK_NB) == 0;
}

bool stands_for(const std::string& path, const FileDescriptor& file) {
  struct stat opened, named;
  return fstat(file.get(), &opened) == 0 && lstat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino;
}

// Two processes may remove a name at once. When the second gets the lock, the name may already belong to a living
// process's new segment. The second must not remove that name.
void unlink_locked(const std::string& path, const FileDescriptor& file) {
  if (stands_for(path, file)) unlink(path.c_str());
}

bool has_been_unwritten_for_long(const FileDescriptor& file) {
  struct stat info;
  timespec now;
  if (fstat(file.get(), &info) != 0 || clock_gettime(CLOCK_REALTIME, &now) != 0) return false;
  return static_cast<uint64_t>(info.st_size) <= kPageBytes && now.tv_sec - info.st_mtim.tv_sec > kUnwrittenSeconds;
}

void remove_leftover(const std::string& path, bool temporary) {
  const FileDescriptor file = open_own_file(path);
  if (file.get() < 0) return;
  const std::optional<Process> owner = owner_of(file);
  const bool is_left = owner ? is_gone(*owner) : temporary && has_been_unwritten_for_long(file);
  if (is_left && try_lock(file)) unlink_locked(path, file);
}

}  // namespace

bool remove_name_of_the_dead(const std::string& path, uint64_t deadline_ns) {
  const FileDescriptor file = open_own_file(path);
  if (file.get() < 0) return true;
  const std::optional<Process> owner = owner_of(file);
  if (!owner || !is_gone(*owner)) return false;
  while (!try_lock(file)) {
    if (monotonic_ns() > deadline_ns) {
      throw Error(Error::Kind::kPeerTimeout, concat("shared memory ", path, ", which process ", owner->pid,
                                                    " has left behind: another process keeps it locked"));
    }
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  unlink_locked(path, file);
  return !stands_for(path, file);
}

void remove_leftovers() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(kSharedMemory), closedir);
  const uint64_t end = monotonic_ns() + kLookNs;
  while (folder != nullptr && monotonic_ns() < end) {
    const dirent* entry = readdir(folder.get());
    if (entry == nullptr) return;
    const std::string_view name = entry->d_name;
    const bool temporary = name.starts_with(kTemporaryPrefix);
    if (!temporary && !name.starts_with(kNamePrefix)) continue;
    struct stat info;
    if (fstatat(dirfd(folder.get()), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (info.st_uid != geteuid()) continue;
    try {
      remove_leftover(concat(kSharedMemory, name), temporary);
    } catch (const Error&) {
      // Not a segment, so this process leaves it alone.
    }
  }
}

}  // namespace flashmoe::host
