// SPDX-License-Identifier: Apache-2.0
// What one request has cached, and what is to be cached of it: the work of every step.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "retained_cache.h"

namespace kvext::retention {

/// A boundary of a request whose checkpoint is to outlive it.
struct PlannedBoundary {
  std::int64_t boundary_tokens;
  Reason reason;
};

/// One request. Everything that takes the `retention` asks it for what only Python can do: see
/// `vllm_ascend_kvext.retention.checkpoint_retention.CheckpointRetention`.
class RetainedRequest {
 public:
  RetainedRequest(RetainedCache& cache, nb::object request);

  /// The request has got blocks, of which upstream says how many are cached.
  /// @return the tokens that it need not compute
  std::int64_t admit(nb::handle key_table);

  /// Per full-attention group, up to which token a prompt is cached. It is so from the first block
  /// on: takes time that grows with the logarithm of the prompt's length.
  std::vector<std::int64_t> find_shared(nb::handle key_table, std::int64_t hit_tokens,
                                        std::int64_t num_prompt_tokens) const;

  /// The longest boundary of its prompt, in tokens, whose checkpoint was evicted; 0 if none.
  std::int64_t find_evicted(std::int64_t after_tokens, std::int64_t upto_tokens) const;

  /// It would have resumed at a boundary that is gone.
  void want(std::int64_t boundary_tokens);

  /// @param plan  sorted by tokens
  /// @param stops_tokens  boundaries at which a prefill step is to end, ascending
  void set_plan(std::vector<PlannedBoundary> plan, std::vector<std::int64_t> stops_tokens,
                std::int64_t replay_tokens);

  /// Caches what is worth it once tokens are scheduled; see `CheckpointRetention.cache`.
  void cache(nb::handle retention, std::int64_t num_computed_tokens);

  /// Holds on to blocks that are about to leave a window although the next checkpoint needs them.
  ///
  /// A boundary opens only when every group that looks ahead has its block past it, and the latest
  /// one stays where a preempted request resumes. By then the first blocks of a tail may have left
  /// the window.
  /// @return the computed tokens up to which windows may move on
  std::int64_t before_skip(nb::handle retention, std::int64_t total_tokens, bool is_settled);

  /// Settles what the request leaves behind; its blocks are not freed yet.
  /// @param computed_tokens  what it really computed
  /// @param own_tokens  as far as who comes back reads
  void release(nb::handle retention, std::int64_t computed_tokens, std::int64_t own_tokens);

  bool holds_blocks = false;            // false while it is preempted
  std::int64_t boundary_tokens = 0;     // the latest boundary that it has passed
  std::int64_t next_event_tokens = 0;   // tokens to cache at which there is something to do
  std::int64_t cached_tokens = 0;       // what the scheduler has asked to cache

  /// The next boundary at which a prefill step is to end, so that a state is left there.
  std::optional<std::int64_t> next_stop_tokens(std::int64_t computed_tokens) const;

  /// Blocks that have left the window and that a coming checkpoint needs.
  BlockIds held_blocks() const;

  const RetainedCache& cache_of() const { return cache_; }
  nb::handle request() const { return request_; }

 private:
  struct Held {
    BlockId id;
    std::uint32_t need;  // see `CheckpointTree::need`
  };
  struct Progress {
    std::int64_t next_block = 0;  // the first that is not seen to
    Range behind_hit;             // read by the lookup and dropped from the hit: cached already
    std::map<std::int64_t, Held> left;  // have left the window, by index
  };
  class Prefix;  // the request's blocks as `CheckpointTree` asks for them

  PyObject* table(const Group& group) const;
  nb::list hashes() const;
  std::int64_t num_cached_blocks(const Group& group) const;
  void set_num_cached_blocks(const Group& group, std::int64_t num_blocks);
  void cache_sparse_groups(nb::handle retention, const KeyTable& keys);
  void cache_run(const Group& group, const KeyTable& keys, PyObject* blocks, Range run,
                 Range behind_hit);
  /// Blocks of a run that hold content and are not cached: index, block, key. What the lookup read
  /// behind its hit is left to the block that it read.
  template <typename Visit>
  void for_each_uncached(const Group& group, const KeyTable& keys, PyObject* blocks, Range run,
                         Range behind_hit, Visit visit) const;
  void cache_full_groups(nb::handle retention, const KeyTable& keys, std::int64_t upto_tokens);
  void pass_boundaries(nb::handle retention, const KeyTable& keys, std::int64_t reach_tokens,
                       bool is_last);
  std::vector<PlannedBoundary> lasting_boundaries(std::int64_t after_tokens,
                                                  std::int64_t upto_tokens);
  std::shared_ptr<Checkpoint> keep(const Prefix& prefix, std::int64_t tokens, Reason reason);
  void move(std::shared_ptr<Checkpoint> node);
  bool has_states(std::int64_t tokens) const;
  void hold(std::size_t group, Range run, std::int64_t skipped_tokens);
  void let_go(std::int64_t before_tokens);
  void uncache_unreachable(nb::handle retention);
  void forget_uncomputed(std::int64_t computed_tokens);
  std::int64_t find_next_event() const;

  RetainedCache& cache_;
  nb::object request_, request_id_;
  std::vector<Progress> groups_;  // per sparse group
  std::vector<PlannedBoundary> plan_;
  std::vector<std::int64_t> stops_tokens_;
  std::int64_t replay_tokens_ = 0;
  std::shared_ptr<Checkpoint> last_;  // that it has resumed from or passed
  std::vector<std::shared_ptr<Checkpoint>> supplied_;  // that consist of its blocks
};

}  // namespace kvext::retention
