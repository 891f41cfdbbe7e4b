// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Which boundaries of a request outlive the request: planned boundaries, and boundaries on the
// grid.
#pragma once

#include <cstdint>
#include <vector>

#include "geometry.h"
#include "use_rates.h"

namespace kvext::retention {

/// A boundary whose checkpoint is to outlive the request.
struct PlannedBoundary {
  std::int64_t boundary_tokens;
  Reason reason;
};

/// The boundaries in (after_tokens, upto_tokens] that are planned or on the grid, ascending.
///
/// The grid has no end, because a request may decode any number of tokens. Therefore grid
/// boundaries are computed while a request proceeds, and not when it is planned.
/// @param plan  ascending; a planned boundary on the grid keeps the reason for which it is planned
/// @param is_grid_kept  called in order for each boundary of the grid that is not planned; returns
///   whether this boundary is kept
template <typename IsGridKept>
std::vector<PlannedBoundary> lasting_boundaries(const Geometry& geometry,
                                                const std::vector<PlannedBoundary>& plan,
                                                std::int64_t after_tokens,
                                                std::int64_t upto_tokens,
                                                IsGridKept is_grid_kept) {
  std::vector<PlannedBoundary> boundaries;
  const auto add_grid = [&](std::int64_t end_tokens) {
    const std::int64_t grid_tokens = geometry.grid_tokens;
    if (!grid_tokens) return;
    std::int64_t tokens = (after_tokens / grid_tokens + 1) * grid_tokens;
    for (; tokens < end_tokens; tokens += grid_tokens) {
      // A lookup with a wide window that looks ahead never ends at some of the first multiples.
      if (geometry.is_boundary(tokens) && is_grid_kept()) {
        boundaries.push_back({tokens, kGridReason});
      }
    }
  };
  for (const PlannedBoundary& planned : plan) {
    if (planned.boundary_tokens <= after_tokens) continue;
    if (planned.boundary_tokens > upto_tokens) break;
    add_grid(planned.boundary_tokens);
    boundaries.push_back(planned);
    after_tokens = planned.boundary_tokens;
  }
  add_grid(upto_tokens + 1);
  return boundaries;
}

}  // namespace kvext::retention
