// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The only table that the kernel reads. It describes a transfer in a form that a core can walk
// without searching. vllm_ascend_kvext/transfer/ascend/work_table.py writes it. This header is
// compiled for cores and for the host, so it contains only constants.
//
//   header | tasks | runs                                    all int64
//
// A task is the work of one plane. The work is cut into units, which are numbered through all
// tasks. A unit is a tile of one run, or several whole runs that fit into one tile. Core i moves
// units i, i + cores, ...
#pragma once

#include <cstdint>

namespace kvext {

// Bytes of a tile. A core's unified buffer has two tiles: one is filled while the other is emptied.
constexpr int64_t kTileBytes = 32 * 1024;
constexpr int32_t kTilesInFlight = 2;
constexpr int64_t kMaxRunsPerUnit = 32;

// A core addresses its unified buffer in data blocks.
constexpr int64_t kDataBlockBytes = 32;
// The smallest unified buffer of the supported devices (Atlas A2 and A3).
constexpr int64_t kUnifiedBufferBytes = 192 * 1024;
// DataCopyPad has 21 bits for the length of a block.
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
  kTaskFirstUnit = 0,     // ascending through the tasks
  kTaskFirstRun = 1,      // the first of the runs of the plane's group
  kTaskNumRuns = 2,
  kTaskRunsPerUnit = 3,   // 1 to kMaxRunsPerUnit; more than 1 only if kTaskTilesPerRun is 1
  kTaskTilesPerRun = 4,   // tiles of the longest run; units of shorter runs may have no work
  kTaskPageAddress = 5,   // address of row 0 of page 0
  kTaskPageStride = 6,
  kTaskRowBytes = 7,
  kTaskHostAddress = 8,   // address of host row 0, as the device sees it
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
