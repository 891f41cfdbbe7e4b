// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The only place that decides whether rotations are valid, and that turns positions into angles.
#include <algorithm>
#include <cmath>

#include "kvext/rotation.h"
#include "refusal.h"

namespace kvext {
namespace {

// Largest allowed shift of a key, in positions. Up to this shift the error of an angle is below
// 1e-6.
constexpr int64_t kMaxPositions = int64_t{1} << 30;
constexpr double kFullTurn = 6.283185307179586;

constexpr const char* kTable = "rotations";

int64_t element_bytes(RowDtype dtype) { return dtype == RowDtype::kFloat32 ? 4 : 2; }

void require_multiple(int64_t unit, int64_t found, int64_t row, const char* column) {
  if (found % unit != 0) {
    refuse(cell(kTable, row, column), "a multiple of the element's " + std::to_string(unit) + " bytes",
           std::to_string(found), "Correct the dtype, or count whole elements.");
  }
}

void check_rotation(const Transfer& transfer, const KeyRotation& rotation, int64_t index) {
  const Rotation& row = rotation.rotations[index];
  if (row.plane < 0 || row.plane >= transfer.planes.num_rows) {
    refuse(cell(kTable, index, "plane"),
           "a row of planes, which has " + std::to_string(transfer.planes.num_rows),
           std::to_string(row.plane), "Pass every plane that is rotated.");
  }
  const auto dtype = static_cast<int64_t>(row.dtype);
  if (dtype < 0 || dtype > 2) {
    refuse(cell(kTable, index, "dtype"), "0 (float32), 1 (bfloat16) or 2 (float16)",
           std::to_string(dtype), "Keys of other types cannot be rotated.");
  }
  const auto style = static_cast<int64_t>(row.pair_style);
  if (style < 0 || style > 1) {
    refuse(cell(kTable, index, "pair_style"), "0 (halves) or 1 (neighbours)", std::to_string(style),
           "Pass a PairStyle.");
  }
  const auto at_least = [&](int64_t min, int64_t found, const char* column, const char* remedy) {
    require_at_least(min, found, kTable, index, column, remedy);
  };
  at_least(1, row.num_heads, "num_heads", "A row has at least one head.");
  at_least(1, row.head_bytes, "head_bytes", "Leave out planes without keys.");
  at_least(0, row.offset_bytes, "offset_bytes", "Count from the start of the head.");
  at_least(1, row.num_pairs, "num_pairs", "Leave out planes of which nothing is rotated.");
  at_least(0, row.first_frequency, "first_frequency", "Count from the first frequency.");
  const int64_t unit = element_bytes(row.dtype);
  require_multiple(unit, row.head_bytes, index, "head_bytes");
  require_multiple(unit, row.offset_bytes, index, "offset_bytes");
  const int64_t row_bytes = transfer.planes[row.plane].row_bytes;
  const int64_t found_bytes = saturating_multiply(row.num_heads, row.head_bytes);
  if (found_bytes != row_bytes) {
    refuse(cell(kTable, index, "head_bytes"),
           "heads that fill the " + std::to_string(row_bytes) + " bytes of a row of planes[" +
               std::to_string(row.plane) + "]",
           std::to_string(row.num_heads) + " of " + std::to_string(row.head_bytes) + " bytes",
           "Correct the heads or their bytes; pages that move whole cannot be rotated.");
  }
  const int64_t end =
      saturating_add(row.offset_bytes, saturating_multiply(row.num_pairs, 2 * unit));
  if (end > row.head_bytes) {
    refuse(cell(kTable, index, "num_pairs"),
           "pairs that end within the " + std::to_string(row.head_bytes) + " bytes of a head",
           std::to_string(row.num_pairs) + " pairs that end at byte " + in_words(end),
           "Correct the pairs or their offset.");
  }
  const int64_t frequencies_end = saturating_add(row.first_frequency, row.num_pairs);
  if (frequencies_end > rotation.num_frequencies) {
    refuse(cell(kTable, index, "first_frequency"),
           "pairs with a frequency each, of " + std::to_string(rotation.num_frequencies),
           "pairs up to frequency " + in_words(frequencies_end), "Pass one frequency per pair.");
  }
}

void check_frequencies(const KeyRotation& rotation) {
  for (int64_t i = 0; i < rotation.num_frequencies; ++i) {
    const double found = rotation.frequencies[i];
    if (!(found >= 0 && found <= kFullTurn)) {
      refuse("frequencies[" + std::to_string(i) + "]", "0 to 2 pi radians per position",
             std::to_string(found), "Pass the inverse frequencies of the rotary embedding.");
    }
  }
}

void check_shifts(const CheckedTransfer& checked, const KeyRotation& rotation) {
  const Transfer& transfer = checked.transfer();
  const std::vector<int64_t>& order = checked.plane_order();
  for (int64_t i = 0; i < rotation.shifts.num_rows; ++i) {
    const Shift& shift = rotation.shifts[i];
    if (i > 0 && shift.group <= rotation.shifts[i - 1].group) {
      refuse(cell("shifts", i, "group"),
             "more than " + std::to_string(rotation.shifts[i - 1].group) + ", the group before it",
             std::to_string(shift.group), "Name every group once, in ascending order.");
    }
    const auto found = std::lower_bound(
        order.begin(), order.end(), shift.group,
        [&](int64_t plane, int64_t group) { return transfer.planes[plane].group < group; });
    if (found == order.end() || transfer.planes[*found].group != shift.group) {
      refuse(cell("shifts", i, "group"),
             "a group that one of the " + std::to_string(transfer.planes.num_rows) + " planes has",
             std::to_string(shift.group), "Leave out the shifts of groups without planes.");
    }
    if (shift.positions < -kMaxPositions || shift.positions > kMaxPositions) {
      refuse(cell("shifts", i, "positions"),
             std::to_string(-kMaxPositions) + " to " + std::to_string(kMaxPositions),
             std::to_string(shift.positions), "Pass a difference of positions.");
    }
  }
}

int64_t shift_of(const KeyRotation& rotation, int64_t group, int64_t row) {
  const Shift* const end = rotation.shifts.rows + rotation.shifts.num_rows;
  const Shift* const found =
      std::lower_bound(rotation.shifts.rows, end, group,
                       [](const Shift& shift, int64_t number) { return shift.group < number; });
  if (found == end || found->group != group) {
    refuse(cell(kTable, row, "plane"),
           "a plane of a group that shifts names, as it has runs",
           "a plane of group " + std::to_string(group) + ", which has none",
           "Pass the shift of every group whose keys move, 0 included.");
  }
  return found->positions;
}

// Lists for each plane the row of rotations that names the plane; -1 if no row does.
std::vector<int64_t> rotations_of_planes(const Transfer& transfer, const KeyRotation& rotation) {
  std::vector<int64_t> found(transfer.planes.num_rows, -1);
  for (int64_t i = 0; i < rotation.rotations.num_rows; ++i) {
    int64_t& row = found[rotation.rotations[i].plane];
    if (row >= 0) {
      refuse(cell(kTable, i, "plane"),
             "a plane that no other row names: " + std::string(kTable) + "[" + std::to_string(row) +
                 "] does",
             std::to_string(rotation.rotations[i].plane), "Rotate every plane once.");
    }
    row = i;
  }
  return found;
}

}  // namespace

CheckedRotation::CheckedRotation(const CheckedTransfer& checked, const KeyRotation& rotation)
    : transfer_(checked), places_(checked.plane_order().size(), -1) {
  const Transfer& transfer = checked.transfer();
  for (int64_t i = 0; i < rotation.rotations.num_rows; ++i) check_rotation(transfer, rotation, i);
  check_frequencies(rotation);
  check_shifts(checked, rotation);
  const std::vector<int64_t> rows = rotations_of_planes(transfer, rotation);
  for (const Group& group : checked.groups()) {
    for (int64_t place = group.first_plane; place < group.first_plane + group.num_planes; ++place) {
      const int64_t index = rows[checked.plane_order()[place]];
      if (index < 0) continue;
      const int64_t positions = shift_of(rotation, group.number, index);
      // Keys that do not move keep every bit.
      if (positions == 0) continue;
      const Rotation& row = rotation.rotations[index];
      std::vector<float>& angles = angles_[{positions, row.first_frequency, row.num_pairs}];
      if (angles.empty()) {
        angles.resize(2 * row.num_pairs);
        for (int64_t i = 0; i < row.num_pairs; ++i) {
          const double angle =
              static_cast<double>(positions) * rotation.frequencies[row.first_frequency + i];
          angles[i] = static_cast<float>(std::cos(angle));
          angles[row.num_pairs + i] = static_cast<float>(std::sin(angle));
        }
      }
      places_[place] = static_cast<int64_t>(head_rotations_.size());
      head_rotations_.push_back({row.dtype, row.pair_style, row.head_bytes, row.offset_bytes,
                                 row.num_pairs, angles.data(), angles.data() + row.num_pairs});
    }
  }
}

}  // namespace kvext
