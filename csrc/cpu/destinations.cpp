// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "refusal.h"

namespace kvext {
namespace {

std::string range(int64_t begin, int64_t end) {
  return std::to_string(begin) + " to " + std::to_string(end - 1);
}

int64_t first_byte(const Transfer& transfer, const Plane& plane) {
  return transfer.pools[plane.pool].address + plane.base_bytes;
}

// Lists for each group the first group that has the same pages of the same planes. The chunks of a
// request share planes in this way.
std::vector<size_t> sets_of_planes(const CheckedTransfer& checked) {
  std::map<std::vector<int64_t>, size_t> first_of_planes;
  std::vector<size_t> sets;
  sets.reserve(checked.groups().size());
  for (const Group& group : checked.groups()) {
    std::vector<int64_t> planes;
    for (int64_t i = 0; i < group.num_planes; ++i) {
      const Plane& plane = checked.transfer().planes[checked.plane_order()[group.first_plane + i]];
      planes.insert(planes.end(),
                    {first_byte(checked.transfer(), plane), plane.page_stride_bytes,
                     plane.region_offset_bytes, plane.row_bytes, plane.rows_per_page,
                     plane.num_pages});
    }
    sets.push_back(first_of_planes.try_emplace(std::move(planes), sets.size()).first->second);
  }
  return sets;
}

// Returns whether no two runs have a row in common and no page belongs to two sets of planes.
bool are_rows_apart(const CheckedTransfer& checked, const std::vector<size_t>& sets) {
  struct Rows {
    int64_t page;
    int64_t begin;
    int64_t end;
    size_t set;
  };
  std::vector<Rows> rows;
  rows.reserve(checked.transfer().runs.num_rows);
  for (size_t index = 0; index < checked.groups().size(); ++index) {
    const Group& group = checked.groups()[index];
    for (int64_t i = 0; i < group.num_runs; ++i) {
      const Run& run = checked.transfer().runs[group.first_run + i];
      rows.push_back({run.page, run.first_row, run.first_row + run.num_rows, sets[index]});
    }
  }
  put_in_order(rows, [](const Rows& left, const Rows& right) {
    return std::tie(left.page, left.begin) < std::tie(right.page, right.begin);
  });
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i].page != rows[i - 1].page) continue;
    if (rows[i].set != rows[i - 1].set || rows[i].begin < rows[i - 1].end) return false;
  }
  return true;
}

// Returns whether the planes of one set use different bytes of a page, and whether planes with
// different page boundaries have no bytes in common at all.
bool are_planes_apart(const CheckedTransfer& checked, const std::vector<size_t>& sets) {
  struct Region {
    int64_t first_byte;  // address of page 0 in this plane
    int64_t stride_bytes;
    size_t set;
    int64_t begin;  // offset in the page
    int64_t end;
    int64_t pages_end;  // end of the last page
  };
  std::vector<Region> regions;
  regions.reserve(checked.plane_order().size());
  for (size_t set = 0; set < sets.size(); ++set) {
    if (sets[set] != set) continue;
    const Group& group = checked.groups()[set];
    for (int64_t i = 0; i < group.num_planes; ++i) {
      const Plane& plane = checked.transfer().planes[checked.plane_order()[group.first_plane + i]];
      const int64_t first = first_byte(checked.transfer(), plane);
      regions.push_back(
          {first, plane.page_stride_bytes, set, plane.region_offset_bytes,
           plane.region_offset_bytes + plane.rows_per_page * plane.row_bytes,
           saturating_add(first, saturating_multiply(plane.num_pages, plane.page_stride_bytes))});
    }
  }
  put_in_order(regions, [](const Region& left, const Region& right) {
    return std::tie(left.first_byte, left.stride_bytes, left.set, left.begin) <
           std::tie(right.first_byte, right.stride_bytes, right.set, right.begin);
  });
  int64_t pages_end = regions.empty() ? 0 : regions.front().pages_end;
  for (size_t i = 1; i < regions.size(); ++i) {
    const Region &before = regions[i - 1], &region = regions[i];
    if (region.first_byte != before.first_byte || region.stride_bytes != before.stride_bytes) {
      if (region.first_byte < pages_end) return false;
    } else if (region.set == before.set && region.begin < before.end) {
      return false;
    }
    pages_end = std::max(pages_end, region.pages_end);
  }
  return true;
}

struct Interval {
  int64_t begin;
  int64_t end;
  int64_t plane;
  int64_t run;
};

// Compares every byte range of every run of every plane: this is the definition of an overlap.
void refuse_overlap(const CheckedTransfer& checked) {
  const Transfer& transfer = checked.transfer();
  std::vector<Interval> intervals;
  for (const Group& group : checked.groups()) {
    for (int64_t i = 0; i < group.num_planes; ++i) {
      const int64_t index = checked.plane_order()[group.first_plane + i];
      const Plane& plane = transfer.planes[index];
      const int64_t first = first_byte(transfer, plane) + plane.region_offset_bytes;
      for (int64_t j = group.first_run; j < group.first_run + group.num_runs; ++j) {
        const Run& run = transfer.runs[j];
        const int64_t begin =
            first + run.page * plane.page_stride_bytes + run.first_row * plane.row_bytes;
        intervals.push_back({begin, begin + run.num_rows * plane.row_bytes, index, j});
      }
    }
  }
  std::sort(intervals.begin(), intervals.end(), [](const Interval& left, const Interval& right) {
    return std::tie(left.begin, left.plane, left.run) < std::tie(right.begin, right.plane, right.run);
  });
  for (size_t i = 1; i < intervals.size(); ++i) {
    const Interval& before = intervals[i - 1];
    const Interval& found = intervals[i];
    if (found.begin < before.end) {
      const int64_t address = transfer.pools[transfer.planes[found.plane].pool].address;
      refuse(cell("runs", found.run, "page"),
             "bytes that nothing else writes: planes[" + std::to_string(before.plane) +
                 "] and runs[" + std::to_string(before.run) + "] write bytes " +
                 range(before.begin - address, before.end - address) + " of the pool",
             "byte " + std::to_string(found.begin - address) + " through planes[" +
                 std::to_string(found.plane) + "]",
             "Load every row once; give groups that share a pool different pages, and planes of a "
             "group different regions.");
    }
  }
}

}  // namespace

void refuse_host_rows_written_twice(const CheckedTransfer& checked) {
  const Table<Run>& runs = checked.transfer().runs;
  for (const Group& group : checked.groups()) {
    std::vector<int64_t> order(group.num_runs);
    std::iota(order.begin(), order.end(), group.first_run);
    put_in_order(order, [&](int64_t left, int64_t right) {
      return runs[left].host_row < runs[right].host_row;
    });
    for (size_t i = 1; i < order.size(); ++i) {
      const Run &before = runs[order[i - 1]], &run = runs[order[i]];
      if (run.host_row < before.host_row + before.num_rows) {
        refuse(cell("runs", order[i], "host_row"),
               "host rows that no other run writes: runs[" + std::to_string(order[i - 1]) +
                   "] writes host rows " + range(before.host_row, before.host_row + before.num_rows),
               "host row " + std::to_string(run.host_row), "Store every host row once.");
      }
    }
  }
}

void refuse_pool_bytes_written_twice(const CheckedTransfer& checked) {
  const std::vector<size_t> sets = sets_of_planes(checked);
  // For nearly every transfer, the runs alone and the planes alone show that no byte is written
  // twice.
  if (!are_planes_apart(checked, sets) || !are_rows_apart(checked, sets)) refuse_overlap(checked);
}

}  // namespace kvext
