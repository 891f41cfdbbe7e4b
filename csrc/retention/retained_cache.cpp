// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "retained_cache.h"

#include <cstring>
#include <string_view>

namespace kvext::retention {

namespace {

/// One hash of a list; valid as long as the list has it.
std::string_view hash_at(PyObject* hashes, std::int64_t index) {
  PyObject* hash = PyList_GET_ITEM(hashes, index);
  if (!PyBytes_Check(hash)) throw nb::type_error("block hashes: expected bytes.");
  return {PyBytes_AS_STRING(hash), static_cast<std::size_t>(PyBytes_GET_SIZE(hash))};
}

std::vector<std::int64_t> tokens_of(const std::vector<Group>& groups) {
  std::vector<std::int64_t> block_tokens;
  for (const Group& group : groups) block_tokens.push_back(group.block_tokens);
  return block_tokens;
}

}  // namespace

nb::object GroupKeys::at(PyObject* hashes, std::int64_t block_index) const {
  const std::int64_t end = (block_index + 1) * hashes_per_block;
  const std::int64_t first = end - hashes_in_key;
  std::size_t num_bytes = suffix.size();
  for (std::int64_t index = first; index < end; ++index) num_bytes += hash_at(hashes, index).size();
  nb::object key =
      nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(num_bytes)));
  if (!key.is_valid()) nb::raise_python_error();
  char* target = PyBytes_AS_STRING(key.ptr());
  for (std::int64_t index = first; index < end; ++index) {
    const std::string_view hash = hash_at(hashes, index);
    std::memcpy(target, hash.data(), hash.size());
    target += hash.size();
  }
  std::memcpy(target, suffix.data(), suffix.size());
  return key;
}

nb::object GroupKeys::up_to(PyObject* hashes, std::int64_t hash_end) const {
  if (hash_end <= 0 || hash_end > PyList_GET_SIZE(hashes)) return {};
  const std::string key = std::string(hash_at(hashes, hash_end - 1)) + suffix;
  return nb::bytes(key.data(), key.size());
}

void GroupKeys::require(PyObject* hashes, std::int64_t block_index) const {
  if (!reach(hashes, block_index)) {
    throw std::out_of_range("cache: expected a hash for every full block.");
  }
  const std::int64_t end = (block_index + 1) * hashes_per_block;
  for (std::int64_t index = end - hashes_in_key; index < end; ++index) hash_at(hashes, index);
}

PyObject* value_of(const nb::handle dict, const nb::handle key) {
  PyObject* value = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (!value && PyErr_Occurred()) nb::raise_python_error();
  return value;
}

KeyTable::KeyTable(nb::handle table)
    : table_(table), cache_(table.attr("_cache")), is_dict_(PyDict_CheckExact(cache_.ptr())) {
  if (!PyDict_Check(cache_.ptr())) throw nb::type_error("prefix cache: expected a dict.");
}

PyObject* KeyTable::find(const nb::object& key) const {
  PyObject* found = value_of(cache_, key);
  if (!found || !PyDict_Check(found)) return found;
  Py_ssize_t place = 0;
  PyObject* block = nullptr;
  PyDict_Next(found, &place, nullptr, &block);
  return block;
}

std::vector<PyObject*> KeyTable::find_all(const nb::object& key, std::size_t limit) const {
  std::vector<PyObject*> blocks;
  PyObject* found = value_of(cache_, key);
  if (!found) return blocks;
  if (!PyDict_Check(found)) return {found};
  Py_ssize_t place = 0;
  PyObject* block = nullptr;
  while (blocks.size() < limit && PyDict_Next(found, &place, nullptr, &block)) {
    blocks.push_back(block);
  }
  return blocks;
}

void KeyTable::insert(const nb::object& key, PyObject* block) const {
  if (!is_dict_ || value_of(cache_, key)) {
    table_.attr("insert")(key, nb::handle(block));
    return;
  }
  if (PyDict_SetItem(cache_.ptr(), key.ptr(), block) < 0) nb::raise_python_error();
}

RetainedCache::RetainedCache(nb::list block_list, nb::object head, nb::object tail,
                             Geometry hit_geometry, std::vector<Group> sparse,
                             std::vector<Group> full, std::int64_t tokens_per_hash,
                             bool may_hit_inside_blocks)
    : blocks(std::move(block_list)),
      geometry(std::move(hit_geometry)),
      sparse_groups(std::move(sparse)),
      full_groups(std::move(full)),
      tree(blocks, std::move(head), std::move(tail), tokens_of(full_groups), geometry.unit_tokens,
           may_hit_inside_blocks),
      hash_block_tokens(tokens_per_hash),
      hits_inside_blocks(may_hit_inside_blocks) {}

std::string RetainedCache::prefix_key(PyObject* hashes, std::int64_t num_tokens) const {
  const Group& group = full_groups.empty() ? sparse_groups.at(0) : full_groups[0];
  const std::int64_t tokens_per_hash = group.block_tokens / group.keys.hashes_per_block;
  const std::int64_t index = num_tokens / tokens_per_hash - 1;
  if (index < 0 || index >= PyList_GET_SIZE(hashes)) {
    throw std::out_of_range("prefix: expected a length that the request has hashes for.");
  }
  return std::string(hash_at(hashes, index));
}

std::vector<nb::handle> RetainedCache::held() const {
  std::vector<nb::handle> objects{blocks.list(), tree.free_order().head(),
                                  tree.free_order().tail()};
  for (const auto* groups : {&sparse_groups, &full_groups}) {
    for (const Group& group : *groups) {
      objects.push_back(group.tables);
      objects.push_back(group.num_cached);
    }
  }
  return objects;
}

}  // namespace kvext::retention
