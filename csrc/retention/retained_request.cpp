// SPDX-License-Identifier: Apache-2.0
#include "retained_request.h"

#include <algorithm>

namespace kvext::retention {

namespace {

constexpr std::size_t kMostCopies = 16;

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
      for (PyObject* block : keys_.find_all(key, kMostCopies)) {
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

  /// The blocks of sparse groups that a hit at a boundary reads; nothing if one is missing.
  std::optional<BlockIds> tail(std::int64_t boundary_tokens) const {
    BlockIds ids;
    for (std::size_t index = 0; index < cache_.sparse_groups.size(); ++index) {
      const Group& group = cache_.sparse_groups[index];
      const Range run = cache_.geometry.tail(index, group.block_tokens, boundary_tokens);
      if (!append(group, run, ids)) return std::nullopt;
    }
    return ids;
  }

  /// The full-attention blocks past a boundary that a hit reads, as far as they are cached.
  BlockIds ahead(std::int64_t boundary_tokens) const {
    BlockIds ids;
    if (!cache_.geometry.use_eagle) return ids;
    for (std::size_t index = 0; index < cache_.full_groups.size(); ++index) {
      const Group& group = cache_.full_groups[index];
      const std::int64_t end = cache_.geometry.full_end_tokens(index, boundary_tokens);
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

  /// The cached block that holds what a block of the request holds, its own first.
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

std::int64_t RetainedRequest::admit(nb::handle key_table) {
  const KeyTable keys(key_table);
  const Prefix prefix(*this, keys);
  const Geometry& geometry = cache_.geometry;
  // The least of all groups: of tokens that a connector loads, upstream counts those that no
  // window reads any more as cached.
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
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = cache_.sparse_groups[index];
    Progress& progress = groups_[index];
    progress.next_block = hit_tokens / group.block_tokens;
    const Range run = geometry.tail(index, group.block_tokens, hit_tokens);
    progress.behind_hit = {progress.next_block, hit_tokens ? run.stop : progress.next_block};
    for (std::int64_t block = progress.behind_hit.start; block < progress.behind_hit.stop; ++block) {
      PyObject* found = prefix.elsewhere(group, block);
      if (found) cache_.tree.refresh(cache_.blocks.fields().id(found));
    }
  }
  if (!hit_tokens) return 0;
  // It resumes there.
  std::shared_ptr<Checkpoint> node = cache_.tree.find(prefix.key(hit_tokens));
  if (!node || !cache_.tree.has_whole_tail(*node)) {
    // It was hit because of blocks that other boundaries need, or that were surplus.
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
    // Gallop, then bisect.
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
    lengths.push_back(low * group.block_tokens);
  }
  return lengths;
}

std::int64_t RetainedRequest::find_evicted(std::int64_t after_tokens,
                                           std::int64_t upto_tokens) const {
  const nb::list known = hashes();
  const auto key = [&](std::int64_t num_tokens) { return cache_.prefix_key(known.ptr(), num_tokens); };
  return cache_.tree.evicted().longest(key, after_tokens, upto_tokens);
}

void RetainedRequest::set_plan(std::vector<PlannedBoundary> plan,
                               std::vector<std::int64_t> stops_tokens,
                               std::int64_t replay_tokens) {
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

void RetainedRequest::cache(nb::handle retention, std::int64_t num_computed_tokens) {
  cached_tokens = num_computed_tokens;
  if (num_computed_tokens < next_event_tokens) return;
  const nb::object key_table = retention.attr("key_table");
  const KeyTable keys(key_table);
  cache_sparse_groups(retention, keys);
  // The request itself, should it be preempted, can hit all but its last token. A boundary at its
  // very end waits for the next token, or for the end of the request.
  const std::int64_t own_tokens = nb::cast<std::int64_t>(request_.attr("num_tokens")) - 1;
  pass_boundaries(retention, keys, std::min(num_computed_tokens, own_tokens), false);
  next_event_tokens = find_next_event();
}

std::int64_t RetainedRequest::before_skip(nb::handle retention, std::int64_t total_tokens,
                                          bool is_settled) {
  if (!holds_blocks) return total_tokens;
  std::int64_t computed_tokens = total_tokens;
  if (!is_settled) {
    computed_tokens -= nb::cast<std::int64_t>(request_.attr("num_output_placeholders"));
  }
  const Geometry& geometry = cache_.geometry;
  const std::int64_t unit_tokens = geometry.unit_tokens;
  const std::int64_t first = boundary_tokens ? boundary_tokens : unit_tokens;
  if (first <= computed_tokens) {
    for (std::size_t index = 0; index < groups_.size(); ++index) {
      const Group& group = cache_.sparse_groups[index];
      // A state is read where the last computed token left it, as by a window of 2 tokens.
      const std::int64_t window_tokens = group.is_state ? 2 : group.window_tokens;
      std::int64_t skipped = std::max<std::int64_t>(0, computed_tokens - window_tokens + 1);
      if (!group.is_upstreams) {
        skipped = nb::cast<std::int64_t>(retention.attr("skipped_tokens")(index, computed_tokens));
      }
      for (std::int64_t tokens = first; tokens <= computed_tokens; tokens += unit_tokens) {
        const Range run = geometry.tail(index, group.block_tokens, tokens);
        if (run.start >= skipped / group.block_tokens) break;  // so do all that follow
        hold(index, run, skipped);
      }
    }
  }
  return computed_tokens;
}

void RetainedRequest::release(nb::handle retention, std::int64_t computed_tokens,
                              std::int64_t own_tokens) {
  if (!holds_blocks) return;
  if (computed_tokens < cached_tokens) forget_uncomputed(computed_tokens);
  const nb::object key_table = retention.attr("key_table");
  const KeyTable keys(key_table);
  cache_sparse_groups(retention, keys);
  pass_boundaries(retention, keys, std::min(computed_tokens, own_tokens), true);
  holds_blocks = false;
  uncache_unreachable(retention);
  let_go(INT64_MAX);
  supplied_.clear();
  move(nullptr);
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

void RetainedRequest::want(std::int64_t tokens) {
  cache_.tree.want(cache_.prefix_key(hashes().ptr(), tokens));
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

void RetainedRequest::set_num_cached_blocks(const Group& group, std::int64_t num_blocks) {
  const nb::object number = nb::steal(PyLong_FromLongLong(num_blocks));
  if (PyDict_SetItem(group.num_cached.ptr(), request_id_.ptr(), number.ptr()) < 0) {
    nb::raise_python_error();
  }
}

void RetainedRequest::cache_sparse_groups(nb::handle retention, const KeyTable& keys) {
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = cache_.sparse_groups[index];
    Progress& progress = groups_[index];
    const std::int64_t stop = cached_tokens / group.block_tokens;
    if (stop <= progress.next_block) continue;
    PyObject* blocks = table(group);
    if (!blocks) continue;
    for (const Range run : cache_.geometry.reachable(index, group.block_tokens,
                                                     {progress.next_block, stop})) {
      if (!cache_.has_events && !group.is_state) {
        cache_run(group, keys, blocks, run, progress.behind_hit);
        continue;
      }
      // An event describes one run of blocks that were not cached before. Of states, upstream keeps
      // further books.
      Range part{run.start, run.start};
      const auto cache_part = [&] {
        if (!part.is_empty()) retention.attr("cache_run")(request_, index, part.start, part.stop);
      };
      for_each_uncached(group, keys, blocks, run, progress.behind_hit,
                        [&](std::int64_t block_index, PyObject*, const nb::object&) {
                          if (block_index != part.stop) {
                            cache_part();
                            part.start = block_index;
                          }
                          part.stop = block_index + 1;
                        });
      cache_part();
    }
    progress.next_block = stop;
    set_num_cached_blocks(group, stop);
  }
}

template <typename Visit>
void RetainedRequest::for_each_uncached(const Group& group, const KeyTable& keys, PyObject* blocks,
                                        Range run, Range behind_hit, Visit visit) const {
  const BlockFields& fields = cache_.blocks.fields();
  const nb::list known = hashes();
  const std::int64_t stop = std::min<std::int64_t>(run.stop, PyList_GET_SIZE(blocks));
  for (std::int64_t index = run.start; index < stop; ++index) {
    PyObject* block = PyList_GET_ITEM(blocks, index);
    if (fields.is_null(block) || fields.is_cached(block)) continue;
    if (!group.keys.reach(known.ptr(), index)) {
      throw std::out_of_range("cache: expected a hash for every full block.");
    }
    const nb::object key = group.keys.at(known.ptr(), index);
    if (!behind_hit.has(index) || !keys.find(key)) visit(index, block, key);
  }
}

void RetainedRequest::cache_run(const Group& group, const KeyTable& keys, PyObject* blocks,
                                Range run, Range behind_hit) {
  for_each_uncached(group, keys, blocks, run, behind_hit,
                    [&](std::int64_t index, PyObject* block, const nb::object& key) {
                      cache_.blocks.fields().set_key(block, key.ptr(),
                                                     (index + 1) * group.block_tokens);
                      keys.insert(key, block);
                    });
}

void RetainedRequest::cache_full_groups(nb::handle retention, const KeyTable& keys,
                                        std::int64_t upto_tokens) {
  for (std::size_t index = 0; index < cache_.full_groups.size(); ++index) {
    const Group& group = cache_.full_groups[index];
    const std::int64_t num_tokens =
        std::min(cache_.geometry.full_end_tokens(index, upto_tokens), cached_tokens);
    if (cache_.has_events || !group.is_upstreams) {
      retention.attr("cache_full_group")(request_, index, num_tokens);
      continue;
    }
    const Range run{num_cached_blocks(group), num_tokens / group.block_tokens};
    PyObject* blocks = table(group);
    if (run.is_empty() || !blocks) continue;
    cache_run(group, keys, blocks, run, Range{});
    set_num_cached_blocks(group, run.stop);
  }
}

void RetainedRequest::pass_boundaries(nb::handle retention, const KeyTable& keys,
                                      std::int64_t reach_tokens, bool is_last) {
  const Geometry& geometry = cache_.geometry;
  const std::int64_t before_tokens = boundary_tokens;
  std::int64_t passed_tokens = std::max(geometry.reachable_tokens(reach_tokens), before_tokens);
  if (!has_states(passed_tokens)) {
    if (!is_last) return;
    passed_tokens = before_tokens;
  }
  if (passed_tokens > before_tokens) {
    cache_full_groups(retention, keys, passed_tokens);
    boundary_tokens = passed_tokens;
  }
  std::vector<PlannedBoundary> boundaries = lasting_boundaries(before_tokens, passed_tokens);
  const bool is_planned = !boundaries.empty() && boundaries.back().boundary_tokens == passed_tokens;
  if (is_last && passed_tokens) {
    if (is_planned) boundaries.pop_back();
    // Where an answer has crossed no boundary, the last one is the prompt's, too: told apart, those
    // that only an answer reaches do not hide how useful it is, nor the other way round.
    boundaries.push_back({passed_tokens, Reason{Origin::kLatest, passed_tokens == replay_tokens_, 0}});
  } else if (!is_planned && geometry.has_states && before_tokens < passed_tokens &&
             passed_tokens < replay_tokens_) {
    boundaries.push_back({passed_tokens, Reason{Origin::kChunk, 0, 0}});
  }
  if (!boundaries.empty()) {
    const Prefix prefix(*this, keys);
    for (const PlannedBoundary& each : boundaries) keep(prefix, each.boundary_tokens, each.reason);
  }
  if (passed_tokens > before_tokens) let_go(passed_tokens);
}

std::vector<PlannedBoundary> RetainedRequest::lasting_boundaries(std::int64_t after_tokens,
                                                                 std::int64_t upto_tokens) {
  std::vector<PlannedBoundary> boundaries;
  const auto add_grid = [&](std::int64_t upto) {
    const Geometry& geometry = cache_.geometry;
    if (!geometry.grid_tokens) return;
    std::int64_t tokens = (after_tokens / geometry.grid_tokens + 1) * geometry.grid_tokens;
    for (; tokens < upto; tokens += geometry.grid_tokens) {
      const Reason reason{Origin::kGrid, 0, 0};
      if (geometry.is_boundary(tokens) &&
          (geometry.is_grid_wanted || cache_.tree.rates().is_worth_trying(reason))) {
        boundaries.push_back({tokens, reason});
      }
    }
  };
  for (const PlannedBoundary& planned : plan_) {
    if (planned.boundary_tokens <= after_tokens) continue;
    if (planned.boundary_tokens > upto_tokens) break;
    add_grid(planned.boundary_tokens);
    boundaries.push_back(planned);
    after_tokens = planned.boundary_tokens;
  }
  add_grid(upto_tokens + 1);
  return boundaries;
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
    const Range run = cache_.geometry.tail(index, group.block_tokens, tokens);
    for (std::int64_t block = run.start; block < run.stop; ++block) {
      const bool is_there = blocks && block < PyList_GET_SIZE(blocks) &&
                            !cache_.blocks.fields().is_null(PyList_GET_ITEM(blocks, block));
      if (!is_there && !groups_[index].left.count(block)) return false;
    }
  }
  return true;
}

void RetainedRequest::hold(std::size_t index, Range run, std::int64_t skipped_tokens) {
  // Those blocks of a run that are about to leave the window.
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
  // What was held for boundaries below the latest one.
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    auto& left = groups_[index].left;
    if (left.empty()) continue;
    const Group& group = cache_.sparse_groups[index];
    const auto end = before_tokens == INT64_MAX
                         ? left.end()
                         : left.lower_bound(cache_.geometry
                                                .tail(index, group.block_tokens, before_tokens)
                                                .start);
    BlockIds ids;
    for (auto place = left.begin(); place != end; ++place) {
      const Held& held = place->second;
      if (cache_.tree.is_counted(held.id, held.need)) ids.push_back(held.id);
    }
    left.erase(left.begin(), end);
    cache_.tree.release(ids);
  }
}

void RetainedRequest::uncache_unreachable(nb::handle retention) {
  // What the request cached for boundaries that it did not reach.
  const BlockFields& fields = cache_.blocks.fields();
  nb::list unreachable;
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = cache_.sparse_groups[index];
    const Progress& progress = groups_[index];
    PyObject* blocks = table(group);
    if (!blocks) continue;
    std::int64_t start = progress.behind_hit.stop;
    if (boundary_tokens) {
      start = std::max(
          start, cache_.geometry.tail(index, group.block_tokens, boundary_tokens).stop);
    }
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
  if (unreachable.size()) retention.attr("discard")(unreachable);
}

void RetainedRequest::forget_uncomputed(std::int64_t computed_tokens) {
  // A request that is preempted in the step that scheduled it never computes these tokens. Whoever
  // frees it uncaches their blocks.
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
  // The tokens to cache at which a block is to be cached, or a boundary opens.
  const Geometry& geometry = cache_.geometry;
  std::int64_t boundary = boundary_tokens + geometry.unit_tokens;
  if (geometry.has_states) {
    // A state that was not left when its boundary was passed is not left later.
    boundary = std::max(boundary, floor_to(cached_tokens - geometry.lag_tokens, geometry.unit_tokens));
    while (geometry.opens_at_tokens(boundary) < cached_tokens) boundary += geometry.unit_tokens;
  }
  std::int64_t next = geometry.opens_at_tokens(boundary);
  // It waits for the request's next token.
  if (next <= cached_tokens) next = cached_tokens + 1;
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const std::int64_t block_tokens = cache_.sparse_groups[index].block_tokens;
    const std::int64_t block =
        geometry.next_reachable(index, block_tokens, groups_[index].next_block);
    next = std::min(next, (block + 1) * block_tokens);
  }
  return next;
}

}  // namespace kvext::retention
