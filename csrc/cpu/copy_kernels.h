// SPDX-License-Identifier: Apache-2.0
// Ways to copy bytes, chosen for the CPU at hand when the library is loaded.
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
  // Past the caches: visible to other threads only after fence().
  void (*stream)(uint8_t* destination, const uint8_t* source, size_t num_bytes);
  // Up to num_together copies past the caches, some lines of each in turn, while the sources of as
  // many later ones are fetched. Null where this gains nothing.
  void (*stream_together)(const Copy* copies, size_t num_copies, const Copy* later,
                          size_t num_later);
  // As many streams of lines as one core reads at a time without slowing down.
  size_t num_together;
  // Longer copies gain nothing from others beside them.
  int64_t most_together_bytes;
  void (*fence)();
};

// Best first; the last one is always "memcpy".
const std::vector<CopyKernel>& copy_kernels();

// Fewer than 16 bytes, or up to 64: two overlapping moves of a fixed size each, no call.
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
