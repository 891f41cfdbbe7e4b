// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// A validated transfer. The backends move bytes only for a validated transfer.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kvext/descriptors.h"

namespace kvext {

// The message begins with <table>[<row>].<column>, and names what was expected, what was found and
// the remedy.
class DescriptorError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The planes and the runs that share a group number.
struct Group {
  int64_t number;
  int64_t first_plane;  // place in CheckedTransfer::plane_order
  int64_t num_planes = 0;
  int64_t first_run = 0;
  int64_t num_runs = 0;
  int64_t num_rows = 0;       // rows of all runs
  int64_t host_rows_end = 0;  // end of the last host row of any run
};

// Refers to the tables that it was made from. The tables must outlive it and must not change.
class CheckedTransfer {
 public:
  // Throws DescriptorError; changes nothing but its own memory.
  explicit CheckedTransfer(const Transfer& transfer);

  const Transfer& transfer() const { return transfer_; }
  // The groups that have runs, in ascending order of their numbers.
  const std::vector<Group>& groups() const { return groups_; }
  // Rows of Transfer::planes, sorted by group, ascending within each group.
  const std::vector<int64_t>& plane_order() const { return plane_order_; }
  // Bytes that the transfer moves.
  int64_t num_bytes() const { return num_bytes_; }
  // Sum over all groups: runs of the group times planes of the group.
  int64_t num_plane_runs() const { return num_plane_runs_; }

 private:
  Transfer transfer_;
  std::vector<int64_t> plane_order_;
  std::vector<Group> groups_;
  int64_t num_bytes_ = 0;
  int64_t num_plane_runs_ = 0;
};

}  // namespace kvext
