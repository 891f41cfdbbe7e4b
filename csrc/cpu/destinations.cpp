// SPDX-License-Identifier: Apache-2.0
#include "destinations.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include "refusal.h"

namespace kvext {
namespace {

// Puts rows of the run table in the order of a key; what is in order is not sorted.
template <typename Key>
void sort_runs(const Transfer& transfer, std::vector<int64_t>& order, Key&& key) {
  const auto is_before = [&](int64_t left, int64_t right) {
    return key(transfer.runs[left]) < key(transfer.runs[right]);
  };
  if (!std::is_sorted(order.begin(), order.end(), is_before)) {
    std::sort(order.begin(), order.end(), is_before);
  }
}

std::vector<int64_t> runs_of(const Group& group) {
  std::vector<int64_t> runs(group.num_runs);
  std::iota(runs.begin(), runs.end(), group.first_run);
  return runs;
}

std::string range(int64_t begin, int64_t end) {
  return std::to_string(begin) + " to " + std::to_string(end - 1);
}

void refuse_rows_loaded_twice(const Transfer& transfer, const Group& group) {
  std::vector<int64_t> order = runs_of(group);
  sort_runs(transfer, order, [](const Run& run) { return std::tie(run.page, run.first_row); });
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
}

int64_t first_byte(const Transfer& transfer, const Plane& plane) {
  return transfer.pools[plane.pool].address + plane.base_bytes;
}

// Groups that have the same pages of the same planes: the chunks of a request, for example.
class PlaneSets {
 public:
  explicit PlaneSets(const CheckedTransfer& checked) : checked_(checked) {
    const auto& groups = checked.groups();
    if (groups.size() == 1) {
      first_groups_ = set_of_group_ = {0};
      return;
    }
    std::unordered_multimap<uint64_t, size_t> of_hash;
    set_of_group_.reserve(groups.size());
    for (size_t group = 0; group < groups.size(); ++group) {
      const uint64_t hash = hash_of(groups[group]);
      size_t set = first_groups_.size();
      const auto [first, last] = of_hash.equal_range(hash);
      for (auto found = first; found != last; ++found) {
        if (is_same(groups[first_groups_[found->second]], groups[group])) set = found->second;
      }
      if (set == first_groups_.size()) {
        of_hash.emplace(hash, set);
        first_groups_.push_back(group);
      }
      set_of_group_.push_back(set);
    }
  }

  size_t size() const { return first_groups_.size(); }
  size_t set_of_group(size_t group) const { return set_of_group_[group]; }
  // One group stands for the planes of a set.
  const Group& group_of_set(size_t set) const { return checked_.groups()[first_groups_[set]]; }

 private:
  const Plane& plane(const Group& group, int64_t index) const {
    return checked_.transfer().planes[checked_.plane_order()[group.first_plane + index]];
  }

  uint64_t hash_of(const Group& group) const {
    uint64_t hash = static_cast<uint64_t>(group.num_planes);
    for (int64_t i = 0; i < group.num_planes; ++i) {
      const Plane& of_group = plane(group, i);
      for (const int64_t number : {first_byte(checked_.transfer(), of_group),
                                   of_group.region_offset_bytes, of_group.page_stride_bytes}) {
        hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
      }
    }
    return hash;
  }

  bool is_same(const Group& left, const Group& right) const {
    if (left.num_planes != right.num_planes) return false;
    for (int64_t i = 0; i < left.num_planes; ++i) {
      const Plane &one = plane(left, i), &other = plane(right, i);
      if (first_byte(checked_.transfer(), one) != first_byte(checked_.transfer(), other) ||
          one.page_stride_bytes != other.page_stride_bytes ||
          one.region_offset_bytes != other.region_offset_bytes ||
          one.row_bytes != other.row_bytes || one.rows_per_page != other.rows_per_page ||
          one.num_pages != other.num_pages) {
        return false;
      }
    }
    return true;
  }

  const CheckedTransfer& checked_;
  std::vector<size_t> first_groups_;
  std::vector<size_t> set_of_group_;
};

// Whether no two runs have a row in common and no page belongs to two sets of planes.
bool are_rows_apart(const CheckedTransfer& checked, const PlaneSets& sets) {
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
      rows.push_back({run.page, run.first_row, run.first_row + run.num_rows,
                      sets.set_of_group(index)});
    }
  }
  const auto is_before = [](const Rows& left, const Rows& right) {
    return std::tie(left.page, left.begin) < std::tie(right.page, right.begin);
  };
  if (!std::is_sorted(rows.begin(), rows.end(), is_before)) {
    std::sort(rows.begin(), rows.end(), is_before);
  }
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i].page != rows[i - 1].page) continue;
    if (rows[i].set != rows[i - 1].set || rows[i].begin < rows[i - 1].end) return false;
  }
  return true;
}

// Whether the planes of one set have different bytes of a page, and planes with other page
// boundaries other bytes altogether.
bool are_planes_apart(const CheckedTransfer& checked, const PlaneSets& sets) {
  struct Region {
    int64_t first_byte;  // of page 0
    int64_t stride_bytes;
    size_t set;
    int64_t begin;  // in the page
    int64_t end;
    int64_t pages_end;  // behind the last page
  };
  std::vector<Region> regions;
  regions.reserve(checked.plane_order().size());
  for (size_t set = 0; set < sets.size(); ++set) {
    const Group& group = sets.group_of_set(set);
    for (int64_t i = 0; i < group.num_planes; ++i) {
      const Plane& plane = checked.transfer().planes[checked.plane_order()[group.first_plane + i]];
      const int64_t first = first_byte(checked.transfer(), plane);
      regions.push_back(
          {first, plane.page_stride_bytes, set, plane.region_offset_bytes,
           plane.region_offset_bytes + plane.rows_per_page * plane.row_bytes,
           saturating_add(first, saturating_multiply(plane.num_pages, plane.page_stride_bytes))});
    }
  }
  const auto is_before = [](const Region& left, const Region& right) {
    return std::tie(left.first_byte, left.stride_bytes, left.set, left.begin) <
           std::tie(right.first_byte, right.stride_bytes, right.set, right.begin);
  };
  if (!std::is_sorted(regions.begin(), regions.end(), is_before)) {
    std::sort(regions.begin(), regions.end(), is_before);
  }
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

Interval interval(const Transfer& transfer, int64_t plane_index, int64_t run_index) {
  const Plane& plane = transfer.planes[plane_index];
  const Run& run = transfer.runs[run_index];
  const int64_t begin = first_byte(transfer, plane) + plane.region_offset_bytes +
                        run.page * plane.page_stride_bytes + run.first_row * plane.row_bytes;
  return {begin, begin + run.num_rows * plane.row_bytes, plane_index, run_index};
}

// The definition: every byte of every run of every plane.
void refuse_overlap(const CheckedTransfer& checked) {
  const Transfer& transfer = checked.transfer();
  std::vector<Interval> intervals;
  for (const Group& group : checked.groups()) {
    for (int64_t i = 0; i < group.num_planes; ++i) {
      const int64_t plane = checked.plane_order()[group.first_plane + i];
      for (int64_t run = 0; run < group.num_runs; ++run) {
        intervals.push_back(interval(transfer, plane, group.first_run + run));
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
             "Give groups that share a pool different pages, and planes of a group different "
             "regions.");
    }
  }
}

}  // namespace

void refuse_host_rows_written_twice(const CheckedTransfer& checked) {
  const Transfer& transfer = checked.transfer();
  for (const Group& group : checked.groups()) {
    if (group.num_runs == 1) continue;
    std::vector<int64_t> order = runs_of(group);
    sort_runs(transfer, order, [](const Run& run) { return run.host_row; });
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

void refuse_pool_bytes_written_twice(const CheckedTransfer& checked) {
  for (const Group& group : checked.groups()) {
    if (group.num_runs > 1) refuse_rows_loaded_twice(checked.transfer(), group);
  }
  const PlaneSets sets(checked);
  // Nearly every transfer is seen to be apart by its runs alone and its planes alone.
  if (!are_planes_apart(checked, sets) || !are_rows_apart(checked, sets)) refuse_overlap(checked);
}

}  // namespace kvext
