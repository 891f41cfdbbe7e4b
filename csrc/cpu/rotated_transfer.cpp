// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include <algorithm>

#include "copier.h"
#include "copy_threads.h"
#include "kvext/copies.h"
#include "kvext/page_transfer.h"
#include "kvext/rotation.h"
#include "rotator.h"

namespace kvext {
namespace {

// Finds the rows that begin in a part. Each row begins in one part, so one thread moves it.
Copy whole_rows(const PlaneRunPart& part) {
  const int64_t before_bytes =
      (part.row_bytes - part.first_byte % part.row_bytes) % part.row_bytes;
  const int64_t num_rows =
      (part.copy.num_bytes - before_bytes + part.row_bytes - 1) / part.row_bytes;
  return {part.copy.source + before_bytes, part.copy.destination + before_bytes,
          std::max<int64_t>(num_rows, 0) * part.row_bytes};
}

}  // namespace

void rotated_page_transfer(const CheckedRotation& rotation, const CopyOptions& options) {
  const CheckedTransfer& checked = rotation.transfer();
  const bool is_streaming = streams(checked.num_bytes(), options.streaming);
  split_by_bytes(checked.num_bytes(), options, [&](int64_t begin, int64_t end) {
    Copier copier(is_streaming);
    Joiner<Copier> join(copier);
    Rotator rotate(is_streaming);
    for_each_part(checked, begin, end, [&](const PlaneRunPart& part) {
      const HeadRotation* const head = rotation.head_rotation(part.place);
      if (head == nullptr) {
        join(part.copy);
      } else {
        rotate(whole_rows(part), *head);
      }
    });
    join.flush();
  });
}

}  // namespace kvext
