#include "host/own_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::host {
namespace {

constexpr mode_t kOthers = S_IRWXG | S_IRWXO;

bool is_own(const struct stat& file) {
  // Another user may have given the file a second name. Then one rank's file could have another rank's name.
  return S_ISREG(file.st_mode) && file.st_uid == geteuid() && (file.st_mode & kOthers) == 0 && file.st_nlink == 1;
}

Error not_own(const std::string& path, const struct stat& file) {
  const mode_t mode = file.st_mode & 07777;
  std::string got = concat(S_ISREG(file.st_mode) ? "a file" : "no regular file, but one", " of uid ", file.st_uid,
                           " with mode ", mode >> 6 & 7, mode >> 3 & 7, mode & 7);
  if (file.st_nlink != 1) got += concat(" and ", file.st_nlink, " names");
  return {Error::Kind::kGroup, concat("shared memory ", path, ": expected a file of uid ", geteuid(),
                                      " that no other user may open, with one name, got ", got)};
}

}  // namespace

FileDescriptor open_own_file(const std::string& path) {
  // O_NONBLOCK: open() must not wait for a lease that the file's owner has taken, nor for something that is not a
  // regular file.
  FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY));
  struct stat info;
  if (file.get() < 0) {
    const int failed = errno;
    if (failed == ENOENT) return FileDescriptor();
    if (lstat(path.c_str(), &info) == 0 && !is_own(info)) throw not_own(path, info);
    throw Error(Error::Kind::kGroup, concat("shared memory ", path, ": cannot open it: ", std::strerror(failed)));
  }
  // Examines the file that has been opened. By now the name may stand for another file.
  if (fstat(file.get(), &info) != 0 || info.st_nlink == 0) return FileDescriptor();
  if (!is_own(info)) throw not_own(path, info);
  return file;
}

}  // namespace flashmoe::host
