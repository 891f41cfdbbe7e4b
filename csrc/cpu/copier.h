// SPDX-License-Identifier: Apache-2.0
// Does the copies of one thread: which kernel, and what is fetched ahead.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "copy_kernels.h"
#include "kvext/copies.h"
#include "kvext/page_transfer.h"

namespace kvext {

// Transfers smaller than this may be read again from the cache.
constexpr int64_t kLeastStreamedBytes = 1024 * 1024;

inline bool streams(int64_t num_bytes, Streaming streaming) {
  return streaming == Streaming::kAuto ? num_bytes >= kLeastStreamedBytes
                                       : streaming == Streaming::kOn;
}

// Short copies wait in a queue while their sources come from memory: the CPU's own prefetching does
// not know where the next one begins. Copies may be done in any order.
class Copier {
 public:
  explicit Copier(bool is_streaming)
      : kernel_(copy_kernels().front()), is_streaming_(is_streaming) {}
  ~Copier() {
    while (num_waiting_ > 0) do_oldest();
    kernel_.fence();
  }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  void operator()(const Copy& copy) {
    if (copy.num_bytes > kMostWaitingBytes) {
      move(copy);
      return;
    }
    fetch(copy);
    while (num_waiting_ == kMostWaiting || waiting_bytes_ + copy.num_bytes > kMostWaitingBytes) {
      do_oldest();
    }
    waiting_[(oldest_ + num_waiting_) % kMostWaiting] = copy;
    ++num_waiting_;
    waiting_bytes_ += copy.num_bytes;
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  // Shorter copies are streamed only where they fill whole lines: a line that is filled in part is
  // read first.
  static constexpr int64_t kLeastStreamedCopyBytes = 256;
  // What is fetched of each copy: the CPU finds the lines behind these by itself.
  static constexpr int64_t kFetchedBytes = 2 * kLineBytes;
  static constexpr int64_t kMostWaitingBytes = 8192;
  static constexpr uint32_t kMostWaiting = 64;

  static void fetch(const Copy& copy) {
    for (int64_t at = 0; at < kFetchedBytes && at < copy.num_bytes; at += kLineBytes) {
      __builtin_prefetch(reinterpret_cast<const void*>(copy.source + at), 0, 3);
    }
  }

  bool streams_well(const Copy& copy) const {
    if (!is_streaming_) return false;
    return copy.num_bytes >= kLeastStreamedCopyBytes ||
           (copy.destination | copy.num_bytes) % kLineBytes == 0;
  }

  void do_oldest() {
    const Copy& copy = waiting_[oldest_];
    oldest_ = (oldest_ + 1) % kMostWaiting;
    --num_waiting_;
    waiting_bytes_ -= copy.num_bytes;
    move(copy);
  }

  void move(const Copy& copy) const {
    auto* const destination = reinterpret_cast<uint8_t*>(copy.destination);
    const auto* const source = reinterpret_cast<const uint8_t*>(copy.source);
    const auto num_bytes = static_cast<size_t>(copy.num_bytes);
    if (streams_well(copy)) {
      kernel_.stream(destination, source, num_bytes);
    } else if (num_bytes <= 64) {
      copy_up_to_64(destination, source, num_bytes);
    } else {
      std::memcpy(destination, source, num_bytes);
    }
  }

  const CopyKernel& kernel_;
  const bool is_streaming_;
  std::array<Copy, kMostWaiting> waiting_;
  uint32_t oldest_ = 0;
  uint32_t num_waiting_ = 0;
  int64_t waiting_bytes_ = 0;
};

}  // namespace kvext
