"""The compiled loops of this room. Imported only at the first use, because numba takes 0.4 s.

**The permutation.** A number x in [0, size) is written as (left, right) with
right = x mod 2**bits and left < radix = ceil(size / 2**bits), both ranges near sqrt(size). A pass adds a
keyed hash of left to right (mod 2**bits), then a keyed hash of right to left (mod radix): two
rounds of a Feistel network over mixed radices (Black and Rogaway 2002), a bijection because subtracting in
reverse undoes it. The grid has fewer than 2**bits cells above size, and a result that falls there is
permuted again until it does not ("cycle walking"): fewer than 1 + 2/sqrt(size) turns on average,
8/5 at the worst size (5). The usual two halves of whole bits need up to two or four turns, and a
branch that the processor cannot predict; here a size just above a power of two costs no more.

**How many passes.** Measured over keys, by chi-square: after 4 passes the joint places of two numbers
show a bias at size 128 and none at 257; from 65,536 on, 4 are used. Below that 6 are used, after which
size 64 shows none. Tiny sizes, whose halves have 2 to 8 values, need 12: after 10, the 5,040 orders of
7 numbers are not yet equally likely. This took up to 2,000 keys per outcome; a quicker test already
rejects 5 passes at size 6, 3 at sizes 20 to 80, and 2 at 65,536.

**Indices.** Kernels read int64 indices, write int64 results, and return the place of the first
index that is out of range, or -1. Inside, everything is uint64: numba makes uint64 + int64 a float.

Price: 42 M numbers/s/core for any size from 65,536 to 2**62, 25 M below, 10 M below 64, on an AMD EPYC at
2.4 GHz (benchmarks/bench_order.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock import splitmix
from penstock.compiled import compiled

Int64 = NDArray[np.int64]
Shape = tuple[np.uint64, np.uint64, np.uint64, int]
"""(size, bits, radix, passes) of a permutation."""

_U = np.uint64
_ONE, _HALF_WORD = _U(1), _U(32)
_ALL_OK = -1
_GAMMA, _M1, _M2 = splitmix.GAMMA, splitmix.FACTOR_1, splitmix.FACTOR_2
_mix = compiled(splitmix.mix)


@compiled
def child_key(key: np.uint64, number: int) -> np.uint64:
    """The key of numbered part `number`: one output of SplitMix64 started at `key`."""
    return _mix(key + (_U(number) + _ONE) * _GAMMA)


@compiled
def _shape(size: int) -> Shape:
    largest = _U(max(size, 1) - 1)
    rest, length = largest, _U(0)
    for step in (_U(32), _U(16), _U(8), _U(4), _U(2), _U(1)):
        if rest >> step:
            rest >>= step
            length += step
    bits = (length + rest + _ONE) >> _ONE  # half of the bit length of `largest`, rounded up
    passes = 12 if size < 64 else 6 if size < 65536 else 4
    return _U(size), bits, (largest >> bits) + _ONE, passes


@compiled
def _hash(half: np.uint64, key: np.uint64) -> np.uint64:
    """32 bits, each of which depends on all 31 bits of `half` and on every bit of the key."""
    h = (half + key) * _M1
    h = (h ^ (h >> _HALF_WORD)) * _M2
    return h >> _HALF_WORD


@compiled
def _encipher(x: np.uint64, shape: Shape, key: np.uint64) -> np.uint64:
    _, bits, radix, passes = shape
    mask = (_ONE << bits) - _ONE
    left, right = x >> bits, x & mask
    for _ in range(passes):
        right = (right + _hash(left, key)) & mask
        left += (_hash(right, key + _GAMMA) * radix) >> _HALF_WORD  # hash * radix / 2**32 < radix
        left -= radix if left >= radix else _U(0)
        key += _GAMMA + _GAMMA
    return (left << bits) | right


@compiled
def _permuted(x: int, shape: Shape, key: np.uint64) -> int:
    y = _encipher(_U(x), shape, key)
    while y >= shape[0]:
        y = _encipher(y, shape, key)
    return int(np.int64(y))  # numba's int() alone keeps uint64


@compiled
def permute(positions: Int64, out: Int64, size: int, key: np.uint64) -> int:
    """Apply the permutation of [0, size) under `key` to each position."""
    shape, key = _shape(size), child_key(key, 0)  # keys 1 and 2 must not be neighbours
    for i in range(positions.size):
        if not 0 <= positions[i] < size:
            return i
        out[i] = _permuted(positions[i], shape, key)
    return _ALL_OK


@compiled
def _last_at_most(starts: Int64, low: int, high: int, value: int) -> int:
    """The last i in [low, high) with starts[i] <= value; `low` always qualifies."""
    while high - low > 1:
        middle = (low + high) >> 1
        if starts[middle] <= value:
            low = middle
        else:
            high = middle
    return low


# The kernel below remembers the group of the last position: neighbours in a batch share it, and searching all groups
# for every one of them would cost more than the permutation itself.


@compiled
def windowed_rows(
    positions: Int64,
    out: Int64,
    size: int,
    key: np.uint64,
    group: int,
    group_starts: Int64,
    slot_starts: Int64,
    shifts: Int64,
) -> int:
    """Position -> row: permute inside its group, then find the slot (window) that it fell into."""
    number, start, stop = 0, 0, 0
    shape, group_key = _shape(0), key
    for i in range(positions.size):
        position = positions[i]
        if not 0 <= position < size:
            return i
        if not start <= position < stop:
            number = _last_at_most(group_starts, 0, group_starts.size - 1, position)
            start, stop = group_starts[number], group_starts[number + 1]
            shape, group_key = _shape(stop - start), child_key(key, number)
        place = start + _permuted(position - start, shape, group_key)
        last = min((number + 1) * group, shifts.size)
        out[i] = place + shifts[_last_at_most(slot_starts, number * group, last, place)]
    return _ALL_OK


@compiled
def shuffle_strata(rows: Int64, out: Int64, size: int, key: np.uint64, stratum: int) -> int:
    """Permute every `stratum` consecutive numbers among themselves, each stratum under its own key."""
    shape, start, stratum_key = _shape(stratum), -1, key
    for i in range(rows.size):
        if not 0 <= rows[i] < size:
            return i
        offset = rows[i] % stratum
        if start != rows[i] - offset:
            start = rows[i] - offset
            stratum_key = child_key(key, start // stratum)
        out[i] = start + _permuted(offset, shape, stratum_key)
    return _ALL_OK


@compiled
def deal_evenly(quotas: Int64, out: Int64) -> None:
    """Fill `out` with quotas[k] times k, spread evenly: earliest deadline first.

    See `_mixture.py` for the windows and the proof that no source is ever off by a whole item.
    """
    dealt = np.zeros_like(quotas)
    deadlines = -(-out.size // quotas)
    for slot in range(out.size):
        chosen, earliest = 0, out.size + 1
        for source in range(quotas.size):
            is_released = dealt[source] * out.size < (slot + 1) * quotas[source]
            if is_released and deadlines[source] < earliest:
                chosen, earliest = source, deadlines[source]
        out[slot] = chosen
        dealt[chosen] += 1
        deadlines[chosen] = -(-(dealt[chosen] + 1) * out.size // quotas[chosen])


@compiled
def deal_classes(
    rows: Int64, out: Int64, size: int, key: np.uint64, is_shuffled: bool, sizes: Int64, starts: Int64, used: Int64
) -> int:
    """Row -> member: permute the classes of the round, then the members of the class in its cycle; see `_draw.py`."""
    num_classes = sizes.size
    round_shape, round_key, cycle_key = _shape(num_classes), child_key(key, 0), child_key(key, 1)
    for i in range(rows.size):
        if not 0 <= rows[i] < size:
            return i
        turn, number = rows[i] // num_classes, rows[i] % num_classes
        if is_shuffled:
            number = _permuted(number, round_shape, child_key(round_key, turn))
        place = turn % used[number]
        if is_shuffled:
            own_key = child_key(child_key(cycle_key, number), turn // used[number])
            place = _permuted(place, _shape(sizes[number]), own_key)
        out[i] = starts[number] + place
    return _ALL_OK
