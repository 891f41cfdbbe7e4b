// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Does the copies of one thread: chooses the kernel, and which bytes are prefetched.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "copy_kernels.h"
#include "kvext/copies.h"
#include "kvext/page_transfer.h"

namespace kvext {

// Bytes of the smallest transfer that is written past the caches. A smaller transfer may be read
// again while it is still in the caches.
constexpr int64_t kMinStreamedBytes = 1024 * 1024;

inline bool streams(int64_t num_bytes, Streaming streaming) {
  return streaming == Streaming::kAuto ? num_bytes >= kMinStreamedBytes
                                       : streaming == Streaming::kOn;
}

constexpr int64_t kLineBytes = 64;

inline void fetch_lines(int64_t source, int64_t num_bytes) {
  for (int64_t at = 0; at < num_bytes; at += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(source + at), 0, 3);
  }
}

// Copies may be done in any order. A streamed copy is cut into parts, and several parts are copied
// together while the next parts are prefetched. Other short copies wait in a queue while their
// sources are prefetched, because the CPU's own prefetching does not know where the next copy
// begins.
class Copier {
 public:
  explicit Copier(bool is_streaming, const CopyKernel& kernel = copy_kernels().front())
      : kernel_(kernel), is_streaming_(is_streaming && kernel.writes_past_caches) {}
  ~Copier() {
    if (num_gathered_ > 0) exchange();
    exchange();
    while (num_waiting_ > 0) do_oldest();
    kernel_.fence();
  }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  void operator()(const Copy& copy) {
    const bool follows = copy.source == source_end_;
    source_end_ = copy.source + copy.num_bytes;
    if (follows && copy.num_bytes <= kMaxFollowingBytes) {
      move(copy);
    } else if (is_streaming_ && copy.num_bytes >= kMinStreamedCopyBytes &&
               copy.num_bytes <= kernel_.max_together_bytes) {
      cut(copy);
    } else if (copy.num_bytes > kMaxWaitingBytes) {
      move(copy);
    } else {
      wait(copy);
    }
  }

 private:
  // Bytes of the shortest copy that is always streamed. A shorter copy is streamed only if it fills
  // whole cache lines, because the CPU reads a partly filled line before it writes the line.
  static constexpr int64_t kMinStreamedCopyBytes = 256;
  // Bytes of the longest copy that does not wait if its source begins where the source of the last
  // copy ended. The CPU's own prefetching is enough there.
  static constexpr int64_t kMaxFollowingBytes = 1024;
  // Bytes of the longest part. A longer part would not stay in the smallest second-level caches
  // until it is copied.
  static constexpr int64_t kPartBytes = 4096;
  // Bytes that are prefetched of each waiting copy. The CPU prefetches the lines behind these bytes
  // by itself.
  static constexpr int64_t kFetchedBytes = 2 * kLineBytes;
  static constexpr int64_t kMaxWaitingBytes = 8192;
  static constexpr uint32_t kMaxWaiting = 64;

  // Every part except the first begins with a whole line of the destination.
  void cut(Copy copy) {
    while (copy.num_bytes > kPartBytes) {
      const int64_t part_bytes = kPartBytes - copy.destination % kLineBytes;
      gather({copy.source, copy.destination, part_bytes});
      copy = {copy.source + part_bytes, copy.destination + part_bytes, copy.num_bytes - part_bytes};
    }
    gather(copy);
  }

  void gather(const Copy& part) {
    gathered_[num_gathered_] = part;
    if (++num_gathered_ == kernel_.num_together) exchange();
  }

  // Copies the parts that have been prefetched; the parts that have been gathered take their place.
  void exchange() {
    if (num_fetched_ > 0) {
      kernel_.stream_together(fetched_, num_fetched_, gathered_, num_gathered_);
    }
    std::swap(fetched_, gathered_);
    num_fetched_ = num_gathered_;
    num_gathered_ = 0;
  }

  void wait(const Copy& copy) {
    fetch_lines(copy.source, std::min(copy.num_bytes, kFetchedBytes));
    while (num_waiting_ == kMaxWaiting || waiting_bytes_ + copy.num_bytes > kMaxWaitingBytes) {
      do_oldest();
    }
    waiting_[(oldest_ + num_waiting_) % kMaxWaiting] = copy;
    ++num_waiting_;
    waiting_bytes_ += copy.num_bytes;
  }

  bool streams_well(const Copy& copy) const {
    if (!is_streaming_) return false;
    return copy.num_bytes >= kMinStreamedCopyBytes ||
           (copy.destination | copy.num_bytes) % kLineBytes == 0;
  }

  void do_oldest() {
    const Copy& copy = waiting_[oldest_];
    oldest_ = (oldest_ + 1) % kMaxWaiting;
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
  int64_t source_end_ = 0;
  std::array<Copy, kMaxTogether> parts_;
  std::array<Copy, kMaxTogether> other_parts_;
  Copy* gathered_ = parts_.data();
  Copy* fetched_ = other_parts_.data();
  size_t num_gathered_ = 0;
  size_t num_fetched_ = 0;
  std::array<Copy, kMaxWaiting> waiting_;
  uint32_t oldest_ = 0;
  uint32_t num_waiting_ = 0;
  int64_t waiting_bytes_ = 0;
};

}  // namespace kvext
