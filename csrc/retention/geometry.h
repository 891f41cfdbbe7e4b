// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// What a lookup can hit: the tables of `vllm_ascend_kvext.retention.geometry.HitGeometry`.
//
// From the boundary `steady_tokens` on, everything repeats with a period of one unit. Before this
// boundary, the start of the prompt cuts windows off, and every unit is looked up in a table that
// Python has computed.
//
// Every group is identified by its index in `HitGeometry.groups`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvext::retention {

/// Consecutive blocks, by index.
struct Range {
  std::int64_t start = 0, stop = 0;

  bool is_empty() const { return start >= stop; }
  bool has(std::int64_t index) const { return start <= index && index < stop; }
};

inline std::int64_t floor_to(std::int64_t tokens, std::int64_t multiple) {
  return tokens / multiple * multiple;
}

/// The tables of one group. Entry n belongs to the boundary at unit n; the last entry repeats,
/// shifted, for all later units.
struct GroupTables {
  bool is_state = false;
  std::int64_t window_tokens = 0;          // 0 without a sliding window
  std::vector<Range> tails;                // tails[n]: the blocks that a hit reads
  std::vector<std::int64_t> full_tokens;   // full_tokens[n]: tokens that must be cached
};

struct Geometry {
  std::int64_t unit_tokens = 1;    // every hit is a multiple of this
  std::int64_t step_tokens = 1;    // hits get longer only at multiples of this
  std::int64_t steady_tokens = 1;  // the first boundary from which on everything repeats
  std::int64_t lag_tokens = 0;     // extra tokens that a lookup needs to hit a steady boundary
  std::int64_t grid_tokens = 0;    // distance between boundaries of the grid; 0: no grid
  bool is_grid_wanted = false;     // whether the user configured the grid
  bool has_states = false;
  bool use_eagle = false;

  /// hit_by_step[n]: the longest hit of a lookup that is limited to n steps.
  std::vector<std::int64_t> hit_by_step;
  /// opening_by_unit[n]: the minimum of tokens with which a lookup reaches n units.
  std::vector<std::int64_t> opening_by_unit;
  std::vector<GroupTables> groups;

  std::int64_t reachable_tokens(std::int64_t limit_tokens) const {
    const std::int64_t steady = floor_to(limit_tokens - lag_tokens, unit_tokens);
    if (steady >= steady_tokens) return steady;
    return limit_tokens <= 0 ? 0 : hit_by_step[static_cast<std::size_t>(limit_tokens / step_tokens)];
  }

  std::int64_t opens_at_tokens(std::int64_t boundary_tokens) const {
    if (boundary_tokens >= steady_tokens) return boundary_tokens + lag_tokens;
    return opening_by_unit[static_cast<std::size_t>(boundary_tokens / unit_tokens)];
  }

  bool is_boundary(std::int64_t boundary_tokens) const {
    return reachable_tokens(opens_at_tokens(boundary_tokens)) == boundary_tokens;
  }

  /// The blocks of a sparse group that a hit at a boundary reads.
  Range tail(std::size_t group, std::int64_t block_tokens, std::int64_t boundary_tokens) const {
    const std::int64_t steady = std::min(boundary_tokens, steady_tokens);
    const Range range = groups[group].tails[static_cast<std::size_t>(steady / unit_tokens)];
    const std::int64_t shift = (boundary_tokens - steady) / block_tokens;
    return {range.start + shift, range.stop + shift};
  }

  /// The number of tokens that a full-attention group must have cached for a hit at a boundary.
  std::int64_t full_end_tokens(std::size_t group, std::int64_t boundary_tokens) const {
    const std::int64_t steady = std::min(boundary_tokens, steady_tokens);
    const auto unit = static_cast<std::size_t>(steady / unit_tokens);
    return groups[group].full_tokens[unit] + boundary_tokens - steady;
  }

  /// The blocks of a range of a sparse group that some hit reads. Takes time per boundary in the
  /// range.
  std::vector<Range> reachable(std::size_t group, std::int64_t block_tokens, Range range) const {
    std::vector<Range> parts;
    if (range.is_empty()) return parts;
    const Range steady = groups[group].tails.back();
    const std::int64_t blocks_per_unit = unit_tokens / block_tokens;
    if (steady.stop - steady.start >= blocks_per_unit) return {range};
    // The tail of a boundary starts before the boundary, and ends before the next boundary.
    for (std::int64_t unit = std::max<std::int64_t>(1, range.start / blocks_per_unit);; ++unit) {
      const Range read = tail(group, block_tokens, unit * unit_tokens);
      if (read.start >= range.stop) return parts;
      const Range part{std::max(read.start, range.start), std::min(read.stop, range.stop)};
      if (part.is_empty()) continue;
      if (!parts.empty() && part.start <= parts.back().stop) {
        parts.back().stop = std::max(parts.back().stop, part.stop);
      } else {
        parts.push_back(part);
      }
    }
  }

  /// The first block of a sparse group, from an index on, that some hit reads.
  std::int64_t next_reachable(std::size_t group, std::int64_t block_tokens,
                              std::int64_t block_index) const {
    const std::int64_t span = 2 * (unit_tokens / block_tokens) + 1;
    return reachable(group, block_tokens, {block_index, block_index + span}).front().start;
  }
};

}  // namespace kvext::retention
