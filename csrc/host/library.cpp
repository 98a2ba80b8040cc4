#include "host/library.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "host/error.h"
#include "host/text.h"

namespace flashmoe::host {

Library::Library(const std::string& path, const std::string& what, std::string release)
    : path_(path), release_(std::move(release)), library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ == nullptr) throw Error(Error::Kind::kOther, concat(what, ", got: ", dlerror()));
}

void* Library::find(const char* symbol) const {
  void* const found = dlsym(library_, symbol);
  if (found == nullptr) throw Error(Error::Kind::kOther, concat(release_, ", got ", path_, " without ", symbol));
  return found;
}

void set_defaults(std::initializer_list<std::pair<const char*, const char*>> variables) {
  for (const auto& [name, value] : variables) setenv(name, value, 0);
}

}  // namespace flashmoe::host
