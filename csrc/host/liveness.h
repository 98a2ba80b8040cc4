// Finds out whether the process of another rank still lives.
#pragma once

#include <cstdint>
#include <string>

namespace flashmoe::host {

// Identifies a process for others that share memory with it. Lies in shared memory.
struct Process {
  int32_t pid;
  uint64_t pid_space;  // the namespace of the pid; 0: unknown
  uint64_t started;    // start time in ticks of the system's clock, since a pid is used again; 0: unknown
};

Process this_process();

// Whether the process has ended, as far as can be told. A process of another pid namespace counts as alive.
bool is_gone(const Process& process);

// A sentence that says that the process is gone, or an empty string if it is not.
std::string obituary_of(const Process& process);

}  // namespace flashmoe::host
