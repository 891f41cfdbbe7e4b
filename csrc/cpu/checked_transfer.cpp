// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The only place that decides whether descriptors are valid. Every range is checked before a
// computation relies on it.
#include "kvext/checked_transfer.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "refusal.h"

namespace kvext {
namespace {

constexpr int64_t kHostAlignmentBytes = 64;

void check_region(int64_t address, int64_t num_bytes, const char* table, int64_t row) {
  require_at_least(1, address, table, row, "address", "Pass the address of allocated memory.");
  require_at_least(1, num_bytes, table, row, "num_bytes", "Leave out what is empty.");
  if (saturating_add(address, num_bytes) == INT64_MAX) {
    refuse(cell(table, row, "num_bytes"), "at most " + std::to_string(INT64_MAX - 1 - address),
           std::to_string(num_bytes), "A region ends within the address space.");
  }
}

void check_memory(const Transfer& transfer) {
  // A transfer without runs needs no host buffer.
  if (transfer.host_bytes != 0 || transfer.host_address < 0 || transfer.runs.num_rows != 0) {
    check_region(transfer.host_address, transfer.host_bytes, "host", 0);
  }
  for (int64_t i = 0; i < transfer.pools.num_rows; ++i) {
    const Pool& pool = transfer.pools[i];
    check_region(pool.address, pool.num_bytes, "pools", i);
    if (pool.address < transfer.host_address + transfer.host_bytes &&
        transfer.host_address < pool.address + pool.num_bytes) {
      refuse(cell("pools", i, "address"),
             "memory outside the host buffer, which lies at " +
                 std::to_string(transfer.host_address) + " and has " +
                 std::to_string(transfer.host_bytes) + " bytes",
             std::to_string(pool.address), "Pass a host buffer of its own.");
    }
  }
}

void check_plane(const Transfer& transfer, int64_t index) {
  const Plane& plane = transfer.planes[index];
  const auto at_least = [&](int64_t min, int64_t found, const char* column, const char* remedy) {
    require_at_least(min, found, "planes", index, column, remedy);
  };
  at_least(0, plane.group, "group", "Number the groups from 0.");
  if (plane.pool < 0 || plane.pool >= transfer.pools.num_rows) {
    refuse(cell("planes", index, "pool"),
           "a row of pools, which has " + std::to_string(transfer.pools.num_rows),
           std::to_string(plane.pool), "Pass every pool that a plane names.");
  }
  at_least(0, plane.base_bytes, "base_bytes", "Count from the start of the pool.");
  at_least(1, plane.page_stride_bytes, "page_stride_bytes", "Pages do not share bytes.");
  at_least(0, plane.region_offset_bytes, "region_offset_bytes", "Count from the start of the page.");
  at_least(1, plane.row_bytes, "row_bytes", "Leave out planes without bytes.");
  at_least(1, plane.rows_per_page, "rows_per_page", "Leave out planes without rows.");
  at_least(1, plane.num_pages, "num_pages", "Leave out planes without pages.");
  at_least(0, plane.host_offset_bytes, "host_offset_bytes", "Count from the start of the host buffer.");
  if (plane.host_offset_bytes % kHostAlignmentBytes != 0) {
    refuse(cell("planes", index, "host_offset_bytes"),
           "a multiple of " + std::to_string(kHostAlignmentBytes),
           std::to_string(plane.host_offset_bytes), "Begin every plane on a cache line.");
  }
  const int64_t region_end =
      saturating_add(plane.region_offset_bytes,
                     saturating_multiply(plane.rows_per_page, plane.row_bytes));
  if (region_end > plane.page_stride_bytes) {
    refuse(cell("planes", index, "page_stride_bytes"),
           "at least " + in_words(region_end) + ", where the region of a page ends",
           std::to_string(plane.page_stride_bytes),
           "Correct the stride, the region's offset, its rows or their bytes.");
  }
  const int64_t last_page = saturating_multiply(plane.num_pages - 1, plane.page_stride_bytes);
  const int64_t plane_end =
      saturating_add(saturating_add(plane.base_bytes, last_page), region_end);
  const int64_t pool_bytes = transfer.pools[plane.pool].num_bytes;
  if (plane_end > pool_bytes) {
    refuse(cell("planes", index, "num_pages"),
           "pages that end within the " + std::to_string(pool_bytes) + " bytes of pools[" +
               std::to_string(plane.pool) + "]",
           std::to_string(plane.num_pages) + " pages, the last of which ends at byte " +
               in_words(plane_end),
           "Correct the number of pages, their stride or the base.");
  }
}

// Lists the rows of the planes, sorted by group.
std::vector<int64_t> order_of_planes(const Transfer& transfer) {
  std::vector<int64_t> order(transfer.planes.num_rows);
  std::iota(order.begin(), order.end(), int64_t{0});
  put_in_order(order, [&](int64_t left, int64_t right) {
    return std::tie(transfer.planes[left].group, left) <
           std::tie(transfer.planes[right].group, right);
  });
  return order;
}

// Lists the groups by ascending number, each with its planes.
std::vector<Group> groups_of_planes(const Transfer& transfer, const std::vector<int64_t>& order) {
  std::vector<Group> groups;
  for (size_t i = 0; i < order.size(); ++i) {
    const Plane& plane = transfer.planes[order[i]];
    if (groups.empty() || groups.back().number != plane.group) {
      groups.push_back(Group{plane.group, static_cast<int64_t>(i)});
    }
    Group& group = groups.back();
    const int64_t first_plane = order[group.first_plane];
    const int64_t rows_per_page = transfer.planes[first_plane].rows_per_page;
    if (plane.rows_per_page != rows_per_page) {
      refuse(cell("planes", order[i], "rows_per_page"),
             std::to_string(rows_per_page) + ", as planes[" + std::to_string(first_plane) +
                 "] of the same group has",
             std::to_string(plane.rows_per_page),
             "Make planes whose rows stand for different numbers of tokens groups of their own.");
    }
    ++group.num_planes;
  }
  return groups;
}

void check_run(const Transfer& transfer, int64_t index, int64_t rows_per_page,
               int64_t plane_of_fewest_pages) {
  const Run& run = transfer.runs[index];
  const int64_t num_pages = transfer.planes[plane_of_fewest_pages].num_pages;
  if (run.page < 1 || run.page >= num_pages) {
    refuse(cell("runs", index, "page"),
           "1 to " + std::to_string(num_pages - 1) + ", the pages of planes[" +
               std::to_string(plane_of_fewest_pages) + "] without the null page",
           std::to_string(run.page),
           run.page == 0 ? "Leave out the runs of null pages." : "Correct the page.");
  }
  require_at_least(0, run.first_row, "runs", index, "first_row", "Count from the page's first row.");
  require_at_least(1, run.num_rows, "runs", index, "num_rows", "Leave out runs without rows.");
  require_at_least(0, run.host_row, "runs", index, "host_row", "Count from the plane's first row.");
  const int64_t rows_end = saturating_add(run.first_row, run.num_rows);
  if (rows_end > rows_per_page) {
    refuse(cell("runs", index, "num_rows"),
           "rows that end within the " + std::to_string(rows_per_page) + " of a page",
           std::to_string(run.num_rows) + " rows that end at " + in_words(rows_end),
           "Split the run at the end of the page.");
  }
}

// Assigns to every group its runs.
void assign_runs(const Transfer& transfer, const std::vector<int64_t>& order,
                 std::vector<Group>& groups) {
  int64_t index = 0;
  for (Group& group : groups) {
    int64_t smallest = order[group.first_plane];
    for (int64_t i = 1; i < group.num_planes; ++i) {
      const int64_t plane = order[group.first_plane + i];
      if (transfer.planes[plane].num_pages < transfer.planes[smallest].num_pages) smallest = plane;
    }
    const int64_t rows_per_page = transfer.planes[smallest].rows_per_page;
    group.first_run = index;
    for (; index < transfer.runs.num_rows && transfer.runs[index].group == group.number; ++index) {
      const Run& run = transfer.runs[index];
      check_run(transfer, index, rows_per_page, smallest);
      group.num_rows = saturating_add(group.num_rows, run.num_rows);
      group.host_rows_end =
          std::max(group.host_rows_end, saturating_add(run.host_row, run.num_rows));
    }
    group.num_runs = index - group.first_run;
  }
}

// Refuses a run that assign_runs did not assign to a group.
void check_run_groups(const Transfer& transfer, const std::vector<Group>& groups) {
  auto group = groups.begin();
  for (int64_t i = 0; i < transfer.runs.num_rows; ++i) {
    const int64_t number = transfer.runs[i].group;
    require_at_least(0, number, "runs", i, "group", "Number the groups from 0.");
    if (i > 0 && number < transfer.runs[i - 1].group) {
      refuse(cell("runs", i, "group"),
             "at least " + std::to_string(transfer.runs[i - 1].group) + ", the group before it",
             std::to_string(number), "Sort the runs by group.");
    }
    while (group != groups.end() && group->number < number) ++group;
    if (group == groups.end() || group->number != number) {
      refuse(cell("runs", i, "group"), "a group that one of the " +
                 std::to_string(transfer.planes.num_rows) + " planes has",
             std::to_string(number), "Pass the planes of every group that has runs.");
    }
  }
}

void check_host_extents(const Transfer& transfer, const std::vector<int64_t>& order,
                        const std::vector<Group>& groups) {
  struct Extent {
    int64_t begin;
    int64_t end;
    int64_t plane;
  };
  std::vector<Extent> extents;
  extents.reserve(transfer.planes.num_rows);
  for (const Group& group : groups) {
    for (int64_t i = 0; i < group.num_planes; ++i) {
      const int64_t index = order[group.first_plane + i];
      const Plane& plane = transfer.planes[index];
      const int64_t end =
          saturating_add(plane.host_offset_bytes,
                         saturating_multiply(group.host_rows_end, plane.row_bytes));
      if (end > transfer.host_bytes) {
        refuse(cell("planes", index, "host_offset_bytes"),
               "host rows that end within the " + std::to_string(transfer.host_bytes) +
                   " bytes of the host buffer",
               std::to_string(plane.host_offset_bytes) + " for rows that end at byte " +
                   in_words(end),
               "Pass a larger host buffer, or correct the runs' host rows.");
      }
      extents.push_back({plane.host_offset_bytes, end, index});
    }
  }
  put_in_order(extents, [](const Extent& left, const Extent& right) {
    return left.begin < right.begin;
  });
  for (size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].begin < extents[i - 1].end) {
      refuse(cell("planes", extents[i].plane, "host_offset_bytes"),
             "at least " + std::to_string(extents[i - 1].end) + ", where the host rows of planes[" +
                 std::to_string(extents[i - 1].plane) + "] end",
             std::to_string(extents[i].begin), "Give every plane host bytes of its own.");
    }
  }
}

}  // namespace

CheckedTransfer::CheckedTransfer(const Transfer& transfer) : transfer_(transfer) {
  check_memory(transfer);
  for (int64_t i = 0; i < transfer.planes.num_rows; ++i) check_plane(transfer, i);
  plane_order_ = order_of_planes(transfer);
  groups_ = groups_of_planes(transfer, plane_order_);
  check_run_groups(transfer, groups_);
  assign_runs(transfer, plane_order_, groups_);
  groups_.erase(std::remove_if(groups_.begin(), groups_.end(),
                               [](const Group& group) { return group.num_runs == 0; }),
                groups_.end());
  check_host_extents(transfer, plane_order_, groups_);
  if (transfer.direction == Direction::kPagesToHost) {
    refuse_host_rows_written_twice(*this);
  } else {
    refuse_pool_bytes_written_twice(*this);
  }
  for (const Group& group : groups_) {
    num_plane_runs_ += group.num_planes * group.num_runs;
    for (int64_t i = 0; i < group.num_planes; ++i) {
      num_bytes_ += group.num_rows * transfer.planes[plane_order_[group.first_plane + i]].row_bytes;
    }
  }
}

}  // namespace kvext
