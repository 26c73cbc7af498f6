/* Which row stands at which position: keyed permutations, and dealing from sources and classes.

   The permutation. A number x in [0, size) is written as (left, right) with
   right = x mod 2**bits and left < radix = ceil(size / 2**bits), both ranges near sqrt(size). A pass adds a
   keyed hash of left to right (mod 2**bits), then a keyed hash of right to left (mod radix): two
   rounds of a Feistel network over mixed radices (Black and Rogaway 2002), a bijection because subtracting in
   reverse undoes it. The grid has fewer than 2**bits cells above size, and a result that falls there is
   permuted again until it does not ("cycle walking"): fewer than 1 + 2/sqrt(size) turns on average,
   8/5 at the worst size (5). The usual two halves of whole bits need up to two or four turns, and a
   branch that the processor cannot predict; here a size just above a power of two costs no more.

   How many passes. Measured over keys, by chi-square: after 4 passes the joint places of two numbers
   show a bias at size 128 and none at 257; from 65,536 on, 4 are used. Below that 6 are used, after which
   size 64 shows none. Tiny sizes, whose halves have 2 to 8 values, need 12: after 10, the 5,040 orders of
   7 numbers are not yet equally likely. This took up to 2,000 keys per outcome; a quicker test already
   rejects 5 passes at size 6, 3 at sizes 20 to 80, and 2 at 65,536.

   Indices. Kernels read int64 indices, write int64 results, and return the place of the first index that is out of
   range, or DONE: indices come from users. */

#include "../native/kernels.h"

/* What a permutation of `size` numbers needs beside its key. */
typedef struct {
    uint64_t size, radix;
    int bits, passes;
} Shape;

static Shape shape_of(int64_t size)
{
    uint64_t last = (uint64_t)greatest(size, 1) - 1;
    int length = last ? 64 - __builtin_clzll(last) : 0;
    int bits = (length + 1) / 2;
    return (Shape){
        .size = (uint64_t)size,
        .radix = (last >> bits) + 1,
        .bits = bits,
        .passes = size < 64 ? 12 : size < 65536 ? 6 : 4,
    };
}

/* The key of numbered part `number`: one output of SplitMix64 started at `key`. */
static uint64_t child_key(uint64_t key, int64_t number) { return mix(key + ((uint64_t)number + 1) * GAMMA); }

/* 32 bits, each of which depends on all 31 bits of `half` and on every bit of the key. */
static uint64_t hash(uint64_t half, uint64_t key)
{
    uint64_t word = (half + key) * FACTOR_1;
    word = (word ^ word >> 32) * FACTOR_2;
    return word >> 32;
}

static uint64_t encipher(uint64_t number, const Shape *shape, uint64_t key)
{
    uint64_t mask = ((uint64_t)1 << shape->bits) - 1, radix = shape->radix;
    uint64_t left = number >> shape->bits, right = number & mask;
    for (int pass = 0; pass < shape->passes; pass++) {
        right = (right + hash(left, key)) & mask;
        left += hash(right, key + GAMMA) * radix >> 32; /* hash * radix / 2**32 < radix */
        left -= left >= radix ? radix : 0;
        key += GAMMA + GAMMA;
    }
    return left << shape->bits | right;
}

static int64_t permuted(int64_t number, const Shape *shape, uint64_t key)
{
    uint64_t place = encipher((uint64_t)number, shape, key);
    while (place >= shape->size)
        place = encipher(place, shape, key);
    return (int64_t)place;
}

/* How many numbers are permuted side by side: a round waits for the one before it, and those of the other numbers fill
   that time. It takes half as long as one by one, and twice as many at once gain nothing more. */
enum { TOGETHER = 8 };

/* Whether `TOGETHER` of these numbers, of which there are `count`, are from `start` up to `stop`. */
static bool are_together(const int64_t *number, int64_t count, int64_t start, int64_t stop)
{
    bool are_inside = count >= TOGETHER;
    for (int k = 0; are_inside && k < TOGETHER; k++)
        are_inside = number[k] >= start && number[k] < stop;
    return are_inside;
}

/* `TOGETHER` numbers, each less `start`, as `permuted` gives them one by one. */
static void permute_together(const int64_t *number, int64_t start, const Shape *shape, uint64_t key, int64_t *place)
{
    uint64_t mask = ((uint64_t)1 << shape->bits) - 1, radix = shape->radix, round_key = key;
    uint64_t left[TOGETHER], right[TOGETHER];
    for (int k = 0; k < TOGETHER; k++) {
        left[k] = (uint64_t)(number[k] - start) >> shape->bits;
        right[k] = (uint64_t)(number[k] - start) & mask;
    }
    for (int pass = 0; pass < shape->passes; pass++) {
        for (int k = 0; k < TOGETHER; k++)
            right[k] = (right[k] + hash(left[k], round_key)) & mask;
        for (int k = 0; k < TOGETHER; k++) {
            left[k] += hash(right[k], round_key + GAMMA) * radix >> 32;
            left[k] -= left[k] >= radix ? radix : 0;
        }
        round_key += GAMMA + GAMMA;
    }
    for (int k = 0; k < TOGETHER; k++) {
        uint64_t found = left[k] << shape->bits | right[k];
        while (found >= shape->size)
            found = encipher(found, shape, key);
        place[k] = (int64_t)found;
    }
}

static bool are_mapped(const Object *indices, const Object *out)
{
    return is_int64(indices) && is_int64(out) && is_writeable(out) && size_of(out) >= size_of(indices);
}

/* Applies the permutation of [0, size) under `key` to each position. */
KERNEL int64_t order_permute(const Object *positions, const Object *out, int64_t size, uint64_t key)
{
    if (!are_mapped(positions, out))
        return REFUSED;
    Shape shape = shape_of(size);
    const int64_t *position = data_of(positions);
    int64_t *rows = data_of(out), count = size_of(positions);
    uint64_t own_key = child_key(key, 0); /* keys 1 and 2 must not be neighbours */
    for (int64_t i = 0; i < count;) {
        if (are_together(position + i, count - i, 0, size)) {
            permute_together(position + i, 0, &shape, own_key, rows + i);
            i += TOGETHER;
            continue;
        }
        if (position[i] < 0 || position[i] >= size)
            return i;
        rows[i] = permuted(position[i], &shape, own_key);
        i++;
    }
    return DONE;
}

/* Groups of slots: what a position needs to become a row. Remembers the group of the last position: neighbours in a
   batch often share it, and searching all groups for every one of them would cost more than the permutation itself. */
typedef struct {
    const int64_t *starts, *slots, *shift;
    int64_t group, num_slots;
    uint64_t key, group_key;
    int64_t number, start, stop;
    Shape shape;
} Groups;

static bool are_groups(
    Groups *groups, uint64_t key, int64_t group, const Object *group_starts, const Object *slot_starts,
    const Object *shifts)
{
    if (group < 1 || !is_int64(group_starts) || !is_int64(slot_starts) || !is_int64(shifts) ||
        size_of(slot_starts) < size_of(shifts))
        return false;
    *groups = (Groups){
        .starts = data_of(group_starts),
        .slots = data_of(slot_starts),
        .shift = data_of(shifts),
        .group = group,
        .num_slots = size_of(shifts),
        .key = key,
        .shape = shape_of(0),
    };
    return true;
}

/* Makes the group of a place, one of `first` to `last`, the one that is remembered. */
static void enter(Groups *groups, int64_t place, int64_t first, int64_t last)
{
    if (place >= groups->start && place < groups->stop)
        return;
    groups->number = last_at_most(groups->starts, first, last, place);
    groups->start = groups->starts[groups->number], groups->stop = groups->starts[groups->number + 1];
    groups->shape = shape_of(groups->stop - groups->start);
    groups->group_key = child_key(groups->key, groups->number);
}

/* The row at a mixed place of the group: find the slot (window) that it fell into. */
static int64_t row_of(const Groups *groups, int64_t mixed)
{
    int64_t first = groups->number * groups->group, place = groups->start + mixed;
    int64_t end = least(first + groups->group, groups->num_slots);
    return place + groups->shift[last_at_most(groups->slots, first, end, place)];
}

/* The row at a place before rows are mixed. */
static int64_t mixed_row(Groups *groups, int64_t place, int64_t first, int64_t last)
{
    enter(groups, place, first, last);
    return row_of(groups, permuted(place - groups->start, &groups->shape, groups->group_key));
}

/* Position -> row: permute inside its group of slots. */
KERNEL int64_t order_windowed_rows(
    const Object *positions, const Object *out, int64_t size, uint64_t key, int64_t group, const Object *group_starts,
    const Object *slot_starts, const Object *shifts)
{
    Groups groups;
    if (!are_mapped(positions, out) || !are_groups(&groups, key, group, group_starts, slot_starts, shifts))
        return REFUSED;
    const int64_t *position = data_of(positions);
    int64_t *rows = data_of(out), count = size_of(positions), num_groups = size_of(group_starts) - 1;
    for (int64_t i = 0; i < count;) {
        if (position[i] < 0 || position[i] >= size)
            return i;
        enter(&groups, position[i], 0, num_groups);
        if (are_together(position + i, count - i, groups.start, groups.stop)) {
            permute_together(position + i, groups.start, &groups.shape, groups.group_key, rows + i);
            for (int k = 0; k < TOGETHER; k++)
                rows[i + k] = row_of(&groups, rows[i + k]);
            i += TOGETHER;
        } else {
            rows[i] = mixed_row(&groups, position[i], 0, num_groups);
            i++;
        }
    }
    return DONE;
}

/* Position -> row: the lanes take turns, from lane `turn` on; lane l has places l * quota to (l + 1) * quota, and
   groups `lane_groups[l]` to `lane_groups[l + 1]`. What is left over comes after them, as a lane of its own. */
KERNEL int64_t order_lane_rows(
    const Object *positions, const Object *out, int64_t size, uint64_t key, int64_t group, const Object *group_starts,
    const Object *slot_starts, const Object *shifts, const Object *lane_groups, int64_t quota, int64_t turn)
{
    Groups groups;
    int64_t lanes = size_of(lane_groups) - 2;
    if (!are_mapped(positions, out) || !are_groups(&groups, key, group, group_starts, slot_starts, shifts) ||
        !is_int64(lane_groups) || lanes < 1 || turn < 0)
        return REFUSED;
    const int64_t *position = data_of(positions), *lane_group = data_of(lane_groups);
    int64_t *rows = data_of(out), count = size_of(positions);
    for (int64_t i = 0; i < count; i++) {
        if (position[i] < 0 || position[i] >= size)
            return i;
        int64_t number = position[i] / lanes, lane = lanes, place = position[i];
        if (number < quota) {
            lane = (position[i] - number * lanes + turn) % lanes;
            place = lane * quota + number;
        }
        rows[i] = mixed_row(&groups, place, lane_group[lane], lane_group[lane + 1]);
    }
    return DONE;
}

/* Writes those of the numbers `begin` to `end` whose word under `key` is from `least` to `most`; returns how many. */
KERNEL int64_t order_pick(
    int64_t begin, int64_t end, uint64_t key, uint64_t least, uint64_t most, const Object *picked)
{
    if (begin < 0 || !is_int64(picked) || !is_writeable(picked) || size_of(picked) < end - begin)
        return REFUSED;
    int64_t *numbers = data_of(picked), count = 0;
    for (int64_t number = begin; number < end; number++) {
        uint64_t word = mix((uint64_t)number * GAMMA + key);
        numbers[count] = number; /* no branch: which ones are picked cannot be predicted */
        count += word >= least && word <= most;
    }
    return count;
}

/* Permutes every `stratum` consecutive numbers among themselves, each stratum under its own key. */
KERNEL int64_t order_shuffle_strata(const Object *rows, const Object *out, int64_t size, uint64_t key, int64_t stratum)
{
    if (!are_mapped(rows, out) || stratum < 1)
        return REFUSED;
    Shape shape = shape_of(stratum);
    const int64_t *row = data_of(rows);
    int64_t *places = data_of(out), count = size_of(rows), start = -1;
    uint64_t stratum_key = key;
    for (int64_t i = 0; i < count;) {
        if (row[i] < 0 || row[i] >= size)
            return i;
        int64_t offset = row[i] % stratum;
        if (start != row[i] - offset) {
            start = row[i] - offset;
            stratum_key = child_key(key, start / stratum);
        }
        if (are_together(row + i, count - i, start, least(start + stratum, size))) {
            permute_together(row + i, start, &shape, stratum_key, places + i);
            for (int k = 0; k < TOGETHER; k++)
                places[i + k] += start;
            i += TOGETHER;
        } else {
            places[i] = start + permuted(offset, &shape, stratum_key);
            i++;
        }
    }
    return DONE;
}

static int64_t divide_up(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

/* Fills `out` with quotas[k] times k, spread evenly: earliest deadline first. `dealt` and `deadlines` are scratch.

   See `_mixture.py` for the windows and the proof that no source is ever off by a whole item. */
KERNEL int64_t order_deal_evenly(const Object *quotas, const Object *out, const Object *dealt, const Object *deadlines)
{
    int64_t num_sources = size_of(quotas), num_slots = size_of(out);
    if (!is_int64(quotas) || !is_int64(out) || !is_writeable(out) || !is_int64(dealt) || !is_writeable(dealt) ||
        !is_int64(deadlines) || !is_writeable(deadlines) || size_of(dealt) < num_sources ||
        size_of(deadlines) < num_sources)
        return REFUSED;
    const int64_t *quota = data_of(quotas);
    int64_t *sources = data_of(out), *given = data_of(dealt), *deadline = data_of(deadlines);
    for (int64_t source = 0; source < num_sources; source++) {
        if (quota[source] < 1)
            return REFUSED;
        given[source] = 0;
        deadline[source] = divide_up(num_slots, quota[source]);
    }
    for (int64_t slot = 0; slot < num_slots; slot++) {
        int64_t chosen = 0, earliest = num_slots + 1;
        for (int64_t source = 0; source < num_sources; source++) {
            bool is_released = given[source] * num_slots < (slot + 1) * quota[source];
            if (is_released && deadline[source] < earliest)
                chosen = source, earliest = deadline[source];
        }
        sources[slot] = chosen;
        given[chosen]++;
        deadline[chosen] = divide_up((given[chosen] + 1) * num_slots, quota[chosen]);
    }
    return DONE;
}

/* Row -> member: permute the classes of the round, then the members of the class in its cycle; see `_draw.py`. */
KERNEL int64_t order_deal_classes(
    const Object *rows, const Object *out, int64_t size, uint64_t key, int64_t is_shuffled, const Object *sizes,
    const Object *starts, const Object *used)
{
    int64_t num_classes = size_of(sizes), count = size_of(rows);
    if (!are_mapped(rows, out) || !is_int64(sizes) || num_classes < 1 || !is_int64(starts) || !is_int64(used) ||
        size_of(starts) < num_classes || size_of(used) < num_classes)
        return REFUSED;
    const int64_t *row = data_of(rows), *class_size = data_of(sizes), *start = data_of(starts), *in_use = data_of(used);
    int64_t *members = data_of(out);
    Shape round_shape = shape_of(num_classes);
    uint64_t round_key = child_key(key, 0), cycle_key = child_key(key, 1);
    for (int64_t i = 0; i < count; i++) {
        if (row[i] < 0 || row[i] >= size)
            return i;
        int64_t turn = row[i] / num_classes, number = row[i] % num_classes;
        if (is_shuffled)
            number = permuted(number, &round_shape, child_key(round_key, turn));
        if (in_use[number] < 1 || in_use[number] > class_size[number])
            return REFUSED;
        int64_t place = turn % in_use[number];
        if (is_shuffled) {
            Shape shape = shape_of(class_size[number]);
            place = permuted(place, &shape, child_key(child_key(cycle_key, number), turn / in_use[number]));
        }
        members[i] = start[number] + place;
    }
    return DONE;
}
