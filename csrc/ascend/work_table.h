// SPDX-License-Identifier: Apache-2.0
// The one table that the kernel reads: what a transfer is, in a form that a core can walk without
// searching. Written by vllm_ascend_kvext/transfer/ascend/work_table.py; compiled for cores and for
// the host, so it holds nothing but constants.
//
//   header | tasks | runs                                    all int64
//
// A task is one plane. Its work is cut into units, numbered through all tasks; a unit is a tile of
// one run, or several whole runs that fit a tile together. Core i moves units i, i + cores, ...
#pragma once

#include <cstdint>

namespace kvext {

// Bytes of a tile. Two tiles lie in a core's unified buffer: one fills while the other empties.
constexpr int64_t kTileBytes = 32 * 1024;
constexpr int32_t kTilesInFlight = 2;
constexpr int64_t kMaxRunsPerUnit = 32;

// A core addresses its unified buffer in data blocks.
constexpr int64_t kDataBlockBytes = 32;
// The smallest unified buffer of the supported devices (Atlas A2 and A3).
constexpr int64_t kUnifiedBufferBytes = 192 * 1024;
// DataCopyPad has 21 bits for a block's length.
constexpr int64_t kMaxBlockBytes = 2097151;

static_assert(kTileBytes > 0, "a unit must move something");
static_assert(kTileBytes % kDataBlockBytes == 0, "tiles begin on a data block");
static_assert(kTileBytes <= kMaxBlockBytes, "one instruction moves a whole tile");
static_assert(kTilesInFlight * kTileBytes <= kUnifiedBufferBytes, "tiles must fit the buffer");

enum HeaderColumn : int64_t {
  kHeaderNumTasks = 0,
  kHeaderNumUnits = 1,
  kHeaderDirection = 2,
  kHeaderColumns = 3,
};

enum TaskColumn : int64_t {
  kTaskFirstUnit = 0,     // ascending from task to task
  kTaskFirstRun = 1,      // the plane's group's runs
  kTaskNumRuns = 2,
  kTaskRunsPerUnit = 3,   // 1 to kMaxRunsPerUnit; more than 1 only where kTaskTilesPerRun is 1
  kTaskTilesPerRun = 4,   // of the longest run: shorter ones leave units without work
  kTaskPageAddress = 5,   // of row 0 of page 0
  kTaskPageStride = 6,
  kTaskRowBytes = 7,
  kTaskHostAddress = 8,   // of host row 0, as the device sees it
  kTaskColumns = 9,
};

enum RunColumn : int64_t {
  kRunPage = 0,
  kRunFirstRow = 1,
  kRunNumRows = 2,
  kRunHostRow = 3,
  kRunColumns = 4,
};

constexpr int64_t kPagesToHost = 0;

}  // namespace kvext
