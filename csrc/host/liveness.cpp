#include "host/liveness.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "host/text.h"

namespace flashmoe::host {
namespace {

// Containers may share memory although each numbers its processes by itself.
uint64_t own_pid_space() {
  struct stat space;
  return stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0;
}

// What /proc says about a process; nothing if it cannot be read.
struct Seen {
  char state;
  uint64_t started;
};
std::optional<Seen> look_at(pid_t pid) {
  std::ifstream stat(concat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(stat, line);
  // The process's name stands in parentheses and may contain anything. The state follows it, and 19 words later the
  // start time.
  const size_t end = line.rfind(')');
  if (end == std::string::npos) return {};
  std::istringstream words(line.substr(end + 1));
  Seen seen;
  words >> seen.state;
  std::string skipped;
  for (int i = 0; i < 18; ++i) words >> skipped;
  words >> seen.started;
  return words ? std::optional(seen) : std::nullopt;
}

}  // namespace

Process this_process() {
  const std::optional<Seen> seen = look_at(getpid());
  return {getpid(), own_pid_space(), seen ? seen->started : 0};
}

bool is_gone(const Process& process) {
  const pid_t pid = process.pid;
  if (pid <= 0 || process.pid_space == 0 || process.pid_space != own_pid_space()) return false;
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  const std::optional<Seen> seen = look_at(pid);
  if (!seen) return false;
  // Two kinds of processes still answer kill although this one has ended: a zombie, whose parent has not asked for its
  // exit status, and another process that has the pid now.
  return seen->state == 'Z' || (process.started != 0 && seen->started != process.started);
}

std::string obituary_of(const Process& process) {
  return is_gone(process) ? concat("its process ", process.pid, " is gone") : std::string();
}

}  // namespace flashmoe::host
