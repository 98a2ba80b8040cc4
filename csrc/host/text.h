// Messages from parts (std::format would do; the oldest supported compilers lack it), and what others have written.
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

// A text in memory that another process may write at any time: its first characters, at most `bytes` bytes of them, up to a
// NUL. What is not UTF-8 becomes '?': a message that is none cannot be made a string of Python's.
std::string text_of_another(const char* text, size_t bytes);

// As much of the text as `bytes` bytes have room for, whole characters of UTF-8, and "..." where that is not all.
std::string shortened(const std::string& text, size_t bytes);

}  // namespace flashmoe::host
