// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Ways to copy bytes, chosen for this CPU when the library is loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kvext/copies.h"

namespace kvext {

constexpr size_t kMaxTogether = 16;

struct CopyKernel {
  std::string name;
  // Whether stream() writes past the caches. Otherwise it does what std::memcpy does, and bytes
  // that are staged for it are copied once more for nothing.
  bool writes_past_caches;
  // Copies past the caches, if it can; other threads see the bytes only after fence().
  void (*stream)(uint8_t* destination, const uint8_t* source, size_t num_bytes);
  // Does up to num_together copies past the caches, some lines of each in turn, and meanwhile
  // prefetches the sources of as many later copies. The pointer is null if this CPU gains nothing
  // from it.
  void (*stream_together)(const Copy* copies, size_t num_copies, const Copy* later,
                          size_t num_later);
  // Number of streams of lines that one core reads at a time without slowing down.
  size_t num_together;
  // Bytes of the longest copy that becomes faster if other copies are done beside it.
  int64_t max_together_bytes;
  void (*fence)();
};

// The kernels of this CPU, the best first; the last one is always "memcpy".
const std::vector<CopyKernel>& copy_kernels();

// Copies up to 64 bytes by two overlapping moves of a fixed size, without a function call.
inline void copy_up_to_64(uint8_t* destination, const uint8_t* source, size_t num_bytes) {
  const auto ends = [&](auto size) {
    unsigned char first[size], last[size];
    std::memcpy(first, source, size);
    std::memcpy(last, source + num_bytes - size, size);
    std::memcpy(destination, first, size);
    std::memcpy(destination + num_bytes - size, last, size);
  };
  if (num_bytes > 32) {
    ends(std::integral_constant<size_t, 32>{});
  } else if (num_bytes >= 16) {
    ends(std::integral_constant<size_t, 16>{});
  } else if (num_bytes >= 8) {
    ends(std::integral_constant<size_t, 8>{});
  } else if (num_bytes >= 4) {
    ends(std::integral_constant<size_t, 4>{});
  } else if (num_bytes >= 2) {
    ends(std::integral_constant<size_t, 2>{});
  } else {
    *destination = *source;
  }
}

}  // namespace kvext
