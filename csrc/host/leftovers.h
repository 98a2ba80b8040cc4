// Names of shared memory that processes have left behind which were killed while they joined a group.
#pragma once

#include <cstdint>
#include <string>

namespace flashmoe::host {

// Removes a name if the process that made it is gone; whether the name is free. Who else removes it at this moment is waited
// for. Throws Error where the name is another user's, or that wait is not over by deadline_ns (of monotonic_ns()).
bool remove_name_of_the_dead(const std::string& path, uint64_t deadline_ns);

// Removes what gone processes of this user have left of any group, as far as a short look finds it.
void remove_leftovers();

}  // namespace flashmoe::host
