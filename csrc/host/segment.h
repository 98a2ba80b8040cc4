// The shared memory of a rank that is a process: a page that says whose it is and how far it has come, then its heap.
//
// Shared memory lies in files of /dev/shm, as shm_open() makes them. A segment's name, by which the other ranks of its group
// find it, is that of its file. Every user of the machine may make files there: only those of the own user are read, mapped
// or locked (own_file.h, docs/security.md).
#pragma once

#include <atomic>
#include <string>

#include "flashmoe/protocol/heap_layout.h"
#include "host/error.h"
#include "host/liveness.h"
#include "host/mapping.h"

namespace flashmoe::host {

inline constexpr const char* kSharedMemory = "/dev/shm/";
inline constexpr const char* kNamePrefix = "flashmoe-";
inline constexpr const char* kTemporaryPrefix = ".flashmoe-";  // of what has no name yet

struct ControlPage {
  static constexpr uint64_t kMagic = 0x31656f6d68736c66;  // "flshmoe1": what this page is, and which form of it
  static constexpr uint32_t kMostRanks = 1024;
  // How far its rank has come with joining its group, see joining.h.
  enum State : uint32_t { kCreated = 0, kReady = 1, kSawAll = 2, kJoined = 3, kFailed = 4 };
  uint32_t state;
  uint32_t seen_by;  // ranks that have opened this segment
  uint64_t magic;
  Process process;
  uint64_t bytes;  // of the segment
  Limits limits;
  // Of kFailed. The time is that at which the cause arose (monotonic_ns()), here or with the rank that this one heard of it from.
  uint64_t cause_ns;
  Error::Kind failure_kind;
  char failure[512];
  // A rank that gives up may come back at once, or be started again, and meet the others while they still join with what it
  // was before. So each attempt to join has a number, and says with which of each peer's it goes, once it has met it.
  uint64_t attempt, met[kMostRanks];
};
inline constexpr uint64_t kPageBytes = 3 * 4096;
static_assert(sizeof(ControlPage) <= kPageBytes);

inline ControlPage* page_of(const Mapping& segment) {
  return reinterpret_cast<ControlPage*>(segment.base());
}

// This rank's segment, while its group forms.
class OwnSegment {
 public:
  // Makes it, as yet of the control page alone. It has its name once its page says whose it is: a process that is killed from
  // then on can be seen to be gone. Throws Error where another process has that name, or there is no room.
  OwnSegment(const std::string& group, uint32_t rank, const Limits& limits, uint64_t bytes, uint64_t deadline_ns);
  // The control page as it is mapped already.
  Mapping take_page() { return std::move(page_); }
  // All of it. Takes the memory.
  Mapping map_whole() const;
  // Once, when nobody needs the name any more: it may be another's from then on.
  void remove_name();

 private:
  const std::string path_;
  const uint64_t bytes_;
  FileDescriptor file_;
  Mapping page_;
  bool named_ = false;
};

// A peer's segment as it can be used at first: its control page alone, since the rest may not be there yet, or be of another
// size.
struct PeerSegment {
  FileDescriptor file;
  Mapping page;
};

// Nothing is open or mapped where it is not there yet. Throws Error for what is not a segment of this user.
PeerSegment open_peer(const std::string& group, uint32_t peer);

// All of it, once its rank is ready. Throws Error where it is smaller: a load from what is missing would end this process.
Mapping map_peer(const std::string& group, uint32_t peer, const FileDescriptor& file, uint64_t bytes);

// Removes the names that ranks of the group which were killed while they joined have left behind.
void remove_names_of_the_dead(const std::string& group, uint32_t ranks);

}  // namespace flashmoe::host
