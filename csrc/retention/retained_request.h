// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The blocks that one request has cached, and the blocks that are to be cached: the work of every
// step.
//
// A step has three parts. First, the request answers which runs of blocks are to be cached. Second,
// Python has them cached. Third, the request settles the step: it keeps the boundaries that are now
// complete. If Python did not carry out a step, nothing of it is settled, and the step is begun
// again.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "boundaries.h"
#include "retained_cache.h"

namespace kvext::retention {

/// Blocks of one group that are to be cached, by their index in the request's block table.
struct GroupRun {
  std::size_t group;  // see `RetainedCache::group`
  Range blocks;
};

/// A boundary at some distance before the end of a prompt.
struct Rung {
  std::int64_t boundary_tokens;
  std::int32_t step;  // number of the rung, counted from the prompt's end
};

class RetainedRequest {
 public:
  RetainedRequest(RetainedCache& cache, nb::object request);

  /// The request has got blocks; vLLM says how many of them are cached.
  /// @param inner_tokens  the tokens of its hit, if the hit may end inside a block; else 0
  /// @return the number of tokens that the request need not compute
  std::int64_t admit(nb::handle key_table, std::int64_t inner_tokens);

  /// Keeps a boundary inside a block. The blocks that a hit there reads are cached up to it.
  /// @param full_tokens  for each full-attention group, the tokens that must be cached for the hit
  /// @return whether all of these blocks are cached
  bool keep_inside(nb::handle key_table, std::int64_t tokens, Reason reason,
                   const std::vector<std::int64_t>& full_tokens);

  /// For each full-attention group, the number of tokens up to which the prompt is cached. A prompt
  /// is cached from its first block on, without gaps. So the time grows only with the logarithm of
  /// the prompt's length, and with the number of places inside a block where a hit may end.
  std::vector<std::int64_t> find_shared(nb::handle key_table, std::int64_t hit_tokens,
                                        std::int64_t num_prompt_tokens) const;

  /// The longest boundary of the prompt, in tokens, whose checkpoint was evicted; 0 if there is
  /// none.
  std::int64_t find_evicted(std::int64_t after_tokens, std::int64_t upto_tokens) const;

  /// Plans the boundaries of an admitted request. If the request would have resumed at a planned
  /// boundary whose checkpoint is gone, this is counted (`Origin::kWanted`).
  /// @param plan  ascending; boundaries inside blocks are left to `keep_inside`
  /// @param rungs  boundaries that no request asked for, the nearest to the prompt's end first; a
  ///   rung is planned if rungs turn out useful, and if nothing else is planned at its place
  /// @param stops_tokens  boundaries at which a prefill step is to end, ascending
  /// @param replay_tokens  where a request with the same prompt resumes
  void plan(std::vector<PlannedBoundary> plan, const std::vector<Rung>& rungs,
            std::vector<std::int64_t> stops_tokens, std::int64_t replay_tokens);

  /// Begins a step: answers which runs are to be cached once tokens are scheduled, in the order of
  /// caching.
  ///
  /// The blocks of a run are full and not cached. Full-attention groups with another manager than
  /// vLLM's are an exception: that manager itself finds out which blocks are cached.
  /// @param num_tokens  tokens of the request, including its answer
  /// @return the runs of groups that are not quiet, for vLLM's functions; runs of quiet groups are
  ///   left to `cache_quiet_runs`. Returns nothing before `next_event_tokens`.
  std::optional<std::vector<GroupRun>> begin_step(nb::handle key_table,
                                                  std::int64_t num_computed_tokens,
                                                  std::int64_t num_tokens);

  /// Begins the last step of a request that is finished or preempted.
  /// @param computed_tokens  the tokens that the request really computed
  /// @param own_tokens  the tokens that a later request reads if it extends or resumes this request
  /// @return nothing if the request holds no blocks
  std::optional<std::vector<GroupRun>> begin_last_step(nb::handle key_table,
                                                       std::int64_t computed_tokens,
                                                       std::int64_t own_tokens);

  /// Caches the runs of quiet groups of the step that was begun last.
  void cache_quiet_runs(nb::handle key_table);

  /// Settles the step that was begun last.
  /// @throws std::logic_error if runs of quiet groups are not cached yet
  void end_step(nb::handle key_table);

  /// Settles the last step, before the request's blocks are freed.
  /// @return the blocks to be uncached, because no lookup reaches them
  nb::list end_last_step(nb::handle key_table);

  /// Holds blocks that are about to leave a window although the next checkpoint needs them.
  ///
  /// A boundary opens (a lookup can hit it) only when every group that looks ahead has its block
  /// past the boundary. Until then, the latest open boundary is where a preempted request resumes.
  /// Meanwhile the first blocks of a tail may leave the window.
  /// @param is_settled  whether the count already excludes tokens of steps in flight
  /// @param skipped_tokens  [n]: number of first tokens that sparse group n no longer reads; empty
  ///   if all managers are vLLM's
  /// @return the number of computed tokens up to which windows may move on
  std::int64_t before_skip(std::int64_t total_tokens, bool is_settled,
                           const std::vector<std::int64_t>& skipped_tokens);

  /// The computed tokens. Tokens of steps in flight are left out, because they may be rejected.
  std::int64_t settled_tokens(std::int64_t total_tokens) const;

  bool holds_blocks = false;            // false while the request is preempted
  std::int64_t boundary_tokens = 0;     // the latest boundary that the request has passed
  std::int64_t next_event_tokens = 0;   // number of tokens to cache at which the next work is due
  std::int64_t cached_tokens = 0;       // number of tokens that the scheduler has asked to cache

  /// The next boundary at which a prefill step should end, so that a state is left there.
  std::optional<std::int64_t> next_stop_tokens(std::int64_t computed_tokens) const;

  /// Blocks that have left the window and that a later checkpoint needs.
  BlockIds held_blocks() const;

  const RetainedCache& cache_of() const { return cache_; }
  nb::handle request() const { return request_; }

 private:
  struct Held {
    BlockId id;
    std::uint32_t need;  // see `CheckpointTree::need`
  };
  struct Progress {
    std::int64_t next_block = 0;        // the first block not looked at yet
    // Blocks that the lookup read past its hit. They are cached already.
    Range behind_hit;
    std::map<std::int64_t, Held> left;  // blocks that have left the window, by block index
  };
  struct GroupStop {
    std::size_t group;  // see `RetainedCache::group`
    std::int64_t num_blocks;
  };
  /// A step that is begun and not settled.
  struct Step {
    bool is_last = false;
    bool is_settled = true;
    std::vector<GroupRun> quiet_runs;  // runs of quiet groups that are not cached yet
    bool passes_boundary = false;    // whether the step left every state of that boundary
    std::int64_t passed_tokens = 0;  // the latest boundary that the step reaches
    std::vector<GroupStop> stops;    // up to which block groups are cached at that boundary
  };
  class Prefix;  // the request's blocks, as `CheckpointTree` reads them

  PyObject* table(const Group& group) const;
  nb::list hashes() const;
  std::int64_t num_cached_blocks(const Group& group) const;
  void set_num_cached_blocks(const Group& group, std::int64_t num_blocks) const;
  std::vector<GroupRun> plan_step(const KeyTable& keys, std::int64_t reach_tokens, bool is_last);
  /// Adds the parts of a range that are full and not cached. Blocks that the lookup read past its
  /// hit are left out, because the block that was read stays cached.
  void add_uncached(std::size_t group, const KeyTable& keys, PyObject* blocks, Range range,
                    Range behind_hit, std::vector<GroupRun>& runs) const;
  void settle(const KeyTable& keys);
  void pass_boundaries(const KeyTable& keys);
  std::shared_ptr<Checkpoint> keep(const Prefix& prefix, std::int64_t tokens, Reason reason);
  void move(std::shared_ptr<Checkpoint> node);
  bool has_states(std::int64_t tokens) const;
  void hold(std::size_t group, Range run, std::int64_t skipped_tokens);
  void let_go(std::int64_t before_tokens);
  nb::list find_unreachable() const;
  void forget_uncomputed(std::int64_t computed_tokens);
  std::int64_t find_next_event() const;

  RetainedCache& cache_;
  nb::object request_, request_id_;
  std::vector<Progress> groups_;  // groups_[n]: progress of sparse group n
  Step step_;
  std::vector<PlannedBoundary> plan_;
  std::vector<std::int64_t> stops_tokens_;
  std::int64_t replay_tokens_ = 0;
  std::shared_ptr<Checkpoint> last_;  // the checkpoint that it resumed from, or passed last
  std::vector<std::shared_ptr<Checkpoint>> supplied_;  // checkpoints that consist of its blocks
};

}  // namespace kvext::retention
