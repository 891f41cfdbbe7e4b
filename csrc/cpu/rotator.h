// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Does the rotated copies of one thread: chooses which bytes are staged and prefetched.
#pragma once

#include <algorithm>
#include <cstdint>

#include "copier.h"
#include "copy_kernels.h"
#include "kvext/copies.h"
#include "kvext/rotation.h"

namespace kvext {

// A copy is delayed by one, so that the first bytes of the next copy can be prefetched. The CPU's
// own prefetching does not know where the next copy begins.
class Rotator {
 public:
  explicit Rotator(bool is_streaming, const CopyKernel& copying = copy_kernels().front())
      : rotation_(rotation_kernels().front()),
        copying_(copying),
        is_streaming_(is_streaming && copying_.writes_past_caches) {}
  ~Rotator() {
    do_waiting();
    copying_.fence();
  }
  Rotator(const Rotator&) = delete;
  Rotator& operator=(const Rotator&) = delete;

  // The copy must contain whole heads only.
  void operator()(const Copy& copy, const HeadRotation& head) {
    fetch_lines(copy.source, std::min(copy.num_bytes, kAheadBytes));
    do_waiting();
    waiting_ = copy;
    head_ = &head;
  }

 private:
  // If the CPU can write past its caches, heads are rotated in the first-level cache, a few at a
  // time, and then streamed to their destination. The CPU computes the next heads while it still
  // stores the last heads and prefetches.
  static constexpr int64_t kAtOnceBytes = 1024;
  static constexpr int64_t kAheadBytes = 4096;
  // Maximum bytes of a head that is staged in the first-level cache.
  static constexpr int64_t kStageBytes = 8192;

  void do_waiting() {
    if (waiting_.num_bytes == 0) return;
    const bool is_staged = is_streaming_ && head_->head_bytes <= kStageBytes;
    const int64_t at_once_bytes =
        std::max<int64_t>(kAtOnceBytes / head_->head_bytes, 1) * head_->head_bytes;
    for (Copy left = waiting_; left.num_bytes > 0;) {
      const int64_t num_bytes = is_staged ? std::min(left.num_bytes, at_once_bytes) : left.num_bytes;
      auto* const destination = reinterpret_cast<uint8_t*>(left.destination);
      const auto* const source = reinterpret_cast<const uint8_t*>(left.source);
      const int64_t num_heads = num_bytes / head_->head_bytes;
      left = {left.source + num_bytes, left.destination + num_bytes, left.num_bytes - num_bytes};
      if (is_staged) {
        fetch_lines(left.source - num_bytes + kAheadBytes,
                    std::min(left.num_bytes + num_bytes - kAheadBytes, num_bytes));
        rotation_.rotate(stage_, source, num_heads, *head_);
        copying_.stream(destination, stage_, static_cast<size_t>(num_bytes));
      } else {
        rotation_.rotate(destination, source, num_heads, *head_);
      }
    }
    waiting_.num_bytes = 0;
  }

  const RotationKernel& rotation_;
  const CopyKernel& copying_;
  const bool is_streaming_;
  Copy waiting_{0, 0, 0};
  const HeadRotation* head_ = nullptr;
  alignas(64) uint8_t stage_[kStageBytes];
};

}  // namespace kvext
