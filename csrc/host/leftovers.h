// Removes names of shared memory that were left behind by processes that were killed while they joined a group.
#pragma once

#include <cstdint>
#include <string>

namespace flashmoe::host {

// Removes a name if the process that made it is gone. Returns whether the name is free. If another process is removing
// the name at this moment, waits for it. Throws Error if the name is another user's, or if that wait is not over by
// deadline_ns (of monotonic_ns()).
bool remove_name_of_the_dead(const std::string& path, uint64_t deadline_ns);

// Removes the names that gone processes of this user have left, of any group, as far as a short look finds them.
void remove_leftovers();

}  // namespace flashmoe::host
