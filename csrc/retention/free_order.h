// SPDX-License-Identifier: Apache-2.0
// The order in which free blocks are reallocated.
//
// Upstream keeps free blocks in a doubly linked queue and reallocates from its front. Here the queue
// has two parts. Blocks that no checkpoint needs come first, uncached blocks before cached ones:
//
//   front   □ □ □   ▨ ▨ ▨ ▨   ■ ■ ■ ■ ■ ■   back
//           not     surplus   needed by checkpoints
//           cached         ↑
//                          a freed block that nothing needs is inserted here
//
// The surplus can be hit for as long as it is there, and is in the order in which it was freed.
#pragma once

#include <deque>

#include "blocks.h"

namespace kvext::retention {

/// By block id, how many runs and tails of checkpoints a block is part of.
class BlockNeeds {
 public:
  explicit BlockNeeds(std::size_t num_blocks) : counts_(num_blocks, 0) {}

  std::int32_t operator[](BlockId id) const { return counts_[static_cast<std::size_t>(id)]; }
  std::int32_t& operator[](BlockId id) { return counts_[static_cast<std::size_t>(id)]; }
  void clear() { counts_.assign(counts_.size(), 0); }

  /// Blocks of a tail, each divided among those that need it. Were a block that others need counted
  /// for none of them, neighbours whose windows overlap would each seem to cost nothing, and cost a
  /// window together.
  double share(const BlockIds& ids) const;

 private:
  std::vector<std::int32_t> counts_;
};

/// Keeps the queue of one pool in its parts. Moves blocks within the queue, and never into it or
/// out of it. Every call takes time in proportion to the blocks that it is given, or is asked for,
/// over many calls: entries of blocks that have left the surplus are met at most twice for each
/// time that they were put in.
class FreeOrder {
 public:
  /// @param head, tail  the ends of the queue, which are no real blocks
  FreeOrder(const Blocks& blocks, const BlockNeeds& needs, nb::object head, nb::object tail);

  nb::handle head() const { return head_; }
  nb::handle tail() const { return tail_; }

  /// Nothing is cached, and nothing needed.
  void clear();

  /// How many of the next `limit` blocks to be reallocated nothing needs, in a row. A block that is
  /// not cached counts as one of them, for no hit can read it.
  std::int64_t count_next(std::int64_t limit) const;

  /// The next blocks to be reallocated.
  BlockIds next_blocks(std::int64_t limit) const;

  /// The last blocks of the queue, in this order, have just been freed; nothing needs them.
  void note_appended(const BlockIds& ids);

  /// The first blocks of the queue, in this order, are not cached and have just been freed.
  void note_prepended(const BlockIds& ids);

  /// Nothing needs these blocks any more; blocks that are not free are left alone.
  void move_to_surplus(const BlockIds& ids);

  /// A checkpoint has come to need these blocks; blocks that are not free are left alone.
  void move_to_back(const BlockIds& ids);

 private:
  /// A block, and what has to be its stamp for the entry to hold.
  struct Entry {
    BlockId id;
    std::uint32_t stamp;
  };

  bool holds(const Entry& entry, bool is_cached) const;
  PyObject* last_of_surplus();
  void take_out(PyObject* block) const;
  void link_behind(PyObject* before, PyObject* first, PyObject* last) const;
  /// Makes blocks that are linked to each other the last ones of the surplus.
  void insert(const BlockIds& chain);

  const Blocks& blocks_;
  const BlockFields& fields_;
  const BlockNeeds& needs_;
  nb::object head_, tail_;
  std::vector<std::uint32_t> stamps_;  // by id: how often a block was put into one of the parts
  std::deque<Entry> uncached_, surplus_;  // both in the order of the queue
};

}  // namespace kvext::retention
