// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Expands a transfer into plain copies; every backend uses this expansion.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kvext/checked_transfer.h"

namespace kvext {

struct Copy {
  int64_t source;
  int64_t destination;
  int64_t num_bytes;
};

// The bytes that one run moves in one plane, or a part of these bytes.
struct PlaneRunPart {
  int64_t place;  // place of the plane in CheckedTransfer::plane_order
  int64_t row_bytes;
  int64_t first_byte;  // offset of the part in the run's bytes of this plane
  Copy copy;
};

// Calls visit(PlaneRunPart) for the bytes [begin, end) of a transfer. Bytes are counted plane by
// plane, and run by run within a plane.
template <typename Visit>
void for_each_part(const CheckedTransfer& checked, int64_t begin, int64_t end, Visit&& visit) {
  const Transfer& transfer = checked.transfer();
  const bool is_store = transfer.direction == Direction::kPagesToHost;
  int64_t position = 0;
  for (const Group& group : checked.groups()) {
    const Run* const runs = transfer.runs.rows + group.first_run;
    for (int64_t place = group.first_plane; place < group.first_plane + group.num_planes; ++place) {
      const Plane& plane = transfer.planes[checked.plane_order()[place]];
      const int64_t plane_bytes = group.num_rows * plane.row_bytes;
      if (position >= end) return;
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
        visit(PlaneRunPart{place, plane.row_bytes, skipped, {source, destination, num_bytes}});
      }
    }
  }
}

// Joins consecutive copies: two copies whose sources and destinations are adjacent become one copy.
template <typename Visit>
class Joiner {
 public:
  explicit Joiner(Visit& visit) : visit_(visit) {}

  void operator()(const Copy& copy) {
    if (copy.source == pending_.source + pending_.num_bytes &&
        copy.destination == pending_.destination + pending_.num_bytes) {
      pending_.num_bytes += copy.num_bytes;
      return;
    }
    flush();
    pending_ = copy;
  }

  void flush() {
    if (pending_.num_bytes > 0) visit_(pending_);
    pending_.num_bytes = 0;
  }

 private:
  Visit& visit_;
  Copy pending_{0, 0, 0};
};

// Calls visit(Copy) for the bytes [begin, end) of a transfer, counted as in for_each_part.
template <typename Visit>
void for_each_copy(const CheckedTransfer& checked, int64_t begin, int64_t end, Visit&& visit) {
  Joiner<std::remove_reference_t<Visit>> join(visit);
  for_each_part(checked, begin, end, [&](const PlaneRunPart& part) { join(part.copy); });
  join.flush();
}

}  // namespace kvext
