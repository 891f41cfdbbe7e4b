// SPDX-License-Identifier: Apache-2.0
// The checkpoints of one prefix cache, as a tree of prefixes.
//
// A boundary has the full-attention blocks between its parent's boundary and its own (its runs),
// and, if it can be resumed from, the blocks of the sparse groups that a hit reads (its tail):
//
//   root ───── 400 ────┬──── 900 [tail]       runs of 900: full-attention blocks 400 to 900
//                      └──── 720 [tail]       400 has no tail: two prompts part ways there
//
// Full-attention blocks go with the last checkpoint that needs them, and never before it. Blocks that
// no checkpoint needs stay cached as surplus, and are reallocated first.
//
// The cost of a call depends on the blocks of the boundary that it is about, and not on how many
// other boundaries there are.
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

/// Consecutive blocks of one stretch of tokens: one list per full-attention group.
using Runs = std::vector<BlockIds>;

/// A boundary of some prompts.
struct Checkpoint {
  Checkpoint() = default;
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;
  ~Checkpoint();

  std::string key;  // chained hash of the prefix
  std::int64_t boundary_tokens = 0;
  std::shared_ptr<Checkpoint> parent;  // the boundary before it; none for the empty prefix
  std::vector<Checkpoint*> children;
  std::size_t place_among_children = 0;
  Runs runs;
  /// Blocks of the sparse groups, and full-attention blocks past the boundary, that a hit reads;
  /// empty if nothing can resume here and prompts merely part ways.
  BlockIds tail;
  /// The key of each block of the tail when it was taken: a block with another key holds other tokens.
  std::vector<nb::object> tail_keys;
  std::size_t num_ahead = 0;      // how many of the tail are past it, in full-attention groups
  std::int64_t num_requests = 0;  // running ones that resumed here, or passed here last
  Origin origin = Origin::kLatest;  // what suggested it at first
  Reason reason;                  // why it is kept
  double clock_pools = 0;         // when it was last of use
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

  /// The chained hash of the first tokens.
  virtual std::string key(std::int64_t num_tokens) const = 0;

  /// Ids of cached blocks that hold what a block of the first full-attention group does; a bounded
  /// number of them.
  virtual BlockIds copies(std::int64_t block_index) const = 0;

  /// The full-attention blocks of a stretch of tokens; nothing if one is not cached.
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
  /// @param unit_tokens  every boundary is a multiple of it
  CheckpointTree(const Blocks& blocks, nb::object head, nb::object tail,
                 std::vector<std::int64_t> block_tokens, std::int64_t unit_tokens);

  /// Forgets everything; the pool has uncached all blocks, and no request holds one.
  void clear();

  // Requests report:

  /// The boundary with a key; none if there is none.
  std::shared_ptr<Checkpoint> find(const std::string& key) const;

  /// Whether a boundary can be resumed from: it has a tail, and the blocks hold what they held. A
  /// connector may have uncached some, and they have been reallocated then.
  bool has_whole_tail(const Checkpoint& node) const;

  /// A request resumes here.
  void use(Checkpoint& node);

  /// A request would have resumed at a boundary that is gone.
  void want(const std::string& key);

  /// Keeps a boundary that a running request has just passed, or hit.
  ///
  /// @param tail  its cached blocks of the sparse groups
  /// @param ahead  its cached full-attention blocks past the boundary that a hit reads
  /// @param reason  why it is kept; a known boundary that has been used keeps its own reason
  /// @param before  a boundary below it on the request's path, or none. It is read only where there
  ///   is no full attention: nothing else tells then which boundary lies behind which.
  /// @return none if full-attention blocks that lead there are not cached
  std::shared_ptr<Checkpoint> add(const PrefixBlocks& prefix, std::int64_t boundary_tokens,
                                  BlockIds tail, const BlockIds& ahead, const Reason& reason,
                                  const std::shared_ptr<Checkpoint>& before);

  /// A request takes back a checkpoint, whose tokens it did not compute after all.
  void remove(Checkpoint& node);

  /// A running request needs a block that it is about to free.
  /// @return the need, for `is_counted`
  std::uint32_t need(BlockId id) {
    ++needs_[id];
    return overruled_[static_cast<std::size_t>(id)];
  }

  /// Whether a need is counted still: where nothing else is left, `make_room` overrules it.
  bool is_counted(BlockId id, std::uint32_t need) const {
    return overruled_[static_cast<std::size_t>(id)] == need;
  }

  /// A running request needs these no more, once for each call of `need` that is counted still.
  void release(const BlockIds& ids);

  /// If a block is surplus, makes it the last of the surplus to be reallocated.
  void refresh(BlockId id);

  // The pool reports:

  /// Evicts checkpoints until nothing needs the next blocks to be reallocated. Takes time in
  /// proportion to `num_blocks` and to the blocks of the evicted checkpoints.
  void make_room(std::int64_t num_blocks);

  /// The first blocks of the queue, in this order, are not cached and have just been freed. They are
  /// reallocated first, even a block that a checkpoint still needs: a connector has uncached it.
  void note_uncached(const BlockIds& ids);

  FreeOrder& free_order() { return free_order_; }
  const FreeOrder& free_order() const { return free_order_; }
  const BlockNeeds& needs() const { return needs_; }
  UseRates& rates() { return rates_; }
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
  /// The last boundary in whose runs a path is known, and up to which token it is.
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
  /// Takes time in proportion to the blocks between two boundaries of a path.
  void mend(Checkpoint& node, const PrefixBlocks& prefix, std::int64_t after_tokens);
  void add_child(Checkpoint& parent, Checkpoint& child);
  void remove_child(Checkpoint& parent, Checkpoint& child);
  std::shared_ptr<Checkpoint> shared(const Checkpoint& node) const;

  const Blocks& blocks_;
  std::vector<std::int64_t> block_tokens_;
  std::int64_t unit_tokens_;
  BlockNeeds needs_;
  std::vector<std::uint32_t> overruled_;  // by id: how often running requests' needs were
  FreeOrder free_order_;
  UseRates rates_;
  EvictionOrder order_;
  EvictedPrefixes evicted_;
  std::shared_ptr<Checkpoint> root_;
  std::unordered_map<std::string, std::shared_ptr<Checkpoint>> nodes_;
  // By id of a block of the first full-attention group: the boundary whose run it is in.
  std::vector<Checkpoint*> owners_;
  CheckpointCounts counts_;
};

/// A boundary or its nearest ancestor with a tail; after a bounded number of others, any ancestor.
std::shared_ptr<Checkpoint> nearest_with_tail(const std::shared_ptr<Checkpoint>& node);

}  // namespace kvext::retention
