// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The checkpoints of one prefix cache, as a tree of prefixes.
//
// A boundary has runs: the full-attention blocks between its parent's boundary and its own. A
// boundary from which a request can resume also has a tail: the blocks of the sparse groups that a
// hit reads.
//
//   root ───── 400 ────┬──── 900 [tail]       runs of 900: full-attention blocks 400 to 900
//                      └──── 720 [tail]       400 has no tail: two prompts part ways there
//
// Full-attention blocks are given up with the last checkpoint that needs them, and never before.
// Blocks that no checkpoint needs stay cached as surplus, and are reallocated first.
//
// The cost of a call depends on the number of blocks of the boundary in question. It does not
// depend on the number of other boundaries.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "eviction_order.h"
#include "free_order.h"
#include "use_rates.h"

namespace kvext::retention {

/// runs[n]: the consecutive blocks of full-attention group n for one range of tokens.
using Runs = std::vector<BlockIds>;

/// A boundary that one or more prompts share.
struct Checkpoint {
  Checkpoint() = default;
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;
  ~Checkpoint();

  std::string key;  // chained hash of the prefix that ends here
  std::int64_t boundary_tokens = 0;
  std::shared_ptr<Checkpoint> parent;  // the boundary before this one; null for the empty prefix
  std::vector<Checkpoint*> children;
  std::size_t place_among_children = 0;
  Runs runs;
  /// The blocks that a hit here reads: blocks of the sparse groups, and full-attention blocks past
  /// the boundary. The tail is empty if no request can resume here, because prompts merely differ
  /// from here on.
  BlockIds tail;
  /// tail_keys[n]: the key of tail[n] when it was taken. If a block has another key now, it holds
  /// other tokens.
  std::vector<nb::object> tail_keys;
  std::size_t num_ahead = 0;      // how many blocks at the end of `tail` lie past the boundary
  std::int64_t num_requests = 0;  // running requests whose latest boundary this is
  Origin origin = Origin::kLatest;  // the first reason to create it
  Reason reason;                  // why it is kept
  double clock_pools = 0;         // clock at the last use
  int seen_ages = 0;              // see `UseRates::note_age`
  bool is_in_tree = true;
  EvictionOrder::Place place;

  bool is_root() const { return !parent; }
  bool has_tail() const { return !tail.empty(); }
};

/// The cached blocks of one request's prefixes.
class PrefixBlocks {
 public:
  virtual ~PrefixBlocks() = default;

  /// The chained hash of the first `num_tokens` tokens.
  virtual std::string key(std::int64_t num_tokens) const = 0;

  /// Ids of cached blocks with the same content as block `block_index` of the first full-attention
  /// group. Their number is bounded.
  virtual BlockIds copies(std::int64_t block_index) const = 0;

  /// The full-attention blocks of a range of tokens; nothing if one of them is not cached.
  virtual std::optional<Runs> runs(std::int64_t start_tokens, std::int64_t stop_tokens) const = 0;
};

/// The counters of `CheckpointTree`, for `vllm_ascend_kvext.retention.stats.RetentionStats`.
struct CheckpointCounts {
  std::int64_t checkpoints = 0;
  std::int64_t checkpoints_kept = 0;
  std::int64_t checkpoints_evicted = 0;
  std::int64_t junctions_hit = 0;
};

/// All checkpoints of one block pool.
class CheckpointTree {
 public:
  /// @param block_tokens  tokens per block of each full-attention group
  /// @param unit_tokens  every boundary is a multiple of this
  /// @param hits_inside_blocks  whether boundaries may lie inside blocks
  CheckpointTree(const Blocks& blocks, nb::object head, nb::object tail,
                 std::vector<std::int64_t> block_tokens, std::int64_t unit_tokens,
                 bool hits_inside_blocks);

  /// Removes all checkpoints. The pool has uncached all blocks, and no request holds a block.
  void clear();

  // Calls about requests:

  /// The boundary with this key; null if there is none.
  std::shared_ptr<Checkpoint> find(const std::string& key) const;

  /// Whether a request can resume from a boundary. The boundary then has a tail whose blocks still
  /// hold the tail's tokens. A connector may have uncached some of these blocks, and then the pool
  /// may have reallocated them.
  bool has_whole_tail(const Checkpoint& node) const;

  /// A request resumes here.
  void use(Checkpoint& node);

  /// A request would have resumed at a boundary whose checkpoint was evicted.
  void want(const std::string& key);

  /// Keeps a boundary that a running request has just passed, or hit.
  ///
  /// @param tail  the request's cached blocks of the sparse groups that a hit at the boundary reads
  /// @param ahead  the request's cached full-attention blocks past the boundary that a hit reads
  /// @param reason  why the boundary is kept; a boundary that has been used keeps its own reason
  /// @param before  an earlier boundary on the request's path, or null. It is read only if there is
  ///   no full-attention group: then the blocks do not tell the order of boundaries.
  /// @return null if full-attention blocks before the boundary are not cached
  std::shared_ptr<Checkpoint> add(const PrefixBlocks& prefix, std::int64_t boundary_tokens,
                                  BlockIds tail, const BlockIds& ahead, const Reason& reason,
                                  const std::shared_ptr<Checkpoint>& before);

  /// A request takes back a checkpoint, because it did not compute the checkpoint's tokens after
  /// all.
  void remove(Checkpoint& node);

  /// A running request needs a block that it is about to free.
  /// @return the number to pass to `is_counted`
  std::uint32_t need(BlockId id) {
    ++needs_[id];
    return overruled_[static_cast<std::size_t>(id)];
  }

  /// Whether a need still counts: `make_room` overrules needs if no other block is left.
  bool is_counted(BlockId id, std::uint32_t need) const {
    return overruled_[static_cast<std::size_t>(id)] == need;
  }

  /// Running requests no longer need these blocks. Call it once for each call of `need` that still
  /// counts.
  void release(const BlockIds& ids);

  /// If a block is surplus, moves it behind the other surplus blocks, so that these are reallocated
  /// first.
  void refresh(BlockId id);

  // Calls about the pool:

  /// Evicts checkpoints until nothing needs the next `num_blocks` blocks to be reallocated. The
  /// time is proportional to `num_blocks` and to the blocks of the evicted checkpoints.
  void make_room(std::int64_t num_blocks);

  /// The pool has just freed these uncached blocks; they are the first of the queue, in this order.
  /// They are reallocated first, even if a checkpoint still needs one of them. A connector has
  /// uncached such a block.
  void note_uncached(const BlockIds& ids);

  FreeOrder& free_order() { return free_order_; }
  const FreeOrder& free_order() const { return free_order_; }
  const BlockNeeds& needs() const { return needs_; }
  UseRates& rates() { return rates_; }
  bool hits_inside_blocks() const { return hits_inside_blocks_; }
  /// Why a checkpoint is kept, and how many paths go on from it.
  Reason judged(const Checkpoint& node) const;
  const EvictedPrefixes& evicted() const { return evicted_; }
  const CheckpointCounts& counts() const { return counts_; }
  const EvictionOrder& order() const { return order_; }
  const std::unordered_map<std::string, std::shared_ptr<Checkpoint>>& nodes() const {
    return nodes_;
  }

 private:
  friend class EvictionOrder;

  std::size_t evict(Checkpoint& node);
  std::shared_ptr<Checkpoint> insert(const PrefixBlocks& prefix, const std::string& key,
                                     std::int64_t boundary_tokens, const Reason& reason,
                                     const std::shared_ptr<Checkpoint>& before);
  /// The last boundary in whose runs the path is known, and the number of tokens up to which the
  /// path is known.
  std::pair<std::shared_ptr<Checkpoint>, std::int64_t> find_deepest(
      const PrefixBlocks& prefix, std::int64_t upto_tokens) const;
  Checkpoint* find_owner(const PrefixBlocks& prefix, std::int64_t block_index) const;
  std::shared_ptr<Checkpoint> split(Checkpoint& node, std::string key,
                                    std::int64_t boundary_tokens);
  std::size_t remove_unneeded(std::shared_ptr<Checkpoint> node);
  void join_child(Checkpoint& node);
  void take_tail(Checkpoint& node, BlockIds tail, const BlockIds& ahead);
  void extend_tail(Checkpoint& node, const BlockIds& ids);
  void take_ahead(Checkpoint& node, const BlockIds& ahead);
  std::size_t give_up_tail(Checkpoint& node);
  void need_all(const BlockIds& ids);
  std::size_t give_up(const BlockIds& ids);
  void own(const BlockIds& ids, Checkpoint* node);
  void disown(const BlockIds& ids, const Checkpoint* node);
  /// The time is proportional to the number of blocks between two boundaries of a path.
  void mend(Checkpoint& node, const PrefixBlocks& prefix, std::int64_t after_tokens);
  void add_child(Checkpoint& parent, Checkpoint& child);
  void remove_child(Checkpoint& parent, Checkpoint& child);
  /// The number of paths that go on from a checkpoint is about to change.
  void note_age(Checkpoint& node);
  std::shared_ptr<Checkpoint> shared(const Checkpoint& node) const;

  const Blocks& blocks_;
  std::vector<std::int64_t> block_tokens_;
  std::int64_t unit_tokens_;
  bool hits_inside_blocks_;
  BlockNeeds needs_;
  std::vector<std::uint32_t> overruled_;  // [id]: how often its needs were overruled
  FreeOrder free_order_;
  UseRates rates_;
  EvictionOrder order_;
  EvictedPrefixes evicted_;
  std::shared_ptr<Checkpoint> root_;
  std::unordered_map<std::string, std::shared_ptr<Checkpoint>> nodes_;
  // owners_[id], for blocks of the first full-attention group: the boundary that has the block in
  // its run.
  std::vector<Checkpoint*> owners_;
  CheckpointCounts counts_;
};

/// The nearest boundary with a tail: the given boundary, or one of its ancestors. After a bounded
/// number of ancestors without a tail, any ancestor.
std::shared_ptr<Checkpoint> nearest_with_tail(const std::shared_ptr<Checkpoint>& node);

}  // namespace kvext::retention
