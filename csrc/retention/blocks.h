// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Reads and writes the fields of vLLM's blocks at the offsets where a slotted dataclass keeps them.
//
// A scheduler handles hundreds of blocks per step. Reading a field by its name costs more than the
// work that is done with its value.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>

namespace kvext::retention {

namespace nb = nanobind;

/// The id of a block, which is its index in the pool.
using BlockId = std::int32_t;
using BlockIds = std::vector<BlockId>;

/// The offsets of the fields of `vllm.v1.core.kv_cache_utils.KVCacheBlock`.
class BlockFields {
 public:
  /// @throws nb::type_error if the class lacks a slot for one of the fields
  explicit BlockFields(PyTypeObject* type);

  PyTypeObject* type() const { return type_; }

  BlockId id(PyObject* block) const {
    return static_cast<BlockId>(PyLong_AsLong(at(block, block_id_)));
  }
  bool is_free(PyObject* block) const { return PyLong_AsLong(at(block, ref_cnt_)) == 0; }
  /// Whether exactly one request uses the block.
  bool has_one_user(PyObject* block) const { return PyLong_AsLong(at(block, ref_cnt_)) == 1; }
  bool is_null(PyObject* block) const { return at(block, is_null_) == Py_True; }
  bool is_cached(PyObject* block) const { return at(block, block_hash_) != Py_None; }
  /// Whether the block is in the free queue: vLLM clears the links of a block that it takes out.
  bool is_queued(PyObject* block) const { return at(block, next_) != Py_None; }

  PyObject* key(PyObject* block) const { return at(block, block_hash_); }
  PyObject* previous(PyObject* block) const { return at(block, previous_); }
  PyObject* next(PyObject* block) const { return at(block, next_); }

  /// Gives a block the key of its request's first `num_tokens` tokens. Since vLLM 0.30, a block
  /// also stores this number.
  void set_key(PyObject* block, PyObject* key, std::int64_t num_tokens) const;
  void set_previous(PyObject* block, PyObject* other) const { set(block, previous_, other); }
  void set_next(PyObject* block, PyObject* other) const { set(block, next_, other); }

 private:
  static PyObject*& at(PyObject* block, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(block) + offset);
  }
  static void set(PyObject* block, Py_ssize_t offset, PyObject* value) {
    PyObject*& field = at(block, offset);
    PyObject* before = field;
    Py_INCREF(value);
    field = value;
    Py_XDECREF(before);
  }

  PyTypeObject* type_;
  Py_ssize_t block_id_, ref_cnt_, is_null_, block_hash_, previous_, next_;
  Py_ssize_t num_tokens_;  // 0 if the class has no such slot
};

/// All blocks of one pool, by id.
class Blocks {
 public:
  /// @throws nb::type_error if an item of the list is no block, or is not at the index of its id
  explicit Blocks(nb::list blocks);

  const BlockFields& fields() const { return fields_; }
  std::size_t size() const { return by_id_.size(); }
  PyObject* operator[](BlockId id) const { return by_id_[static_cast<std::size_t>(id)]; }

  bool is_free(BlockId id) const { return fields_.is_free((*this)[id]); }

  nb::handle list() const { return list_; }

 private:
  nb::list list_;  // keeps the blocks alive
  std::vector<PyObject*> by_id_;
  BlockFields fields_;
};

}  // namespace kvext::retention
