// SPDX-License-Identifier: Apache-2.0
#include "destinations.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "refusal.h"

namespace kvext {
namespace {

// The runs of a group in the order of a key; runs that are in order are not sorted.
template <typename Key>
std::vector<int64_t> ordered_runs(const Transfer& transfer, const Group& group, Key&& key) {
  std::vector<int64_t> order(group.num_runs);
  std::iota(order.begin(), order.end(), group.first_run);
  const auto is_before = [&](int64_t left, int64_t right) {
    return key(transfer.runs[left]) < key(transfer.runs[right]);
  };
  if (!std::is_sorted(order.begin(), order.end(), is_before)) {
    std::sort(order.begin(), order.end(), is_before);
  }
  return order;
}

std::string range(int64_t begin, int64_t end) {
  return std::to_string(begin) + " to " + std::to_string(end - 1);
}

// The runs of a group by page and row. Since a page's region fits its stride, every plane's
// addresses ascend in this order.
std::vector<int64_t> runs_by_page(const Transfer& transfer, const Group& group) {
  const auto order = ordered_runs(transfer, group, [](const Run& run) {
    return std::make_tuple(run.page, run.first_row);
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const Run& before = transfer.runs[order[i - 1]];
    const Run& run = transfer.runs[order[i]];
    if (run.page == before.page && run.first_row < before.first_row + before.num_rows) {
      refuse(cell("runs", order[i], "first_row"),
             "rows of page " + std::to_string(run.page) + " that no other run writes: runs[" +
                 std::to_string(order[i - 1]) + "] writes rows " +
                 range(before.first_row, before.first_row + before.num_rows),
             "row " + std::to_string(run.first_row), "Load every row once.");
    }
  }
  return order;
}

// What one plane writes: its runs in ascending order of addresses.
struct Writes {
  int64_t plane;
  const std::vector<int64_t>* runs;
  int64_t begin;
  int64_t end;
};

struct Interval {
  int64_t begin;
  int64_t end;
  int64_t plane;
  int64_t run;
};

Interval interval(const Transfer& transfer, int64_t plane_index, int64_t run_index) {
  const Plane& plane = transfer.planes[plane_index];
  const Run& run = transfer.runs[run_index];
  const int64_t begin = transfer.pools[plane.pool].address + plane.base_bytes +
                        plane.region_offset_bytes + run.page * plane.page_stride_bytes +
                        run.first_row * plane.row_bytes;
  return {begin, begin + run.num_rows * plane.row_bytes, plane_index, run_index};
}

// Planes whose addresses interleave: sorts every interval.
void refuse_overlap(const Transfer& transfer, const Writes* first, const Writes* last) {
  std::vector<Interval> intervals;
  for (; first != last; ++first) {
    for (const int64_t run : *first->runs) {
      intervals.push_back(interval(transfer, first->plane, run));
    }
  }
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& left, const Interval& right) { return left.begin < right.begin; });
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
             "Give groups that share a pool different pages, and planes of a group different "
             "regions.");
    }
  }
}

}  // namespace

void refuse_host_rows_written_twice(const Transfer& transfer, const std::vector<Group>& groups) {
  for (const Group& group : groups) {
    const auto order =
        ordered_runs(transfer, group, [](const Run& run) { return run.host_row; });
    for (size_t i = 1; i < order.size(); ++i) {
      const Run& before = transfer.runs[order[i - 1]];
      const Run& run = transfer.runs[order[i]];
      if (run.host_row < before.host_row + before.num_rows) {
        refuse(cell("runs", order[i], "host_row"),
               "host rows that no other run writes: runs[" + std::to_string(order[i - 1]) +
                   "] writes host rows " + range(before.host_row, before.host_row + before.num_rows),
               "host row " + std::to_string(run.host_row), "Store every host row once.");
      }
    }
  }
}

void refuse_pool_bytes_written_twice(const Transfer& transfer, const std::vector<Group>& groups) {
  std::vector<std::vector<int64_t>> orders;
  orders.reserve(groups.size());
  std::vector<Writes> writes;
  for (const Group& group : groups) {
    const auto& order = orders.emplace_back(runs_by_page(transfer, group));
    for (const int64_t plane : group.planes) {
      writes.push_back({plane, &order, interval(transfer, plane, order.front()).begin,
                        interval(transfer, plane, order.back()).end});
    }
  }
  std::sort(writes.begin(), writes.end(),
            [](const Writes& left, const Writes& right) { return left.begin < right.begin; });
  // Only planes whose addresses interleave can meet.
  for (size_t first = 0, last; first < writes.size(); first = last) {
    int64_t end = writes[first].end;
    for (last = first + 1; last < writes.size() && writes[last].begin < end; ++last) {
      end = std::max(end, writes[last].end);
    }
    if (last - first > 1) refuse_overlap(transfer, &writes[first], writes.data() + last);
  }
}

}  // namespace kvext
