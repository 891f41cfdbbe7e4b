// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "blocks.h"

#include <structmember.h>

namespace kvext::retention {

namespace {

/// The offset of a slot in the object; 0 if the class has no slot of this name.
Py_ssize_t find_offset(PyTypeObject* type, const char* name) {
  const nb::object descriptor =
      nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
  if (descriptor.is_valid() && Py_IS_TYPE(descriptor.ptr(), &PyMemberDescr_Type)) {
    const PyMemberDef* member =
        reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member;
    if (member->type == T_OBJECT_EX) return member->offset;
  }
  PyErr_Clear();
  return 0;
}

Py_ssize_t offset_of(PyTypeObject* type, const char* name) {
  if (const Py_ssize_t offset = find_offset(type, name)) return offset;
  const std::string text =
      std::string("blocks: expected a class with the slot ") + name + ", found " + type->tp_name +
      " without it. Install a vLLM that `python -m vllm_ascend_kvext status` supports.";
  throw nb::type_error(text.c_str());
}

PyTypeObject* type_of_first(const nb::list& blocks) {
  if (blocks.size() == 0) throw nb::type_error("blocks: expected at least one, found none.");
  return Py_TYPE(nb::object(blocks[0]).ptr());
}

}  // namespace

BlockFields::BlockFields(PyTypeObject* type)
    : type_(type),
      block_id_(offset_of(type, "block_id")),
      ref_cnt_(offset_of(type, "ref_cnt")),
      is_null_(offset_of(type, "is_null")),
      block_hash_(offset_of(type, "_block_hash")),
      previous_(offset_of(type, "prev_free_block")),
      next_(offset_of(type, "next_free_block")),
      num_tokens_(find_offset(type, "_block_hash_num_tokens")) {}

void BlockFields::set_key(PyObject* block, PyObject* key, std::int64_t num_tokens) const {
  set(block, block_hash_, key);
  if (num_tokens_) set(block, num_tokens_, nb::int_(num_tokens).ptr());
}

Blocks::Blocks(nb::list blocks) : list_(std::move(blocks)), fields_(type_of_first(list_)) {
  by_id_.reserve(list_.size());
  for (const nb::handle block : list_) {
    const bool is_block = Py_TYPE(block.ptr()) == fields_.type();
    if (!is_block || fields_.id(block.ptr()) != static_cast<BlockId>(by_id_.size())) {
      throw nb::type_error("blocks: expected blocks of one class, each at the place of its id.");
    }
    by_id_.push_back(block.ptr());
  }
}

}  // namespace kvext::retention
