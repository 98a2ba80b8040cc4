// A shared library that is loaded when it is first needed, so that a program that does not need it runs without it. It
// then stays loaded.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

namespace flashmoe::host {

class Library {
 public:
  // path: a path, or a name that the loader searches for. what, release: parts of error messages. If the library cannot
  // be loaded: "<what>, got: ...". If it lacks a symbol: "<release>, got <path> without ...". Throws Error.
  Library(const std::string& path, const std::string& what, std::string release);

  // Sets `function` to the symbol's address. Also searches the libraries that this library needs. Throws Error.
  template <class F>
  void resolve(F*& function, const char* symbol) const {
    function = reinterpret_cast<F*>(find(symbol));
  }

 private:
  void* find(const char* symbol) const;

  const std::string path_, release_;
  void* const library_;
};

// Sets environment variables that a library reads when it is loaded. A variable that the user has set stays as it is.
void set_defaults(std::initializer_list<std::pair<const char*, const char*>> variables);

}  // namespace flashmoe::host
