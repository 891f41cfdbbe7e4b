// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "checkpoint_tree.h"

#include <algorithm>

namespace kvext::retention {

namespace {

constexpr std::size_t kRemembered = 8192;
constexpr std::size_t kMaxContinuations = 16;
constexpr int kMaxAncestors = 16;

}  // namespace

Checkpoint::~Checkpoint() {
  // Ancestors are dropped in a loop. A path has as many ancestors as a prompt has boundaries, which
  // is too many for recursion.
  while (parent && parent.use_count() == 1) {
    std::shared_ptr<Checkpoint> above = std::move(parent->parent);
    parent = std::move(above);
  }
}

std::shared_ptr<Checkpoint> nearest_with_tail(const std::shared_ptr<Checkpoint>& node) {
  const std::shared_ptr<Checkpoint>* nearest = &node;
  for (int seen = 0; seen < kMaxAncestors; ++seen) {
    if ((*nearest)->is_root() || (*nearest)->has_tail()) break;
    nearest = &(*nearest)->parent;
  }
  return *nearest;
}

CheckpointTree::CheckpointTree(const Blocks& blocks, nb::object head, nb::object tail,
                               std::vector<std::int64_t> block_tokens, std::int64_t unit_tokens,
                               bool hits_inside_blocks)
    : blocks_(blocks),
      block_tokens_(std::move(block_tokens)),
      unit_tokens_(unit_tokens),
      hits_inside_blocks_(hits_inside_blocks),
      needs_(blocks.size()),
      overruled_(blocks.size(), 0),
      free_order_(blocks, needs_, std::move(head), std::move(tail)),
      order_(*this),
      evicted_(kRemembered),
      root_(std::make_shared<Checkpoint>()),
      owners_(blocks.size(), nullptr) {}

void CheckpointTree::clear() {
  order_.clear();
  for (auto& [key, node] : nodes_) {
    node->is_in_tree = false;
    node->tail.clear();
    node->tail_keys.clear();
    node->children.clear();
    node->parent = root_;  // a request may still hold this node, but not the other nodes
  }
  owners_.assign(owners_.size(), nullptr);
  needs_.clear();
  free_order_.clear();
  nodes_.clear();
  evicted_.clear();
  root_->children.clear();
  counts_.checkpoints = 0;
}

std::shared_ptr<Checkpoint> CheckpointTree::find(const std::string& key) const {
  const auto found = nodes_.find(key);
  return found == nodes_.end() ? nullptr : found->second;
}

bool CheckpointTree::has_whole_tail(const Checkpoint& node) const {
  for (std::size_t place = 0; place < node.tail.size(); ++place) {
    PyObject* block = blocks_[node.tail[place]];
    if (blocks_.fields().key(block) != node.tail_keys[place].ptr()) return false;
  }
  return node.has_tail();
}

void CheckpointTree::use(Checkpoint& node) {
  counts_.junctions_hit += node.origin == Origin::kJunction;
  rates_.count_use(judged(node), order_.clock_pools() - node.clock_pools, node.seen_ages);
  node.reason = node.reason.used_again();
  order_.renew(node);
}

void CheckpointTree::want(const std::string& key) {
  EvictedPrefixes::Entry entry;
  if (!evicted_.pop(key, &entry)) return;
  rates_.count_missed_use(entry.reason, order_.clock_pools() - entry.clock_pools, entry.seen_ages);
}

std::shared_ptr<Checkpoint> CheckpointTree::add(const PrefixBlocks& prefix,
                                                std::int64_t boundary_tokens, BlockIds tail,
                                                const BlockIds& ahead, const Reason& reason,
                                                const std::shared_ptr<Checkpoint>& before) {
  const std::string key = prefix.key(boundary_tokens);
  std::shared_ptr<Checkpoint> node = find(key);
  const bool is_new = !node;
  if (is_new) {
    node = insert(prefix, key, boundary_tokens, reason, before ? before : root_);
    if (!node) return nullptr;
  } else if (node->has_tail() && !node->reason.uses) {
    node->reason = reason;
  }
  mend(is_new && !node->is_root() ? *node->parent : *node, prefix,
       before ? before->boundary_tokens : 0);
  // A tail that is not whole is given up, because the request has another tail.
  if (node->has_tail() && !has_whole_tail(*node)) give_up_tail(*node);
  if (!node->has_tail()) {
    node->origin = reason.origin;
    node->reason = reason;
    take_tail(*node, std::move(tail), ahead);
  } else {
    if (!ahead.empty()) take_ahead(*node, ahead);
    order_.renew(*node);
  }
  return node;
}

void CheckpointTree::remove(Checkpoint& node) {
  if (!node.has_tail()) return;
  give_up_tail(node);
  remove_unneeded(shared(node));
}

void CheckpointTree::release(const BlockIds& ids) {
  BlockIds useless;
  for (const BlockId id : ids) {
    if (--needs_[id] == 0) useless.push_back(id);
  }
  free_order_.move_to_surplus(useless);
}

void CheckpointTree::refresh(BlockId id) {
  if (!needs_[id]) free_order_.move_to_surplus({id});
}

void CheckpointTree::make_room(std::int64_t num_blocks) {
  std::int64_t missing = num_blocks - free_order_.count_next(num_blocks);
  while (missing > 0) {
    Checkpoint* node = order_.choose();
    if (!node) break;
    missing -= static_cast<std::int64_t>(evict(*node));
  }
  if (missing > 0) {
    // Only running requests still need the blocks, and their needs are overruled.
    for (const BlockId id : free_order_.next_blocks(num_blocks)) {
      needs_[id] = 0;
      ++overruled_[static_cast<std::size_t>(id)];
    }
  }
}

std::size_t CheckpointTree::evict(Checkpoint& node) {
  const std::shared_ptr<Checkpoint> held = shared(node);
  ++counts_.checkpoints_evicted;
  rates_.count_eviction(node.reason);
  evicted_.put({node.key, node.boundary_tokens, judged(node), node.clock_pools, node.seen_ages},
               order_.clock_pools(), rates_);
  const std::size_t num_surplus = give_up_tail(node);
  return num_surplus + remove_unneeded(held);
}

std::shared_ptr<Checkpoint> CheckpointTree::insert(const PrefixBlocks& prefix,
                                                   const std::string& key,
                                                   std::int64_t boundary_tokens,
                                                   const Reason& reason,
                                                   const std::shared_ptr<Checkpoint>& before) {
  std::shared_ptr<Checkpoint> parent = before;
  if (!block_tokens_.empty()) {
    const auto [deepest, known_tokens] = find_deepest(prefix, boundary_tokens);
    parent = deepest;
    if (known_tokens < parent->boundary_tokens) {
      // The path ends within the parent's runs, or differs from them there.
      const std::int64_t cut_tokens = known_tokens / unit_tokens_ * unit_tokens_;
      if (cut_tokens > parent->parent->boundary_tokens) {
        const std::string cut_key = prefix.key(cut_tokens);
        const std::shared_ptr<Checkpoint> known_elsewhere = find(cut_key);
        // The known boundary has blocks of its own if the blocks of this path can no longer be
        // found.
        parent = known_elsewhere ? known_elsewhere : split(*parent, cut_key, cut_tokens);
      } else {
        parent = parent->parent;
      }
    }
    if (parent->boundary_tokens == boundary_tokens) return parent;
  } else {
    // If the last step of a request was undone, the request may be before the last boundary it
    // passed.
    while (!parent->is_root() &&
           (!parent->is_in_tree || parent->boundary_tokens >= boundary_tokens)) {
      parent = parent->parent;
    }
    parent = nearest_with_tail(parent);
  }
  std::optional<Runs> runs = prefix.runs(parent->boundary_tokens, boundary_tokens);
  if (!runs) {
    remove_unneeded(parent);  // the node may have been inserted just now
    return nullptr;
  }
  auto node = std::make_shared<Checkpoint>();
  node->key = key;
  node->boundary_tokens = boundary_tokens;
  node->parent = parent;
  node->origin = reason.origin;
  node->reason = reason;
  node->runs = std::move(*runs);
  for (const BlockIds& run : node->runs) need_all(run);
  if (!node->runs.empty()) {
    own(node->runs[0], node.get());
    add_child(*parent, *node);
  }
  nodes_.emplace(key, node);
  return node;
}

std::pair<std::shared_ptr<Checkpoint>, std::int64_t> CheckpointTree::find_deepest(
    const PrefixBlocks& prefix, std::int64_t upto_tokens) const {
  // Known blocks of a path begin at the first token without gaps, so bisection finds the last known
  // block.
  const std::int64_t block_tokens = block_tokens_[0];
  Checkpoint* node = nullptr;
  std::int64_t low = 0, high = upto_tokens / block_tokens;
  std::int64_t middle = high;  // most paths are known to their end
  while (low < high) {
    if (Checkpoint* owner = find_owner(prefix, middle - 1)) {
      node = owner;
      low = middle;
    } else {
      high = middle - 1;
    }
    middle = (low + high + 1) / 2;
  }
  return {node ? shared(*node) : root_, low * block_tokens};
}

Checkpoint* CheckpointTree::find_owner(const PrefixBlocks& prefix,
                                       std::int64_t block_index) const {
  for (const BlockId id : prefix.copies(block_index)) {
    Checkpoint* node = owners_[static_cast<std::size_t>(id)];
    if (!node) continue;
    const std::int64_t index = block_index - node->parent->boundary_tokens / block_tokens_[0];
    const BlockIds& run = node->runs[0];
    if (index >= 0 && index < static_cast<std::int64_t>(run.size()) &&
        run[static_cast<std::size_t>(index)] == id) {
      return node;
    }
  }
  return nullptr;
}

std::shared_ptr<Checkpoint> CheckpointTree::split(Checkpoint& node, std::string key,
                                                  std::int64_t boundary_tokens) {
  // Insert the new boundary, which has no tail, between a node and its parent.
  const std::shared_ptr<Checkpoint> parent = node.parent;
  auto upper = std::make_shared<Checkpoint>();
  upper->key = std::move(key);
  upper->boundary_tokens = boundary_tokens;
  upper->parent = parent;
  for (std::size_t group = 0; group < node.runs.size(); ++group) {
    BlockIds& run = node.runs[group];
    const auto cut = (boundary_tokens - parent->boundary_tokens) / block_tokens_[group];
    upper->runs.emplace_back(run.begin(), run.begin() + cut);
    run.erase(run.begin(), run.begin() + cut);
  }
  remove_child(*parent, node);
  node.parent = upper;
  add_child(*upper, node);
  add_child(*parent, *upper);
  own(upper->runs[0], upper.get());
  nodes_.emplace(upper->key, upper);
  return upper;
}

void CheckpointTree::mend(Checkpoint& node, const PrefixBlocks& prefix,
                          std::int64_t after_tokens) {
  // A connector may have uncached blocks of runs. The request has computed these blocks again.
  if (block_tokens_.empty()) return;
  const BlockFields& fields = blocks_.fields();
  const auto is_same = [&](BlockId known, BlockId own) {
    if (known == own) return true;
    PyObject* key = fields.key(blocks_[known]);
    const int is_equal = PyObject_RichCompareBool(key, fields.key(blocks_[own]), Py_EQ);
    if (is_equal < 0) nb::raise_python_error();
    return is_equal == 1;
  };
  for (Checkpoint* part = &node; !part->is_root() && part->boundary_tokens > after_tokens;
       part = part->parent.get()) {
    std::optional<Runs> runs = prefix.runs(part->parent->boundary_tokens, part->boundary_tokens);
    if (!runs) continue;
    for (std::size_t group = 0; group < runs->size(); ++group) {
      BlockIds& run = part->runs[group];
      const BlockIds& own_run = (*runs)[group];
      if (std::equal(run.begin(), run.end(), own_run.begin(), own_run.end(), is_same)) continue;
      need_all(own_run);
      disown(run, part);
      give_up(run);
      run = own_run;
      if (group == 0) own(run, part);
    }
  }
}

std::size_t CheckpointTree::remove_unneeded(std::shared_ptr<Checkpoint> node) {
  // Every boundary without a tail has at least two children. If only one child is left, the
  // boundary is joined with it.
  std::size_t num_surplus = 0;
  while (!node->is_root() && !node->has_tail()) {
    if (node->children.size() > 1) return num_surplus;
    if (!node->children.empty()) {
      join_child(*node);
      return num_surplus;
    }
    nodes_.erase(node->key);
    node->is_in_tree = false;
    if (block_tokens_.empty()) return num_surplus;
    const std::shared_ptr<Checkpoint> parent = node->parent;
    remove_child(*parent, *node);
    for (BlockIds& run : node->runs) {
      std::reverse(run.begin(), run.end());  // the block with the first tokens is reallocated last
      num_surplus += give_up(run);
    }
    if (!node->runs.empty()) disown(node->runs[0], node.get());
    node->runs.clear();
    node = parent;
  }
  if (node->has_tail() && node->children.empty()) {
    order_.offer(*node);  // its eviction now frees its runs, too
  }
  return num_surplus;
}

void CheckpointTree::join_child(Checkpoint& node) {
  Checkpoint& child = *node.children[0];
  for (std::size_t group = 0; group < node.runs.size(); ++group) {
    BlockIds run = std::move(node.runs[group]);
    run.insert(run.end(), child.runs[group].begin(), child.runs[group].end());
    child.runs[group] = std::move(run);
  }
  const std::shared_ptr<Checkpoint> held = shared(node);
  const std::shared_ptr<Checkpoint> parent = node.parent;
  remove_child(node, child);
  remove_child(*parent, node);
  child.parent = parent;
  add_child(*parent, child);
  own(child.runs[0], &child);
  nodes_.erase(node.key);
  node.is_in_tree = false;
  node.runs.clear();
}

void CheckpointTree::take_tail(Checkpoint& node, BlockIds tail, const BlockIds& ahead) {
  tail.insert(tail.end(), ahead.begin(), ahead.end());
  extend_tail(node, tail);
  node.num_ahead = ahead.size();
  ++counts_.checkpoints_kept;
  ++counts_.checkpoints;
  order_.add(node);
}

void CheckpointTree::take_ahead(Checkpoint& node, const BlockIds& ahead) {
  // Also keep blocks of other requests past the boundary, because a hit of such a request reads its
  // own blocks.
  BlockIds more;
  const auto known = node.tail.end() - static_cast<std::ptrdiff_t>(node.num_ahead);
  for (const BlockId id : ahead) {
    if (std::find(known, node.tail.end(), id) == node.tail.end()) more.push_back(id);
  }
  if (more.empty() || node.num_ahead >= kMaxContinuations * more.size()) return;
  extend_tail(node, more);
  node.num_ahead += more.size();
}

void CheckpointTree::extend_tail(Checkpoint& node, const BlockIds& ids) {
  need_all(ids);
  node.tail.insert(node.tail.end(), ids.begin(), ids.end());
  for (const BlockId id : ids) {
    node.tail_keys.push_back(nb::borrow(blocks_.fields().key(blocks_[id])));
  }
}

std::size_t CheckpointTree::give_up_tail(Checkpoint& node) {
  --counts_.checkpoints;
  order_.remove(node);
  const BlockIds tail = std::move(node.tail);
  node.tail.clear();
  node.tail_keys.clear();
  node.num_ahead = 0;
  return give_up(tail);
}

void CheckpointTree::need_all(const BlockIds& ids) {
  BlockIds idle;
  std::size_t num_new = 0;
  for (const BlockId id : ids) {
    if (needs_[id]++ != 0) continue;
    ++num_new;
    if (blocks_.is_free(id)) idle.push_back(id);
  }
  order_.advance(static_cast<double>(num_new) / static_cast<double>(blocks_.size()));
  free_order_.move_to_back(idle);
}

std::size_t CheckpointTree::give_up(const BlockIds& ids) {
  BlockIds idle;
  for (const BlockId id : ids) {
    if (--needs_[id] == 0 && blocks_.is_free(id)) idle.push_back(id);
  }
  free_order_.move_to_surplus(idle);
  return idle.size();
}

void CheckpointTree::own(const BlockIds& ids, Checkpoint* node) {
  for (const BlockId id : ids) owners_[static_cast<std::size_t>(id)] = node;
}

void CheckpointTree::disown(const BlockIds& ids, const Checkpoint* node) {
  for (const BlockId id : ids) {
    Checkpoint*& owner = owners_[static_cast<std::size_t>(id)];
    if (owner == node) owner = nullptr;
  }
}

void CheckpointTree::note_uncached(const BlockIds& ids) {
  for (const BlockId id : ids) owners_[static_cast<std::size_t>(id)] = nullptr;
  free_order_.note_prepended(ids);
}

void CheckpointTree::add_child(Checkpoint& parent, Checkpoint& child) {
  note_age(parent);
  child.place_among_children = parent.children.size();
  parent.children.push_back(&child);
  if (hits_inside_blocks_ && parent.has_tail()) order_.offer(parent);
}

void CheckpointTree::remove_child(Checkpoint& parent, Checkpoint& child) {
  note_age(parent);
  Checkpoint* last = parent.children.back();
  parent.children[child.place_among_children] = last;
  last->place_among_children = child.place_among_children;
  parent.children.pop_back();
}

Reason CheckpointTree::judged(const Checkpoint& node) const {
  Reason judged = node.reason;
  const auto num_paths = static_cast<std::int32_t>(node.children.size());
  if (hits_inside_blocks_) judged.num_paths = std::min(num_paths, Reason::kMaxPaths);
  return judged;
}

void CheckpointTree::note_age(Checkpoint& node) {
  if (!hits_inside_blocks_ || !node.has_tail()) return;
  rates_.note_age(judged(node), order_.clock_pools() - node.clock_pools, node.seen_ages);
}

std::shared_ptr<Checkpoint> CheckpointTree::shared(const Checkpoint& node) const {
  return node.is_root() ? root_ : nodes_.at(node.key);
}

}  // namespace kvext::retention
