// Builds messages from parts (std::format would do this, but the oldest supported compilers lack it), and reads texts
// that other processes have written.
#pragma once

#include <sstream>
#include <string>

namespace flashmoe::host {

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Reads a text in memory that another process may write at any time. Returns the characters up to a NUL, at most
// `bytes` bytes. What is not UTF-8 becomes '?', because a Python string can only be made from UTF-8.
std::string text_of_another(const char* text, size_t bytes);

// The text, shortened to at most `bytes` bytes. It is cut between characters of UTF-8. If it was cut, it ends in "...".
std::string shortened(const std::string& text, size_t bytes);

}  // namespace flashmoe::host
