// The whole test framework: a test is a main() that returns 0, or prints what was wrong and exits with 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>

namespace flashmoe::test {

// Ends the process at once, because other threads may be waiting for the thread that has failed.
[[noreturn]] inline void fail() {
  std::cerr.flush();
  std::_Exit(1);
}

inline std::ostream& failure(const char* file, int line) {
  static std::mutex* one_report = new std::mutex;  // stays locked, so that only the first failure is printed
  one_report->lock();
  return std::cerr << file << ":" << line << ": ";
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  failure(file, line) << expression << ": " << a << " != " << b << "\n";
  fail();
}

}  // namespace flashmoe::test

#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      flashmoe::test::failure(__FILE__, __LINE__) << "expected " << #condition << std::endl; \
      flashmoe::test::fail();                                                                \
    }                                                                                        \
  } while (false)

#define CHECK_EQ(a, b) flashmoe::test::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
