// Messages from parts. (std::format would do; the oldest supported compilers lack it.)
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

}  // namespace flashmoe::host
