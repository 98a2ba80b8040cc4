#include "host/liveness.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "host/text.h"

namespace flashmoe::host {
namespace {

// Containers may share their memory and not their processes' numbers.
uint64_t own_pid_space() {
  struct stat space;
  return stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0;
}

}  // namespace

Process this_process() {
  return {getpid(), own_pid_space()};
}

bool is_gone(const Process& process) {
  const pid_t pid = process.pid;
  if (process.pid_space == 0 || process.pid_space != own_pid_space()) return false;
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  // A process that has ended, but whose parent has not asked for its exit status (a zombie), still answers kill. Its state is
  // the letter behind the parenthesised name in /proc.
  std::ifstream stat(concat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(stat, line);
  const size_t end = line.rfind(')');
  return end != std::string::npos && end + 2 < line.size() && line[end + 2] == 'Z';
}

std::string obituary_of(const Process& process) {
  return is_gone(process) ? concat("its process ", process.pid, " is gone") : std::string();
}

}  // namespace flashmoe::host
