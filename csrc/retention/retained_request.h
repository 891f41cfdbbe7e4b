// SPDX-License-Identifier: Apache-2.0
// The blocks that one request has cached, and those that are to be cached: the work of every step.
//
// A step has three parts. The request answers which runs of blocks are to be cached, Python has
// them cached, and the request settles the step: it keeps the boundaries that are complete now.
// Nothing is settled of a step that Python did not carry out: it is begun once more.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "boundaries.h"
#include "retained_cache.h"

namespace kvext::retention {

/// Blocks of one group to be cached, by their index in the request's block table.
struct GroupRun {
  std::size_t group;  // see `RetainedCache::group`
  Range blocks;
};

/// A boundary at some distance before the end of a prompt.
struct Rung {
  std::int64_t boundary_tokens;
  std::int32_t step;  // counted from the prompt's end
};

class RetainedRequest {
 public:
  RetainedRequest(RetainedCache& cache, nb::object request);

  /// The request has got blocks; upstream says how many of them are cached.
  /// @return the tokens that it need not compute
  std::int64_t admit(nb::handle key_table);

  /// Per full-attention group, up to which token a prompt is cached. A prompt is cached from the
  /// first block on: takes time that grows with the logarithm of the prompt's length.
  std::vector<std::int64_t> find_shared(nb::handle key_table, std::int64_t hit_tokens,
                                        std::int64_t num_prompt_tokens) const;

  /// The longest boundary of its prompt, in tokens, whose checkpoint was evicted; 0 if none.
  std::int64_t find_evicted(std::int64_t after_tokens, std::int64_t upto_tokens) const;

  /// Plans the boundaries of an admitted request. Takes note that it would have resumed at a planned
  /// boundary that is gone (`Origin::kWanted`).
  /// @param plan  ascending
  /// @param rungs  boundaries that no request asked for, the nearest to the prompt's end first;
  ///   planned where they turn out useful, and where nothing else is planned
  /// @param stops_tokens  boundaries at which a prefill step is to end, ascending
  /// @param replay_tokens  where a request with the same prompt resumes
  void plan(std::vector<PlannedBoundary> plan, const std::vector<Rung>& rungs,
            std::vector<std::int64_t> stops_tokens, std::int64_t replay_tokens);

  /// Begins a step: which runs are to be cached once tokens are scheduled, in their order.
  ///
  /// The blocks of a run are full and not cached, but for full-attention groups whose manager is not
  /// upstream's: their manager finds them out itself.
  /// @param num_tokens  tokens of the request, with its answer
  /// @return runs of groups that are not quiet, for upstream's functions; the runs of quiet groups
  ///   are left to `cache_quiet_runs`. Nothing before `next_event_tokens`.
  std::optional<std::vector<GroupRun>> begin_step(nb::handle key_table,
                                                  std::int64_t num_computed_tokens,
                                                  std::int64_t num_tokens);

  /// Begins the last step of a request that is finished or preempted.
  /// @param computed_tokens  what it really computed
  /// @param own_tokens  up to which token a request that extends it, or resumes it, reads
  /// @return nothing where it holds no blocks
  std::optional<std::vector<GroupRun>> begin_last_step(nb::handle key_table,
                                                       std::int64_t computed_tokens,
                                                       std::int64_t own_tokens);

  /// Caches the runs of quiet groups in the step that was begun last.
  void cache_quiet_runs(nb::handle key_table);

  /// Settles the step that was begun last.
  /// @throws std::logic_error if runs of quiet groups are not cached yet
  void end_step(nb::handle key_table);

  /// Settles the last step; the request's blocks are not freed yet.
  /// @return blocks to be uncached: no lookup reaches them
  nb::list end_last_step(nb::handle key_table);

  /// Holds on to blocks that are about to leave a window although the next checkpoint needs them.
  ///
  /// A boundary opens only when every group that looks ahead has its block past it, and the latest
  /// boundary stays where a preempted request resumes. By then the first blocks of a tail may have
  /// left the window.
  /// @param is_settled  whether tokens of steps in flight are left out of the count already
  /// @param skipped_tokens  per sparse group, how many tokens no computation reads any more; empty
  ///   where all managers are upstream's
  /// @return the computed tokens up to which windows may move on
  std::int64_t before_skip(std::int64_t total_tokens, bool is_settled,
                           const std::vector<std::int64_t>& skipped_tokens);

  /// Computed tokens without those of steps in flight, which may be rejected.
  std::int64_t settled_tokens(std::int64_t total_tokens) const;

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
    std::int64_t next_block = 0;        // the first block that is not seen to
    Range behind_hit;                   // read by the lookup and dropped from the hit: cached already
    std::map<std::int64_t, Held> left;  // blocks that have left the window, by index
  };
  struct GroupStop {
    std::size_t group;  // see `RetainedCache::group`
    std::int64_t num_blocks;
  };
  /// A step that is begun and not settled.
  struct Step {
    bool is_last = false;
    bool is_settled = true;
    std::vector<GroupRun> quiet_runs;  // of quiet groups, not cached yet
    bool passes_boundary = false;    // it has left every state of the boundary
    std::int64_t passed_tokens = 0;  // the latest boundary that it reaches
    std::vector<GroupStop> stops;    // how far groups are cached then
  };
  class Prefix;  // the request's blocks as `CheckpointTree` asks for them

  PyObject* table(const Group& group) const;
  nb::list hashes() const;
  std::int64_t num_cached_blocks(const Group& group) const;
  void set_num_cached_blocks(const Group& group, std::int64_t num_blocks) const;
  std::vector<GroupRun> plan_step(const KeyTable& keys, std::int64_t reach_tokens, bool is_last);
  /// Adds the parts of a range that hold content and are not cached. What the lookup read behind its
  /// hit is left to the block that it read.
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
  std::vector<Progress> groups_;  // per sparse group
  Step step_;
  std::vector<PlannedBoundary> plan_;
  std::vector<std::int64_t> stops_tokens_;
  std::int64_t replay_tokens_ = 0;
  std::shared_ptr<Checkpoint> last_;  // that it has resumed from or passed
  std::vector<std::shared_ptr<Checkpoint>> supplied_;  // that consist of its blocks
};

}  // namespace kvext::retention
