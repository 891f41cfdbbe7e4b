# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A text that documents are stored behind. No question is about it."""

TEXT = (
    "Salt was once carried across deserts and over mountain passes, because without it meat and "
    "fish could not be kept for long. Where it lay near the surface it was broken out in "
    "blocks, and on the coast shallow basins were filled by the tide and left to dry in the "
    "sun. Today most of it is pumped up as brine and boiled down in closed vessels. Only a "
    "small part ends up on a table; far more is used to make glass, soap and paper, and to keep "
    "roads free of ice.\n"
    "Bees tell each other where flowers are by dancing on the comb. The direction of the dance "
    "says where to fly, and how long it lasts says how far. A colony has one queen and tens of "
    "thousands of workers, which clean cells at first, then feed the brood, build, guard the "
    "entrance, and only in their last weeks gather nectar. In winter they sit close together "
    "and keep warm by moving their muscles without moving their wings.\n"
    "A map leaves out almost everything. What remains depends on who is going to read it: a "
    "sailor needs depths and lights, a hiker needs paths and slopes, and a driver needs little "
    "more than the order of the crossings. Since the earth is round and paper is flat, every "
    "map also bends what it shows. Some keep angles, some keep areas, and many keep neither but "
    "look pleasant.\n"
    "Tides follow the moon, and to a lesser degree the sun. When both pull along one line the "
    "water rises and falls the most; a week later the difference is small. In narrow bays it "
    "may reach the height of a house, while inland seas hardly notice. Harbors used to print "
    "tables for the year to come, worked out by machines with wheels and strings, and those "
    "tables were seldom wrong by more than a few minutes."
)
