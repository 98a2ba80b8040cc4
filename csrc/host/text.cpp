#include "host/text.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace flashmoe::host {
namespace {

// How many bytes the UTF-8 character at `at` has (RFC 3629); 0: no valid character begins there.
size_t character(const std::string& s, size_t at) {
  auto byte = [&](size_t i) { return at + i < s.size() ? static_cast<uint8_t>(s[at + i]) : uint8_t{0}; };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xC2 && first <= 0xDF   ? 2
                        : (first & 0xF0) == 0xE0         ? 3
                        : first >= 0xF0 && first <= 0xF4 ? 4
                                                         : 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  const uint8_t second = byte(1);
  const bool overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
  const bool no_character = (first == 0xED && second > 0x9F) || (first == 0xF4 && second > 0x8F);
  return overlong || no_character ? 0 : length;
}

}  // namespace

std::string text_of_another(const char* text, size_t bytes) {
  std::string copy(text, bytes);  // copied first, since the original may change meanwhile
  copy.resize(std::min(copy.find('\0'), copy.size()));
  std::string valid;
  for (size_t at = 0; at < copy.size();) {
    const size_t length = character(copy, at);
    valid += length == 0 ? "?" : copy.substr(at, length);
    at += std::max(length, size_t{1});
  }
  return valid;
}

std::string shortened(const std::string& text, size_t bytes) {
  if (text.size() <= bytes) return text;
  size_t end = bytes - 3;
  while (end != 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

}  // namespace flashmoe::host
