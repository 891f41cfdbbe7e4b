// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The tables that describe a transfer. Their columns are the same as in
// vllm_ascend_kvext/transfer/schema.py. This header knows neither Python nor torch, only addresses
// and sizes.
#pragma once

#include <cstdint>

namespace kvext {

enum class Direction : int64_t { kPagesToHost = 0, kHostToPages = 1 };

// One registered memory region.
struct Pool {
  static constexpr int64_t kColumns = 2;
  int64_t address;
  int64_t num_bytes;
};

// One region of bytes per page. Row r of page q lies at
//   pool.address + base_bytes + q * page_stride_bytes + region_offset_bytes + r * row_bytes.
// Host row h lies at host_address + host_offset_bytes + h * row_bytes.
struct Plane {
  static constexpr int64_t kColumns = 9;
  int64_t group;
  int64_t pool;
  int64_t base_bytes;
  int64_t page_stride_bytes;
  int64_t region_offset_bytes;
  int64_t row_bytes;
  int64_t rows_per_page;
  int64_t num_pages;
  int64_t host_offset_bytes;
};

// Consecutive rows of one page; every plane of the group moves them.
struct Run {
  static constexpr int64_t kColumns = 5;
  int64_t group;
  int64_t page;
  int64_t first_row;
  int64_t num_rows;
  int64_t host_row;
};

template <typename Row>
struct Table {
  const Row* rows = nullptr;
  int64_t num_rows = 0;

  const Row& operator[](int64_t index) const { return rows[index]; }
};

static_assert(sizeof(Pool) == Pool::kColumns * sizeof(int64_t));
static_assert(sizeof(Plane) == Plane::kColumns * sizeof(int64_t));
static_assert(sizeof(Run) == Run::kColumns * sizeof(int64_t));

// Every plane of a group moves every run of that group.
struct Transfer {
  Table<Pool> pools;
  Table<Plane> planes;
  Table<Run> runs;
  int64_t host_address = 0;
  int64_t host_bytes = 0;
  Direction direction = Direction::kPagesToHost;
};

}  // namespace kvext
