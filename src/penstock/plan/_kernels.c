/* Writes everything that a packed batch holds beside its tokens.

   Labels, positions, document ids and borders all come from one list of pieces, never from token ids. One pass per row,
   each array in a loop of its own so that it is vectorised. */

#include "../native/kernels.h"

enum { IGNORED = -100 }; /* as in `_stages.py` */

/* The least and the greatest of some numbers; for a batch of them, a tenth of the time of numpy's two calls. */
KERNEL int64_t plan_extent(const Object *numbers, const Object *extent)
{
    int64_t count = size_of(numbers);
    if (!is_int64(numbers) || count < 1 || !is_int64(extent) || !is_writeable(extent) || size_of(extent) != 2)
        return REFUSED;
    const int64_t *number = data_of(numbers);
    int64_t low = number[0], high = number[0];
    for (int64_t place = 1; place < count; place++)
        low = least(low, number[place]), high = greatest(high, number[place]);
    ((int64_t *)data_of(extent))[0] = low;
    ((int64_t *)data_of(extent))[1] = high;
    return DONE;
}

/* How many flags from each edge to the next are not 0. */
KERNEL int64_t plan_count_set(const Object *flags, const Object *edges, const Object *counts)
{
    int64_t num_counts = size_of(counts), num_flags = size_of(flags);
    if (!is_uint8(flags) || !is_int64(edges) || size_of(edges) <= num_counts || !is_int64(counts) ||
        !is_writeable(counts))
        return REFUSED;
    const uint8_t *flag = data_of(flags);
    const int64_t *edge = data_of(edges);
    for (int64_t k = 0; k < num_counts; k++) {
        int64_t count = 0;
        if (edge[k] < 0 || edge[k + 1] > num_flags)
            return REFUSED;
        for (int64_t place = edge[k]; place < edge[k + 1]; place++)
            count += flag[place] != 0;
        ((int64_t *)data_of(counts))[k] = count;
    }
    return DONE;
}

/* Packed windows side by side. The row offsets of window w begin at `row_bases[w]`, its pieces at `piece_bases[w]`. */
typedef struct {
    const int64_t *row_bases, *piece_bases;
    const int32_t *row_offsets;
} Windows;

static bool open_windows(
    Windows *windows, const Object *row_bases, const Object *row_offsets, const Object *piece_bases)
{
    *windows = (Windows){data_of(row_bases), data_of(piece_bases), data_of(row_offsets)};
    return is_int64(row_bases) && is_int64(piece_bases) && is_int32(row_offsets);
}

/* Where the pieces of row `rows[k]` of window `slots[k]` begin when they are side by side, and finally their number. */
KERNEL int64_t plan_count_pieces(
    const Object *slots, const Object *rows, const Object *row_bases, const Object *row_offsets,
    const Object *piece_bases, const Object *offsets)
{
    Windows windows;
    int64_t num_rows = size_of(rows);
    if (!is_int64(slots) || !is_int64(rows) || size_of(slots) < num_rows || !is_int64(offsets) ||
        !is_writeable(offsets) || size_of(offsets) <= num_rows ||
        !open_windows(&windows, row_bases, row_offsets, piece_bases))
        return REFUSED;
    const int64_t *slot = data_of(slots), *row = data_of(rows);
    int64_t *offset = data_of(offsets);
    offset[0] = 0;
    for (int64_t k = 0; k < num_rows; k++) {
        const int32_t *edges = windows.row_offsets + windows.row_bases[slot[k]] + row[k];
        offset[k + 1] = offset[k] + edges[1] - edges[0];
    }
    return DONE;
}

/* Document and start of each of those pieces, part `p` of a document beginning at `p * length`. */
KERNEL int64_t plan_collect(
    const Object *slots, const Object *rows, const Object *row_bases, const Object *row_offsets,
    const Object *piece_bases, const Object *documents, const Object *parts, const Object *first_documents,
    int64_t length, const Object *offsets, const Object *found, const Object *starts)
{
    Windows windows;
    int64_t num_rows = size_of(rows), part_bytes = dtype_of(parts)->item_bytes;
    Copy *widen = copy_between(starts, parts);
    if (!is_int64(slots) || !is_int64(rows) || size_of(slots) < num_rows || !is_int64(offsets) ||
        size_of(offsets) <= num_rows || !is_int32(documents) || !is_whole(parts) || widen == NULL ||
        !is_int64(first_documents) || !is_int64(found) || !is_writeable(found) || !is_int64(starts) ||
        !is_writeable(starts) || !open_windows(&windows, row_bases, row_offsets, piece_bases))
        return REFUSED;
    const int64_t *slot = data_of(slots), *row = data_of(rows), *offset = data_of(offsets);
    int64_t num_pieces = offset[num_rows];
    if (size_of(found) < num_pieces || size_of(starts) < num_pieces)
        return REFUSED;
    for (int64_t k = 0; k < num_rows; k++) {
        int64_t first = ((const int64_t *)data_of(first_documents))[slot[k]], count = offset[k + 1] - offset[k];
        int64_t begin = windows.piece_bases[slot[k]] + windows.row_offsets[windows.row_bases[slot[k]] + row[k]];
        const int32_t *document = (const int32_t *)data_of(documents) + begin;
        int64_t *to_document = (int64_t *)data_of(found) + offset[k], *to_start = (int64_t *)data_of(starts) + offset[k];
        widen(to_start, (const char *)data_of(parts) + begin * part_bytes, count, part_bytes);
        for (int64_t piece = 0; piece < count; piece++) {
            to_document[piece] = first + document[piece];
            to_start[piece] *= length;
        }
    }
    return DONE;
}

/* Where each piece goes in the flat batch, when row r of the pieces is row `rows[r]` of the batch. */
KERNEL int64_t plan_find_targets(
    const Object *row_offsets, const Object *sizes, const Object *rows, int64_t length, const Object *targets)
{
    int64_t num_rows = size_of(rows), num_pieces = size_of(sizes);
    if (!is_int64(row_offsets) || size_of(row_offsets) <= num_rows || !is_int64(sizes) || !is_int64(rows) ||
        !is_int64(targets) || !is_writeable(targets) || size_of(targets) < num_pieces)
        return REFUSED;
    const int64_t *offset = data_of(row_offsets), *size = data_of(sizes), *row = data_of(rows);
    int64_t *target = data_of(targets);
    if (offset[num_rows] > num_pieces)
        return REFUSED;
    for (int64_t k = 0; k < num_rows; k++) {
        int64_t at = row[k] * length;
        for (int64_t piece = offset[k]; piece < offset[k + 1]; piece++) {
            target[piece] = at;
            at += size[piece];
        }
    }
    return DONE;
}

static void fill(int64_t *array, int64_t begin, int64_t end, int64_t value)
{
    for (int64_t place = begin; place < end; place++)
        array[place] = value;
}

static void fill_ids(int32_t *array, int64_t begin, int64_t end, int64_t value)
{
    for (int64_t place = begin; place < end; place++)
        array[place] = (int32_t)value;
}

static void fill_positions(int64_t *array, int64_t begin, int64_t end, int64_t base)
{
    for (int64_t place = begin; place < end; place++)
        array[place] = base + place - begin;
}

static void fill_labels(
    int64_t *restrict labels, const int64_t *restrict tokens, int64_t begin, int64_t end, bool is_shifted)
{
    if (end <= begin)
        return;
    size_t rest = (size_t)(end - begin - 1) * sizeof *labels;
    if (is_shifted) { /* the last token of a piece has nothing to predict */
        memcpy(labels + begin, tokens + begin + 1, rest);
        labels[end - 1] = IGNORED;
    } else { /* the model shifts: the first token of a piece must not be predicted from the piece before */
        labels[begin] = IGNORED;
        memcpy(labels + begin + 1, tokens + begin + 1, rest);
    }
}

/* Ignores the labels of tokens that are not targets; returns how many were not ignored before. */
static int64_t hide(int64_t *restrict labels, const uint8_t *restrict is_target, int64_t end, bool is_shifted)
{
    int64_t hidden = 0;
    for (int64_t place = 0; place < end - is_shifted; place++) {
        bool is_hidden = is_target[place + is_shifted] == 0;
        hidden += is_hidden & (labels[place] != IGNORED);
        labels[place] = is_hidden ? IGNORED : labels[place];
    }
    return hidden;
}

/* The arrays of a batch, each of `num_rows` rows of `length` places. */
typedef struct {
    int64_t num_rows, length;
    int64_t *input_ids, *labels, *position_ids;
    int32_t *document_ids;
} Batch;

static bool is_of_batch(const Object *array, const Batch *batch)
{
    return is_writeable(array) && size_of(array) == batch->num_rows * batch->length;
}

static bool open_batch(
    Batch *batch, const Object *input_ids, const Object *labels, const Object *position_ids,
    const Object *document_ids)
{
    if (!is_int64(input_ids) || array_of(input_ids)->num_dimensions != 2 || !is_int64(labels) ||
        !is_int64(position_ids) || !is_int32(document_ids))
        return false;
    *batch = (Batch){
        .num_rows = array_of(input_ids)->shape[0],
        .length = array_of(input_ids)->shape[1],
        .input_ids = data_of(input_ids),
        .labels = data_of(labels),
        .position_ids = data_of(position_ids),
        .document_ids = data_of(document_ids),
    };
    return is_of_batch(input_ids, batch) && is_of_batch(labels, batch) && is_of_batch(position_ids, batch) &&
           is_of_batch(document_ids, batch);
}

/* Fills the arrays of a batch whose tokens stand in `input_ids`; `counted` becomes (segments, longest segment).

   `bases` is the position of each piece's first token; `is_target`, one byte per place of the batch or
   empty, says which tokens may be predicted; `is_shifted` puts the label of a token one place before it.
   `sizes` follow from settings and packings: a row that they overfill is refused. */
KERNEL int64_t plan_lay_out(
    const Object *row_offsets, const Object *sizes, const Object *bases, const Object *is_target, int64_t is_shifted,
    int64_t pad, const Object *input_ids, const Object *labels, const Object *position_ids,
    const Object *document_ids, const Object *borders, const Object *row_targets, const Object *counted)
{
    Batch batch;
    int64_t num_pieces = size_of(sizes), num_flags = size_of(is_target);
    if (!open_batch(&batch, input_ids, labels, position_ids, document_ids) || !is_int64(row_offsets) ||
        size_of(row_offsets) <= batch.num_rows || !is_int64(sizes) || !is_int64(bases) ||
        size_of(bases) < num_pieces || !is_uint8(is_target) ||
        (num_flags && num_flags != batch.num_rows * batch.length) || !is_int32(borders) || !is_writeable(borders) ||
        size_of(borders) <= num_pieces + batch.num_rows || !is_int64(row_targets) || !is_writeable(row_targets) ||
        size_of(row_targets) < batch.num_rows || !is_int64(counted) || !is_writeable(counted) || size_of(counted) != 2)
        return REFUSED;
    const int64_t *offset = data_of(row_offsets), *size = data_of(sizes), *base = data_of(bases);
    int32_t *border = data_of(borders);
    int64_t length = batch.length, segment = 0, longest = 0;
    if (offset[batch.num_rows] > num_pieces)
        return REFUSED;
    border[0] = 0;
    for (int64_t row = 0; row < batch.num_rows; row++) {
        int64_t *ids = batch.input_ids + row * length, *row_labels = batch.labels + row * length;
        int64_t *positions = batch.position_ids + row * length, at = 0, targets = 0;
        int32_t *documents = batch.document_ids + row * length;
        for (int64_t piece = offset[row]; piece < offset[row + 1]; piece++) {
            int64_t end = at + size[piece];
            if (end < at || end > length)
                return REFUSED;
            fill_positions(positions, at, end, base[piece]);
            fill_ids(documents, at, end, piece);
            fill_labels(row_labels, ids, at, end, is_shifted);
            at = end;
            targets += greatest(0, size[piece] - 1);
            longest = greatest(longest, size[piece]);
            border[++segment] = (int32_t)(row * length + at);
        }
        if (num_flags)
            targets -= hide(row_labels, (const uint8_t *)data_of(is_target) + row * length, at, is_shifted);
        ((int64_t *)data_of(row_targets))[row] = targets;
        if (at < length) {
            fill(ids, at, length, pad);
            fill(row_labels, at, length, IGNORED);
            fill_positions(positions, at, length, 0);
            fill_ids(documents, at, length, -1);
            longest = greatest(longest, length - at);
            border[++segment] = (int32_t)((row + 1) * length);
        }
    }
    ((int64_t *)data_of(counted))[0] = segment;
    ((int64_t *)data_of(counted))[1] = longest;
    return DONE;
}

/* --- equal work ------------------------------------------------------------------------------------------------ */

/* Rows in bins: those of bin b are `rows[starts[b]]` to `rows[starts[b + 1]]`, which cost `sums[b]` together. */
typedef struct {
    int64_t num_rows, num_bins;
    const int64_t *costs, *starts;
    int64_t *rows, *sums;
} Bins;

/* A heap of the bins that are not full, the cheapest first; of equal ones, the one with the least number. */
static void sink(int64_t *heap, int64_t count, const int64_t *sums)
{
    for (int64_t at = 0, child = 1; child < count; child = 2 * at + 1) {
        int64_t *left = heap + child, *right = left + (child + 1 < count);
        int64_t *next = sums[*right] < sums[*left] || (sums[*right] == sums[*left] && *right < *left) ? right : left;
        if (sums[heap[at]] < sums[*next] || (sums[heap[at]] == sums[*next] && heap[at] < *next))
            return;
        int64_t moved = heap[at];
        heap[at] = *next, *next = moved;
        at = next - heap;
    }
}

/* The dearest row first, each to the cheapest bin that has a place left. */
static void put_in_turn(Bins *bins, const int64_t *by_cost, int64_t *heap, int64_t *filled)
{
    int64_t count = 0;
    for (int64_t bin = 0; bin < bins->num_bins; bin++) {
        bins->sums[bin] = filled[bin] = 0;
        if (bins->starts[bin + 1] > bins->starts[bin])
            heap[count++] = bin;
    }
    for (int64_t k = 0; k < bins->num_rows; k++) {
        int64_t bin = heap[0], begin = bins->starts[bin];
        bins->rows[begin + filled[bin]++] = by_cost[k];
        bins->sums[bin] += bins->costs[by_cost[k]];
        if (begin + filled[bin] == bins->starts[bin + 1])
            heap[0] = heap[--count];
        sink(heap, count, bins->sums);
    }
}

/* Exchanges of up to `most` rows of a bin for as many of another: which one leaves least in the dearer of both bins. */
typedef struct {
    int64_t most, least;
    int64_t *ours[2], *theirs[2], other;
} Exchange;

static void try_with(Bins *bins, Exchange *exchange, int64_t top, int64_t other)
{
    int64_t *ours = bins->rows + bins->starts[top], *our_end = bins->rows + bins->starts[top + 1];
    int64_t *theirs = bins->rows + bins->starts[other], *their_end = bins->rows + bins->starts[other + 1];
    const int64_t *cost = bins->costs;
    for (int64_t *a = ours; a < our_end; a++)
        for (int64_t *b = exchange->most > 1 ? a + 1 : a; b < our_end && (exchange->most > 1 || b == a); b++)
            for (int64_t *c = theirs; c < their_end; c++)
                for (int64_t *d = exchange->most > 1 ? c + 1 : c; d < their_end && (exchange->most > 1 || d == c); d++) {
                    int64_t less = cost[*a] - cost[*c] + (exchange->most > 1 ? cost[*b] - cost[*d] : 0);
                    int64_t left = greatest(bins->sums[top] - less, bins->sums[other] + less);
                    if (left < exchange->least)
                        *exchange = (Exchange){exchange->most, left, {a, b}, {c, d}, other};
                }
}

static int64_t dearest(const Bins *bins)
{
    int64_t top = 0;
    for (int64_t bin = 1; bin < bins->num_bins; bin++)
        top = bins->sums[bin] > bins->sums[top] ? bin : top;
    return top;
}

/* Makes the dearest bin cheaper as long as an exchange does; returns whether one did. `work` bounds what is tried. */
static bool exchange_best(Bins *bins, int64_t top, int64_t most, int64_t *work)
{
    Exchange exchange = {.most = most, .least = bins->sums[top], .other = -1};
    for (int64_t other = 0; other < bins->num_bins; other++) {
        int64_t ours = bins->starts[top + 1] - bins->starts[top], theirs = bins->starts[other + 1] - bins->starts[other];
        *work -= most > 1 ? ours * (ours - 1) / 2 * (theirs * (theirs - 1) / 2) : ours * theirs;
        if (*work < 0)
            return false;
        if (other != top)
            try_with(bins, &exchange, top, other);
    }
    if (exchange.other < 0)
        return false;
    for (int64_t k = 0; k < most; k++) {
        int64_t *one = exchange.ours[k], *other = exchange.theirs[k], less = bins->costs[*one] - bins->costs[*other];
        int64_t moved = *one;
        *one = *other, *other = moved;
        bins->sums[top] -= less, bins->sums[exchange.other] += less;
    }
    return true;
}

/* Deals rows to bins of fixed sizes so that their costs are as equal as exchanges of one and two rows make them.

   `by_cost` are the rows, the dearest first; `starts` says where each bin begins in `rows`, and finally their number;
   `scratch` has two places for each bin. Stops at 0.1 % above the mean, or after `work` exchanges were tried. */
KERNEL int64_t plan_deal(
    const Object *costs, const Object *by_cost, const Object *starts, int64_t work, const Object *scratch,
    const Object *sums, const Object *rows)
{
    int64_t num_rows = size_of(costs), num_bins = size_of(sums), total = 0;
    if (!is_int64(costs) || !is_int64(by_cost) || size_of(by_cost) != num_rows || !is_int64(starts) || num_bins < 1 ||
        size_of(starts) != num_bins + 1 || !is_int64(scratch) || !is_writeable(scratch) ||
        size_of(scratch) < 2 * num_bins || !is_int64(sums) || !is_writeable(sums) || !is_int64(rows) ||
        !is_writeable(rows) || size_of(rows) != num_rows || ((int64_t *)data_of(starts))[num_bins] != num_rows)
        return REFUSED;
    Bins bins = {num_rows, num_bins, data_of(costs), data_of(starts), data_of(rows), data_of(sums)};
    int64_t *heap = data_of(scratch);
    put_in_turn(&bins, data_of(by_cost), heap, heap + num_bins);
    for (int64_t row = 0; row < num_rows; row++)
        total += bins.costs[row];
    int64_t mean = total / num_bins, top = dearest(&bins);
    while (bins.sums[top] - mean > mean >> 10) {
        if (!exchange_best(&bins, top, 1, &work) && !exchange_best(&bins, top, 2, &work))
            break;
        top = dearest(&bins);
    }
    return DONE;
}

/* Cuts rows of these lengths into batches: `multiple` rows at a time, as long as their number times the width of the
   longest is at most `tokens`; widths are multiples of `unit`. `multiple` rows are a batch in any case, and those left
   over at the end are one. Fills `borders` with where each begins, and finally the number of rows; returns how many. */
KERNEL int64_t plan_cut(const Object *lengths, int64_t tokens, int64_t multiple, int64_t unit, const Object *borders)
{
    int64_t num_rows = size_of(lengths), count = 0, begin = 0;
    if (!is_int64(lengths) || multiple < 1 || unit < 1 || !is_int64(borders) || !is_writeable(borders) ||
        size_of(borders) < num_rows / multiple + 2)
        return REFUSED;
    const int64_t *length = data_of(lengths);
    int64_t *border = data_of(borders);
    while (begin < num_rows) {
        int64_t end = begin, widest = 1;
        while (end + multiple <= num_rows) {
            int64_t wider = widest;
            for (int64_t row = end; row < end + multiple; row++)
                wider = greatest(wider, length[row]);
            if (end > begin && (wider + unit - 1) / unit * unit > tokens / (end + multiple - begin))
                break;
            widest = wider, end += multiple;
        }
        border[count++] = begin;
        begin = end > begin ? end : num_rows;
    }
    border[count] = num_rows;
    return count;
}
