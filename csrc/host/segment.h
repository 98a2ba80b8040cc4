// The shared memory of a rank that is a process. First comes the control page, which says who owns the segment and how
// far the owner has come with joining. The heap follows.
//
// Shared memory lies in files of /dev/shm, as shm_open() makes them. The name of a segment is the name of its file. The
// other ranks of the group find the segment by this name. Every user of the machine may make files in /dev/shm. So only
// files of the own user are read, mapped or locked (own_file.h, docs/security.md).
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
inline constexpr const char* kTemporaryPrefix = ".flashmoe-";  // of segments that have no name yet

struct ControlPage {
  static constexpr uint64_t kMagic = 0x31656f6d68736c66;  // "flshmoe1": says that this is a control page, and its
                                                          // version
  static constexpr uint32_t kMostRanks = 1024;
  // How far the page's rank has come with joining its group, see joining.h.
  enum State : uint32_t { kCreated = 0, kReady = 1, kSawAll = 2, kJoined = 3, kFailed = 4 };
  uint32_t state;
  uint32_t seen_by;  // how many ranks have opened this segment
  uint64_t magic;
  Process process;
  uint64_t bytes;  // bytes of the whole segment
  Limits limits;
  // Set with kFailed. The time is when the cause arose (monotonic_ns()), either here or at the rank that told this one
  // about it.
  uint64_t cause_ns;
  Error::Kind failure_kind;
  char failure[512];
  // A rank that gives up may try again at once, or be started again. It may then meet peers that are still joining with
  // its earlier attempt. So each attempt to join has a number. met[p] is the number of rank p's attempt that this
  // attempt joins with, once they have met.
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
  // Makes the segment, at first with the control page alone. The segment gets its name only after its page says which
  // process owns it. So if that process is killed while the name exists, others can see that it is gone. Throws Error
  // if another process has that name, or if there is no room.
  OwnSegment(const std::string& group, uint32_t rank, const Limits& limits, uint64_t bytes, uint64_t deadline_ns);
  // Hands over the control page, which is already mapped.
  Mapping take_page() { return std::move(page_); }
  // Maps the whole segment. Allocates all its memory.
  Mapping map_whole() const;
  // Called once, when nobody needs the name any more. From then on another process may use the name.
  void remove_name();

 private:
  const std::string path_;
  const uint64_t bytes_;
  FileDescriptor file_;
  Mapping page_;
  bool named_ = false;
};

// A peer's segment as it can be used at first: its control page alone. The rest may not be there yet, or may have
// another size.
struct PeerSegment {
  FileDescriptor file;
  Mapping page;
};

// Nothing is open or mapped if the segment is not there yet. Throws Error for a file that is not a segment of this
// user.
PeerSegment open_peer(const std::string& group, uint32_t peer);

// Maps the whole segment of a peer that is ready. Throws Error if the segment is too small: a load beyond its end would
// end this process.
Mapping map_peer(const std::string& group, uint32_t peer, const FileDescriptor& file, uint64_t bytes);

// Removes the names of segments whose ranks were killed while they joined this group.
void remove_names_of_the_dead(const std::string& group, uint32_t ranks);

}  // namespace flashmoe::host
