// SPDX-License-Identifier: Apache-2.0
// What a lookup can hit: `vllm_ascend_kvext.retention.geometry.HitGeometry`, as tables.
//
// From some boundary on, everything repeats with a period of one unit. Before it, windows are cut
// off by the start of the prompt, and every unit is looked up in a table that Python has made.
//
// Every group is named by its place in `HitGeometry.groups`.
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

/// What is known of one group.
struct GroupTables {
  bool is_state = false;
  std::int64_t window_tokens = 0;          // 0 without a sliding window
  std::vector<Range> tails;                // by unit, the last one steady: the blocks a hit reads
  std::vector<std::int64_t> full_tokens;   // by unit, the last one steady: tokens to be cached
};

struct Geometry {
  std::int64_t unit_tokens = 1;    // every hit is a multiple of it
  std::int64_t step_tokens = 1;    // hits change at multiples of it
  std::int64_t steady_tokens = 1;  // a boundary, from which on everything repeats
  std::int64_t lag_tokens = 0;     // past a steady boundary that a lookup has to look at
  std::int64_t grid_tokens = 0;    // distance of checkpoints that no request asks for; 0: none
  bool is_grid_wanted = false;     // the grid was configured
  bool has_states = false;
  bool use_eagle = false;

  /// The longest hit of a lookup that may look at so many steps.
  std::vector<std::int64_t> hit_by_step;
  /// The fewest tokens with which a lookup reaches so many units.
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

  /// How far a full-attention group has to be cached for a hit at a boundary.
  std::int64_t full_end_tokens(std::size_t group, std::int64_t boundary_tokens) const {
    const std::int64_t steady = std::min(boundary_tokens, steady_tokens);
    const auto unit = static_cast<std::size_t>(steady / unit_tokens);
    return groups[group].full_tokens[unit] + boundary_tokens - steady;
  }

  /// The blocks of a range that some hit reads, in a sparse group. Takes time per boundary.
  std::vector<Range> reachable(std::size_t group, std::int64_t block_tokens, Range range) const {
    std::vector<Range> parts;
    if (range.is_empty()) return parts;
    const Range steady = groups[group].tails.back();
    const std::int64_t blocks_per_unit = unit_tokens / block_tokens;
    if (steady.stop - steady.start >= blocks_per_unit) return {range};
    // The tail of a boundary ends before the next boundary, and begins before its own.
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

  /// The first block at or past an index that some hit reads, in a sparse group.
  std::int64_t next_reachable(std::size_t group, std::int64_t block_tokens,
                              std::int64_t block_index) const {
    const std::int64_t span = 2 * (unit_tokens / block_tokens) + 1;
    return reachable(group, block_tokens, {block_index, block_index + span}).front().start;
  }
};

}  // namespace kvext::retention
