/* Copies samples out of many shards in one call.

   A table has one row per shard: FILE, SIZE, then COLUMN_NUMBERS numbers per column, addresses among them (`_storage.py`).
   For every sample a kernel finds the shard, tests one state, and copies, converting the dtype on the way.

   NOTE [what may be dereferenced]
     An address in a table is valid as long as the table is referenced: `Table.held` keeps the maps.
     A sample lies inside its tensor because shard sizes were checked when the shard was opened, and
     offsets are tested here each time they are read. Reading a file that shrank would fault, so its
     size is checked whenever a call enters a shard.

   NOTE [fetched ahead]
     Samples lie apart, so each would begin with a wait for memory, and the processor's own prefetching ends with the
     page. So a few dozen are found first, and while one is copied, what is AHEAD_BYTES further on is fetched: 32 rows of
     4 KiB, widened to int64, take 10 us in place of 16. */

#define _XOPEN_SOURCE 700 /* with -std=c11, `pread` is declared for who asks */

#include <errno.h>
#include <unistd.h>

#include "../native/kernels.h"

/* As in `_storage.py` and `_layout.py`. */
enum { FILE, SIZE };
enum { VALUES, OFFSETS, COUNT, STATE, VALUE_FLAGS, OFFSET_FLAGS, COLUMN_NUMBERS };
enum { ABSENT, OPEN, READY };
enum { BLOCK_BYTES = 512 << 10 };

enum { NOWHERE = -1 };
enum { MOST_PARTS = 64, PIECE_BYTES = 512, AHEAD_BYTES = 4096, LINE_BYTES = 64 };

/* One column of a table, and where its shards begin. */
typedef struct {
    const int64_t *rows;
    int64_t width, slot;
    const int64_t *starts;
    int64_t num_shards;
} Column;

/* Elements of one ragged sample; the address is NULL if they are not checked or its offsets are invalid. */
typedef struct {
    const char *address;
    int64_t size;
} Sample;

/* Consecutive items that are copied to one place. */
typedef struct {
    char *target;
    const char *source;
    int64_t count;
} Part;

/* Parts found and not yet copied; see NOTE [fetched ahead]. */
typedef struct {
    Copy *copy;
    int64_t item_bytes, target_bytes;
    int64_t count;
    Part parts[MOST_PARTS];
} Parts;

static Parts no_parts(Copy *copy, const Object *out, const Object *like)
{
    Parts parts;
    parts.copy = copy, parts.count = 0;
    parts.item_bytes = dtype_of(like)->item_bytes, parts.target_bytes = dtype_of(out)->item_bytes;
    return parts;
}

/* Has the processor fetch the next lines of parts from `*part` and `*at` on. */
static void fetch(const Parts *parts, int64_t *part, int64_t *at, int64_t num_bytes)
{
    for (; num_bytes > 0 && *part < parts->count; num_bytes -= LINE_BYTES) {
        const Part *found = &parts->parts[*part];
        __builtin_prefetch(found->source + *at);
        *at += LINE_BYTES;
        if (*at >= found->count * parts->item_bytes)
            ++*part, *at = 0;
    }
}

/* Copies all parts, and forgets them. */
static void copy_parts(Parts *parts)
{
    int64_t next = 0, at = 0, piece = greatest(1, PIECE_BYTES / parts->item_bytes);
    fetch(parts, &next, &at, AHEAD_BYTES);
    for (int64_t k = 0; k < parts->count; k++) {
        const Part *part = &parts->parts[k];
        for (int64_t done = 0; done < part->count; done += piece) {
            int64_t size = least(piece, part->count - done);
            fetch(parts, &next, &at, size * parts->item_bytes);
            parts->copy(
                part->target + done * parts->target_bytes, part->source + done * parts->item_bytes, size,
                parts->item_bytes);
        }
    }
    parts->count = 0;
}

/* Takes a part that was found, and copies when there are many. */
static void add_part(Parts *parts, char *target, const char *source, int64_t count)
{
    parts->parts[parts->count++] = (Part){target, source, count};
    if (parts->count == MOST_PARTS)
        copy_parts(parts);
}

static bool open_column(Column *column, const Object *table, const Object *starts, int64_t slot)
{
    if (!is_int64(table) || array_of(table)->num_dimensions != 2 || !is_int64(starts))
        return false;
    *column = (Column){
        .rows = data_of(table),
        .width = array_of(table)->shape[1],
        .slot = slot,
        .starts = data_of(starts),
        .num_shards = size_of(starts) - 1,
    };
    return column->num_shards >= 0 && column->num_shards <= array_of(table)->shape[0] && slot > SIZE &&
           slot + COLUMN_NUMBERS <= column->width;
}

static int64_t num_samples_of(const Column *column) { return column->starts[column->num_shards]; }

/* The numbers of a column in one shard. */
static const int64_t *numbers_of(const Column *column, int64_t shard)
{
    return column->rows + shard * column->width + column->slot;
}

static int64_t find_shard(const Column *column, int64_t index)
{
    return last_at_most(column->starts, 0, column->num_shards, index);
}

/* Whether the shard is open and its file still has its size. */
static bool can_enter(const Column *column, int64_t shard)
{
    const int64_t *row = column->rows + shard * column->width;
    if (row[column->slot + STATE] == ABSENT)
        return false;
    return row[FILE] < 0 || lseek((int)row[FILE], 0, SEEK_END) == row[SIZE];
}

/* The shard that holds `index`, or NOWHERE if it cannot be entered; `previous` was entered before. */
static int64_t enter(const Column *column, int64_t index, int64_t previous)
{
    int64_t shard = find_shard(column, index);
    return shard == previous || can_enter(column, shard) ? shard : NOWHERE;
}

/* The index as a non-negative one, or NOWHERE if there is no such sample. */
static int64_t from_front(int64_t index, int64_t num_samples)
{
    if (index < 0)
        index += num_samples;
    return 0 <= index && index < num_samples ? index : NOWHERE;
}

static const void *at_address(int64_t address) { return (const void *)(intptr_t)address; } // NOLINT

/* Whether the blocks that hold bytes `begin` to `end` of a tensor were checked. */
static bool are_checked(int64_t flags_address, int64_t begin, int64_t end)
{
    const uint8_t *flags = at_address(flags_address);
    for (int64_t block = begin / BLOCK_BYTES; begin < end && block <= (end - 1) / BLOCK_BYTES; block++)
        if (flags[block] == 0)
            return false;
    return true;
}

/* Where a ragged sample begins and ends in its tensor of values; false if its offsets are not checked or invalid. */
static bool read_edges(const Column *column, int64_t shard, int64_t index, int64_t edges[2])
{
    const int64_t *numbers = numbers_of(column, shard);
    int64_t at = (index - column->starts[shard]) * (int64_t)sizeof(int64_t);
    if (numbers[STATE] != READY && !are_checked(numbers[OFFSET_FLAGS], at, at + 16))
        return false;
    memcpy(edges, at_address(numbers[OFFSETS] + at), 16); /* the source may be at any address */
    return 0 <= edges[0] && edges[0] <= edges[1] && edges[1] <= numbers[COUNT];
}

static Sample find_elements(const int64_t *numbers, int64_t first, int64_t size, int64_t item_bytes)
{
    int64_t begin = first * item_bytes, end = (first + size) * item_bytes;
    if (numbers[STATE] != READY && !are_checked(numbers[VALUE_FLAGS], begin, end))
        return (Sample){0};
    return (Sample){at_address(numbers[VALUES] + begin), size};
}

static Sample find_sample(const Column *column, int64_t shard, int64_t index, int64_t item_bytes)
{
    int64_t edges[2];
    if (!read_edges(column, shard, index, edges))
        return (Sample){0};
    return find_elements(numbers_of(column, shard), edges[0], edges[1] - edges[0], item_bytes);
}

/* `size` elements of a ragged sample, from its element `first` on; nothing else of it has to be checked. */
static Sample find_part(
    const Column *column, int64_t shard, int64_t index, int64_t first, int64_t size, int64_t item_bytes)
{
    int64_t edges[2];
    if (!read_edges(column, shard, index, edges) || first < 0 || size < 0 || first > edges[1] - edges[0] - size)
        return (Sample){0};
    return find_elements(numbers_of(column, shard), edges[0] + first, size, item_bytes);
}

/* Copies samples `indices[begin:]` of a fixed column into the rows of `out`; `like` has the stored dtype.

   Returns DONE, or the place in `indices` of the first sample that is not open or not checked, or -2 - place of an
   index out of range. Everything before that place is done. */
KERNEL int64_t shards_gather(
    const Object *table, const Object *starts, int64_t slot, const Object *indices, int64_t begin, const Object *out,
    const Object *like)
{
    Column column;
    Copy *copy = copy_between(out, like);
    const Array *rows = array_of(out);
    if (!open_column(&column, table, starts, slot) || !is_int64(indices) || begin < 0 || !is_writeable(out) ||
        rows->num_dimensions != 2 || rows->shape[0] < size_of(indices) || copy == NULL)
        return REFUSED;
    Parts parts = no_parts(copy, out, like);
    int64_t num_items = rows->shape[1], row_bytes = num_items * parts.item_bytes, stopped = DONE;
    int64_t num_samples = num_samples_of(&column), num_indices = size_of(indices), previous = NOWHERE;
    const int64_t *wanted = data_of(indices);
    uint64_t entered = 0; /* shards of this call, where 64 bits are enough for all */
    for (int64_t place = begin; place < num_indices; place++) {
        int64_t index = from_front(wanted[place], num_samples);
        if (index == NOWHERE) {
            stopped = -2 - place;
            break;
        }
        int64_t shard = find_shard(&column, index);
        if (shard != previous) {
            uint64_t bit = (uint64_t)1 << (shard & 63);
            if (column.num_shards > 64 || !(entered & bit)) {
                if (!can_enter(&column, shard)) {
                    stopped = place;
                    break;
                }
                entered |= bit;
            }
            previous = shard;
        }
        const int64_t *numbers = numbers_of(&column, shard);
        int64_t at = (index - column.starts[shard]) * row_bytes;
        if (numbers[STATE] != READY && !are_checked(numbers[VALUE_FLAGS], at, at + row_bytes)) {
            stopped = place;
            break;
        }
        char *target = (char *)rows->data + place * num_items * parts.target_bytes;
        add_part(&parts, target, at_address(numbers[VALUES] + at), num_items);
    }
    copy_parts(&parts);
    return stopped;
}

/* Address of each ragged sample, and where it ends when they are laid side by side.

   Returns as `shards_gather` does; a sample whose offsets decrease or exceed the values counts as not checked,
   so that the caller examines it and raises. */
KERNEL int64_t shards_locate(
    const Object *table, const Object *starts, int64_t slot, const Object *indices, int64_t begin, int64_t item_bytes,
    const Object *addresses, const Object *ends)
{
    Column column;
    if (!open_column(&column, table, starts, slot) || !is_int64(indices) || begin < 0 || !is_int64(addresses) ||
        !is_writeable(addresses) || !is_int64(ends) || !is_writeable(ends))
        return REFUSED;
    int64_t num_samples = num_samples_of(&column), num_indices = size_of(indices), previous = NOWHERE;
    if (size_of(addresses) < num_indices || size_of(ends) < num_indices || begin > num_indices)
        return REFUSED;
    const int64_t *wanted = data_of(indices);
    int64_t *found = data_of(addresses), *total = data_of(ends);
    for (int64_t place = begin; place < num_indices; place++) {
        int64_t index = from_front(wanted[place], num_samples);
        if (index == NOWHERE)
            return -2 - place;
        previous = enter(&column, index, previous);
        if (previous == NOWHERE)
            return place;
        Sample sample = find_sample(&column, previous, index, item_bytes);
        if (sample.address == NULL)
            return place;
        found[place] = (int64_t)(intptr_t)sample.address;
        total[place] = (place ? total[place - 1] : 0) + sample.size;
    }
    return DONE;
}

/* Length of each ragged sample, from its offsets alone. Returns as `shards_locate` does; no index may be negative. */
KERNEL int64_t shards_measure(
    const Object *table, const Object *starts, int64_t slot, const Object *indices, int64_t begin,
    const Object *lengths)
{
    Column column;
    if (!open_column(&column, table, starts, slot) || !is_int64(indices) || begin < 0 || !is_int64(lengths) ||
        !is_writeable(lengths) || size_of(lengths) < size_of(indices))
        return REFUSED;
    int64_t num_indices = size_of(indices), previous = NOWHERE;
    const int64_t *wanted = data_of(indices);
    for (int64_t place = begin; place < num_indices; place++) {
        int64_t index = wanted[place], edges[2];
        if (index < 0 || index >= num_samples_of(&column))
            return REFUSED;
        previous = enter(&column, index, previous);
        if (previous == NOWHERE || !read_edges(&column, previous, index, edges))
            return place;
        ((int64_t *)data_of(lengths))[place] = edges[1] - edges[0];
    }
    return DONE;
}

/* Copies the bytes of each located sample to its place in `out`; `ends` are in bytes. */
KERNEL int64_t shards_copy_spans(const Object *addresses, const Object *ends, const Object *out)
{
    if (!is_int64(addresses) || !is_int64(ends) || size_of(ends) != size_of(addresses) || !is_uint8(out) ||
        !is_writeable(out))
        return REFUSED;
    const int64_t *sources = data_of(addresses), *edges = data_of(ends);
    int64_t begin = 0, num_bytes = size_of(out), num_samples = size_of(addresses);
    for (int64_t place = 0; place < num_samples; place++) {
        if (edges[place] < begin || edges[place] > num_bytes)
            return REFUSED;
        memcpy((uint8_t *)data_of(out) + begin, at_address(sources[place]), (size_t)(edges[place] - begin));
        begin = edges[place];
    }
    return DONE;
}

/* Copies `sizes[k]` elements from `firsts[k]` of sample `indices[k]` to `out[targets[k]:]`, for k from `begin`.

   Returns as `shards_locate` does, and no index may be negative; a span that exceeds its sample counts as invalid. */
KERNEL int64_t shards_gather_spans(
    const Object *table, const Object *starts, int64_t slot, const Object *indices, const Object *firsts,
    const Object *sizes, const Object *targets, int64_t begin, const Object *out, const Object *like)
{
    Column column;
    Copy *copy = copy_between(out, like);
    int64_t num_spans = size_of(indices), previous = NOWHERE;
    if (!open_column(&column, table, starts, slot) || !is_int64(indices) || !is_int64(firsts) || !is_int64(sizes) ||
        !is_int64(targets) || begin < 0 || size_of(firsts) < num_spans || size_of(sizes) < num_spans ||
        size_of(targets) < num_spans || !is_writeable(out) || copy == NULL)
        return REFUSED;
    const int64_t *index = data_of(indices), *first = data_of(firsts), *size = data_of(sizes), *to = data_of(targets);
    Parts parts = no_parts(copy, out, like);
    int64_t num_items = size_of(out), stopped = DONE;
    for (int64_t span = begin; span < num_spans; span++) {
        if (index[span] < 0 || index[span] >= num_samples_of(&column))
            return REFUSED;
        previous = enter(&column, index[span], previous);
        Sample part = {0};
        if (previous != NOWHERE)
            part = find_part(&column, previous, index[span], first[span], size[span], parts.item_bytes);
        if (part.address == NULL) {
            stopped = span;
            break;
        }
        if (to[span] < 0 || to[span] > num_items - part.size)
            return REFUSED;
        add_part(&parts, (char *)data_of(out) + to[span] * parts.target_bytes, part.address, part.size);
    }
    copy_parts(&parts);
    return stopped;
}

/* Copies a row of consecutive elements from each of `firsts[begin:]`, across samples and shards.

   `value_starts` is to elements what `starts` is to samples; all elements must exist. Returns as `shards_gather` does. */
KERNEL int64_t shards_gather_stream(
    const Object *table, const Object *value_starts, int64_t slot, const Object *firsts, int64_t begin,
    const Object *out, const Object *like)
{
    Column column;
    Copy *copy = copy_between(out, like);
    const Array *rows = array_of(out);
    if (!open_column(&column, table, value_starts, slot) || !is_int64(firsts) || begin < 0 || !is_writeable(out) ||
        rows->num_dimensions != 2 || rows->shape[0] < size_of(firsts) || copy == NULL)
        return REFUSED;
    int64_t length = rows->shape[1], num_elements = num_samples_of(&column), num_rows = size_of(firsts);
    Parts parts = no_parts(copy, out, like);
    int64_t item_bytes = parts.item_bytes, stopped = DONE;
    for (int64_t place = begin; place < num_rows && stopped == DONE; place++) {
        int64_t at = ((const int64_t *)data_of(firsts))[place];
        char *target = (char *)rows->data + place * length * parts.target_bytes;
        if (at < 0 || at > num_elements - length)
            return REFUSED;
        for (int64_t left = length; left > 0;) {
            int64_t shard = enter(&column, at, NOWHERE);
            if (shard == NOWHERE) {
                stopped = place;
                break;
            }
            const int64_t *numbers = numbers_of(&column, shard);
            int64_t first = at - column.starts[shard], size = least(left, column.starts[shard + 1] - at);
            if (numbers[STATE] != READY &&
                !are_checked(numbers[VALUE_FLAGS], first * item_bytes, (first + size) * item_bytes)) {
                stopped = place;
                break;
            }
            add_part(&parts, target, at_address(numbers[VALUES] + first * item_bytes), size);
            at += size, left -= size, target += size * parts.target_bytes;
        }
    }
    copy_parts(&parts);
    return stopped;
}

/* Reads `sizes[k]` bytes from byte `begins[k]` of an open file to `out[targets[k]:]`, for every k.

   Returns DONE, or the first k of which not all bytes were read: the file is shorter, or the disk failed. */
KERNEL int64_t shards_read_files(
    const Object *descriptors, const Object *begins, const Object *sizes, const Object *targets, const Object *out)
{
    int64_t num_reads = size_of(descriptors), num_bytes = size_of(out);
    if (!is_int64(descriptors) || !is_int64(begins) || !is_int64(sizes) || !is_int64(targets) || !is_uint8(out) ||
        !is_writeable(out) || size_of(begins) < num_reads || size_of(sizes) < num_reads || size_of(targets) < num_reads)
        return REFUSED;
    const int64_t *file = data_of(descriptors), *begin = data_of(begins), *size = data_of(sizes), *to = data_of(targets);
    for (int64_t k = 0; k < num_reads; k++) {
        if (size[k] < 0 || begin[k] < 0 || to[k] < 0 || to[k] > num_bytes - size[k])
            return REFUSED;
        for (int64_t done = 0; done < size[k];) {
            uint8_t *target = (uint8_t *)data_of(out) + to[k] + done;
            ssize_t count = pread((int)file[k], target, (size_t)(size[k] - done), begin[k] + done);
            if (count < 0 && errno == EINTR)
                continue;
            if (count <= 0)
                return k;
            done += count;
        }
    }
    return DONE;
}
