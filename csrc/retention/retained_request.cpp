// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "retained_request.h"

#include <algorithm>

namespace kvext::retention {

namespace {

constexpr std::size_t kMaxCopies = 16;

bool is_same_key(PyObject* one, const nb::object& other) {
  const int is_equal = PyObject_RichCompareBool(one, other.ptr(), Py_EQ);
  if (is_equal < 0) nb::raise_python_error();
  return is_equal == 1;
}

}  // namespace

/// The request's blocks in one call.
class RetainedRequest::Prefix final : public PrefixBlocks {
 public:
  Prefix(const RetainedRequest& request, const KeyTable& keys)
      : request_(request), cache_(request.cache_), keys_(keys), hashes_(request.hashes()) {}

  std::string key(std::int64_t num_tokens) const override {
    return cache_.prefix_key(hashes_.ptr(), num_tokens);
  }

  BlockIds copies(std::int64_t block_index) const override {
    const Group& group = cache_.full_groups[0];
    BlockIds ids;
    if (PyObject* own = in_table(request_.table(group), block_index)) {
      ids.push_back(cache_.blocks.fields().id(own));
    }
    if (group.keys.reach(hashes_.ptr(), block_index)) {
      const nb::object key = group.keys.at(hashes_.ptr(), block_index);
      for (PyObject* block : keys_.find_all(key, kMaxCopies)) {
        ids.push_back(cache_.blocks.fields().id(block));
      }
    }
    return ids;
  }

  std::optional<Runs> runs(std::int64_t start_tokens, std::int64_t stop_tokens) const override {
    Runs runs;
    for (const Group& group : cache_.full_groups) {
      const Range run{start_tokens / group.block_tokens, stop_tokens / group.block_tokens};
      if (!append(group, run, runs.emplace_back())) return std::nullopt;
    }
    return runs;
  }

  /// The blocks of sparse groups that a hit at a boundary reads; nothing if a block is missing.
  std::optional<BlockIds> tail(std::int64_t boundary_tokens) const {
    BlockIds ids;
    for (const Group& group : cache_.sparse_groups) {
      if (!append(group, cache_.tail(group, boundary_tokens), ids)) return std::nullopt;
    }
    return ids;
  }

  /// The full-attention blocks past a boundary that a hit reads, as far as they are cached.
  BlockIds ahead(std::int64_t boundary_tokens) const {
    BlockIds ids;
    if (!cache_.geometry.use_eagle) return ids;
    for (const Group& group : cache_.full_groups) {
      const std::int64_t end =
          cache_.geometry.full_end_tokens(group.geometry_index, boundary_tokens);
      PyObject* blocks = request_.table(group);
      for (std::int64_t block_index = boundary_tokens / group.block_tokens;
           block_index < end / group.block_tokens; ++block_index) {
        if (PyObject* block = cached(group, blocks, block_index)) {
          ids.push_back(cache_.blocks.fields().id(block));
        }
      }
    }
    return ids;
  }

  /// The blocks that a hit inside a block reads; nothing if one of them is not cached that far.
  std::optional<BlockIds> tail_inside(std::int64_t tokens,
                                      const std::vector<std::int64_t>& full_tokens) const {
    BlockIds ids;
    const auto add = [&](const Group& group, std::int64_t end_tokens) {
      const nb::object key = group.keys.up_to(hashes_.ptr(), end_tokens / cache_.hash_block_tokens);
      PyObject* block = key.is_valid() ? keys_.find(key) : nullptr;
      if (block) ids.push_back(cache_.blocks.fields().id(block));
      return block != nullptr;
    };
    for (const Group& group : cache_.sparse_groups) {
      if (!add(group, tokens)) return std::nullopt;
    }
    for (std::size_t index = 0; index < cache_.full_groups.size(); ++index) {
      if (!add(cache_.full_groups[index], full_tokens.at(index))) return std::nullopt;
    }
    return ids;
  }

  /// The number of tokens up to which a full-attention group is cached, if its first blocks are.
  std::int64_t end_inside(const Group& group, std::int64_t num_blocks,
                          std::int64_t num_prompt_tokens) const {
    const std::int64_t hash_tokens = cache_.hash_block_tokens;
    const std::int64_t first = num_blocks * group.keys.hashes_per_block;
    std::int64_t end = std::min(first + group.keys.hashes_per_block - 1,
                                num_prompt_tokens / hash_tokens);
    for (; end > first; --end) {
      const nb::object key = group.keys.up_to(hashes_.ptr(), end);
      if (key.is_valid() && keys_.find(key)) break;
    }
    return std::max(end, first) * hash_tokens;
  }

  /// A cached block with the content of a block of the request; the request's own block if
  /// possible.
  PyObject* cached(const Group& group, PyObject* blocks, std::int64_t block_index) const {
    if (PyObject* own = in_table(blocks, block_index)) return own;
    return elsewhere(group, block_index);
  }

  PyObject* elsewhere(const Group& group, std::int64_t block_index) const {
    if (!group.keys.reach(hashes_.ptr(), block_index)) return nullptr;
    return keys_.find(group.keys.at(hashes_.ptr(), block_index));
  }

 private:
  PyObject* in_table(PyObject* blocks, std::int64_t block_index) const {
    if (!blocks || block_index >= PyList_GET_SIZE(blocks)) return nullptr;
    PyObject* block = PyList_GET_ITEM(blocks, block_index);
    return cache_.blocks.fields().is_cached(block) ? block : nullptr;
  }

  bool append(const Group& group, Range run, BlockIds& ids) const {
    PyObject* blocks = request_.table(group);
    for (std::int64_t index = run.start; index < run.stop; ++index) {
      PyObject* block = cached(group, blocks, index);
      if (!block) return false;
      ids.push_back(cache_.blocks.fields().id(block));
    }
    return true;
  }

  const RetainedRequest& request_;
  const RetainedCache& cache_;
  const KeyTable& keys_;
  nb::list hashes_;
};

RetainedRequest::RetainedRequest(RetainedCache& cache, nb::object request)
    : cache_(cache),
      request_(std::move(request)),
      request_id_(request_.attr("request_id")),
      groups_(cache.sparse_groups.size()) {}

std::int64_t RetainedRequest::admit(nb::handle key_table, std::int64_t inner_tokens) {
  const KeyTable keys(key_table);
  const Prefix prefix(*this, keys);
  const Geometry& geometry = cache_.geometry;
  // Take the minimum of all groups. vLLM counts tokens that a connector loads as cached, even in a
  // group whose window does not read them any more.
  std::int64_t hit_tokens = INT64_MAX;
  for (const auto* groups : {&cache_.sparse_groups, &cache_.full_groups}) {
    for (const Group& group : *groups) {
      hit_tokens = std::min(hit_tokens, num_cached_blocks(group) * group.block_tokens);
    }
  }
  hit_tokens = floor_to(hit_tokens, geometry.unit_tokens);
  boundary_tokens = hit_tokens;
  next_event_tokens = 0;
  holds_blocks = true;
  if (hit_tokens < inner_tokens && inner_tokens < hit_tokens + geometry.unit_tokens) {
    // The hit has read a state inside a block, and no state at the block's beginning.
    for (std::size_t index = 0; index < groups_.size(); ++index) {
      const std::int64_t next_block = hit_tokens / cache_.sparse_groups[index].block_tokens;
      groups_[index].next_block = next_block;
      groups_[index].behind_hit = {next_block, next_block};
    }
    const std::shared_ptr<Checkpoint> inner = cache_.tree.find(prefix.key(inner_tokens));
    if (inner && inner->has_tail()) {
      cache_.tree.use(*inner);
      move(inner);
    }
    return inner_tokens;
  }
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = cache_.sparse_groups[index];
    Progress& progress = groups_[index];
    progress.next_block = hit_tokens / group.block_tokens;
    const Range run = cache_.tail(group, hit_tokens);
    progress.behind_hit = {progress.next_block, hit_tokens ? run.stop : progress.next_block};
    for (std::int64_t block = progress.behind_hit.start; block < progress.behind_hit.stop; ++block) {
      PyObject* found = prefix.elsewhere(group, block);
      if (found) cache_.tree.refresh(cache_.blocks.fields().id(found));
    }
  }
  if (!hit_tokens) return 0;
  // The request resumes at this boundary.
  std::shared_ptr<Checkpoint> node = cache_.tree.find(prefix.key(hit_tokens));
  if (!node || !cache_.tree.has_whole_tail(*node)) {
    // The hit read blocks that other boundaries need, or surplus blocks.
    node = keep(prefix, hit_tokens, Reason{Origin::kOverlap, 0, 0});
  }
  if (node) {
    cache_.tree.use(*node);
    move(node);
  }
  return hit_tokens;
}

std::vector<std::int64_t> RetainedRequest::find_shared(nb::handle key_table,
                                                       std::int64_t hit_tokens,
                                                       std::int64_t num_prompt_tokens) const {
  const KeyTable keys(key_table);
  const Prefix prefix(*this, keys);
  std::vector<std::int64_t> lengths;
  for (const Group& group : cache_.full_groups) {
    const auto is_cached = [&](std::int64_t index) {
      return prefix.elsewhere(group, index) != nullptr;
    };
    // Exponential search, then bisection.
    std::int64_t low = hit_tokens / group.block_tokens, step = 1;
    const std::int64_t limit = num_prompt_tokens / group.block_tokens;
    while (low + step <= limit && is_cached(low + step - 1)) {
      low += step;
      step *= 2;
    }
    std::int64_t high = std::min(low + step, limit + 1);
    while (low + 1 < high) {
      const std::int64_t middle = (low + high) / 2;
      if (is_cached(middle - 1)) {
        low = middle;
      } else {
        high = middle;
      }
    }
    std::int64_t shared_tokens = low * group.block_tokens;
    if (cache_.hits_inside_blocks) {
      shared_tokens = std::max(hit_tokens, prefix.end_inside(group, low, num_prompt_tokens));
    }
    lengths.push_back(shared_tokens);
  }
  return lengths;
}

std::int64_t RetainedRequest::find_evicted(std::int64_t after_tokens,
                                           std::int64_t upto_tokens) const {
  const nb::list known = hashes();
  const auto key = [&](std::int64_t num_tokens) { return cache_.prefix_key(known.ptr(), num_tokens); };
  return cache_.tree.evicted().longest(key, after_tokens, upto_tokens);
}

void RetainedRequest::plan(std::vector<PlannedBoundary> plan, const std::vector<Rung>& rungs,
                           std::vector<std::int64_t> stops_tokens, std::int64_t replay_tokens) {
  for (const PlannedBoundary& planned : plan) {
    if (planned.reason.origin != Origin::kWanted) continue;
    cache_.tree.want(cache_.prefix_key(hashes().ptr(), planned.boundary_tokens));
  }
  const auto is_before = [](const PlannedBoundary& one, std::int64_t tokens) {
    return one.boundary_tokens < tokens;
  };
  for (const Rung& rung : rungs) {
    const Reason reason{Origin::kLadder, rung.step, 0};
    // `is_worth_trying` is called for every rung, planned or not, because it counts its calls. One
    // rung in `kTryEvery` is left even if rungs seem useless.
    if (!cache_.tree.rates().is_worth_trying(reason)) continue;
    const auto place = std::lower_bound(plan.begin(), plan.end(), rung.boundary_tokens, is_before);
    if (place != plan.end() && place->boundary_tokens == rung.boundary_tokens) continue;
    plan.insert(place, {rung.boundary_tokens, reason});
  }
  const auto is_inside_block = [&](const PlannedBoundary& planned) {
    return planned.boundary_tokens % cache_.geometry.unit_tokens != 0;
  };
  plan.erase(std::remove_if(plan.begin(), plan.end(), is_inside_block), plan.end());
  plan_ = std::move(plan);
  stops_tokens_ = std::move(stops_tokens);
  replay_tokens_ = replay_tokens;
}

std::optional<std::int64_t> RetainedRequest::next_stop_tokens(std::int64_t computed_tokens) const {
  const auto next =
      std::upper_bound(stops_tokens_.begin(), stops_tokens_.end(), computed_tokens);
  if (next == stops_tokens_.end()) return std::nullopt;
  return *next;
}

std::optional<std::vector<GroupRun>> RetainedRequest::begin_step(nb::handle key_table,
                                                                 std::int64_t num_computed_tokens,
                                                                 std::int64_t num_tokens) {
  cached_tokens = num_computed_tokens;
  if (num_computed_tokens < next_event_tokens) return std::nullopt;
  // If this request is preempted, it can hit all its tokens except the last one. A boundary at the
  // very end of the request waits for the next token, or for the end of the request.
  return plan_step(KeyTable(key_table), std::min(num_computed_tokens, num_tokens - 1), false);
}

std::optional<std::vector<GroupRun>> RetainedRequest::begin_last_step(nb::handle key_table,
                                                                      std::int64_t computed_tokens,
                                                                      std::int64_t own_tokens) {
  if (!holds_blocks) return std::nullopt;
  if (computed_tokens < cached_tokens) forget_uncomputed(computed_tokens);
  return plan_step(KeyTable(key_table), std::min(computed_tokens, own_tokens), true);
}

void RetainedRequest::end_step(nb::handle key_table) {
  if (step_.is_settled) return;
  settle(KeyTable(key_table));
  next_event_tokens = find_next_event();
}

nb::list RetainedRequest::end_last_step(nb::handle key_table) {
  if (step_.is_settled) return {};
  settle(KeyTable(key_table));
  holds_blocks = false;
  nb::list unreachable = find_unreachable();
  let_go(INT64_MAX);
  supplied_.clear();
  move(nullptr);
  return unreachable;
}

std::int64_t RetainedRequest::settled_tokens(std::int64_t total_tokens) const {
  return total_tokens - nb::cast<std::int64_t>(request_.attr("num_output_placeholders"));
}

std::int64_t RetainedRequest::before_skip(std::int64_t total_tokens, bool is_settled,
                                          const std::vector<std::int64_t>& skipped_tokens) {
  if (!holds_blocks) return total_tokens;
  const std::int64_t computed_tokens = is_settled ? total_tokens : settled_tokens(total_tokens);
  const std::int64_t unit_tokens = cache_.geometry.unit_tokens;
  const std::int64_t first = boundary_tokens ? boundary_tokens : unit_tokens;
  if (first > computed_tokens) return computed_tokens;
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = cache_.sparse_groups[index];
    // A state is what the last computed token left, so it acts like a window of 2 tokens.
    const std::int64_t window_tokens = group.is_state ? 2 : group.window_tokens;
    const std::int64_t skipped =
        group.is_upstreams ? std::max<std::int64_t>(0, computed_tokens - window_tokens + 1)
                           : skipped_tokens.at(index);
    for (std::int64_t tokens = first; tokens <= computed_tokens; tokens += unit_tokens) {
      const Range run = cache_.tail(group, tokens);
      if (run.start >= skipped / group.block_tokens) break;  // following runs begin later
      hold(index, run, skipped);
    }
  }
  return computed_tokens;
}

BlockIds RetainedRequest::held_blocks() const {
  BlockIds ids;
  for (const Progress& progress : groups_) {
    for (const auto& [index, held] : progress.left) {
      if (cache_.tree.is_counted(held.id, held.need)) ids.push_back(held.id);
    }
  }
  return ids;
}

PyObject* RetainedRequest::table(const Group& group) const {
  PyObject* blocks = value_of(group.tables, request_id_);
  if (blocks && !PyList_Check(blocks)) throw nb::type_error("block table: expected a list.");
  return blocks;
}

nb::list RetainedRequest::hashes() const {
  nb::object hashes = request_.attr("block_hashes");
  if (!PyList_Check(hashes.ptr())) throw nb::type_error("block hashes: expected a list.");
  return nb::borrow<nb::list>(hashes);
}

std::int64_t RetainedRequest::num_cached_blocks(const Group& group) const {
  PyObject* number = value_of(group.num_cached, request_id_);
  return number ? nb::cast<std::int64_t>(nb::handle(number)) : 0;
}

void RetainedRequest::set_num_cached_blocks(const Group& group, std::int64_t num_blocks) const {
  const nb::object number = nb::steal(PyLong_FromLongLong(num_blocks));
  if (PyDict_SetItem(group.num_cached.ptr(), request_id_.ptr(), number.ptr()) < 0) {
    nb::raise_python_error();
  }
}

std::vector<GroupRun> RetainedRequest::plan_step(const KeyTable& keys, std::int64_t reach_tokens,
                                                 bool is_last) {
  const Geometry& geometry = cache_.geometry;
  const std::size_t num_sparse_groups = groups_.size();
  std::vector<GroupRun> runs;
  Step step;
  step.is_last = is_last;
  step.is_settled = false;
  for (std::size_t index = 0; index < num_sparse_groups; ++index) {
    const Group& group = cache_.sparse_groups[index];
    const Progress& progress = groups_[index];
    const std::int64_t stop = cached_tokens / group.block_tokens;
    PyObject* blocks = stop > progress.next_block ? table(group) : nullptr;
    if (!blocks) continue;
    for (const Range part : geometry.reachable(group.geometry_index, group.block_tokens,
                                               {progress.next_block, stop})) {
      add_uncached(index, keys, blocks, part, progress.behind_hit,
                   group.is_quiet ? step.quiet_runs : runs);
    }
    step.stops.push_back({index, stop});
  }
  step.passed_tokens = std::max(geometry.reachable_tokens(reach_tokens), boundary_tokens);
  const std::int64_t reached_tokens = step.passed_tokens;
  step.passes_boundary = has_states(step.passed_tokens);
  if (!step.passes_boundary) step.passed_tokens = boundary_tokens;
  // A hit inside a later block reads rows before a boundary that has no state.
  const std::int64_t full_tokens =
      cache_.hits_inside_blocks ? reached_tokens : step.passed_tokens;
  if (full_tokens > boundary_tokens) {
    for (std::size_t index = 0; index < cache_.full_groups.size(); ++index) {
      const Group& group = cache_.full_groups[index];
      const std::int64_t end_tokens =
          geometry.full_end_tokens(group.geometry_index, full_tokens);
      const Range range{num_cached_blocks(group),
                        std::min(end_tokens, cached_tokens) / group.block_tokens};
      PyObject* blocks = range.is_empty() ? nullptr : table(group);
      if (!blocks) continue;
      const std::size_t place = num_sparse_groups + index;
      if (group.is_upstreams) {
        add_uncached(place, keys, blocks, range, Range{}, group.is_quiet ? step.quiet_runs : runs);
      } else {
        runs.push_back({place, range});
      }
      step.stops.push_back({place, range.stop});
    }
  }
  step_ = std::move(step);
  return runs;
}

void RetainedRequest::add_uncached(std::size_t place, const KeyTable& keys, PyObject* blocks,
                                   Range range, Range behind_hit,
                                   std::vector<GroupRun>& runs) const {
  const BlockFields& fields = cache_.blocks.fields();
  const Group& group = cache_.group(place);
  const nb::list known = hashes();
  const std::int64_t stop = std::min<std::int64_t>(range.stop, PyList_GET_SIZE(blocks));
  bool is_run_open = false;
  for (std::int64_t index = range.start; index < stop; ++index) {
    PyObject* block = PyList_GET_ITEM(blocks, index);
    bool is_new = !fields.is_null(block) && !fields.is_cached(block);
    if (is_new) group.keys.require(known.ptr(), index);
    if (cache_.hits_inside_blocks && !group.is_state && fields.is_cached(block)) {
      // The block may be cached up to a place inside it, and be full now.
      group.keys.require(known.ptr(), index);
      is_new = !is_same_key(fields.key(block), group.keys.at(known.ptr(), index));
    }
    if (is_new && behind_hit.has(index)) is_new = !keys.find(group.keys.at(known.ptr(), index));
    if (is_new && is_run_open) {
      runs.back().blocks.stop = index + 1;
    } else if (is_new) {
      runs.push_back({place, {index, index + 1}});
    }
    is_run_open = is_new;
  }
}

void RetainedRequest::cache_quiet_runs(nb::handle key_table) {
  if (step_.quiet_runs.empty()) return;
  const KeyTable keys(key_table);
  const BlockFields& fields = cache_.blocks.fields();
  const nb::list known = hashes();
  const Group* group = nullptr;
  PyObject* blocks = nullptr;
  for (const GroupRun& run : step_.quiet_runs) {
    if (const Group& next = cache_.group(run.group); &next != group) {
      group = &next;
      blocks = table(next);
    }
    if (!blocks || run.blocks.stop > PyList_GET_SIZE(blocks)) {
      throw std::out_of_range("cache: expected the blocks that the step began with.");
    }
    for (std::int64_t index = run.blocks.start; index < run.blocks.stop; ++index) {
      PyObject* block = PyList_GET_ITEM(blocks, index);
      group->keys.require(known.ptr(), index);
      const nb::object key = group->keys.at(known.ptr(), index);
      keys.insert(key, block);
      fields.set_key(block, key.ptr(), (index + 1) * group->block_tokens);
    }
  }
  step_.quiet_runs.clear();
}

void RetainedRequest::settle(const KeyTable& keys) {
  if (!step_.quiet_runs.empty()) {
    throw std::logic_error("end_step: expected that the runs of the step are cached.");
  }
  step_.is_settled = true;
  for (const GroupStop& stop : step_.stops) {
    if (stop.group < groups_.size()) groups_[stop.group].next_block = stop.num_blocks;
    set_num_cached_blocks(cache_.group(stop.group), stop.num_blocks);
  }
  if (step_.passes_boundary || step_.is_last) pass_boundaries(keys);
}

void RetainedRequest::pass_boundaries(const KeyTable& keys) {
  const std::int64_t before_tokens = boundary_tokens;
  const std::int64_t passed_tokens = step_.passed_tokens;
  boundary_tokens = passed_tokens;
  const auto is_grid_kept = [this] {
    return cache_.geometry.is_grid_wanted || cache_.tree.rates().is_worth_trying(kGridReason);
  };
  std::vector<PlannedBoundary> boundaries =
      lasting_boundaries(cache_.geometry, plan_, before_tokens, passed_tokens, is_grid_kept);
  const bool is_planned = !boundaries.empty() && boundaries.back().boundary_tokens == passed_tokens;
  if (step_.is_last && passed_tokens) {
    if (is_planned) boundaries.pop_back();
    // If an answer has crossed no boundary, its last boundary is also the last boundary of the
    // prompt. Such a boundary gets a reason of its own, so that its rates stay apart from the rates
    // of boundaries that only answers reach.
    boundaries.push_back({passed_tokens, Reason{Origin::kLatest, passed_tokens == replay_tokens_, 0}});
  } else if (!is_planned && cache_.geometry.has_states && before_tokens < passed_tokens &&
             passed_tokens < replay_tokens_) {
    boundaries.push_back({passed_tokens, Reason{Origin::kChunk, 0, 0}});
  }
  if (!boundaries.empty()) {
    const Prefix prefix(*this, keys);
    for (const PlannedBoundary& each : boundaries) keep(prefix, each.boundary_tokens, each.reason);
  }
  if (passed_tokens > before_tokens) let_go(passed_tokens);
}

std::shared_ptr<Checkpoint> RetainedRequest::keep(const Prefix& prefix, std::int64_t tokens,
                                                  Reason reason) {
  std::optional<BlockIds> tail = prefix.tail(tokens);
  if (!tail) return nullptr;
  const std::shared_ptr<Checkpoint> known = cache_.tree.find(prefix.key(tokens));
  const bool is_supplied = !known || !cache_.tree.has_whole_tail(*known);
  std::shared_ptr<Checkpoint> node =
      cache_.tree.add(prefix, tokens, std::move(*tail), prefix.ahead(tokens), reason, last_);
  if (!node) return nullptr;
  move(node);
  if (is_supplied) supplied_.push_back(node);
  return node;
}

bool RetainedRequest::keep_inside(nb::handle key_table, std::int64_t tokens, Reason reason,
                                  const std::vector<std::int64_t>& full_tokens) {
  const KeyTable keys(key_table);
  const Prefix prefix(*this, keys);
  std::optional<BlockIds> tail = prefix.tail_inside(tokens, full_tokens);
  if (!tail) return false;
  const std::shared_ptr<Checkpoint> node =
      cache_.tree.add(prefix, tokens, std::move(*tail), {}, reason, last_);
  if (!node) return false;
  // A request that has ended, or was preempted, goes on from no checkpoint.
  if (holds_blocks) move(node);
  return true;
}

void RetainedRequest::move(std::shared_ptr<Checkpoint> node) {
  if (node) ++node->num_requests;
  if (last_) --last_->num_requests;
  last_ = std::move(node);
}

bool RetainedRequest::has_states(std::int64_t tokens) const {
  if (!cache_.geometry.has_states || tokens <= boundary_tokens) return true;
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = cache_.sparse_groups[index];
    if (!group.is_state) continue;
    PyObject* blocks = table(group);
    const Range run = cache_.tail(group, tokens);
    for (std::int64_t block = run.start; block < run.stop; ++block) {
      const bool is_there = blocks && block < PyList_GET_SIZE(blocks) &&
                            !cache_.blocks.fields().is_null(PyList_GET_ITEM(blocks, block));
      if (!is_there && !groups_[index].left.count(block)) return false;
    }
  }
  return true;
}

void RetainedRequest::hold(std::size_t index, Range run, std::int64_t skipped_tokens) {
  // Hold the blocks of a run that are about to leave the window.
  const Group& group = cache_.sparse_groups[index];
  PyObject* blocks = table(group);
  if (!blocks) return;
  const BlockFields& fields = cache_.blocks.fields();
  auto& left = groups_[index].left;
  const std::int64_t stop = std::min({run.stop, skipped_tokens / group.block_tokens,
                                      static_cast<std::int64_t>(PyList_GET_SIZE(blocks))});
  for (std::int64_t block_index = run.start; block_index < stop; ++block_index) {
    PyObject* block = PyList_GET_ITEM(blocks, block_index);
    if (!fields.is_cached(block) || left.count(block_index)) continue;
    const BlockId id = fields.id(block);
    left.emplace(block_index, Held{id, cache_.tree.need(id)});
  }
}

void RetainedRequest::let_go(std::int64_t before_tokens) {
  // Blocks that were held for boundaries below the latest boundary are no longer needed.
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    auto& left = groups_[index].left;
    if (left.empty()) continue;
    const Group& group = cache_.sparse_groups[index];
    const auto end = before_tokens == INT64_MAX
                         ? left.end()
                         : left.lower_bound(cache_.tail(group, before_tokens).start);
    BlockIds ids;
    for (auto place = left.begin(); place != end; ++place) {
      const Held& held = place->second;
      if (cache_.tree.is_counted(held.id, held.need)) ids.push_back(held.id);
    }
    left.erase(left.begin(), end);
    cache_.tree.release(ids);
  }
}

nb::list RetainedRequest::find_unreachable() const {
  // Find the blocks that the request has cached for boundaries that it did not reach.
  const BlockFields& fields = cache_.blocks.fields();
  nb::list unreachable;
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = cache_.sparse_groups[index];
    const Progress& progress = groups_[index];
    PyObject* blocks = table(group);
    if (!blocks) continue;
    std::int64_t start = progress.behind_hit.stop;
    if (boundary_tokens) start = std::max(start, cache_.tail(group, boundary_tokens).stop);
    const std::int64_t stop =
        std::min<std::int64_t>(progress.next_block, PyList_GET_SIZE(blocks));
    for (std::int64_t block_index = start; block_index < stop; ++block_index) {
      PyObject* block = PyList_GET_ITEM(blocks, block_index);
      if (fields.is_cached(block) && fields.has_one_user(block) &&
          !cache_.tree.needs()[fields.id(block)]) {
        unreachable.append(nb::borrow(block));
      }
    }
  }
  return unreachable;
}

void RetainedRequest::forget_uncomputed(std::int64_t computed_tokens) {
  // A request that is preempted in the same step that scheduled it never computes these tokens. The
  // repair `preempted-in-step` uncaches their blocks when they are freed.
  const std::int64_t reachable_tokens = cache_.geometry.reachable_tokens(computed_tokens);
  for (const std::shared_ptr<Checkpoint>& node : supplied_) {
    if (node->boundary_tokens > reachable_tokens && node->is_in_tree) cache_.tree.remove(*node);
  }
  cached_tokens = computed_tokens;
  boundary_tokens = std::min(boundary_tokens, reachable_tokens);
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    groups_[index].next_block = std::min(
        groups_[index].next_block, computed_tokens / cache_.sparse_groups[index].block_tokens);
  }
}

std::int64_t RetainedRequest::find_next_event() const {
  // Find the number of tokens at which the next block must be cached, or the next boundary opens.
  const Geometry& geometry = cache_.geometry;
  std::int64_t boundary = boundary_tokens + geometry.unit_tokens;
  if (geometry.has_states) {
    // A state that was not kept when its boundary was passed is not kept later.
    boundary = std::max(boundary, floor_to(cached_tokens - geometry.lag_tokens, geometry.unit_tokens));
    while (geometry.opens_at_tokens(boundary) < cached_tokens) boundary += geometry.unit_tokens;
  }
  std::int64_t next = geometry.opens_at_tokens(boundary);
  // The boundary waits for the request's next token.
  if (next <= cached_tokens) next = cached_tokens + 1;
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = cache_.sparse_groups[index];
    const std::int64_t block = geometry.next_reachable(group.geometry_index, group.block_tokens,
                                                       groups_[index].next_block);
    next = std::min(next, (block + 1) * group.block_tokens);
  }
  return next;
}

}  // namespace kvext::retention
