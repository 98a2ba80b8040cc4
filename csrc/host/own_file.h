// A file of this process's user, in a folder where every user of the machine may make files.
#pragma once

#include <string>

#include "host/mapping.h"

namespace flashmoe::host {

// Opens a file for reading and writing. Its descriptor is -1 where there is none by that name, or no more. Throws Error where
// another user might read, write, shorten or lock it, or has put something else in its place: nothing of it is read then, and
// nothing waits for it.
FileDescriptor open_own_file(const std::string& path);

}  // namespace flashmoe::host
