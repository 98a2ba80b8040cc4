// Whether the process of another rank still lives.
#pragma once

#include <cstdint>
#include <string>

namespace flashmoe::host {

// A process, as others that share memory with it can look it up. In shared memory.
struct Process {
  int32_t pid;
  uint64_t pid_space;  // in which the pid means something; 0: unknown
  uint64_t started;    // when, in ticks of the system's clock: numbers are given again; 0: unknown
};

Process this_process();

// Whether it has ended, as far as can be told: one whose pid means nothing here counts as alive.
bool is_gone(const Process& process);

// A sentence that says so, or nothing.
std::string obituary_of(const Process& process);

}  // namespace flashmoe::host
