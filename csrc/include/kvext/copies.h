// SPDX-License-Identifier: Apache-2.0
// From a transfer to plain copies: the one expansion that every backend uses.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvext/checked_transfer.h"

namespace kvext {

struct Copy {
  int64_t source;
  int64_t destination;
  int64_t num_bytes;
};

// Calls visit(Copy) for the bytes [begin, end) of a transfer, counted plane after plane and run after
// run. What is adjacent at both ends becomes one copy.
template <typename Visit>
void for_each_copy(const CheckedTransfer& checked, int64_t begin, int64_t end, Visit&& visit) {
  const Transfer& transfer = checked.transfer();
  const bool is_store = transfer.direction == Direction::kPagesToHost;
  Copy pending{0, 0, 0};
  int64_t position = 0;
  for (const Group& group : checked.groups()) {
    const Run* const runs = transfer.runs.rows + group.first_run;
    const int64_t* const planes = checked.plane_order().data() + group.first_plane;
    for (int64_t index = 0; index < group.num_planes; ++index) {
      const Plane& plane = transfer.planes[planes[index]];
      const int64_t plane_bytes = group.num_rows * plane.row_bytes;
      if (position >= end) break;
      if (position + plane_bytes <= begin) {
        position += plane_bytes;
        continue;
      }
      const int64_t pages =
          transfer.pools[plane.pool].address + plane.base_bytes + plane.region_offset_bytes;
      const int64_t host = transfer.host_address + plane.host_offset_bytes;
      for (int64_t i = 0; i < group.num_runs; ++i) {
        const Run& run = runs[i];
        const int64_t run_bytes = run.num_rows * plane.row_bytes;
        const int64_t skipped = std::max<int64_t>(begin - position, 0);
        const int64_t num_bytes = std::min(run_bytes, end - position) - skipped;
        position += run_bytes;
        if (num_bytes <= 0) continue;
        const int64_t in_page =
            pages + run.page * plane.page_stride_bytes + run.first_row * plane.row_bytes + skipped;
        const int64_t in_host = host + run.host_row * plane.row_bytes + skipped;
        const int64_t source = is_store ? in_page : in_host;
        const int64_t destination = is_store ? in_host : in_page;
        if (source == pending.source + pending.num_bytes &&
            destination == pending.destination + pending.num_bytes) {
          pending.num_bytes += num_bytes;
          continue;
        }
        if (pending.num_bytes > 0) visit(pending);
        pending = Copy{source, destination, num_bytes};
      }
    }
  }
  if (pending.num_bytes > 0) visit(pending);
}

}  // namespace kvext
