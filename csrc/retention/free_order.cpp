// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "free_order.h"

#include <algorithm>

namespace kvext::retention {

double BlockNeeds::share(const BlockIds& ids) const {
  double share = 0;
  for (const BlockId id : ids) {
    const std::int32_t count = (*this)[id];
    share += count <= 1 ? 1.0 : 1.0 / count;
  }
  return share;
}

FreeOrder::FreeOrder(const Blocks& blocks, const BlockNeeds& needs, nb::object head,
                     nb::object tail)
    : blocks_(blocks),
      fields_(blocks.fields()),
      needs_(needs),
      head_(std::move(head)),
      tail_(std::move(tail)),
      stamps_(blocks.size(), 0) {
  if (Py_TYPE(head_.ptr()) != fields_.type() || Py_TYPE(tail_.ptr()) != fields_.type()) {
    throw nb::type_error("free queue: expected ends of the class of its blocks.");
  }
  clear();
}

void FreeOrder::clear() {
  uncached_.clear();
  surplus_.clear();
  PyObject* block = fields_.next(head_.ptr());
  for (; block != tail_.ptr(); block = fields_.next(block)) {
    const BlockId id = fields_.id(block);
    uncached_.push_back({id, ++stamps_[static_cast<std::size_t>(id)]});
  }
}

std::int64_t FreeOrder::count_next(std::int64_t limit) const {
  std::int64_t count = 0;
  PyObject* block = fields_.next(head_.ptr());
  while (count < limit && block != tail_.ptr() &&
         (!needs_[fields_.id(block)] || !fields_.is_cached(block))) {
    block = fields_.next(block);
    ++count;
  }
  return count;
}

BlockIds FreeOrder::next_blocks(std::int64_t limit) const {
  BlockIds ids;
  PyObject* block = fields_.next(head_.ptr());
  for (; static_cast<std::int64_t>(ids.size()) < limit && block != tail_.ptr();
       block = fields_.next(block)) {
    ids.push_back(fields_.id(block));
  }
  return ids;
}

void FreeOrder::note_appended(const BlockIds& ids) {
  if (ids.empty()) return;
  PyObject* block = tail_.ptr();
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
    block = fields_.previous(block);
    if (block != blocks_[*id]) {
      move_to_surplus(ids);  // the queue has these blocks in another order
      return;
    }
  }
  PyObject* before = fields_.previous(block);
  fields_.set_next(before, tail_.ptr());
  fields_.set_previous(tail_.ptr(), before);
  insert(ids);
}

void FreeOrder::note_prepended(const BlockIds& ids) {
  while (!uncached_.empty() && !holds(uncached_.front(), false)) uncached_.pop_front();
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
    uncached_.push_front({*id, ++stamps_[static_cast<std::size_t>(*id)]});
  }
}

void FreeOrder::move_to_surplus(const BlockIds& ids) {
  BlockIds chain;
  chain.reserve(ids.size());
  for (const BlockId id : ids) {
    PyObject* block = blocks_[id];
    if (!fields_.is_queued(block)) continue;
    take_out(block);
    if (!chain.empty()) {
      PyObject* last = blocks_[chain.back()];
      fields_.set_next(last, block);
      fields_.set_previous(block, last);
    }
    chain.push_back(id);
  }
  if (!chain.empty()) insert(chain);
}

void FreeOrder::move_to_back(const BlockIds& ids) {
  for (const BlockId id : ids) {
    PyObject* block = blocks_[id];
    if (!fields_.is_queued(block)) continue;
    take_out(block);
    link_behind(fields_.previous(tail_.ptr()), block, block);
  }
}

void FreeOrder::insert(const BlockIds& chain) {
  // These blocks are not in the surplus: invalidate older entries of theirs.
  for (const BlockId id : chain) ++stamps_[static_cast<std::size_t>(id)];
  link_behind(last_of_surplus(), blocks_[chain.front()], blocks_[chain.back()]);
  while (!surplus_.empty() && !holds(surplus_.front(), true)) surplus_.pop_front();
  for (const BlockId id : chain) {
    surplus_.push_back({id, stamps_[static_cast<std::size_t>(id)]});
  }
  if (surplus_.size() > 2 * blocks_.size()) {
    // This is done only after so many insertions that each insertion bears a constant share of the
    // cost.
    const auto is_over = [this](const Entry& entry) { return !holds(entry, true); };
    surplus_.erase(std::remove_if(surplus_.begin(), surplus_.end(), is_over), surplus_.end());
  }
}

bool FreeOrder::holds(const Entry& entry, bool is_cached) const {
  PyObject* block = blocks_[entry.id];
  return stamps_[static_cast<std::size_t>(entry.id)] == entry.stamp && fields_.is_queued(block) &&
         !needs_[entry.id] && fields_.is_cached(block) == is_cached;
}

PyObject* FreeOrder::last_of_surplus() {
  for (; !surplus_.empty(); surplus_.pop_back()) {
    if (holds(surplus_.back(), true)) return blocks_[surplus_.back().id];
  }
  for (; !uncached_.empty(); uncached_.pop_back()) {
    if (holds(uncached_.back(), false)) return blocks_[uncached_.back().id];
  }
  return head_.ptr();
}

void FreeOrder::take_out(PyObject* block) const {
  // The block's neighbours and the pool's list keep the blocks alive.
  PyObject* before = fields_.previous(block);
  PyObject* after = fields_.next(block);
  fields_.set_next(before, after);
  fields_.set_previous(after, before);
}

void FreeOrder::link_behind(PyObject* before, PyObject* first, PyObject* last) const {
  PyObject* after = fields_.next(before);
  fields_.set_next(before, first);
  fields_.set_previous(first, before);
  fields_.set_next(last, after);
  fields_.set_previous(after, last);
}

}  // namespace kvext::retention
