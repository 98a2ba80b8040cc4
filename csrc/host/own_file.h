// Opens a file that belongs to this process's user, in a folder where every user of the machine may make files.
#pragma once

#include <string>

#include "host/mapping.h"

namespace flashmoe::host {

// Opens a file for reading and writing. The descriptor is -1 if no file has that name, or has it no longer. Throws
// Error if another user might read, write, shorten or lock the file, or has put something else in its place. In that
// case nothing of the file is read, and nothing waits for the file.
FileDescriptor open_own_file(const std::string& path);

}  // namespace flashmoe::host
