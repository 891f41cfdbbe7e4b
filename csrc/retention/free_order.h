// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The order in which free blocks are reallocated.
//
// vLLM keeps free blocks in a doubly linked queue and reallocates blocks from its front. Here the
// queue has two parts. Blocks that no checkpoint needs come first, uncached blocks before cached
// blocks:
//
//   front   □ □ □   ▨ ▨ ▨ ▨   ■ ■ ■ ■ ■ ■   back
//           not     surplus   needed by checkpoints
//           cached         ↑
//                          a freed block that nothing needs is inserted here
//
// Surplus blocks can be hit as long as they are cached. They are in the order in which they were
// freed.
#pragma once

#include <deque>

#include "blocks.h"

namespace kvext::retention {

/// needs[id]: the number of runs and tails of checkpoints that contain the block.
class BlockNeeds {
 public:
  explicit BlockNeeds(std::size_t num_blocks) : counts_(num_blocks, 0) {}

  std::int32_t operator[](BlockId id) const { return counts_[static_cast<std::size_t>(id)]; }
  std::int32_t& operator[](BlockId id) { return counts_[static_cast<std::size_t>(id)]; }
  void clear() { counts_.assign(counts_.size(), 0); }

  /// Number of blocks of a tail; a block counts as 1/n if n runs and tails contain it. If shared
  /// blocks were not counted at all, neighbours with overlapping windows would each seem to cost
  /// nothing, although together they cost a window.
  double share(const BlockIds& ids) const;

 private:
  std::vector<std::int32_t> counts_;
};

/// Keeps the queue of one pool in the order of its parts. It moves blocks only within the queue,
/// never into the queue or out of it. On average over many calls, a call takes time in proportion
/// to the blocks that it is given or asked for. Entries of blocks that have left the surplus are
/// visited at most twice per insertion.
class FreeOrder {
 public:
  /// @param head, tail  the sentinels at both ends of the queue, which are no real blocks
  FreeOrder(const Blocks& blocks, const BlockNeeds& needs, nb::object head, nb::object tail);

  nb::handle head() const { return head_; }
  nb::handle tail() const { return tail_; }

  /// Call it when no block is cached and none is needed.
  void clear();

  /// The number of consecutive blocks at the front of the queue that nothing needs, at most
  /// `limit`. An uncached block counts as not needed, because no hit can read it.
  std::int64_t count_next(std::int64_t limit) const;

  /// The next blocks to be reallocated.
  BlockIds next_blocks(std::int64_t limit) const;

  /// These blocks have just been freed, and are the last of the queue, in this order. Nothing needs
  /// them.
  void note_appended(const BlockIds& ids);

  /// These uncached blocks have just been freed, and are the first of the queue, in this order.
  void note_prepended(const BlockIds& ids);

  /// Nothing needs these blocks any more. Blocks that are not free do not move.
  void move_to_surplus(const BlockIds& ids);

  /// A checkpoint now needs these blocks. Blocks that are not free do not move.
  void move_to_back(const BlockIds& ids);

 private:
  /// A block, and the stamp that the block must have for the entry to be valid.
  struct Entry {
    BlockId id;
    std::uint32_t stamp;
  };

  bool holds(const Entry& entry, bool is_cached) const;
  PyObject* last_of_surplus();
  void take_out(PyObject* block) const;
  void link_behind(PyObject* before, PyObject* first, PyObject* last) const;
  /// Appends linked blocks to the surplus.
  void insert(const BlockIds& chain);

  const Blocks& blocks_;
  const BlockFields& fields_;
  const BlockNeeds& needs_;
  nb::object head_, tail_;
  std::vector<std::uint32_t> stamps_;  // stamps_[id]: how often the block was put into a part
  std::deque<Entry> uncached_, surplus_;  // both in the order of the queue
};

}  // namespace kvext::retention
