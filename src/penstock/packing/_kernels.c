/* The loops of packing: best fit in O(1) per piece, counting sort, and keyed shuffles.

   Unfinished rows are kept on *shelves*: shelf f holds the rows with room for f more tokens. The best fit for a
   piece of s tokens is any row of the lowest occupied shelf f >= s, which a bitmap of occupied shelves finds:
   one bit per shelf in 64-bit words, one summary bit per word, and a scan over the summary (one word per
   4,096 tokens of a row: 32 at 128 k, too few for a third level to pay). The shelf of untouched rows,
   f = length, is never empty, so a search always ends and a new row is no special case.

   Pieces come in runs of equal length s. If f is the lowest shelf that fits, one of its rows takes f / s pieces
   in a row: after each its room is below f, so it stays the best fit as long as it fits. `count_rows` goes one step
   further and moves all rows of a shelf at once, knowing only how many there are.

   Invariant: `count_rows(h)` equals the number of rows of `lay_out(h)` without a limit, because rows with the
   same room are alike. With a limit on documents they are not: then the row touched last goes first,
   which depends on lengths only, so the count still does not depend on the key.

   A histogram of lengths has length + 1 entries, for pieces of 0 to `length` tokens.

   With further budgets (images in a row, say), documents are vectors, and rows of equal room are not alike. Shelves are
   then kept once for each *class* of rows, those with about the same room in the first of these budgets; a search asks
   each class for one row, and the one that scores best takes the document. */

#include "../native/kernels.h"

enum { NOBODY = -1 };

/* --- the bitmap of occupied shelves ---------------------------------------------------------------------------- */

/* Bit f & 63 of words[f >> 6]: shelf f is occupied; bit w & 63 of summary[w >> 6]: words[w] is not 0. */
typedef struct {
    uint64_t *words, *summary;
} Bitmap;

static void mark(Bitmap bitmap, int64_t shelf)
{
    int64_t word = shelf >> 6;
    bitmap.words[word] |= (uint64_t)1 << (shelf & 63);
    bitmap.summary[word >> 6] |= (uint64_t)1 << (word & 63);
}

static void clear(Bitmap bitmap, int64_t shelf)
{
    int64_t word = shelf >> 6;
    bitmap.words[word] &= ~((uint64_t)1 << (shelf & 63));
    if (bitmap.words[word] == 0)
        bitmap.summary[word >> 6] &= ~((uint64_t)1 << (word & 63));
}

/* The lowest occupied shelf with room for `shelf` tokens; there is one, that of untouched rows. */
static int64_t lowest_from(Bitmap bitmap, int64_t shelf)
{
    int64_t word = shelf >> 6;
    uint64_t bits = bitmap.words[word] >> (shelf & 63);
    if (bits != 0)
        return shelf + __builtin_ctzll(bits);
    int64_t group = (word + 1) >> 6, skipped = (word + 1) & 63;
    bits = bitmap.summary[group] >> skipped << skipped;
    while (bits == 0)
        bits = bitmap.summary[++group];
    word = (group << 6) + __builtin_ctzll(bits);
    return (word << 6) + __builtin_ctzll(bitmap.words[word]);
}

/* A bitmap in scratch arrays of zeros, with the shelf of untouched rows. */
static bool make_bitmap(Bitmap *bitmap, const Object *words, const Object *summary, int64_t length)
{
    if (length < 1 || !is_uint64(words) || !is_writeable(words) || size_of(words) <= length >> 6 ||
        !is_uint64(summary) || !is_writeable(summary) || size_of(summary) <= length >> 12)
        return false;
    *bitmap = (Bitmap){data_of(words), data_of(summary)};
    mark(*bitmap, length);
    return true;
}

/* --- the layout: from a histogram of piece lengths to rows ----------------------------------------------------- */

/* Counts into `histogram`, all zeros, the pieces of each length that cutting makes; entry 0 counts what has no piece. */
KERNEL int64_t packing_count_pieces(const Object *kept, const Object *histogram)
{
    int64_t length = size_of(histogram) - 1, num_documents = size_of(kept);
    if (!is_int64(kept) || !is_int64(histogram) || !is_writeable(histogram) || length < 1)
        return REFUSED;
    const int64_t *sizes = data_of(kept);
    int64_t *counts = data_of(histogram);
    for (int64_t document = 0; document < num_documents; document++) {
        int64_t size = sizes[document];
        if (size < 0)
            return REFUSED;
        if (size > length) { /* divide only here: it costs more than the rest of the loop */
            counts[length] += size / length;
            size %= length;
        }
        counts[size]++;
    }
    return DONE;
}

/* How many rows are on each shelf. */
typedef struct {
    int64_t *counts;
    Bitmap occupied;
} Shelves;

static void move_rows(Shelves shelves, int64_t old, int64_t new, int64_t num_rows)
{
    shelves.counts[old] -= num_rows;
    if (num_rows > 0 && new > 0) { /* full rows are never needed again */
        shelves.counts[new] += num_rows;
        mark(shelves.occupied, new);
    }
}

/* `room / size` for room >= size, without the division in the commonest case. */
static int64_t quotient(int64_t room, int64_t size) { return room < 2 * size ? 1 : room / size; }

/* Gives up to `left` pieces to the rows of one shelf; returns how many are left for the next shelf. */
static int64_t fill_shelf(Shelves shelves, int64_t shelf, int64_t size, int64_t left)
{
    int64_t each = quotient(shelf, size);
    int64_t num_full = least(shelves.counts[shelf], each > 1 ? left / each : left);
    move_rows(shelves, shelf, shelf - each * size, num_full);
    left -= num_full * each;
    if (left > 0 && shelves.counts[shelf] > 0) { /* one row takes the rest of the run */
        move_rows(shelves, shelf, shelf - left * size, 1);
        left = 0;
    }
    if (shelves.counts[shelf] == 0)
        clear(shelves.occupied, shelf);
    return left;
}

/* The number of rows of the layout without a limit on documents, a whole shelf at a time.

   `on_shelf` is scratch as long as the histogram, `words` and `summary` are for the bitmap; all zeros. */
KERNEL int64_t packing_count_rows(
    const Object *histogram, const Object *on_shelf, const Object *words, const Object *summary)
{
    int64_t length = size_of(histogram) - 1;
    Shelves shelves;
    if (!is_int64(histogram) || !is_int64(on_shelf) || !is_writeable(on_shelf) || size_of(on_shelf) <= length ||
        !make_bitmap(&shelves.occupied, words, summary, length))
        return REFUSED;
    const int64_t *pieces = data_of(histogram);
    shelves.counts = data_of(on_shelf);
    int64_t untouched = 1; /* one more than can be used, so that this shelf never empties */
    for (int64_t size = 0; size <= length; size++)
        untouched += pieces[size];
    shelves.counts[length] = untouched;
    for (int64_t size = length; size > 0; size--)
        for (int64_t left = pieces[size]; left > 0;)
            left = fill_shelf(shelves, lowest_from(shelves.occupied, size), size, left);
    return untouched - shelves.counts[length];
}

/* Rows on shelves, each shelf a chain: the row put there last, and below each row the next one. */
typedef struct {
    int32_t *tops, *below;
    Bitmap occupied;
} Chains;

static int32_t take_row(Chains chains, int64_t shelf)
{
    int32_t row = chains.tops[shelf];
    chains.tops[shelf] = chains.below[row];
    if (chains.tops[shelf] == NOBODY)
        clear(chains.occupied, shelf);
    return row;
}

static void put_row(Chains chains, int64_t shelf, int32_t row)
{
    chains.below[row] = chains.tops[shelf];
    chains.tops[shelf] = row;
    mark(chains.occupied, shelf);
}

/* The row of every slot, slots being the pieces by decreasing length, and the number of pieces in each row.

   Returns the number of rows. `row_sizes`, `words` and `summary` come as zeros; `tops` is scratch as long as the
   histogram, `below` is as long as there are slots. */
KERNEL int64_t packing_lay_out(
    const Object *histogram, int64_t max_documents, const Object *slot_rows, const Object *row_sizes,
    const Object *tops, const Object *below, const Object *words, const Object *summary)
{
    int64_t length = size_of(histogram) - 1, num_slots = size_of(slot_rows), slot = 0;
    Chains chains;
    if (!is_int64(histogram) || !is_int32(slot_rows) || !is_writeable(slot_rows) || !is_int32(row_sizes) ||
        !is_writeable(row_sizes) || size_of(row_sizes) < num_slots || !is_int32(tops) || !is_writeable(tops) ||
        size_of(tops) <= length || !is_int32(below) || !is_writeable(below) || size_of(below) < num_slots ||
        max_documents < 1 || num_slots > INT32_MAX || !make_bitmap(&chains.occupied, words, summary, length))
        return REFUSED;
    const int64_t *pieces = data_of(histogram);
    int32_t *rows = data_of(slot_rows), *sizes = data_of(row_sizes);
    chains.tops = data_of(tops), chains.below = data_of(below);
    for (int64_t shelf = 0; shelf < length; shelf++)
        chains.tops[shelf] = NOBODY;
    chains.tops[length] = 0; /* untouched rows are in order and never run out, so this also counts the rows taken */
    for (int64_t row = 0; row < num_slots; row++)
        chains.below[row] = (int32_t)row + 1;
    for (int64_t size = length; size > 0; size--) {
        int64_t run_end = slot + pieces[size];
        if (run_end > num_slots)
            return REFUSED;
        while (slot < run_end) {
            int64_t shelf = lowest_from(chains.occupied, size);
            int32_t row = take_row(chains, shelf);
            int64_t num_taken = least(least(quotient(shelf, size), run_end - slot), max_documents - sizes[row]);
            for (int64_t end = slot + num_taken; slot < end; slot++)
                rows[slot] = row;
            sizes[row] += (int32_t)num_taken;
            int64_t room = shelf - num_taken * size;
            if (room > 0 && sizes[row] < max_documents)
                put_row(chains, room, row);
        }
    }
    return chains.tops[length];
}

/* --- the layout under several budgets -------------------------------------------------------------------------- */

enum { MAX_BUDGETS = 9, NUM_TRIES = 16 };

/* Rows of every class on shelves. Budget 0 is that of tokens, budget 1 decides the class of a row. */
typedef struct {
    int64_t num_budgets, num_classes, length, num_words, num_sums;
    const int64_t *budgets;
    int64_t weights[MAX_BUDGETS];
    int64_t *rooms; /* of each row in each budget */
    int32_t *tops, *below;
    uint64_t *words, *summary;
    bool spreads;
} Field;

static int64_t class_of(const Field *field, int64_t amount)
{
    return amount * (field->num_classes - 1) / field->budgets[1];
}

static Bitmap bitmap_of(const Field *field, int64_t number)
{
    return (Bitmap){field->words + number * field->num_words, field->summary + number * field->num_sums};
}

/* The lowest occupied shelf from `shelf` on, or the highest one if rows are to be filled evenly; -1 if there is none. */
static int64_t find_shelf(const Field *field, Bitmap bitmap, int64_t shelf)
{
    int64_t group, word;
    if (field->spreads) {
        for (group = field->num_sums - 1; group >= 0 && bitmap.summary[group] == 0; group--)
            ;
        if (group < 0)
            return -1;
        word = (group << 6) + 63 - __builtin_clzll(bitmap.summary[group]);
        int64_t highest = (word << 6) + 63 - __builtin_clzll(bitmap.words[word]);
        return highest >= shelf ? highest : -1;
    }
    if (shelf > field->length)
        return -1;
    word = shelf >> 6;
    uint64_t bits = bitmap.words[word] >> (shelf & 63);
    if (bits != 0)
        return shelf + __builtin_ctzll(bits);
    if (++word == field->num_words)
        return -1;
    group = word >> 6;
    bits = bitmap.summary[group] >> (word & 63) << (word & 63);
    while (bits == 0) {
        if (++group == field->num_sums)
            return -1;
        bits = bitmap.summary[group];
    }
    word = (group << 6) + __builtin_ctzll(bits);
    return (word << 6) + __builtin_ctzll(bitmap.words[word]);
}

static const int64_t HIGHEST_SCORE = (int64_t)1 << 40;

/* How well a row takes a document, more being better; -1 if it does not fit. Tight rows are best, or, if rows are to
   be filled evenly, those that keep room in every budget. */
static int64_t score_of(const Field *field, int64_t row, const int64_t *document)
{
    int64_t sum = 0, least_left = INT64_MAX;
    for (int64_t budget = 0; budget < field->num_budgets; budget++) {
        int64_t left = field->rooms[row * field->num_budgets + budget] - document[budget];
        if (left < 0)
            return -1;
        left *= field->weights[budget];
        sum += left;
        least_left = least(least_left, left);
    }
    return field->spreads ? sum + 7 * least_left : HIGHEST_SCORE - sum;
}

static void put_in_field(const Field *field, int64_t row)
{
    const int64_t *rooms = field->rooms + row * field->num_budgets;
    if (rooms[0] == 0)
        return;
    int64_t number = class_of(field, rooms[1]);
    int32_t *top = field->tops + number * (field->length + 1) + rooms[0];
    field->below[row] = *top;
    *top = (int32_t)row;
    mark(bitmap_of(field, number), rooms[0]);
}

/* Takes the row that is best for a document off its shelf; -1 if none of the rows searched fits. */
static int64_t take_from_field(const Field *field, const int64_t *document)
{
    int64_t best = -1, best_score = -1, best_class = 0, best_shelf = 0;
    for (int64_t number = class_of(field, document[1]); number < field->num_classes; number++) {
        /* All rows of a class, and of those after it, keep at least so much of the second budget. */
        int64_t left_over = (number * field->budgets[1] / (field->num_classes - 1) - document[1]) * field->weights[1];
        if (!field->spreads && HIGHEST_SCORE - left_over <= best_score)
            break;
        int64_t shelf = find_shelf(field, bitmap_of(field, number), document[0]);
        for (int64_t left = NUM_TRIES; shelf >= 0 && left > 0; left--) {
            int64_t row = field->tops[number * (field->length + 1) + shelf];
            int64_t score = score_of(field, row, document);
            if (score > best_score)
                best = row, best_score = score, best_class = number, best_shelf = shelf;
            if (score >= 0 || field->spreads)
                break;
            shelf = find_shelf(field, bitmap_of(field, number), shelf + 1);
        }
    }
    if (best >= 0) {
        int32_t *top = field->tops + best_class * (field->length + 1) + best_shelf;
        *top = field->below[best];
        if (*top == NOBODY)
            clear(bitmap_of(field, best_class), best_shelf);
    }
    return best;
}

/* The places of `keys`, the largest key first and equal ones in order: a radix sort, 11 bits at a time. `keys` is
   overwritten; the others are scratch. */
KERNEL int64_t packing_sort_keys(const Object *keys, const Object *order, const Object *other_keys, const Object *other)
{
    int64_t count = size_of(keys);
    if (!is_uint64(keys) || !is_writeable(keys) || !is_int32(order) || !is_writeable(order) || !is_uint64(other_keys) ||
        !is_writeable(other_keys) || !is_int32(other) || !is_writeable(other) || size_of(order) < count ||
        size_of(other_keys) < count || size_of(other) < count || count > INT32_MAX)
        return REFUSED;
    uint64_t *from = data_of(keys), *to = data_of(other_keys);
    int32_t *place = data_of(order), *moved = data_of(other);
    for (int64_t at = 0; at < count; at++)
        place[at] = (int32_t)at;
    for (int64_t shift = 0; shift < 66; shift += 11) {
        int64_t ends[2049] = {0};
        for (int64_t at = 0; at < count; at++)
            ends[2048 - (from[at] >> shift & 2047)]++;
        for (int64_t digit = 1; digit <= 2048; digit++)
            ends[digit] += ends[digit - 1];
        for (int64_t at = 0; at < count; at++) {
            int64_t target = ends[2047 - (from[at] >> shift & 2047)]++;
            to[target] = from[at], moved[target] = place[at];
        }
        uint64_t *keys_before = from;
        int32_t *places_before = place;
        from = to, place = moved, to = keys_before, moved = places_before;
    }
    return DONE; /* six passes: the result is where it began */
}

/* The row of every document in order, and the number of documents in each row; returns the number of rows.

   `documents` has what each takes of every budget, none of it more than the budget, and of the first at least 1. With
   `num_opened`, so many rows are there from the start and are filled evenly; with 0, a row is opened when no other fits.
   `rooms`, `below` and `row_sizes` have room for as many rows as there are documents, `row_sizes`, `words` and `summary`
   come as zeros. */
KERNEL int64_t packing_lay_out_vectors(
    const Object *documents, const Object *budgets, int64_t num_classes, int64_t num_opened, const Object *slot_rows,
    const Object *row_sizes, const Object *rooms, const Object *tops, const Object *below, const Object *words,
    const Object *summary)
{
    int64_t num_budgets = size_of(budgets), num_slots = size_of(slot_rows), num_rows = 0;
    if (!is_int64(documents) || !is_int64(budgets) || num_budgets < 2 || num_budgets > MAX_BUDGETS ||
        size_of(documents) < num_slots * num_budgets || !is_int32(slot_rows) || !is_writeable(slot_rows) ||
        !is_int32(row_sizes) || !is_writeable(row_sizes) || size_of(row_sizes) < num_slots || !is_int64(rooms) ||
        !is_writeable(rooms) || size_of(rooms) < num_slots * num_budgets || !is_int32(tops) || !is_writeable(tops) ||
        !is_int32(below) || !is_writeable(below) || size_of(below) < num_slots || num_slots > INT32_MAX ||
        num_classes < 2 || num_opened < 0 || num_opened > num_slots)
        return REFUSED;
    Field field = {.num_budgets = num_budgets, .num_classes = num_classes, .budgets = data_of(budgets)};
    int64_t length = field.length = field.budgets[0];
    field.num_words = (length >> 6) + 1, field.num_sums = (length >> 12) + 1;
    if (length < 1 || size_of(tops) < num_classes * (length + 1) || !is_uint64(words) || !is_writeable(words) ||
        size_of(words) < num_classes * field.num_words || !is_uint64(summary) || !is_writeable(summary) ||
        size_of(summary) < num_classes * field.num_sums)
        return REFUSED;
    for (int64_t budget = 0; budget < num_budgets; budget++) {
        if (field.budgets[budget] < 1 || field.budgets[budget] > (int64_t)1 << 30)
            return REFUSED;
        field.weights[budget] = ((int64_t)1 << 30) / field.budgets[budget];
    }
    const int64_t *document = data_of(documents);
    for (int64_t place = 0; place < num_slots * num_budgets; place++)
        if (document[place] < (place % num_budgets == 0) || document[place] > field.budgets[place % num_budgets])
            return REFUSED;
    field.rooms = data_of(rooms), field.tops = data_of(tops), field.below = data_of(below);
    field.words = data_of(words), field.summary = data_of(summary), field.spreads = num_opened > 0;
    for (int64_t place = 0; place < num_classes * (length + 1); place++)
        field.tops[place] = NOBODY;
    for (int64_t row = 0; row < num_slots; row++)
        for (int64_t budget = 0; budget < num_budgets; budget++)
            field.rooms[row * num_budgets + budget] = field.budgets[budget];
    for (; num_rows < num_opened; num_rows++)
        put_in_field(&field, num_rows);
    for (int64_t slot = 0; slot < num_slots; slot++, document += num_budgets) {
        int64_t row = take_from_field(&field, document);
        if (row < 0)
            row = num_rows++;
        for (int64_t budget = 0; budget < num_budgets; budget++)
            field.rooms[row * num_budgets + budget] -= document[budget];
        ((int32_t *)data_of(slot_rows))[slot] = (int32_t)row;
        ((int32_t *)data_of(row_sizes))[row]++;
        put_in_field(&field, row);
    }
    return num_rows;
}

/* --- the deal: from documents to the slots of a layout --------------------------------------------------------- */

/* Documents, starts and lengths of all pieces of at most `length` tokens, in the order of the documents. */
KERNEL int64_t packing_cut(
    const Object *kept, int64_t length, const Object *documents, const Object *starts, const Object *lengths)
{
    int64_t num_documents = size_of(kept), num_pieces = size_of(documents), piece = 0;
    if (!is_int64(kept) || length < 1 || !is_int64(documents) || !is_writeable(documents) || !is_int64(starts) ||
        !is_writeable(starts) || !is_int32(lengths) || !is_writeable(lengths) || size_of(starts) < num_pieces ||
        size_of(lengths) < num_pieces)
        return REFUSED;
    const int64_t *sizes = data_of(kept);
    int64_t *document_of = data_of(documents), *start_of = data_of(starts);
    int32_t *length_of = data_of(lengths);
    for (int64_t document = 0; document < num_documents; document++)
        for (int64_t start = 0; start < sizes[document]; start += length, piece++) {
            if (piece >= num_pieces)
                return REFUSED;
            document_of[piece] = document, start_of[piece] = start;
            length_of[piece] = (int32_t)least(length, sizes[document] - start);
        }
    return DONE;
}

/* The pieces by decreasing length. Those of `length - k` tokens go to places `ends[k]` and on; `ends` is moved on. */
KERNEL int64_t packing_sort_falling(const Object *lengths, const Object *ends, const Object *ordered)
{
    int64_t length = size_of(ends) - 1, num_pieces = size_of(lengths);
    if (!is_int32(lengths) || !is_int64(ends) || !is_writeable(ends) || !is_int32(ordered) || !is_writeable(ordered) ||
        size_of(ordered) < num_pieces)
        return REFUSED;
    const int32_t *sizes = data_of(lengths);
    int64_t *end = data_of(ends);
    int32_t *pieces = data_of(ordered);
    for (int64_t piece = 0; piece < num_pieces; piece++)
        pieces[end[length - sizes[piece]]++] = (int32_t)piece;
    return DONE;
}

/* The pieces row by row, given the piece dealt to each slot and the row of each slot. Row r begins at `ends[r]`, which is
   moved on. */
KERNEL int64_t packing_gather_rows(
    const Object *dealt, const Object *slot_rows, const Object *ends, const Object *pieces)
{
    int64_t num_slots = size_of(dealt);
    if (!is_int32(dealt) || !is_int32(slot_rows) || size_of(slot_rows) < num_slots || !is_int64(ends) ||
        !is_writeable(ends) || !is_int32(pieces) || !is_writeable(pieces) || size_of(pieces) < num_slots)
        return REFUSED;
    const int32_t *piece = data_of(dealt), *row = data_of(slot_rows);
    int64_t *end = data_of(ends);
    for (int64_t slot = 0; slot < num_slots; slot++)
        ((int32_t *)data_of(pieces))[end[row[slot]]++] = piece[slot];
    return DONE;
}

/* Shuffles each group `offsets[g]` to `offsets[g + 1]` of `values` in place (Fisher-Yates over SplitMix64).

   Scaling 32 random bits to n choices favours some by at most n / 2**32: 2e-5 at 75,000 equal lengths. */
KERNEL int64_t packing_shuffle_groups(const Object *values, const Object *offsets, uint64_t key, uint64_t stream)
{
    int64_t num_groups = size_of(offsets) - 1;
    if (!is_int32(values) || !is_writeable(values) || !is_int64(offsets))
        return REFUSED;
    int32_t *value = data_of(values);
    const int64_t *offset = data_of(offsets);
    uint64_t state = mix(mix(key) + stream);
    for (int64_t group = 0; group < num_groups; group++)
        for (int64_t last = offset[group + 1] - 1; last > offset[group]; last--) {
            state += GAMMA;
            uint64_t draw = (mix(state) >> 32) * (uint64_t)(last - offset[group] + 1);
            int64_t other = offset[group] + (int64_t)(draw >> 32);
            int32_t moved = value[last];
            value[last] = value[other], value[other] = moved;
        }
    return DONE;
}

/* Document, start and length of each piece, in the order of `pieces`; numpy would widen the indices first. */
KERNEL int64_t packing_take_pieces(
    const Object *pieces, const Object *documents, const Object *starts, const Object *lengths,
    const Object *taken_documents, const Object *taken_starts, const Object *taken_lengths)
{
    int64_t num_pieces = size_of(pieces);
    if (!is_int32(pieces) || !is_int64(documents) || !is_int64(starts) || !is_int32(lengths) ||
        !is_int64(taken_documents) || !is_writeable(taken_documents) || size_of(taken_documents) < num_pieces ||
        !is_int64(taken_starts) || !is_writeable(taken_starts) || size_of(taken_starts) < num_pieces ||
        !is_int32(taken_lengths) || !is_writeable(taken_lengths) || size_of(taken_lengths) < num_pieces)
        return REFUSED;
    const int32_t *piece = data_of(pieces), *length = data_of(lengths);
    const int64_t *document = data_of(documents), *start = data_of(starts);
    int64_t *to_document = data_of(taken_documents), *to_start = data_of(taken_starts);
    int32_t *to_length = data_of(taken_lengths);
    for (int64_t place = 0; place < num_pieces; place++) {
        to_document[place] = document[piece[place]];
        to_start[place] = start[piece[place]];
        to_length[place] = length[piece[place]];
    }
    return DONE;
}
