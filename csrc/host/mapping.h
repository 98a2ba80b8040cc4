// Files and memory of the operating system that release themselves.
#pragma once

#include <cstdint>
#include <utility>

namespace flashmoe::host {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

class Mapping {
 public:
  Mapping() = default;
  // Maps the first bytes of a file; everyone who maps the file shares them. With fd -1: private, zeroed memory, which
  // takes no space until it is written. Throws Error if this fails.
  Mapping(int fd, uint64_t bytes);
  Mapping(Mapping&& other) noexcept : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();
  uint8_t* base() const { return base_; }

 private:
  uint8_t* base_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace flashmoe::host
