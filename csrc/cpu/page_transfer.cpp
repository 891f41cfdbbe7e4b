// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "kvext/page_transfer.h"

#include <cstring>

#include "copier.h"
#include "copy_kernels.h"
#include "copy_threads.h"
#include "kvext/copies.h"

namespace kvext {

void page_transfer(const CheckedTransfer& checked, const CopyOptions& options) {
  const bool is_streaming = streams(checked.num_bytes(), options.streaming);
  split_by_bytes(checked.num_bytes(), options, [&](int64_t begin, int64_t end) {
    for_each_copy(checked, begin, end, Copier(is_streaming));
  });
}

void copy(void* destination, const void* source, int64_t num_bytes, const CopyOptions& options) {
  const bool is_streaming = streams(num_bytes, options.streaming);
  const CopyKernel& kernel = copy_kernels().front();
  auto* const to = static_cast<uint8_t*>(destination);
  const auto* const from = static_cast<const uint8_t*>(source);
  split_by_bytes(num_bytes, options, [&](int64_t begin, int64_t end) {
    const auto part_bytes = static_cast<size_t>(end - begin);
    if (is_streaming) {
      kernel.stream(to + begin, from + begin, part_bytes);
      kernel.fence();
    } else {
      std::memcpy(to + begin, from + begin, part_bytes);
    }
  });
}

}  // namespace kvext
