// A shared library that is loaded when something first needs it, so that nothing else does, and then stays.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

namespace flashmoe::host {

class Library {
 public:
  // path: or a name, which the loader looks for. what, release: of errors, "<what>, got: ..." where there is none, and
  // "<release>, got <path> without ..." where it lacks a symbol. Throws Error.
  Library(const std::string& path, const std::string& what, std::string release);

  // Sets the function to that of this name, also in the libraries that this one needs. Throws Error.
  template <class F>
  void resolve(F*& function, const char* symbol) const {
    function = reinterpret_cast<F*>(find(symbol));
  }

 private:
  void* find(const char* symbol) const;

  const std::string path_, release_;
  void* const library_;
};

// Environment variables that a library reads when it is loaded: those that the user has not set.
void set_defaults(std::initializer_list<std::pair<const char*, const char*>> variables);

}  // namespace flashmoe::host
